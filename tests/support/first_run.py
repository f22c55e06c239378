"""What ranks have behind them when they are forked: nearly all that they import, numba's loops, and
a model's run forward and backward. No thread is left."""

from __future__ import annotations

import gc

# what is imported stays, and collections among it are a quarter of the time; ranks turn them on
gc.disable()

import peft  # noqa: E402, F401
import torch  # noqa: E402
from packaging import version  # noqa: E402

from prefixtree.models.family_table import OLDEST_WITH_STATES  # noqa: E402
from tests.support.models import (  # noqa: E402
    TRANSFORMERS,
    build,
    ragged_objective,
    ragged_packed,
    run_packed,
)

torch.set_num_threads(1)
with_states = version.parse(OLDEST_WITH_STATES) <= TRANSFORMERS
for family in ("qwen3", *["nemotron_h"] * with_states):
    run_packed(build(family), ragged_packed(), ragged_objective())
