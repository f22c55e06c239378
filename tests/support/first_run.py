"""What ranks have behind them when they are forked: numba's loops are loaded, and a model has run
forward and backward. No thread is left."""

from __future__ import annotations

import torch
from packaging import version

from prefixtree.models.family_table import OLDEST_WITH_STATES
from tests.support.models import TRANSFORMERS, build, ragged_objective, ragged_packed, run_packed

torch.set_num_threads(1)
with_states = version.parse(OLDEST_WITH_STATES) <= TRANSFORMERS
for family in ("qwen3", *["nemotron_h"] * with_states):
    run_packed(build(family), ragged_packed(), ragged_objective())
