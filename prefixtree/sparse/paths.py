"""The paths along which indexers choose keys.

Legend: T packed tokens, n queries of a chunk, K keys of their path, H index heads, W words of bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch

from prefixtree.kernels.chosen import to_bits, words
from prefixtree.packing.mask import TreeMask
from prefixtree.sparse.masks import ForestMask

# scores of all index heads held at once: 128 MiB in float32
CHUNK = 1 << 25


class QueryPath:
    """The path of the queries that an indexer chooses for, and the choices so far.

    Attributes:
        rows: the queries: packed tokens, or own tokens of a part. positions: int64 [n], theirs.
        length: K.
        exported: [T, D], the keys of all rows of a part.
        bits: int32 [T, W], or [H, T, W].
    """

    rows: slice
    positions: torch.Tensor
    length: int
    exported: torch.Tensor | None = None
    bits: torch.Tensor

    def __init__(self, mask: TreeMask, hidden_states: torch.Tensor) -> None:
        batch, rows = hidden_states.shape[:2]
        self._host = mask.host
        if batch != 1:
            raise ValueError(f"a packed forest is one row: expected batch size 1, got {batch}")
        if rows != self._host.num_queries:
            raise ValueError(
                f"a packed forest has no key-value cache: pass use_cache=False ({rows} rows, the "
                f"mask has {self._host.num_queries})"
            )
        self._device = hidden_states.device
        self._keys: torch.Tensor | None = None

    def spans(self, heads: int) -> Iterator[slice]:
        """Cuts queries into runs of one path, few enough for the scores of `heads` heads.

        The object stands for the run that came last.
        """
        for start, length, runs in self._host.blocks():
            above, at, begin = runs[:-1], 0, runs[-1][0]
            depth = sum(end - first for first, end, _ in above)
            size = max(1, CHUNK // (heads * (depth + length)))
            while at < length:
                # keys are kept in packed order, in which a token comes after its ancestors
                last = min(at + size, length)
                self.rows = slice(start + at, start + last)
                self._runs = [*above, (begin, begin + last, True)]
                self.positions = torch.arange(depth + at, depth + last, device=self._device)
                self.length = depth + last
                yield self.rows
                at = last

    def of_all(self) -> torch.Tensor:
        """Makes int32 [1, T, 0], which says that all queries choose all keys."""
        return torch.empty(1, self._host.num_queries, 0, dtype=torch.int32, device=self._device)

    def of_path(self, keys: torch.Tensor) -> torch.Tensor:
        """Finds the path's keys [K, D], root first, with those of the chunk [n, D]."""
        known = self.exported
        if known is None:
            if self._keys is None:
                self._keys = keys.new_empty(self._host.num_tokens, keys.shape[1])
            known = self._keys
            known[self.rows] = keys
        parts = [known[begin:end] for begin, end, _ in self._runs]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    @property
    def num_words(self) -> int:
        """W."""
        return words(self._host.deepest)

    def note(self, chosen: torch.Tensor) -> None:
        """Notes the chosen keys, bool [n, K] or [H, n, K]."""
        bits = to_bits(chosen.reshape(-1, chosen.shape[-1]), self.num_words)
        self.note_bits(bits.view(*chosen.shape[:-1], self.num_words))

    def note_bits(self, bits: torch.Tensor) -> None:
        """Notes the chosen keys' bits, int32 [n, W] or [H, n, W]."""
        if not hasattr(self, "bits"):
            self.bits = bits.new_empty(*bits.shape[:-2], self._host.num_queries, self.num_words)
        self.bits[..., self.rows, :] = bits


def keys_of_part(
    indexer: Any, mask: ForestMask, numbers: int, ask: Callable[[slice, Any], None]
) -> torch.Tensor | None:
    """Computes the keys [K, D] of a part's rows for an indexer; None for a whole forest.

    Args:
        numbers: of a query, over all heads.
        ask: runs the indexer's forward of some own tokens, with a stand-in for a cache.
    """
    if mask.part is None:
        return None
    keys, size = [], max(1, CHUNK // numbers)
    for start in range(0, mask.mask.num_queries, size):
        path = _KeysAlone()
        with suppress(_EnoughError):
            ask(slice(start, start + size), path)
        keys.append(path.keys)
    return mask.part.index_keys(indexer, torch.cat(keys))


class _EnoughError(Exception):
    """Ends an indexer's forward."""


class _KeysAlone:
    """A stand-in for a cache in an indexer's forward, which it ends once it has the keys [n, D]."""

    keys: torch.Tensor

    @property
    def layers(self) -> _KeysAlone:
        """The cache of all layers."""
        return self

    def __getitem__(self, layer_idx: int) -> _KeysAlone:
        return self

    def update_indexer(self, keys: torch.Tensor, *_: int) -> None:
        """Keeps keys [1, n, D] or [1, 1, n, D], and ends the forward."""
        self.keys = keys.flatten(0, -2)
        # the error is another object, as it keeps its frames and their tensors alive
        raise _EnoughError

    update_index = update_indexer
