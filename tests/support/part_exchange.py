"""Tree attention on the parts of a packed forest, one part after another in this process."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from prefixtree import PackedForest, tree_attention
from prefixtree.planning.parts import Parts

Tensors = list[torch.Tensor]


def import_rows(parts: Parts, own: Tensors) -> Tensors:
    """[t, ...] of every part -> [K, ...]: own rows and imported rows in their places.

    Rows that nothing fills are NaN.
    """
    everything = whole(parts, own)
    return [everything[part.tokens] for part in parts]


def give_back(parts: Parts, rows: Tensors, left_out: tuple[int, int] | None = None) -> Tensors:
    """Gradients [K, ...] of every part -> [t, ...]: those of imported rows are added to their own,
    importer after importer.

    Args:
        left_out: (importer, exporter) whose gradients get lost, for tests that must turn red.
    """
    own = []
    for part, x in zip(parts, rows, strict=True):
        out = x[part.own_rows].clone()
        for importer, gradient in zip(parts, rows, strict=True):
            is_exported = np.isin(importer.tokens, part.own_tokens)
            if importer is not part and (importer.index, part.index) != left_out:
                place = np.searchsorted(part.own_tokens, importer.tokens[is_exported])
                out.index_add_(0, torch.from_numpy(place), gradient[is_exported])
        own.append(out)
    return own


class ListExchange:
    """The exchange of one part while the others are not there, for `part_attention`.

    What the others export comes from lists of all parts' keys and values. What they return is known
    once the backward of each has run, so gradients are right in the second backward of each.

    Args:
        own: the own keys and values of every part.
        returned: the gradients of keys and values that each part gave to `give_back`; all parts
            share this list, and fill it.
        lost: (importer, exporter) whose gradients get lost, for tests that must turn red.
        dtype: to which returned gradients are cast, likewise. Default: none.
    """

    def __init__(
        self,
        parts: Parts,
        index: int,
        own: tuple[Tensors, Tensors],
        returned: list[Tensors | None],
        lost: tuple[int, int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.parts, self.index, self.own, self.returned = parts, index, own, returned
        self.lost, self.dtype = lost, dtype

    def import_rows(self, *own: torch.Tensor) -> Tensors:
        assert all(torch.equal(x, of[self.index]) for x, of in zip(own, self.own, strict=True))
        return [import_rows(self.parts, of)[self.index] for of in self.own]

    def give_back(self, *gradients: torch.Tensor) -> Tensors:
        self.returned[self.index] = list(gradients)
        if any(of is None for of in self.returned):
            return [x[self.parts[self.index].own_rows] for x in gradients]
        dtypes = [x.dtype for x in gradients]
        rows = [
            [x.to(self.dtype or x.dtype) for x in of] for of in zip(*self.returned, strict=True)
        ]
        own = [give_back(self.parts, x, self.lost)[self.index] for x in rows]
        return [x.to(dtype) for x, dtype in zip(own, dtypes, strict=True)]


def whole(parts: Parts, own: Tensors) -> torch.Tensor:
    """[T, ...] of the own rows of every part; NaN where no part owns a token."""
    out = own[0].new_full((parts.packed.num_tokens, *own[0].shape[1:]), torch.nan)
    for part, x in zip(parts, own, strict=True):
        out[part.own_tokens] = x
    return out


def attend_in_parts(
    parts: Parts,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
    left_out: tuple[int, int] | None = None,
    **options: Any,
) -> Tensors:
    """out, dq, dk, dv [T, ...] of tree attention that every part computes on its own rows."""
    q, k, v = ([part.own(x) for part in parts] for x in qkv)
    outs, gradients = [], []
    for part, q_own, k_rows, v_rows in zip(
        parts, q, import_rows(parts, k), import_rows(parts, v), strict=True
    ):
        leaves = [x.detach().requires_grad_() for x in (q_own, k_rows, v_rows)]
        out = tree_attention(*leaves, part.mask, **options)
        outs.append(out.detach())
        gradients.append(torch.autograd.grad(out, leaves, part.own(dout)))
    dq, dk, dv = (list(x) for x in zip(*gradients, strict=True))
    returned = [give_back(parts, x, left_out) for x in (dk, dv)]
    return [whole(parts, x) for x in (outs, dq, *returned)]


def attend_in_steps(
    parts: Parts,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
    order: list[int],
    backwards: list[int] | None = None,
    **options: Any,
) -> Tensors:
    """The same with one step after another: forwards in `order`, and then `backwards`.

    The backwards run in the reverse order by default. Keys and values of a step are there once its
    forward has run, and NaN before. What is added to the gradients of a step after its backward has
    run is lost.
    """
    q, k, v = qkv
    store = [torch.full_like(x, torch.nan) for x in (k, v)]
    returned = [torch.zeros_like(x) for x in (k, v)]
    results = [torch.full_like(x, torch.nan) for x in (dout, q, k, v)]
    graphs = {}
    for number in order:
        part = parts[number]
        own = part.own_tokens
        for kept, x in zip(store, (k, v), strict=True):
            kept[own] = x[own]
        leaves = [x.clone().requires_grad_() for x in (q[own], *(x[part.tokens] for x in store))]
        graphs[number] = tree_attention(*leaves, part.mask, **options), leaves
    for number in order[::-1] if backwards is None else backwards:
        part = parts[number]
        own, (out, leaves) = part.own_tokens, graphs[number]
        results[0][own] = out.detach()
        dq, *rows = torch.autograd.grad(out, leaves, dout[own])
        results[1][own] = dq
        for result, later, gradient in zip(results[2:], returned, rows, strict=True):
            result[own] = gradient[part.own_rows] + later[own]
            later[part.imported_tokens] += gradient[~np.isin(part.tokens, own)]
    return results


def scattered(packed: PackedForest, border: np.ndarray, ranks: int, *_: Any, **__: Any) -> Parts:
    """In the place of `split_slots`: tokens of each slot go anywhere."""
    slot = np.searchsorted(border, np.arange(packed.num_tokens), side="right") - 1
    rank = np.random.default_rng(1).integers(0, ranks, packed.num_tokens)
    return Parts(packed, slot * ranks + rank, ranks * (len(border) - 1))


def random_values(num_tokens: int, seed: int = 0, kv_heads: int = 1) -> tuple[torch.Tensor, ...]:
    """q, k, v and dout, float64."""
    generator = torch.Generator().manual_seed(seed)
    heads = (2, kv_heads, kv_heads, 2)
    return tuple(
        torch.randn(num_tokens, h, 4, generator=generator, dtype=torch.float64) for h in heads
    )


def attend_whole(packed: PackedForest, qkv, dout, **options):
    """out, dq, dk, dv of the whole forest, by the reference."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = tree_attention(*leaves, packed.mask, backend="reference", **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]
