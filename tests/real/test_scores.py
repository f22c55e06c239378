"""Log-probabilities, entropies, values and gradients of real weights, beside float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.real.runs import (
    LIMIT,
    Far,
    Run,
    alone_with_a_hidden_key,
    alone,
    distance,
    exact,
    packed,
    replicated,
)

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
# by the reference, which is made anew for each kind
CASES = [
    ("one forward", "all weights", FLOAT32),
    ("one forward", "all weights", BFLOAT16),
    ("steps", "all weights", FLOAT32),
    ("kept trunks", "all weights", FLOAT32),
    ("compiled layers", "all weights", FLOAT32),
    ("one forward", "LoRA", FLOAT32),
    ("one forward", "QLoRA", FLOAT32),
    ("values", "values", FLOAT32),
]
