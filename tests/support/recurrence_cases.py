"""Shared by the tests of the recurrent layers: forests, random calls, sequences one by one, parts
one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from prefixtree import PackedForest, PrefixForest, TreeMask
from prefixtree.kernels.recurrence import tree_conv, tree_delta_rule, tree_ssd
from prefixtree.kernels.recurrence.decode import conv_step, delta_rule_step, ssd_step
from prefixtree.kernels.recurrence.protocol import RowSlots
from prefixtree.planning.part_states import PartStates
from prefixtree.planning.parts import Parts
from prefixtree.planning.steps import Steps
from tests.support.strategies import Sequences, mask_of, packed_path

Leaves = list[torch.Tensor]


@dataclass(frozen=True)
class Operator:
    """One of the operators with options.

    Attributes:
        leaves: (tokens, generator) -> float64 inputs, those per token first.
        per_token: how many of them are per token.
        run: (mask, leaves, backend) -> out. Of recurrences also (borders, leaves, backend,
            initial=) -> out, final.
        step: (leaves, pool, rows) -> out, of one token per row; the pool holds states or tails.
            Default: none.
        state: the shape of a slot of the pool.
    """

    name: str
    leaves: Callable[[int, torch.Generator], Leaves]
    per_token: int
    run: Callable[..., Any]
    step: Callable[[Sequence[torch.Tensor], torch.Tensor, RowSlots], torch.Tensor] | None = None
    state: tuple[int, ...] = ()

    def random(self, tokens: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Leaves:
        """Leaves that require gradients, rounded to the dtype."""
        generator = torch.Generator().manual_seed(seed)
        return [x.to(dtype).requires_grad_() for x in self.leaves(tokens, generator)]


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _conv(width: int, bias: bool, activation: str | None) -> Operator:
    def leaves(tokens: int, generator: torch.Generator) -> Leaves:
        x, weight = _normal(generator, tokens, 5), _normal(generator, 5, width)
        return [x, weight, _normal(generator, 5)] if bias else [x, weight]

    def run(mask: TreeMask, leaves: Sequence[torch.Tensor], backend: str) -> torch.Tensor:
        x, weight, *rest = leaves
        return tree_conv(x, weight, rest[0] if rest else None, mask, activation, backend=backend)

    def step(leaves: Sequence[torch.Tensor], pool: torch.Tensor, rows: RowSlots) -> torch.Tensor:
        x, weight, *rest = leaves
        return conv_step(x, weight, rest[0] if rest else None, pool, rows, activation is not None)

    return Operator(f"conv {width} {bias} {activation}", leaves, 1, run, step, (width - 1, 5))


def _delta(key_heads: int, per_channel: bool, l2norm: bool, scale: float | None) -> Operator:
    def leaves(tokens: int, generator: torch.Generator) -> Leaves:
        def normal(*shape: int) -> torch.Tensor:
            return _normal(generator, *shape)

        gates = (tokens, 4, 6) if per_channel else (tokens, 4)
        key = normal(tokens, key_heads, 6)
        # without the operator's own norm keys longer than 1 make the recurrence explode
        key = key if l2norm else torch.nn.functional.normalize(key, dim=-1)
        return [
            normal(tokens, key_heads, 6),
            key,
            normal(tokens, 4, 5),
            -normal(*gates).abs(),
            normal(tokens, 4).sigmoid(),
        ]

    def run(mask: Any, leaves: Sequence[torch.Tensor], backend: str, **states: Any) -> Any:
        options = {"scale": scale, "qk_l2norm": l2norm, "backend": backend}
        return tree_delta_rule(*leaves, mask, **options, **states)

    def step(leaves: Sequence[torch.Tensor], pool: torch.Tensor, rows: RowSlots) -> torch.Tensor:
        return delta_rule_step(*leaves, pool, rows, scale=scale, qk_l2norm=l2norm)

    name = f"delta {key_heads} {per_channel} {l2norm} {scale}"
    return Operator(name, leaves, 5, run, step, (4, 6, 5))


def _ssd(extras: bool) -> Operator:
    def leaves(tokens: int, generator: torch.Generator) -> Leaves:
        def normal(*shape: int) -> torch.Tensor:
            return _normal(generator, *shape)

        x, B, C = normal(tokens, 4, 5), normal(tokens, 2, 6), normal(tokens, 2, 6)
        dt = normal(tokens, 4)
        found = [x, dt if extras else dt.abs(), B, C, -(normal(4) / 2).exp()]
        return [*found, normal(4), normal(4)] if extras else found

    def options(rest: Sequence[torch.Tensor]) -> dict[str, Any]:
        if not rest:
            return {}
        # the least dt is above 0, as Nemotron-H's: it would decay states over padding
        return {"D": rest[0], "dt_bias": rest[1], "dt_softplus": True, "dt_limit": (0.3, 2.0)}

    def run(mask: Any, leaves: Sequence[torch.Tensor], backend: str, **states: Any) -> Any:
        x, dt, B, C, A, *rest = leaves
        return tree_ssd(x, dt, A, B, C, mask, **options(rest), backend=backend, **states)

    def step(leaves: Sequence[torch.Tensor], pool: torch.Tensor, rows: RowSlots) -> torch.Tensor:
        x, dt, B, C, A, *rest = leaves
        return ssd_step(x, dt, A, B, C, pool, rows, **options(rest))

    return Operator(f"ssd {extras}", leaves, 4, run, step, (4, 6, 5))


OPERATORS = [
    _conv(4, True, "silu"),
    _conv(3, False, None),
    _conv(1, True, "swish"),
    _delta(2, False, True, None),
    _delta(4, False, False, 0.7),
    _delta(2, True, True, None),
    _ssd(True),
    _ssd(False),
]
RECURRENCES = [op for op in OPERATORS if not op.name.startswith("conv")]


def _run_of(start: int, length: int) -> list[int]:
    return list(range(start, start + length))


def _caterpillar(depth: int, length: int) -> Sequences:
    spine: list[int] = []
    found = []
    for level in range(depth):
        spine = [*spine, *_run_of(100 * level, length)]
        found.append([*spine, 9999, *_run_of(0, 3)])
    return found


FORESTS: dict[str, Sequences] = {
    "one token": [[1]],
    "chain": [_run_of(0, 150)],
    "star": [[*_run_of(0, 70), 1000 + i, *_run_of(0, i)] for i in range(9)],
    "caterpillar": _caterpillar(6, 20),
    "deep": [[0] * d + [1] for d in range(12)],
    "ends inside runs": [_run_of(0, 140), _run_of(0, 70), _run_of(0, 64), _run_of(0, 3)],
    "duplicates": [[*_run_of(0, 66), 7], [*_run_of(0, 66), 8], [*_run_of(0, 66), 7], [5], [5]],
    "many roots": [_run_of(100 * i, i + 1) for i in range(25)],
    "long and short": [
        *([*_run_of(0, 129), 500, *_run_of(0, 65)], [*_run_of(0, 129), 501]),
        *([*_run_of(0, 129), 500, *_run_of(0, 65), 3], [*_run_of(0, 129), 500, *_run_of(0, 65), 4]),
    ],
}


def forest_of(name: str) -> PrefixForest:
    return PrefixForest.from_sequences(FORESTS[name])


def chain(tokens: int) -> TreeMask:
    """The mask of one sequence."""
    return TreeMask(np.full(tokens, tokens, np.int32))


def gradients(
    op: Operator, mask: TreeMask, leaves: Leaves, cotangent: torch.Tensor, backend: str
) -> Leaves:
    """out, and the gradients of the leaves."""
    out = op.run(mask, leaves, backend)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent.to(out.dtype))]


def one_by_one(
    op: Operator, forest: PrefixForest, leaves: Leaves, cotangents: Leaves
) -> tuple[Leaves, Leaves]:
    """Each sequence alone: its out, and the sums of the gradients of the leaves."""
    outs = []
    total = torch.zeros((), dtype=torch.float64)
    for s in range(forest.num_sequences):
        path = torch.from_numpy(packed_path(forest, s))
        mine = [x[path] if i < op.per_token else x for i, x in enumerate(leaves)]
        outs.append(op.run(chain(len(path)), mine, "reference"))
        total = total + (outs[-1] * cotangents[s]).sum()
    grads = torch.autograd.grad(total, leaves)
    return [out.detach() for out in outs], list(grads)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b|, of tensors as a whole."""
    a, b = a.detach(), b.detach()
    if not (a.numel() and b.double().norm() > 0):
        return float((a.double() - b.double()).norm())
    return float((a.double() - b.double()).norm() / b.double().norm())


def along_the_tree(
    op: Operator, forest: PrefixForest, leaves: Leaves, cotangents: Leaves, backend: str
) -> tuple[Leaves, Leaves]:
    """The results of `one_by_one`, from one call over the packed forest."""
    out = op.run(mask_of(forest).to(leaves[0].device), leaves, backend)
    paths = [torch.from_numpy(packed_path(forest, s)) for s in range(forest.num_sequences)]
    total = torch.zeros((), dtype=torch.float64, device=out.device)
    for path, cotangent in zip(paths, cotangents, strict=True):
        total = total + (out[path] * cotangent).sum()
    return [out[path].detach() for path in paths], list(torch.autograd.grad(total, leaves))


def cotangents_for(op: Operator, forest: PrefixForest, seed: int = 3) -> Leaves:
    """Random gradients of each sequence's out."""
    generator = torch.Generator().manual_seed(seed)
    shape = op.run(chain(1), op.random(1), "reference").shape[1:]
    lengths = [len(packed_path(forest, s)) for s in range(forest.num_sequences)]
    return [_normal(generator, n, *shape) for n in lengths]


def worst_errors(
    op: Operator, forest: PrefixForest, backend: str, seed: int = 0
) -> tuple[float, float]:
    """(out, gradients): the worst relative error against each sequence alone, float64."""
    leaves, cotangents = op.random(forest.num_tokens, seed), cotangents_for(op, forest)
    ours = along_the_tree(op, forest, leaves, cotangents, backend)
    alone = one_by_one(op, forest, leaves, cotangents)
    out, grads = (
        max(relative(a, b) for a, b in zip(mine, theirs, strict=True))
        for mine, theirs in zip(ours, alone, strict=True)
    )
    return out, grads


def runs(packed: PackedForest, num_parts: int) -> Steps:
    """Parts of neighbouring tokens."""
    owner = np.arange(packed.num_tokens) * num_parts // packed.num_tokens
    return Steps(packed, owner, num_parts)


def of_parts(op: Operator, parts: Parts, leaves: Leaves, backend: str) -> torch.Tensor:
    """out of the whole forest; autograd leads from part to part through states."""
    outs, behind = [], {}
    for part in parts:
        states = PartStates(part)
        own = torch.from_numpy(part.own_tokens).long()
        mine = [x[own] if i < op.per_token else x for i, x in enumerate(leaves)]
        entering = [behind[token] for token in states.entered.tolist()]
        initial = torch.stack(entering) if entering else None
        out, final = op.run(states.borders, mine, backend, initial=initial)
        behind.update(zip(states.left.tolist(), final, strict=True))
        outs.append(out)
    order = torch.from_numpy(np.argsort(np.concatenate([part.own_tokens for part in parts])))
    return torch.cat(outs)[order]
