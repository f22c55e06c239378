"""The flash backend with one of its choices fixed, and how far two results are apart."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from prefixtree.kernels.attention.flash import launch

# of the norm; two computations in half precision differ by a few thousandths
MOST_ERROR = 1e-2


@contextlib.contextmanager
def order_of(variant: str) -> Iterator[None]:
    """Inside, the backward is in the order that a variant names, if it names one."""
    rule = launch.heads_first
    if variant in ("tiles first", "heads first"):
        launch.heads_first = lambda lists, heads, processors: variant == "heads first"
    try:
        yield
    finally:
        launch.heads_first = rule


@contextlib.contextmanager
def heads_in_tiles(packed: bool) -> Iterator[None]:
    """Inside, the forward's tiles hold the heads of a group side by side, or one head."""
    rule = launch.packs_heads
    launch.packs_heads = lambda group, d: packed
    try:
        yield
    finally:
        launch.packs_heads = rule


def worst_error(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """Greatest distance over the norm, of out, dq, dk and dv; NaN is infinitely far."""
    errors = [
        float((a.float() - b.float()).norm() / b.float().norm())
        for a, b in zip(got, want, strict=True)
    ]
    return max(error if error == error else float("inf") for error in errors)
