"""`part_attention`: all parts of a forest, one after another in this process, against the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from prefixtree import PrefixForest, UnsupportedError, compile_layers, pack, tree_attention
from prefixtree.parallel.attention import PartMask, part_attention
from prefixtree.planning.parts import Parts
from tests.support.models import (
    attentions,
    build,
    gradients,
    pack_sequences,
    ragged_packed,
    ragged_sequences,
)
from tests.support.part_exchange import ListExchange, whole
from tests.support.strategies import divisions, random_forest, random_owner

Case = tuple[torch.Tensor, ...]


def random_case(
    num_tokens: int,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (4, 4),
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Case:
    """q, k, v and dout of all packed tokens."""
    generator = torch.Generator().manual_seed(seed)
    (h, hk), (d, dv) = heads, dims
    shapes = [(num_tokens, *s) for s in ((h, d), (hk, d), (hk, dv), (h, dv))]
    return tuple(
        torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes
    )


def attend_whole(
    parts: Parts, case: Case, sinks: torch.Tensor | None = None, **options: Any
) -> list[torch.Tensor]:
    """out, dq, dk, dv and, with sinks, dsinks of the whole forest."""
    *qkv, dout = case
    leaves = [x.detach().requires_grad_() for x in (*qkv, *([] if sinks is None else [sinks]))]
    options["sinks"] = None if sinks is None else leaves[3]
    out = tree_attention(*leaves[:3], parts.packed.mask, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def attend_in_parts(
    parts: Parts,
    case: Case,
    sinks: torch.Tensor | None = None,
    lost: tuple[int, int] | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> list[torch.Tensor]:
    """The same through `part_attention` of every part; dsinks is the sum over parts."""
    *qkv, dout = case
    q, k, v = ([part.own(x) for part in parts] for x in qkv)
    returned: list[Any] = [None] * len(parts)
    graphs = []
    for part in parts:
        leaves = [x[part.index].detach().requires_grad_() for x in (q, k, v)]
        if sinks is not None:
            leaves.append(sinks.detach().requires_grad_())
        exchange = ListExchange(parts, part.index, (k, v), returned, lost, dtype)
        options["sinks"] = None if sinks is None else leaves[3]
        graphs.append((part_attention(*leaves[:3], part, exchange, **options), leaves))
    # what importers return is there in the second one
    for _ in range(2):
        found = [
            torch.autograd.grad(out, leaves, part.own(dout), retain_graph=True)
            for part, (out, leaves) in zip(parts, graphs, strict=True)
        ]
    results = [whole(parts, [out.detach() for out, _ in graphs])]
    results += [whole(parts, [each[i] for each in found]) for i in range(3)]
    if sinks is not None:
        results.append(torch.stack([each[3] for each in found]).sum(0))
    return results


def assert_close(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@settings(max_examples=60)
@given(
    divisions(),
    st.integers(0, 99),
    st.sampled_from([None, 1, 3]),
    st.booleans(),
    st.sampled_from([((4, 2), (4, 4)), ((2, 2), (6, 3)), ((3, 1), (2, 5))]),
    st.sampled_from(["sdpa", "reference"]),
)
def test_all_parts_together_are_the_whole(parts, seed, window, extras, shape, backend) -> None:
    case = random_case(parts.packed.num_tokens, *shape, seed)
    options: dict[str, Any] = {"window": window}
    if extras:
        sinks = torch.linspace(-1, 1, shape[0][0], dtype=torch.float64)
        options |= {"softcap": 5.0, "sinks": sinks, "scale": 0.7}
    expected = attend_whole(parts, case, **options)
    assert_close(attend_in_parts(parts, case, backend=backend, **options), expected)


def test_red_without_one_importers_gradients() -> None:
    rng = np.random.default_rng(0)
    checked = 0
    for _ in range(10):
        packed = pack(random_forest(rng, 8, 6))
        parts = Parts(packed, random_owner(rng, packed.num_tokens, 3, "runs"), 3)
        case = random_case(packed.num_tokens)
        expected = attend_whole(parts, case)
        for importer, exporter in zip(*np.nonzero(parts.imported), strict=True):
            got = attend_in_parts(parts, case, lost=(importer, exporter))
            # the forward and dq know nothing of it
            assert_close(got[:2], expected[:2])
            assert all(
                (one - other).abs().max() > 1e-6
                for one, other in zip(got[2:], expected[2:], strict=True)
            )
            checked += 1
    assert checked > 10


def test_gradients_in_bfloat16_are_as_good_as_one_launchs() -> None:
    """And they are not if importers' shares are rounded before they are summed."""
    packed = pack(PrefixForest.from_parents([-1, *[0] * 24], [64, *[32] * 24]))
    parts = Parts(packed, np.repeat([0, *[i % 8 for i in range(24)]], [64, *[32] * 24]), 8)
    exact = random_case(packed.num_tokens, dims=(16, 16))
    half = tuple(x.bfloat16() for x in exact)
    # of what the rounded inputs give
    reference = attend_whole(parts, tuple(x.double() for x in half))
    exported = slice(0, 64)

    def mean_errors(results: list[torch.Tensor]) -> list[float]:
        pairs = zip(results[2:], reference[2:], strict=True)
        return [float((a.double() - b)[exported].abs().mean()) for a, b in pairs]

    one_launch = mean_errors(attend_whole(parts, half, backend="sdpa"))
    ours = mean_errors(attend_in_parts(parts, half, backend="sdpa"))
    rounded = mean_errors(attend_in_parts(parts, half, backend="sdpa", dtype=torch.bfloat16))
    for once, wide, narrow in zip(one_launch, ours, rounded, strict=True):
        assert wide <= 1.05 * once
        assert narrow > 1.2 * once


def test_a_part_without_tokens() -> None:
    packed = pack(PrefixForest.from_sequences([[1, 2, 3], [1, 2, 4]]))
    parts = Parts(packed, [0, 2, 0, 2], 3)
    assert parts[1].num_tokens == 0
    case = random_case(packed.num_tokens)
    for backend in ("sdpa", "reference"):
        assert_close(attend_in_parts(parts, case, backend=backend), attend_whole(parts, case))


def test_nothing_is_given_back_where_no_key_needs_a_gradient() -> None:
    """As with adapters on the queries of the first layer alone, or on sinks beside them."""
    packed = pack(PrefixForest.from_sequences([[1, 2, 3], [1, 2, 4]]))
    parts = Parts(packed, [0, 1, 0, 1], 2)
    case = random_case(packed.num_tokens)
    q, k, v = ([part.own(x) for part in parts] for x in case[:3])
    expected = attend_whole(parts, case)[1]
    for part in parts:
        exchange = ListExchange(parts, part.index, (k, v), [None, None])
        exchange.give_back = lambda *_: pytest.fail("gave back")
        query = q[part.index].requires_grad_()
        out = part_attention(query, k[part.index], v[part.index], part, exchange)
        (dq,) = torch.autograd.grad(out, query, part.own(case[3]))
        torch.testing.assert_close(dq, part.own(expected))
        sinks = torch.zeros(4, dtype=query.dtype, requires_grad=True)
        out = part_attention(query, k[part.index], v[part.index], part, exchange, sinks=sinks)
        torch.autograd.grad(out, [query, sinks], part.own(case[3]))


def test_what_is_saved_for_the_backward() -> None:
    """Queries, keys and values of the part's rows, out and lse: no own keys beside them."""
    packed = pack(random_forest(np.random.default_rng(8), 20, 60))
    parts = Parts(packed, np.arange(packed.num_tokens) % 2, 2)
    q, k, v = ([part.own(x) for part in parts] for x in random_case(packed.num_tokens)[:3])
    saved = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)
        return x

    part = parts[0]
    leaves = [x[0].requires_grad_() for x in (q, k, v)]
    exchange = ListExchange(parts, 0, (k, v), [None, None])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        part_attention(*leaves, part, exchange)
    rows, own = part.num_rows, part.num_tokens
    assert sum(x.numel() for x in saved) == rows * 2 * (4 + 4) + own * 4 * (4 + 4 + 1) + 1


def test_wrong_arguments() -> None:
    packed = pack(PrefixForest.from_sequences([[1, 2, 3], [1, 2, 4]]))
    parts = Parts(packed, [0, 1, 0, 1], 2)
    q, k, v, _ = random_case(packed.num_tokens)
    own = [parts[0].own(x) for x in (q, k, v)]
    exchange = ListExchange(parts, 0, ([], []), [])
    with pytest.raises(ValueError, match="k and v have 4 and 4 rows, the part owns 2 tokens"):
        part_attention(own[0], k, v, parts[0], exchange)
    with pytest.raises(ValueError, match="q has 4 rows, the mask has 2 queries"):
        part_attention(q, own[1], own[2], parts[0], exchange)
    with pytest.raises(UnsupportedError, match="backend 'dense' does not exist"):
        part_attention(*own, parts[0], exchange, backend="dense")


# ---- through a model -----------------------------------------------------------------------------


class Alone:
    """The exchange of the only part there is."""

    times = 0

    def import_rows(self, *own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.times += 1
        return own

    def give_back(self, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "deepseek_v3"])
def test_a_model_takes_a_part_in_the_place_of_the_mask(family: str) -> None:
    """Windows, softcap, sinks, and Dv != D."""
    model, packed = build(family), ragged_packed()
    (part,) = Parts(packed, [0] * packed.num_tokens, 1)
    seen = []

    def exchange_of(module: torch.nn.Module) -> Alone:
        seen.append(module)
        return Alone()

    inputs = packed.model_inputs()
    model(**inputs).logits.square().sum().backward()
    expected = gradients(model)
    model.zero_grad(set_to_none=True)
    mask = PartMask(part, exchange_of)
    model(**inputs | {"tree_mask": mask}).logits.square().sum().backward()
    assert seen == attentions(model)
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, expected[name]), name
    with pytest.raises(ValueError, match="position_ids are not the tokens' positions"):
        model(**inputs | {"tree_mask": mask, "position_ids": inputs["position_ids"] + 1})
    assert repr(mask).startswith("PartMask(Part(0: ")


# dynamo looks at .grad of its inputs
@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_layers_know_no_forest() -> None:
    """The graphs of the first forest serve the others, each with its own exchange."""
    torch._dynamo.reset()
    model, counter = build("gemma2"), CompileCounterWithBackend("eager")
    compile_layers(model, backend=counter)
    frames = []
    for seed in range(3):
        packed, exchange = pack_sequences(ragged_sequences(seed)[: 6 + seed]), Alone()
        (part,) = Parts(packed, [0] * packed.num_tokens, 1)
        mask = PartMask(part, lambda module, exchange=exchange: exchange)
        model(**packed.model_inputs() | {"tree_mask": mask}).logits.sum().backward()
        assert exchange.times == len(attentions(model))
        frames.append(counter.frame_count)
    assert frames[0] == frames[-1] > 0
