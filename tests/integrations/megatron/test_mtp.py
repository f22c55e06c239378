"""Layers of multi-token prediction on forests, against Megatron's own loss of them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from prefixtree.integrations.megatron import mtp, tree_logprobs
from prefixtree.packing.copies import GatherIndex
from tests.integrations.megatron.mtp_runs import LAYERS, compared
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


def test_sequences_too_short_for_a_layer() -> None:
    scores = tree_logprobs(build(Case(LAYERS)), packed_of([[1, 2], [1, 3]]), mtp=True)
    assert not any(x.any() for x in scores.mtp[0] + scores.mtp[1])


def test_the_model_is_as_before() -> None:
    model = build(Case(LAYERS))
    held = [dict(vars(m)) for m in model.modules()]
    tree_logprobs(model, packed_of([[1, 2, 3, 4], [1, 2, 5]]), mtp=True)
    assert [set(vars(m)) for m in model.modules()] == [set(h) for h in held]
    assert isinstance(model.config.mtp_num_layers, int) and torch.is_grad_enabled()
