"""The backends as objects, and the choice of one for a call, with the reason.

Each backend imports its kernels when a call first needs them.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from prefixtree.errors import UnsupportedError
from prefixtree.kernels import runtime
from prefixtree.kernels.attention.protocol import AttentionCall, Kernels
from prefixtree.kernels.runtime import Backend
from prefixtree.packing.block_tables import TileShape, chain_tile_costs
from prefixtree.packing.host_mask import HostMask


def _flash() -> Kernels:
    from prefixtree.kernels.attention.flash import launch

    return launch


def _triton() -> Kernels:
    from prefixtree.kernels.attention.triton import launch

    return launch


def _sdpa() -> Kernels:
    from prefixtree.kernels.attention import sdpa

    return sdpa


def _reference() -> Kernels:
    from prefixtree.kernels.attention import reference

    return reference


FLASH = Backend("flash", _flash)
TRITON = Backend("triton", _triton, package="triton")
SDPA = Backend("sdpa", _sdpa)
REFERENCE = Backend("reference", _reference)
# "auto" prefers the earlier ones, if they serve the call and were measured to be faster
BACKENDS: tuple[Backend[Kernels], ...] = (FLASH, TRITON, SDPA, REFERENCE)


_NAMED = {backend.name: backend for backend in BACKENDS}
NAMES = ("auto", *reversed(_NAMED))

# the work (`flash_work` and `with_tail`) up to which flash is faster, by head dim and whether query
# heads share kv heads; None stands for all other head dims. One H200, bf16; tests hold this to
# backends.json and shapes_*.json in benchmarks/results/h200. Milliseconds of triton over those of
# flash, forward + backward, by work, at 32 / 8 heads of 128, and at fewer, whose tails are long:
#   1.02 prompt 32K x 16 x 2K   1.42    1.46 prompt 512 x 64 x 1K            1.32
#   1.06 prompt 8K x 16 x 2K    1.42    1.70 prompt 512 x 64 x 1K, 12 / 2    1.13
#   1.08 4K then 4-2-2-1 x 1K   1.38    2.03 caterpillar 24, 4 / 1           1.08
#   1.20 8 x (2K, 8 x 512, ..)  1.34    2.28 prompt 256 x 1024 x 256         0.94
#   1.22 airline per turn       1.32    2.33 prompt 512 x 64 x 1K, 8 / 2     0.93
#   1.23 documents 32 x 4K      1.37    4.22 prompt 512 x 64 x 1K, 4 / 1     0.55
#   1.30 caterpillar 12         1.27
#   1.34 caterpillar 24         1.24
# heads of 64 break even earlier: 1.02 to 1.17 at 1.34; at 1.46 0.90 to 0.99 with several per kv
# head, 1.25 with one; 0.78 at 2.12. At works up to 1.5 the others gain 1.35 to 1.95 (96), 1.11 to
# 1.67 (128), 1.67 to 2.08 (192), 0.96 to 1.38 (256).
MOST_WORK: dict[tuple[int, bool] | None, float] = {(64, True): 1.4, (64, False): 1.5, None: 2.1}

# the tiles in which flash-attn-4 works, and the cost of starting and storing a query tile, in full
# tiles: 16.5 us against 6.15, forward + backward, in a model fitted to one H200
_TILE = 128
_STARTING = 2.7
# the backward's part of a forward and backward
_BACKWARD = 0.7


@dataclass(frozen=True)
class Choice:
    """A backend, and the reason that `explain` gives."""

    backend: Backend[Kernels]
    reason: str


def check_name(name: str) -> None:
    """Raises an UnsupportedError if no backend has this name."""
    if name not in NAMES:
        raise UnsupportedError(
            f"backend {name!r} does not exist in this version; use one of {', '.join(NAMES)}"
        )


def choose(name: str, call: AttentionCall) -> Choice:
    """Chooses the backend of a call, and so of its backward; refuses with the reason."""
    if name != "auto":
        check_name(name)
        backend = _NAMED[name]
        reason = _refusal(backend, call)
        if reason is not None:
            other = "auto" if backend is FLASH else "sdpa"
            raise UnsupportedError(f"{reason}; use backend={other!r}")
        return Choice(backend, "it was asked for by name")
    q, k, v = call.q, call.k, call.v
    if not q.is_cuda:
        return Choice(SDPA, f"q is on {q.device}, and the other backends need a GPU")
    # the choice depends on this alone; cached, because every call asks
    shapes = q.shape, k.shape[1], v.shape[2]
    options = call.scale, call.deterministic, call.window, call.wide
    key = (q.device, q.dtype, shapes, *options, call.chosen is None)
    choices = _chosen.get(call.mask)
    if choices is None:
        choices = _chosen[call.mask] = {}
    if key not in choices:
        choices[key] = _automatic(call)
    return choices[key]


# choices live as long as their mask
_chosen: weakref.WeakKeyDictionary[HostMask, dict[Any, Choice]] = weakref.WeakKeyDictionary()


def _automatic(call: AttentionCall) -> Choice:
    triton = _refusal(TRITON, call)
    if FLASH.refuses(call) is None:
        is_faster, reason = _compared(call)
        if is_faster or triton is not None:
            return Choice(FLASH, triton or reason)
    if triton is not None:
        return Choice(SDPA, triton)
    return Choice(TRITON, "it serves this call")


def passed_over(call: AttentionCall) -> str:
    """Says why "auto" did not take flash; only `explain` asks."""
    return _refusal(FLASH, call) or _compared(call)[1]


def _refusal(backend: Backend[Kernels], call: AttentionCall) -> str | None:
    """Says why a backend cannot serve a call, starting with its name; None if it can."""
    reason = backend.refuses(call)
    return None if reason is None else f"backend {backend.name!r}: {reason}"


def _compared(call: AttentionCall) -> tuple[bool, str]:
    """Says whether flash, which serves the call, should be faster than triton, and why."""
    q, mask, window = call.q, call.mask, call.window
    work = flash_work(mask, window)
    share = longest_key_tile_share(mask, window)
    work = with_tail(work, share, q.shape[1], runtime.processors(q.device))
    limit = most_work(q.shape[2], q.shape[1] // call.k.shape[1])
    is_faster = work <= limit
    no_branch = mask.chain_starts is not None
    by = ", by its variable-length kernels (no tree branches)" if no_branch else ""
    return is_faster, (
        f"flash-attn-4 {'does' if is_faster else 'would do'} {work:.2f} times the work of the "
        f"visible pairs on this forest{by}, and was faster than triton up to {limit:.2f} times"
    )


def most_work(d: int, group: int) -> float:
    """The work up to which flash was measured to be faster, by head dim and heads per kv head."""
    return MOST_WORK.get((d, group > 1), MOST_WORK[None])


def flash_work(mask: HostMask, window: int) -> float:
    """Divides the cost of flash-attn-4's tiles and starts by that of the visible pairs alone."""
    # near 1 if queries see many keys and nodes are long; tiles that need the mask, computed pairs
    # that are not visible and query tiles with little work raise it
    cost, _ = _tile_costs(mask, window)
    # the unit of a cost is half a full tile
    tiles = int(cost.sum()) / 2 + _STARTING * len(cost)
    return tiles * _TILE**2 / max(1, mask.visible_pairs(window))


def longest_key_tile_share(mask: HostMask, window: int) -> float:
    """The costliest key tile's share of the backward's cost, 0 .. 1."""
    _, cost = _tile_costs(mask, window)
    return int(cost.max()) / int(cost.sum()) if len(cost) else 0.0


def _tile_costs(mask: HostMask, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Lists the costs of the query tiles and of the key tiles of flash-attn-4."""
    if (starts := mask.chain_starts) is not None:
        # the mask of a chain is symmetrical: its key tiles, last to first, cost as much
        return (costs := chain_tile_costs(np.diff(starts), _TILE, window)), costs
    shape, host = TileShape(_TILE, _TILE), torch.device("cpu")
    keys = mask.tables(shape, window, host).k_cost.numpy()
    # flash's query tiles lie on the grid of all tokens
    queries = mask.whole.tables(shape, window, host).q_cost.numpy()
    return queries[mask.asked_tiles(_TILE)], keys


def with_tail(work: float, longest_share: float, heads: int, processors: int) -> float:
    """Raises `flash_work` by the wait for the longest block of flash-attn-4's backward."""
    # one block takes all query tiles of a key tile and head, where triton cuts them: if few heads
    # share a prompt that all queries see, the other multiprocessors then idle
    tail = longest_share * processors / heads
    return work * (1 - _BACKWARD + _BACKWARD * max(1.0, tail))
