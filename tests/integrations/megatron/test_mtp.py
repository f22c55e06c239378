"""Layers of multi-token prediction on forests, against Megatron's own loss of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from prefixtree import PrefixForest, SequenceScores, UnsupportedError, pack
from prefixtree.integrations.megatron import (
    check_model,
    mtp,
    pack_batches,
    tree_logprobs,
    tree_outputs,
)
from prefixtree.integrations.megatron.refusals import MTP
from prefixtree.integrations.megatron.states import ForestDeltaNet
from prefixtree.packing.copies import GatherIndex
from tests.integrations.megatron.mtp_runs import LAYERS, compared, updated
from tests.integrations.megatron.runs import NEWEST, Case, build, latent, moe, packed_of
from tests.integrations.megatron.test_one_process import SELECTIVE

REPEATED = {"mtp_use_repeated_layer": True}
CASES = {
    "two layers": Case(LAYERS),
    "tied, one layer twice, core attention recomputed": Case(
        LAYERS | REPEATED | SELECTIVE, tied=True
    ),
    "latent attention, experts": Case(LAYERS | latent() | moe()),
    "window, sinks, learnt positions": Case(
        LAYERS | {"window_size": (6, 0), "softmax_type": "learnable"}, positions="learned_absolute"
    ),
}
if NEWEST:
    CASES["detached"] = Case(LAYERS | {"mtp_detach_heads": True})


@pytest.mark.parametrize("name", CASES)
def test_equals_megatrons_loss_of_each_sequence(name: str) -> None:
    found = compared(CASES[name])
    assert found.worst < 1e-13, found


def test_an_optimizer_makes_megatrons_steps() -> None:
    name = "tied, one layer twice, core attention recomputed"
    apart, moved = updated(CASES[name])
    assert apart < 1e-12 and moved > 1e-4, (apart, moved)


def off_by_one(packed: Any) -> GatherIndex:
    rows = np.maximum(packed.mask.host.predictor - 1, -1).astype(np.int32)
    return GatherIndex(rows, packed.num_tokens, packed.device)


MISTAKES = {
    "the row before": ("before_each", off_by_one),
    "its gradient": ("gather", lambda values, index: mtp_gather(values.detach(), index)),
    "first tokens are keys": ("mask_ahead", lambda packed, number: packed.mask),
}
mtp_gather = mtp.gather


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_seen(name: str) -> None:
    place, wrong = MISTAKES[name]
    with patch.object(mtp, place, wrong):
        assert compared(CASES["two layers"]).worst > 1e-2
        assert updated(CASES["two layers"], steps=1)[0] > 1e-4


# ---- refusals ------------------------------------------------------------------------------------


def _with_state(model: Any) -> None:
    state = ForestDeltaNet.__new__(type("Delta", (ForestDeltaNet, torch.nn.Module), {}))
    torch.nn.Module.__init__(state)
    model.mtp.layers[0].state = state


REFUSED: dict[str, Callable[[Any], Any]] = {
    "mtp_block_spec": lambda model: delattr(model, "mtp"),
    "foreign code": lambda model: vars(model.mtp.layers[1]).update(forward=print),
    "state": _with_state,
    "routes": lambda model: None,
    "parallelism": lambda model: vars(model.config).update(context_parallel_size=2),
    "recompute_granularity": lambda model: vars(model.config).update(recompute_granularity="full"),
    "router losses": lambda model: vars(model.config).update(moe_z_loss_coeff=0.1),
}


def test_every_row_is_tested() -> None:
    assert REFUSED.keys() == {refusal.name for refusal in MTP}


@pytest.mark.parametrize("refusal", MTP, ids=lambda refusal: refusal.name)
def test_refused(refusal: Any) -> None:
    model, packed = build(Case(LAYERS | {"num_layers": 1})), packed_of([[1, 2, 3]])
    mtp.check_ahead(model, packed)
    REFUSED[refusal.name](model)
    if refusal.name == "routes":
        routes = [np.tile(np.arange(2, dtype=np.uint8), (2, 1, 1))]
        packed = pack(PrefixForest.from_sequences([[1, 2, 3]], routes=routes))
    with pytest.raises(UnsupportedError, match=re.escape(refusal.message.split(" {")[0])):
        mtp.check_ahead(model, packed)
    if refusal.only_training:
        mtp.check_ahead(model.eval(), packed)


def test_code_that_was_replaced_in_megatrons_class(monkeypatch: pytest.MonkeyPatch) -> None:
    model, packed = build(Case(LAYERS | {"num_layers": 1})), packed_of([[1, 2, 3]])
    monkeypatch.setattr(type(model), "_postprocess", lambda self, **_: None)
    with pytest.raises(UnsupportedError, match="its own block and layers"):
        mtp.check_ahead(model, packed)


def test_refused_by_every_other_way() -> None:
    model, packed = build(Case(LAYERS | {"num_layers": 1})), packed_of([[1, 2, 3]])
    check_model(model, mtp=True)
    for way in (check_model, pack_batches):
        with pytest.raises(UnsupportedError, match=r"mtp=True\) alone"):
            way(model)
    for run in (tree_logprobs, tree_outputs):
        with pytest.raises(UnsupportedError, match=r"mtp=True\) alone"):
            run(model, packed)
    with pytest.raises(UnsupportedError, match="needs a model with layers"):
        tree_logprobs(build(Case({"num_layers": 1})), packed, mtp=True)


def test_layers_without_the_spec() -> None:
    case = Case(LAYERS | {"num_layers": 1})
    stock, model = build(case, lambda spec: spec), build(case)
    model.mtp = stock.mtp
    with pytest.raises(UnsupportedError, match=r"mtp\.layers\.0\..* reads a forest as one"):
        tree_logprobs(model, packed_of([[1, 2, 3]]), mtp=True)


def test_a_layer_that_does_not_attend() -> None:
    model = build(Case(LAYERS | {"num_layers": 1}))
    model.mtp.layers[1].mtp_model_layer.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(UnsupportedError, match="0 attention calls followed the forest in layer 1"):
        tree_logprobs(model, packed_of([[1, 2, 3]]), mtp=True)


def test_a_block_that_was_skipped() -> None:
    model = build(Case(LAYERS | {"num_layers": 1}))
    model.config.mtp_num_layers = 1
    model.mtp.register_forward_hook(lambda block, args, output: output[:3])
    with pytest.raises(UnsupportedError, match="the output layer got 3 rows after 1 layers of mtp"):
        tree_logprobs(model, packed_of([[1, 2, 3]]), mtp=True)


# ---- the call ------------------------------------------------------------------------------------


def test_sequences_too_short_for_a_layer() -> None:
    scores = tree_logprobs(build(Case(LAYERS)), packed_of([[1, 2], [1, 3]]), mtp=True)
    assert isinstance(scores, SequenceScores) and scores.mtp is not None
    assert not any(x.any() for x in scores.mtp[0] + scores.mtp[1])


def test_the_model_is_as_before() -> None:
    model = build(Case(LAYERS))
    held = [dict(vars(m)) for m in model.modules()]
    tree_logprobs(model, packed_of([[1, 2, 3, 4], [1, 2, 5]]), mtp=True)
    assert [set(vars(m)) for m in model.modules()] == [set(h) for h in held]
    assert isinstance(model.config.mtp_num_layers, int) and torch.is_grad_enabled()
