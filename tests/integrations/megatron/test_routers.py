"""Router losses, z losses and expert biases of forests through Megatron models of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

from prefixtree import PrefixForest, UnsupportedError, pack
from prefixtree.integrations.megatron import pack_batches, routers, tree_logprobs, tree_spec
from prefixtree.integrations.megatron.routers import RoutedTokens, TokenMask
from tests.integrations.megatron import runs
from tests.integrations.megatron.router_runs import (
    BIAS,
    MISTAKES,
    Z,
    compared,
    losses,
    make_sequences,
    router_counts,
    router_results,
)
from tests.integrations.megatron.runs import Case, build, packed_of, thd
from tests.integrations.megatron.test_one_process import FULL

RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
CASES = {
    "aux, pack_batches": Case(losses("aux_loss"), way="pack_batches"),
    "seq aux, bias, z": Case(losses("seq_aux_loss", **BIAS, **Z)),
    "three losses, hybrid": Case(
        losses("aux_loss", "seq_aux_loss", "global_aux_loss"), model="hybrid"
    ),
    "global aux, z, all recomputed": Case(losses("global_aux_loss", **Z) | FULL),
    "aux, bias, experts recomputed": Case(losses("aux_loss", **BIAS) | RECOMPUTED),
    "aux, z, a loss per token": Case(losses("aux_loss", **Z) | {"calculate_per_token_loss": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_row_of_sequences(name: str) -> None:
    found = compared(CASES[name])
    assert max(found["scores"], found["gradients"], found["routers"]) < 1e-13, found


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_seen_in_gradients_alone(name: str) -> None:
    case, mistake, least = MISTAKES[name]
    with mistake():
        found = compared(case)
    assert found["scores"] < 1e-13 and found["gradients"] > least, found


def counts_in(model: Any) -> torch.Tensor:
    (router,) = routers.routers_of(model).values()
    return router.local_tokens_per_expert


def test_padding_is_not_counted() -> None:
    """What a trainer marks as padding, and what lies between sequences."""
    sequences = make_sequences()
    tokens, counted = sum(map(len, sequences)), []
    for masked in (False, True):
        model = pack_batches(build(Case(losses(**BIAS) | {"num_layers": 1})))
        inputs = thd(sequences, gap=3)
        if masked:
            padding = torch.ones_like(inputs["input_ids"], dtype=torch.bool)
            first = inputs["packed_seq_params"].cu_seqlens_q_padded.tolist()
            for start, sequence in zip(first, sequences, strict=False):
                padding[0, start : start + len(sequence)] = False
            inputs["padding_mask"] = padding
        model(**inputs)
        counted.append(int(counts_in(model).sum()))
    behind = -(tokens + 3 * len(sequences)) % 8
    assert counted == [2 * (tokens + behind), 2 * tokens]


@pytest.mark.parametrize("way", ["tree_logprobs", "no sequence", "all is padding"])
def test_a_dummy_counts_nothing(way: str) -> None:
    """Before a micro-batch: it changes no gradient, no count and no logged loss."""
    kinds = "aux_loss", "seq_aux_loss", "global_aux_loss"
    case = Case(losses(*kinds, **BIAS, **Z) | {"num_layers": 2})
    sequences, found = make_sequences(), []

    def run(model: Any, dummy: bool) -> None:
        if way == "tree_logprobs":
            forest = PrefixForest.from_sequences(sequences)
            scores = tree_logprobs(model, pack(forest.dummy() if dummy else forest))
            torch.cat(scores.logprobs).sum().backward()
            return
        inputs = thd(sequences)
        if dummy and way == "no sequence":
            inputs["packed_seq_params"].cu_seqlens_q = torch.zeros(2, dtype=torch.int32)
        elif dummy:
            inputs["padding_mask"] = torch.ones_like(inputs["input_ids"], dtype=torch.bool)
        (0 * model(**inputs).sum() if dummy else model(**inputs)[0, :, 0].sum()).backward()

    for micro_batches in ([False], [True, False]):
        get_moe_metrics_tracker().metrics.clear()
        model = build(case)
        if way != "tree_logprobs":
            pack_batches(model)
        for dummy in micro_batches:
            run(model, dummy)
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        found.append(grads | router_counts(model) | router_results(model))
    assert all(found[0][name].equal(value) for name, value in found[1].items())
    assert found[0].keys() == found[1].keys() and len(found[0]) > 20
    assert all(value.any() for name, value in found[0].items() if "expert_bias" not in name)


def test_evaluation_counts_nothing() -> None:
    model = build(Case(losses("aux_loss", **BIAS) | {"num_layers": 1})).eval()
    with torch.no_grad():
        tree_logprobs(model, packed_of(make_sequences()))
    assert not counts_in(model).any()


# ---- what may go wrong ---------------------------------------------------------------------------


def test_a_router_that_is_not_from_the_spec() -> None:
    case = Case(losses("aux_loss") | {"num_layers": 1})
    model, plain = build(case), build(case, lambda spec: spec)
    pack_batches(model)
    mlp = model.decoder.layers[0].mlp
    mlp.router = plain.decoder.layers[0].mlp.router
    for run in (
        lambda: pack_batches(model),
        lambda: tree_logprobs(model, packed_of(make_sequences())),
        lambda: model(**thd(make_sequences())),
    ):
        with pytest.raises(UnsupportedError, match=r"layers\.0\.mlp\.router is a TopKRouter, "):
            run()
    model.config.moe_aux_loss_coeff = 0.0
    tree_logprobs(model, packed_of(make_sequences()))


def test_a_layer_that_does_not_hand_on_the_counts() -> None:
    model = build(Case(losses("aux_loss") | {"num_layers": 1}))
    pack_batches(model)
    mlp = model.decoder.layers[0].mlp
    mlp.forward = lambda hidden_states, **_: MoELayer.forward(mlp, hidden_states)
    for run in (
        lambda: tree_logprobs(model, packed_of(make_sequences())),
        lambda: model(**thd(make_sequences())),
    ):
        with pytest.raises(UnsupportedError, match=r"0 routers read .* which has 1 routers"):
            run()


def test_counts_that_are_lost_raise() -> None:
    """Where code makes a plain mask of padding of them, in a recomputation for example."""
    model = build(Case(losses(**BIAS, **Z) | {"num_layers": 1}))
    (router,) = routers.routers_of(model).values()
    plain = RoutedTokens(torch.ones(4)).as_mask().as_subclass(torch.Tensor)
    with pytest.raises(RuntimeError):
        router(torch.zeros(4, 1, 64, dtype=torch.float64), plain.transpose(0, 1))


def test_parts_and_copies_of_a_mask_keep_their_tokens() -> None:
    tokens = RoutedTokens(torch.ones(6, dtype=torch.int64))
    mask = tokens.as_mask()
    assert mask.shape == (1, 6)
    for made in (mask.transpose(0, 1).contiguous()[2:4], mask.detach().bool(), mask.view(6, 1)):
        assert isinstance(made, TokenMask) and made.tokens is tokens


def test_rows_that_are_no_part_of_a_forest() -> None:
    model = build(Case(losses("aux_loss") | {"num_layers": 1}))
    (router,) = routers.routers_of(model).values()
    mask = RoutedTokens(torch.ones(7, dtype=torch.int64)).as_mask()
    with pytest.raises(UnsupportedError, match="got 4 tokens of a forest of 7"):
        router(torch.zeros(4, 1, 64, dtype=torch.float64), mask)


def test_a_spec_that_is_mapped_twice() -> None:
    config = runs.make_config(Case(losses("aux_loss")))
    once = tree_spec(runs.layer_spec(config))
    router = once.submodules.mlp.keywords["submodules"].router
    assert issubclass(router, routers.ForestRouter)
    assert tree_spec(once).submodules.mlp.keywords["submodules"].router is router
