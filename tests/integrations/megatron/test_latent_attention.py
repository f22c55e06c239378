"""Latent attention (MLA) over forests in one process, against one sequence at a time."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from prefixtree.integrations.megatron.layers import ForestLatentAttention
from tests.integrations.megatron import router_runs
from tests.integrations.megatron.router_runs import BIAS, losses
from tests.integrations.megatron.runs import (
    Case,
    build,
    compared,
    latent,
    make_sequences,
    packed_of,
)
from tests.integrations.megatron.test_one_process import FULL, SELECTIVE
from tests.support.hooks import inner, place

YARN = {
    "rope_type": "yarn",
    "rotary_scaling_factor": 4,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
    "original_max_position_embeddings": 16,
}
UP_PROJECTION = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
CASES = {
    "yarn": Case(latent(**YARN)),
    "queries as they are, all recomputed": Case(
        latent(q_lora_rank=None, qk_layernorm=False) | FULL
    ),
    "tied, pack_batches, core attention recomputed": Case(
        latent() | SELECTIVE, tied=True, way="pack_batches"
    ),
    "hybrid, up projection recomputed": Case(latent() | UP_PROJECTION, model="hybrid"),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_sequences_in_float64(name: str) -> None:
    found = compared(CASES[name])
    assert found.worst < 1e-13, found


def test_equals_sequences_in_float32() -> None:
    found = compared(Case(latent(), dtype=torch.float32))
    assert found.worst < 2e-5, found


def test_router_losses_as_deepseek_has_them() -> None:
    found = router_runs.compared(Case(latent() | losses("seq_aux_loss", **BIAS)))
    assert max(found["scores"], found["gradients"], found["routers"]) < 1e-13, found


def test_packed_positions_are_seen() -> None:
    with patch.object(*place("rotary table"), lambda self, length, **_: self._rotary(256)):
        found = compared(Case(latent()))
    assert found.gradients > 1e-2, found


def test_layers_share_one_table_and_keep_their_own_embedding() -> None:
    from prefixtree.integrations.megatron import tree_logprobs

    model = build(Case(latent()))
    attentions = [layer.self_attention for layer in model.decoder.layers]
    tables: list[Any] = []
    call = inner("rotary table")

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        tables.append(call(self, *args, **kwargs))
        return tables[-1]

    packed = packed_of(make_sequences())
    with patch.object(*place("rotary table"), noted):
        tree_logprobs(model, packed)
    assert len(tables) == 3 and all(t is tables[0] for t in tables)
    assert tables[0].shape == (packed.num_tokens, 1, 1, 8)
    for attention in attentions:
        assert isinstance(attention, (ForestLatentAttention, MLASelfAttention))
        assert "rotary_pos_emb" not in vars(attention)
