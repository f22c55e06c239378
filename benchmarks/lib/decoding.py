"""A step of decoding over a forest: its rows and runs, inputs, and attention by each side.

Sides, by name: "cascade" (keys that rows share are read once), "row" (the same kernels, every row
reads all of its keys), "fa4" (flash-attn-4 over variable lengths) and "sdpa" (torch, equal
lengths); the last two over replicated keys that hold the new one already.

Legend: B rows, H query heads, Hk kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.lib.replicated import out_of
from benchmarks.lib.shapes import Shape
from prefixtree import PrefixForest
from prefixtree.kernels.decoding import work as decode_work
from prefixtree.kernels.decoding.cascade import cascade_attention
from prefixtree.kernels.decoding.work import DecodeWork

SIDES = ("cascade", "row", "fa4", "sdpa")
NEVER = 1 << 60


@dataclass(frozen=True)
class Step:
    """The keys that the rows of a step see, as `DecodeWork` takes them.

    Attributes:
        runs, tails: as there.
        num_keys: keys of a pool.
    """

    runs: np.ndarray
    tails: np.ndarray
    num_keys: int

    @classmethod
    def of(cls, forest: PrefixForest, copies: int, written: int) -> Step:
        """So many rows below every sequence of a forest, in the middle of what they write."""
        order = np.sort(np.asarray(forest.sequence_node))
        rows = np.repeat(order, copies)
        starts = np.concatenate([[0], np.cumsum(forest.node_length)])
        # nodes stand in preorder: a subtree ends where the next node is no deeper than its root
        end = np.arange(1, forest.num_nodes + 1)
        for node in range(forest.num_nodes - 1, 0, -1):
            if (parent := forest.node_parent[node]) >= 0:
                end[parent] = max(end[parent], end[node])
        below = np.searchsorted(rows, np.arange(forest.num_nodes)), np.searchsorted(rows, end)
        runs = np.stack([starts[:-1], starts[1:], *below, forest.node_position], 1)
        depth = (forest.node_position + forest.node_length)[rows]
        room = 2 * written
        first = starts[-1] + room * np.arange(len(rows))
        tails = np.stack([first, np.full_like(first, room), np.full_like(first, written), depth], 1)
        return cls(runs.astype(np.int64), tails.astype(np.int64), int(first[-1] + room))

    @property
    def distinct(self) -> int:
        """Keys that a step reads if it reads each once, those that it writes among them."""
        lengths = (self.runs[:, 1] - self.runs[:, 0])[self.runs[:, 3] > self.runs[:, 2]]
        return int(lengths.sum() + (self.tails[:, 2] + 1).sum())

    @property
    def replicated(self) -> int:
        """Keys that the rows read if each reads its own."""
        return int((self.tails[:, 3] + self.tails[:, 2] + 1).sum())

    def keys_of(self, row: int) -> np.ndarray:
        """The keys that a row sees, in the pool, the new one last."""
        mine = self.runs[(self.runs[:, 2] <= row) & (row < self.runs[:, 3])]
        mine = mine[np.argsort(mine[:, 4])]
        first, _, written, _ = self.tails[row]
        return np.concatenate(
            [np.arange(a, b) for a, b, *_ in mine] + [np.arange(first, first + written + 1)]
        )

    def work(self, side: str, shape: Shape, device: str) -> DecodeWork:
        """The work list of "cascade" or "row"."""
        shared = decode_work.SHARE_FROM if side == "cascade" else NEVER
        with patch.object(decode_work, "SHARE_FROM", shared):
            return DecodeWork(
                self.runs,
                self.tails,
                device=device,
                group=shape.heads // shape.kv_heads,
                kv_heads=shape.kv_heads,
                num_keys=self.num_keys,
            )


@dataclass
class Inputs:
    """Tensors of a layer: q [B, H, D], k and v [B, Hk, D], a pool of keys and one of values."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    key_pool: torch.Tensor
    value_pool: torch.Tensor

    @classmethod
    def draw(cls, step: Step, shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(count: int, heads: int, dim: int) -> torch.Tensor:
            size = count, heads, dim
            return torch.randn(size, generator=generator, device=device, dtype=dtype)

        rows, d, d_v = len(step.tails), shape.head_dim, shape.dim_of_v
        sizes = [(rows, shape.heads, d), (rows, shape.kv_heads, d), (rows, shape.kv_heads, d_v)]
        pools = [normal(step.num_keys, shape.kv_heads, dim) for dim in (d, d_v)]
        return cls(*(normal(*size) for size in sizes), *pools)


def exact(step: Step, inputs: Inputs, rows: np.ndarray) -> torch.Tensor:
    """Some rows' attention in float64, row by row. # [rows, H, Dv]"""
    out = []
    for row in rows.tolist():
        at = torch.as_tensor(step.keys_of(row), device=inputs.q.device)
        k, v = inputs.key_pool[at].double(), inputs.value_pool[at].double()
        k[-1], v[-1] = inputs.k[row].double(), inputs.v[row].double()
        q = inputs.q[row].double().unflatten(0, (k.shape[1], -1))
        scores = torch.einsum("kgd,lkd->kgl", q, k) * q.shape[-1] ** -0.5
        out.append(torch.einsum("kgl,lkd->kgd", scores.softmax(-1), v).flatten(0, 1))
    return torch.stack(out)


Attend = Callable[[], torch.Tensor]


def attend(side: str, step: Step, inputs: Inputs, shape: Shape, backend: str) -> Attend:
    """One side's attention of these inputs, ready to be called again and again."""
    if side in ("cascade", "row"):
        work = step.work(side, shape, str(inputs.q.device))
        tensors = inputs.q, inputs.k, inputs.v, inputs.key_pool, inputs.value_pool
        return lambda: cascade_attention(*tensors, work, backend=backend)
    keys = [step.keys_of(row) for row in range(len(step.tails))]
    at = torch.as_tensor(np.concatenate(keys), device=inputs.q.device)
    ends = torch.as_tensor(np.cumsum([0, *map(len, keys)]), device=at.device)
    k, v = inputs.key_pool[at], inputs.value_pool[at]
    k[ends[1:] - 1], v[ends[1:] - 1] = inputs.k, inputs.v
    if side == "fa4":
        return _fa4(inputs.q, k, v, ends, max(map(len, keys)))
    rows = len(keys)
    k, v = (x.unflatten(0, (rows, -1)).transpose(1, 2).contiguous() for x in (k, v))
    q = inputs.q[:, :, None]
    return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)[:, :, 0]


def _fa4(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, longest: int
) -> Attend:
    from flash_attn.cute.interface import flash_attn_varlen_func

    one = torch.arange(len(ends), dtype=torch.int32, device=q.device)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    more = dict(zip(names, (one, ends.int(), 1, longest), strict=True))
    return lambda: out_of(flash_attn_varlen_func(q, k, v, **more))
