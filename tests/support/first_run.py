"""What ranks have behind them when they are forked: numba's loops are loaded, and a model has run
forward and backward. No thread is left."""

from __future__ import annotations

import torch

from tests.support.models import build, ragged_objective, ragged_packed, run_packed

torch.set_num_threads(1)
for family in ("qwen3", "nemotron_h"):
    run_packed(build(family), ragged_packed(), ragged_objective())
