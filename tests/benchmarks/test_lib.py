"""The library of the cases: replicated batches, FLOPs, fits, and others' attention."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.cases import (
    depth,
    layer,
    memory,
)
from benchmarks.lib import (
    against,
    grouper,
    layers,
    replicated,
)
from prefixtree import PrefixForest, TreeMask, pack, prepare, sequence_logprobs, tree_attention
from prefixtree.kernels.recurrence import tree_conv, tree_delta_rule
from prefixtree.packing.visible import visible_pairs
from prefixtree.planning.model_cost import model_cost


def test_a_peer_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="side 'fa3': expected one of fa2, fa4, own"):
        replicated.peer("fa3", [4], torch.device("cpu"), torch.float32)


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
def test_flex_attention_sees_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    mask = pack(depth.depth_forest(3, 0.01)).mask
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(mask.num_tokens, h, 16, generator=generator) for h in (4, 2, 2))
    expected = tree_attention(q, k, v, mask)
    torch.testing.assert_close(against.flex(mask)(q, k, v), expected)


def test_depth_bounds_by_hand() -> None:
    """Fixed leaves and path lengths; the bound grows with the depth."""
    bounds = []
    for levels in depth.FORKS:
        forest = depth.depth_forest(levels, 1.0)
        assert forest.num_sequences == 128 and forest.num_levels == levels
        assert abs(forest.sequence_lengths - 4096).max() <= levels
        lengths = forest.sequence_lengths.astype(float)
        pairs = (lengths * (lengths + 1) / 2).sum()
        bounds.append(pairs / replicated.pairs(forest))
    assert bounds[0] == 1 and bounds == sorted(bounds) and bounds[-1] > 2
    for branching, forks in depth.BRANCHINGS.items():
        for node in depth.NODES:
            forest = depth.branching_forest(branching, node, 1.0)
            assert 0.5 < forest.num_replicated_tokens / depth.TOKENS < 2
            assert forest.num_levels == forks + 1 and (forest.node_length == node).all()


def test_liger_replaces_layers_and_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    liger = SimpleNamespace(apply_liger_kernel_to_qwen3=lambda **given: asked.update(given))
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace(transformers=liger))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    layers.faster_layers("model", "liger")
    assert asked.pop("model") == "model" and set(asked.values()) == {False}
    assert set(asked) == {"cross_entropy", "fused_linear_cross_entropy"}


def test_chains_are_the_replicated_batch() -> None:
    sequences = [np.array(s) for s in ([1, 2, 3], [1, 2, 4, 5], [1, 2], [9])]
    forest = PrefixForest.from_sequences(sequences)
    apart = replicated.chains(forest)
    found = pack(apart).unpack(pack(apart).input_ids)
    assert [x.tolist() for x in found] == [s.tolist() for s in sequences]
    assert apart.num_tokens == forest.num_replicated_tokens
    # in the order in which another's attention takes them
    assert pack(apart).input_ids.tolist() == np.concatenate(sequences).tolist()
    ids = pack(forest).input_ids
    assert ids[replicated.copies(forest)].tolist() == np.concatenate(sequences).tolist()
    assert replicated.pairs(forest) == 3 + 3 + 3 + 4 + 1
    assert replicated.pairs(apart) == 6 + 10 + 3 + 1


def test_flops_of_an_8b_forward() -> None:
    """2 FLOPs a weight and token; 4 D H a pair and layer."""
    shape = layers.config(36, False)
    flops = layers.flops(model_cost(shape), 10, 55, 7)
    weights = 36 * (4096 * 128 * (32 + 8 + 8 + 32) + 3 * 4096 * 12288)
    assert flops.linear == pytest.approx(2 * weights * 10)
    assert flops.attention == pytest.approx(4 * 128 * 32 * 55 * 36)
    assert flops.head == 2 * 4096 * 151_936 * 7
    assert flops.total(3, 3.5, 3) == 3 * flops.linear + 3.5 * flops.attention + 3 * flops.head


def test_responses_are_the_first_of_more() -> None:
    lengths = layers.response_lengths(32, 1.0)
    assert lengths[:4] == layers.response_lengths(32, 1.0)[:4]
    assert min(lengths) >= 131 and max(lengths) <= 2048 and len(set(lengths)) > 20
    batch = layers.prompt_batch(50, lengths[:5], 512)
    assert batch.forest.num_tokens == 50 + sum(lengths[:5])
    assert sum(m.sum() for m in batch.masks) == sum(lengths[:5])


@pytest.mark.parametrize("side", ["packed", "fa2"])
def test_the_law_of_memory_is_found_again(side: str) -> None:
    rows = []
    for prompt in (2000, 8000, 32000):
        for count in (4, 16):
            row = {"prompt": prompt, "count": count, "response": 500}
            copies = 1 if side == "packed" else count
            law = 5e9 + 7000 * copies * prompt + 9000 * count * 500
            rows.append({**row, "peak_with_held_bytes": law})
    fit = memory.fit(side, rows)
    assert [fit[k] for k in ("M0", "a", "b")] == pytest.approx([5e9, 7000, 9000], rel=1e-6)
    assert fit["r2"] == pytest.approx(1) and fit["cases"] == 6
    rows[0]["peak_with_held_bytes"] *= 3
    assert memory.fit(side, rows)["r2"] < 0.99
    assert memory.fit(side, rows[:3]) is None


def test_attention_is_given_back() -> None:
    """Inside, the model attends by another function; behind, by the tree mask again, come what
    may."""
    shape = layers.config(1, True)
    model = layers.model_of(shape, "cpu", "float32")
    packed = layers.prompt_batch(9, [3, 4], 512).packed("packed", "cpu")
    with torch.no_grad():
        first = model(**packed.model_inputs()).logits
        with replicated.attending(lambda q, k, v: q * 0):
            other = model(**packed.model_inputs()).logits
        with (
            pytest.raises(ZeroDivisionError),
            replicated.attending(lambda q, k, v: q * (1 // 0)),
        ):
            model(**packed.model_inputs())
        assert torch.equal(model(**packed.model_inputs()).logits, first)
    assert not torch.allclose(first, other)


def test_attention_of_a_peer_gets_its_own_batch_alone() -> None:
    """FA2 reads past the end where another number of tokens comes, as in a probe of layers."""
    # no other test's kind, of which hooks.probe_each_kind_once would know the result
    model = layers.model_of(layers.config(1, True, vocabulary=511), "cpu", "float32")
    packed = layers.prompt_batch(9, [3, 4], 511).packed("packed", "cpu")
    given: list[int] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        given.append(len(q))
        return q * 0

    with torch.no_grad(), replicated.attending(attend):
        sequence_logprobs(model, packed)
    assert given == [packed.num_tokens]


def test_recurrences_of_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with a state call fla's functions, whose part ours play here, with its keywords."""
    called = []

    def mask_of(cu_seqlens: torch.Tensor) -> TreeMask:
        lengths = cu_seqlens.diff().tolist()
        return pack(PrefixForest.from_parents([-1] * len(lengths), lengths, order="input")).mask

    def conv(x, weight, bias, activation, cu_seqlens):
        called.append("conv")
        return tree_conv(x[0], weight, bias, mask_of(cu_seqlens), activation)[None], None

    def rule(q, k, v, g, beta, use_qk_l2norm_in_kernel, cu_seqlens):
        called.append("rule")
        inputs = (x[0] for x in (q, k, v, g, beta))
        l2norm = use_qk_l2norm_in_kernel
        return tree_delta_rule(*inputs, mask_of(cu_seqlens), qk_l2norm=l2norm)[None], None

    convolutions, rules = ModuleType("causal_conv1d"), ModuleType("gated_delta_rule")
    vars(convolutions)["causal_conv1d"], vars(rules)["chunk_gated_delta_rule"] = conv, rule
    for name in ("fla", "fla.modules", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.modules.causal_conv1d", convolutions)
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", rules)
    model = prepare(layers.model_of(layers.config(4, True, shape="qwen3.5-9b"), "cpu", "float32"))
    batch = layers.prompt_batch(9, [3, 4], 512)
    inputs = batch.packed("own", "cpu").model_inputs()
    with torch.no_grad():
        want = model(**inputs).logits
        with replicated.attending(layers.attention_of("fla", batch.forest, "cpu", "float32")):
            found = model(**inputs).logits
        again = model(**inputs).logits
    # three of four layers carry a state
    assert called == ["conv", "rule"] * 3
    torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)
    assert torch.equal(again, want)


def test_pieces_of_a_large_batch_attend_like_one(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(14, h, 8, generator=generator) for h in (4, 2, 2))
    arguments = ("fa2", [3, 4, 2, 5], torch.device("cpu"), torch.float32)
    whole = replicated.in_pieces(*arguments)(q, k, v)
    monkeypatch.setattr(replicated, "PIECE", 7)
    cut = replicated.in_pieces(*arguments)
    torch.testing.assert_close(cut(q, k, v), whole)
    own = replicated.in_pieces("own", *arguments[1:])
    torch.testing.assert_close(own(q, k, v), whole)


def test_an_odd_grouping_is_laid_out_as_prompt_then_responses() -> None:
    forest = layers.prompt_batch(6, [2, 5, 3], 512).forest
    rows, lengths = layer._grouped_rows(forest)
    assert lengths == (6, [2, 5, 3]) and sorted(rows.tolist()) == list(range(16))
    positions = pack(forest).position_ids[rows].tolist()
    assert positions == [*range(6), 6, 7, *range(6, 11), *range(6, 9)]
    alone = layers.prompt_batch(6, [2], 512).forest
    assert layer._grouped_rows(alone)[1] == (7, [1])


def test_prefix_grouper_attends_like_the_tree() -> None:
    pytest.importorskip("prefix_grouper", reason="prefix-grouper is not installed")
    forest = layers.prompt_batch(6, [2, 5, 3], 512).forest
    rows, (prompt, responses) = layer._grouped_rows(forest)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(16, h, 8, generator=generator) for h in (4, 2, 2))
    run = grouper.grouped_attention(prompt, responses, torch.device("cpu"), torch.float32)
    expected = tree_attention(q, k, v, pack(forest).mask)[rows]
    torch.testing.assert_close(run(q[rows], k[rows], v[rows]), expected)


def test_pairs_are_the_estimates_pairs() -> None:
    forest = depth.depth_forest(3, 0.01)
    mask = pack(forest).mask
    assert replicated.pairs(forest) == int((mask.position_ids.long() + 1).sum())
    assert visible_pairs(np.array([0]), np.array([4]), None) == 10
