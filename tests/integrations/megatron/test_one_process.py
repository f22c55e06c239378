"""Forests through Megatron models of one process, against one sequence at a time."""

from __future__ import annotations

import pytest
import torch

from tests.integrations.megatron.runs import Case, compared, moe

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
CASES = {
    "untied": Case(),
    "tied": Case(tied=True),
    "pack_batches": Case(way="pack_batches"),
    "share, tied": Case(way="pack_batches", tied=True),
    "scored batches": Case(way="scored batches"),
    "scored batches, tied": Case(way="scored batches", tied=True),
    "hybrid, scored batches": Case(model="hybrid", way="scored batches"),
    "measure, tied": Case(way="measure", tied=True),
    "sampling masks": Case(masked=True),
    "hybrid": Case(model="hybrid"),
    "hybrid, pack_batches": Case(model="hybrid", way="pack_batches"),
    "hybrid, recompute": Case(FULL, model="hybrid"),
    "recompute": Case(FULL),
    "recompute, pack_batches": Case(FULL, way="pack_batches"),
    "recompute core attention": Case(SELECTIVE),
    "window": Case({"window_size": (6, 0)}),
    "window in some layers": Case({"window_size": (6, 0), "window_attn_skip_freq": 2}),
    "window, pack_batches": Case({"window_size": (6, 0)}, way="pack_batches"),
    "sink of zero": Case({"softmax_type": "off-by-one"}),
    "learnt sinks": Case({"softmax_type": "learnable"}),
    "own scale": Case({"softmax_scale": 0.3}),
    "no rope in some layers": Case({"no_rope_freq": [0, 1, 0]}),
    "learnt positions": Case(positions="learned_absolute"),
    "no positions": Case(positions="none"),
    "yarn": Case(positions="yarn"),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_sequences_in_float64(name: str) -> None:
    found = compared(CASES[name])
    assert found.worst < 1e-13, found


@pytest.mark.parametrize("way", ["scored edges", "pack_batches"])
def test_equals_sequences_in_float32(way: str) -> None:
    found = compared(Case(dtype=torch.float32, way=way))
    assert found.worst < 1e-5, found


# the router's softmax, and the sigmoid of the gate, are float32 in Megatron
PARTLY_FLOAT32 = {
    "experts": Case(moe()),
    "experts, pack_batches": Case(moe(), way="pack_batches"),
    "shared expert": Case(moe(moe_shared_expert_intermediate_size=32)),
    "frozen expert bias": Case(
        moe(
            moe_router_enable_expert_bias=True,
            moe_router_bias_update_rate=0.0,
            moe_router_score_function="sigmoid",
            moe_router_dtype="fp32",
        )
    ),
    "output gate": Case({"attention_output_gate": True}),
}


@pytest.mark.parametrize("name", PARTLY_FLOAT32)
def test_equals_sequences_where_megatron_rounds(name: str) -> None:
    found = compared(PARTLY_FLOAT32[name])
    assert max(found.logprobs, found.entropy) < 1e-6 and found.gradients < 1e-6, found


@pytest.mark.parametrize("way", ["pack_batches", "scored batches"])
def test_share_with_padding_between_sequences(way: str) -> None:
    found = compared(Case(way=way), gap=3)
    assert found.worst < 1e-13, found
