"""Helpers that the tests on a GPU share, whichever backend they test."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from prefixtree import PrefixForest, TreeMask
from prefixtree.testing.compare import Meter
from tests.support.attention_checks import Case, assert_numerics, ours
from tests.support.strategies import mask_of, random_forest

HALVES = [torch.bfloat16, torch.float16]
# of tree_attention, and of what is asked of it besides out
OPTIONS = [{}, {"window": 200}, {"softcap": 4.0}, {"scale": 0.4}, {"window": 64, "softcap": 9.0}]
EXTRAS = [
    {},
    {"sinks": True},
    {"dlse": True},
    {"sinks": True, "dlse": True},
    # which leave little to the keys
    {"sinks": True, "dlse": True, "sink_level": 12.0},
    {"spread": 12.0},
]
# long and short nodes, several trees, tiles cut and uncut, runs long enough to be cut
FOREST = PrefixForest.from_parents(
    [-1, *[0] * 20, 1, 1, 2, 21, 21, -1, 26, 26],
    [700, *range(20, 60, 2), 129, 64, 5, 200, 3, 90, 1, 77],
)


def cuda_mask(forest: PrefixForest, **options: object) -> TreeMask:
    return mask_of(forest).to("cuda").with_options(**options)


def assert_sinks_of_one_head(backend: str, sink_level: float, seed: int) -> None:
    forest = random_forest(np.random.default_rng(seed), 40, 200)
    mask = cuda_mask(forest)
    case = Case.random(
        mask, (1, 1), (64, 64), torch.bfloat16, seed, sinks=True, dlse=True, sink_level=sink_level
    )
    assert_numerics(forest, mask, case.to("cuda"), ours(mask, backend=backend))


def inputs_of(case: Case) -> list[torch.Tensor]:
    return [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]


def peak_bytes(run: Callable[[], object]) -> int:
    """Peak memory of a second run, beyond what was held."""
    run()
    with Meter(torch.device("cuda")) as meter:
        run()
    assert meter.peak_bytes is not None
    return meter.peak_bytes
