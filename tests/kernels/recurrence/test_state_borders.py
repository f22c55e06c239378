"""States that enter and leave a part of a forest: parts, one after another, are the whole call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixtree import ForestError, PackedForest, PrefixForest, pack
from prefixtree.kernels.recurrence import chunked, operator, tree_conv
from prefixtree.kernels.recurrence.protocol import Computed
from prefixtree.packing.state_borders import StateBorders
from prefixtree.planning.part_states import PartStates
from prefixtree.planning.parts import Parts
from prefixtree.planning.steps import Steps
from tests.kernels.recurrence.test_recurrence import cut_small
from tests.support.full import each_once, mostly
from tests.support.hooks import put
from tests.support.recurrence_cases import (
    OPERATORS,
    RECURRENCES,
    Operator,
    forest_of,
    of_parts,
    relative,
    runs,
)
from tests.support.strategies import forests, mask_of

BY_NAME = pytest.mark.parametrize("op", RECURRENCES, ids=lambda op: op.name)
# a delta rule with one gate a head and with one a channel, and a state-space rule
MOSTLY_BY_NAME = pytest.mark.parametrize(
    "op", mostly(RECURRENCES, [RECURRENCES[0], *RECURRENCES[2:4]]), ids=lambda op: op.name
)


def name_of(x: Any) -> str:
    return getattr(x, "name", getattr(x, "__name__", x))


def in_order(packed: PackedForest, num_parts: int, seed: int) -> Steps:
    """Parts of any tokens, none in an earlier part than a token above it."""
    rng = np.random.default_rng(seed)
    owner = np.zeros(packed.num_tokens, np.int64)
    for token, above in enumerate(packed.mask.host.predictor.tolist()):
        least = 0 if above < 0 else owner[above]
        owner[token] = least if rng.random() < 0.7 else rng.integers(least, num_parts)
    return Steps(packed, owner, num_parts)


def errors(
    op: Operator, parts: Parts, backend: str, dtype: torch.dtype = torch.float64
) -> tuple[float, float]:
    """(out, gradients): the worst relative error against one call over the whole forest."""
    leaves = op.random(parts.packed.num_tokens, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    want = op.run(parts.packed.mask, exact, "chunked")
    draw = torch.Generator().manual_seed(4)
    cotangent = torch.randn(want.shape, generator=draw, dtype=torch.float64)
    found = of_parts(op, parts, leaves, backend)
    grads = torch.autograd.grad((found.double() * cotangent).sum(), leaves)
    right = torch.autograd.grad(want, exact, cotangent)
    return relative(found, want), max(relative(a, b) for a, b in zip(grads, right, strict=True))


@MOSTLY_BY_NAME
@settings(max_examples=8)
@given(forest=forests(), num_parts=st.integers(1, 4), seed=st.integers(0, 99), whole=st.booleans())
def test_any_parts_in_order_are_one_call(
    op: Operator, forest: Any, num_parts: int, seed: int, whole: bool
) -> None:
    packed = pack(forest)
    parts = runs(packed, num_parts) if whole else in_order(packed, num_parts, seed)
    with pytest.MonkeyPatch.context() as patch:
        cut_small(patch)
        out, grads = errors(op, parts, "chunked")
    assert out < 1e-13 and grads < 1e-12


@pytest.mark.parametrize(
    ("op", "name"),
    each_once(RECURRENCES, ["caterpillar", "ends inside runs", "long and short"]),
    ids=name_of,
)
def test_named_forests(op: Operator, name: str) -> None:
    packed = pack(forest_of(name))
    for backend, parts in (("chunked", runs(packed, 4)), ("reference", in_order(packed, 3, 1))):
        out, grads = errors(op, parts, backend)
        assert out < 1e-13 and grads < 1e-12, backend


def test_a_convolution_reads_the_tokens_above() -> None:
    packed = pack(forest_of("caterpillar"))
    for op in OPERATORS[:3]:
        leaves = op.random(packed.num_tokens)
        for parts in (runs(packed, 5), in_order(packed, 3, 2)):
            want = op.run(packed.mask, leaves, "chunked")
            rows = []
            for part in parts:
                tails = PartStates(part).tails(leaves[1].shape[1])
                tokens = np.sort(np.concatenate([tails.tokens, part.own_tokens]))
                mine = [leaves[0][torch.from_numpy(tokens)], *leaves[1:]]
                rows.append(op.run(tails.mask, mine, "chunked")[tails.own_rows])
                joined = np.concatenate([tails.tokens, part.own_tokens])
                assert (joined[tails.joined] == tokens).all()
                assert tails.are_first == (joined == tokens).all()
            order = np.argsort(np.concatenate([part.own_tokens for part in parts]))
            found = torch.cat(rows)[torch.from_numpy(order)]
            grads = (torch.autograd.grad(x.sin().sum(), leaves) for x in (found, want))
            assert relative(found, want) < 1e-14
            for a, b in zip(*grads, strict=True):
                assert relative(a, b) < 1e-13


# ---- the meters see what is wrong ----------------------------------------------------------------


def _lost_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, "gradients of initial states", lambda *_: None)


def _lost_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    real = chunked.backward
    monkeypatch.setattr(chunked, "backward", lambda *given: real(*given[:3], None))


@pytest.mark.parametrize(
    ("op", "lose"), each_once(RECURRENCES, [_lost_entries, _lost_exits]), ids=name_of
)
def test_gradients_of_states_that_are_left_out_show(
    op: Operator, lose: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = runs(pack(forest_of("caterpillar")), 4)
    lose(monkeypatch)
    out, grads = errors(op, parts, "chunked")
    assert out < 1e-13 and grads > 1e-2


# ---- float32 and half precision ------------------------------------------------------------------


@MOSTLY_BY_NAME
def test_states_stay_float32_between_parts(op: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 inputs: parts round as one call does, and states in bfloat16 would show."""
    packed = pack(forest_of("caterpillar"))
    once = errors(op, runs(packed, 1), "chunked", torch.bfloat16)
    cut = errors(op, runs(packed, 5), "chunked", torch.bfloat16)
    assert all(a < 1.05 * b for a, b in zip(cut, once, strict=True))
    real = chunked.forward

    def rounded(call: Any) -> Computed:
        computed = real(call)
        assert computed.final is not None and computed.final.dtype == torch.float32
        return computed._replace(final=computed.final.bfloat16().float())

    leaves = op.random(packed.num_tokens, dtype=torch.float32)
    want = op.run(packed.mask, leaves, "chunked")
    assert relative(of_parts(op, runs(packed, 5), leaves, "chunked"), want) < 1e-6
    monkeypatch.setattr(chunked, "forward", rounded)
    assert relative(of_parts(op, runs(packed, 5), leaves, "chunked"), want) > 1e-4


# ---- torch's contracts and bad calls -------------------------------------------------------------


@pytest.mark.parametrize("backend", mostly(["chunked", "reference"], ["chunked"]))
def test_opcheck_and_what_is_not_asked_for(backend: str) -> None:
    packed = pack(PrefixForest.from_sequences([[1, 2, 3, 4, 5, 6], [1, 2, 7], [8]]))
    op = RECURRENCES[0]
    leaves = op.random(packed.num_tokens)
    roots = np.flatnonzero(packed.mask.host.predictor < 0)
    borders = StateBorders(packed.mask, roots, [0] * len(roots), [3, 5])
    initial = torch.randn(1, 4, 6, 5, dtype=torch.float64, requires_grad=True)
    arguments = (*leaves, initial, borders.handle, 0.3, True, 2, backend)
    torch.library.opcheck(operator.TREE_DELTA_RULE.forward, arguments)
    out, final = op.run(borders, leaves, backend, initial=initial)
    # of the states alone, and of the outputs alone
    both = torch.autograd.grad(out.sum() + final.sum(), [initial, *leaves], retain_graph=True)
    alone = [
        torch.autograd.grad(x.sum(), [initial, *leaves], retain_graph=True) for x in (out, final)
    ]
    for whole, *parts in zip(both, *alone, strict=True):
        torch.testing.assert_close(sum(parts), whole)


def test_roots_that_share_a_state_and_states_behind_leaves() -> None:
    """The last token's state is that of the sequence, as if its tokens went on."""
    op = RECURRENCES[0]
    packed = pack(forest_of("many roots"))
    host = packed.mask.host
    roots = np.flatnonzero(host.predictor < 0)
    leaves = op.random(packed.num_tokens)
    ends = np.append(roots[1:], packed.num_tokens) - 1
    initial = torch.randn(2, 4, 6, 5, dtype=torch.float64, requires_grad=True)
    borders = StateBorders(packed.mask, roots, np.arange(len(roots)) % 2, ends)
    found = [op.run(borders, leaves, b, initial=initial) for b in ("chunked", "reference")]
    for a, b in zip(*found, strict=True):
        assert relative(a, b) < 1e-13
    assert found[0][1].shape == (len(roots), 4, 6, 5)
    grads = [torch.autograd.grad((x[0].sum() + x[1].sin().sum()), initial)[0] for x in found]
    assert relative(*grads) < 1e-13


def test_bad_borders() -> None:
    mask = mask_of(forest_of("star"))
    for match, arguments in (
        ("a state enters at a root; token 1 continues", {"entries": [1]}),
        ("entries must be ascending tokens", {"entries": [0, 0]}),
        ("exits must be ascending tokens of the mask", {"exits": [mask.num_tokens]}),
        ("exits must be ascending", {"exits": [4, 2]}),
        ("a state for each of the 1 entries, got 2", {"entries": [0], "rows": [0, 1]}),
        ("within the 1 states", {"entries": [0], "rows": [1], "num_entries": 1}),
        ("within the 0 states", {"entries": [0], "rows": [-1]}),
    ):
        with pytest.raises(ForestError, match=match):
            StateBorders(mask, **arguments)
    with pytest.raises(TypeError, match="must be a TreeMask"):
        StateBorders(mask.subtree_end)  # type: ignore[arg-type]
    assert repr(StateBorders(mask, [0], exits=[4])) == (
        f"StateBorders({mask.num_tokens} tokens, 1 states enter at 1 roots, 1 leave)"
    )


def test_bad_states() -> None:
    op = RECURRENCES[0]
    mask = mask_of(forest_of("star"))
    leaves = op.random(mask.num_tokens)
    entered, left = StateBorders(mask, [0]), StateBorders(mask, exits=[4])
    state = torch.zeros(1, 4, 6, 5, dtype=torch.float64)
    for borders, initial, match in (
        (mask, state, "in the place of the mask"),
        (entered, None, "hold the 1 states that enter"),
        (left, state, "hold the 0 states that enter"),
        (entered, state[:, :2], r"initial must be \[states, heads, key dim, value dim\]"),
        (entered, state.float(), "initial must be torch.float64 on cpu, got torch.float32"),
    ):
        with pytest.raises(ValueError, match=match):
            op.run(borders, leaves, "chunked", initial=initial)
    x, weight, bias = OPERATORS[0].random(mask.num_tokens)
    with pytest.raises(TypeError, match="must be a TreeMask, got StateBorders"):
        tree_conv(x, weight, bias, entered)  # type: ignore[arg-type]
    out, final = op.run(StateBorders(mask), leaves, "chunked")
    assert final.shape == (0, 4, 6, 5) and torch.equal(out, op.run(mask, leaves, "chunked"))
    out, final = op.run(StateBorders(mask), leaves, "reference")
    assert final.shape == (0, 4, 6, 5)
