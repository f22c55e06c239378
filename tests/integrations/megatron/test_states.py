"""Layers of the gated delta rule and Mamba over forests, in one process."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from prefixtree import UnsupportedError
from prefixtree.integrations.megatron import check_model, pack_batches, tree_logprobs
from prefixtree.states import protocol
from tests.integrations.megatron.runs import Case, make_sequences, moe, packed_of, thd
from tests.integrations.megatron.state_runs import (
    DELTA,
    MAMBA,
    build,
    compared,
    decay_without_gradient,
    packed_convolution,
)
from tests.integrations.megatron.test_one_process import FULL
from tests.support.megatron_cpu import in_float64
from tests.support.megatron_states import stand_in_for_kernels

CASES = {
    "gated delta rule, pack_batches": Case(DELTA, way="pack_batches"),
    "gated delta rule, experts, recompute": Case(DELTA | moe() | FULL),
    "Mamba, pack_batches": Case(MAMBA, model="hybrid", way="pack_batches"),
    "Mamba, recompute": Case(MAMBA | FULL, model="hybrid"),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_sequences_in_float64(name: str) -> None:
    found = compared(CASES[name])
    assert found.worst < 1e-13, found


def test_a_skip_per_channel() -> None:
    found = compared(Case(MAMBA, model="hybrid"), wide=True)
    assert found.worst < 1e-13, found


@pytest.mark.parametrize("case", [Case(DELTA), Case(MAMBA, model="hybrid")], ids=["delta", "Mamba"])
def test_a_decay_without_gradient_is_seen_in_gradients_alone(case: Case) -> None:
    with decay_without_gradient():
        found = compared(case)
    assert max(found.logprobs, found.entropy) < 1e-13 and found.gradients > 0.5, found


@pytest.mark.parametrize("case", [Case(DELTA), Case(MAMBA, model="hybrid")], ids=["delta", "Mamba"])
def test_a_convolution_that_reads_the_packed_order_is_refused(case: Case) -> None:
    """The classes do not show it, so the calls are counted."""
    with in_float64(), stand_in_for_kernels(), packed_convolution():
        model = build(case)
        pack_batches(model)
        for run in (
            lambda: tree_logprobs(model, packed_of(make_sequences())),
            lambda: model(**thd(make_sequences())),
        ):
            with pytest.raises(UnsupportedError, match="2 convolutions and recurrences followed"):
                run()


def made(case: Case, wrap: Any = None) -> Any:
    with in_float64(), stand_in_for_kernels():
        return build(case) if wrap is None else build(case, wrap)


def test_settings_that_pass_the_tree_by() -> None:
    model = made(Case(DELTA))
    check_model(model)
    model.config.deterministic_mode = True
    with pytest.raises(UnsupportedError, match=r"deterministic_mode=True and decoder\.layers\.0"):
        check_model(model)
    model = made(Case(MAMBA, model="hybrid"))
    check_model(model)
    model.decoder.layers[0].mixer.use_mem_eff_path = False
    with pytest.raises(UnsupportedError, match="use_mamba_mem_eff_path=False and decoder"):
        check_model(model)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(DELTA), r"layers\.0\.self_attention is a layer of the gated delta rule"),
        (Case(MAMBA, model="hybrid"), r"layers\.0\.mixer is a Mamba mixer"),
    ],
)
def test_layers_that_are_not_from_the_spec(case: Case, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        check_model(made(case, lambda spec: spec))


def test_an_ordinary_batch_runs_megatrons_code() -> None:
    """Its bits, and not ours."""
    sequence = torch.tensor([make_sequences()[0]])
    places = torch.arange(sequence.shape[1])[None]
    mask = torch.ones(1, 1, *[sequence.shape[1]] * 2, dtype=torch.bool).triu(1)
    case = Case(MAMBA, model="hybrid")
    with in_float64(), stand_in_for_kernels(), patch.object(protocol, "tree_ssd", None):
        plain, ours = build(case, lambda spec: spec), build(case)
        assert torch.equal(plain(sequence, places, mask), ours(sequence, places, mask))
