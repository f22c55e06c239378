"""Compressed keys (DeepSeek V4) on packed forests: an entry is the token that ends its window.

A compressor makes one key (and value) of every m neighbouring tokens of a sequence, an entry. Along
the tree a window is m tokens of a path: the token that ends it, at a position d with d + 1 a
multiple of m, and its m - 1 nearest ancestors. A query sees an entry exactly when it sees that
token. So entries stand in the rows of these tokens. The query's choice of them is a bit per
position of its path, as for other keys (`sparse.indexers`). Shared windows are compressed once; a
window across a branch is one per branch.

Legend: T packed tokens, E entries, m tokens of a window, D head dim, n queries of a chunk, K tokens
of their path, W words of bits.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from prefixtree.kernels.best_keys import best_keys
from prefixtree.kernels.chosen import to_bits, words
from prefixtree.kernels.operators import uncompiled
from prefixtree.packing.mask import TreeMask
from prefixtree.sparse.masks import Entries, ForestMask
from prefixtree.sparse.paths import QueryPath


def of_compressor(original: Any) -> dict[str, Any]:
    """Makes a compressor of the windows of all paths, which also says who sees which entry."""
    rotate = inspect.unwrap(original.forward).__globals__["apply_rotary_pos_emb"]

    @uncompiled
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        q_residual: torch.Tensor,
        position_ids: torch.Tensor,
        cache: Any,
        layer_idx: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compresses a forest's hidden_states [1, T, C] to [1, 1, T, D], in its tokens' rows."""
        if not isinstance(cache, ForestMask):
            members: tuple[torch.Tensor, torch.Tensor | None] = original.forward(
                self, hidden_states, q_residual, position_ids, cache, layer_idx
            )
            return members
        path = QueryPath(cache.mask, hidden_states)
        windows = _Windows.of(cache.mask, self.compress_rate)
        indexer = getattr(self, "indexer", None)
        if indexer is None or cache.mask.host.deepest // self.compress_rate <= indexer.index_topk:
            bits = _every_entry(cache.mask, self.compress_rate)
        else:
            bits = _best_entries(indexer, rotate, hidden_states, q_residual, windows, path)
        cache.entries = _with_own(bits, cache.mask, self.compress_rate)
        return _entries(self, rotate, hidden_states, windows, indexer is not None)[:, None], None

    return {"forward": functools.wraps(original.forward)(forward)}


@dataclass(frozen=True)
class _Windows:
    """The windows of all paths.

    Attributes:
        last: int64 [E], the packed token that ends each.
        tokens, before: int64 [E, m], of each and of the window before it on its path, -1 for none.
        start: int64 [E], the position of its first token.
    """

    last: torch.Tensor
    tokens: torch.Tensor
    before: torch.Tensor
    start: torch.Tensor

    @classmethod
    def of(cls, mask: TreeMask, size: int) -> _Windows:
        """Finds the windows of `size` tokens."""
        host = mask.host
        last = np.flatnonzero((host.position + 1) % size == 0)
        columns, at = [], last
        for _ in range(2 * size):
            columns.append(at)
            at = np.where(at < 0, at, host.predictor[at])
        both = np.stack(columns[::-1], 1).astype(np.int64)
        arrays = last, both[:, size:], both[:, :size], host.position[last] + 1 - size
        return cls(*(torch.from_numpy(x.astype(np.int64)).to(mask.device) for x in arrays))


def _entries(
    module: Any, rotate: Any, hidden_states: torch.Tensor, windows: _Windows, overlaps: bool
) -> torch.Tensor:
    """Compresses hidden_states [1, T, C] to entries [1, T, D], in the rows that end windows.

    Other rows are 0. `overlaps`: a window takes in the one before it, by the first halves of the
    projections.
    """
    dim, bias = module.head_dim, module.position_bias
    values, gates = module.kv_proj(hidden_states)[0], module.gate_proj(hidden_states)[0]
    value, gate = values[windows.tokens][..., -dim:], (gates[windows.tokens] + bias)[..., -dim:]
    if overlaps:
        absent, before = (windows.before < 0)[..., None], windows.before.clamp_min(0)
        first = values[before][..., :dim].masked_fill(absent, 0)
        value = torch.cat([first, value], 1)
        first = (gates[before] + bias)[..., :dim].masked_fill(absent, -torch.inf)
        gate = torch.cat([first, gate], 1)
    weights = gate.softmax(1, dtype=torch.float32).to(value.dtype)
    entries = module.kv_norm((value * weights).sum(1))[None]
    cos, sin = module.rotary_emb(
        entries, position_ids=windows.start[None], layer_type=module.rope_layer_type
    )
    entries = rotate(entries[:, None], cos, sin)[:, 0]
    rows = entries.new_zeros(1, hidden_states.shape[1], dim)
    return rows.index_copy(1, windows.last, entries)


def _every_entry(mask: TreeMask, size: int) -> torch.Tensor:
    """Makes the bits of all entries of a path, int32 [T, W]."""
    deepest = mask.host.deepest
    ends = torch.arange(1, deepest + 1, device=mask.device) % size == 0
    return to_bits(ends[None], words(deepest)).repeat(mask.num_tokens, 1)


@torch.no_grad()
def _best_entries(
    indexer: Any,
    rotate: Any,
    hidden_states: torch.Tensor,
    q_residual: torch.Tensor,
    windows: _Windows,
    path: QueryPath,
) -> torch.Tensor:
    """Makes the bits of each query's best entries, int32 [T, W]."""
    size, kind = indexer.compress_rate, indexer.rope_layer_type
    keys = _entries(indexer, rotate, hidden_states, windows, True)[0]
    for rows in path.spans(indexer.num_heads):
        hidden, positions = hidden_states[:, rows], path.positions
        cos, sin = indexer.rotary_emb(hidden, position_ids=positions[None], layer_type=kind)
        queries = indexer.q_b_proj(q_residual[:, rows]).unflatten(-1, (-1, indexer.head_dim))
        queries = rotate(queries.transpose(1, 2), cos, sin).transpose(1, 2)
        of_path = path.of_path(keys[rows])
        entries = of_path[size - 1 :: size]
        scores = indexer.scorer(queries, entries[None], hidden)[0]
        count = len(entries)
        seen = torch.arange(count, device=scores.device) < (positions[:, None] + 1) // size
        # a query is no entry: scores say which entries it sees
        scores, anywhere = (
            scores.masked_fill(~seen, -torch.inf),
            positions.new_full((len(seen),), count),
        )
        best = best_keys(scores, indexer.index_topk, anywhere) & seen
        chosen = seen.new_zeros(len(positions), len(of_path))
        chosen[:, size - 1 :: size] = best
        path.note(chosen)
    return path.bits


def _with_own(bits: torch.Tensor, mask: TreeMask, size: int) -> Entries:
    """Adds the own bit of a query that sees no entry, as it must attend to something."""
    positions = mask.position_ids.long()
    absent = positions < size - 1
    own = torch.eye(max(1, min(size - 1, mask.host.deepest)), dtype=torch.bool, device=bits.device)
    of_tokens = to_bits(own, bits.shape[1])[positions.clamp_max(len(own) - 1)]
    return Entries(torch.where(absent[:, None], of_tokens, bits), absent)
