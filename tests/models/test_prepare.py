"""`prepare` gives a model its attention, however it was loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import prefixtree as pt
from tests.support.models import build, cases, ragged_objective, ragged_packed, run_packed

# attention that is not transformers' default, sinks, latent attention, states, vision encoders
_LOADED = ["qwen3", "gpt_oss", "deepseek_v3", "gemma2", "qwen3_5", "kimi_linear", "qwen3_vl"]


@pytest.mark.parametrize("model_type", cases(_LOADED))
def test_a_model_loaded_with_another_attention(model_type: str) -> None:
    """Then it runs as one that was loaded with this one, bit by bit; a vision encoder keeps its
    own."""
    wanted = run_packed(build(model_type), ragged_packed(), ragged_objective())
    model = build(model_type, "eager")
    assert pt.prepare(nn.Sequential(model))[0] is model
    found = run_packed(model, ragged_packed(), ragged_objective())
    assert all(map(torch.equal, found.logprobs, wanted.logprobs))
    assert found.gradients.keys() == wanted.gradients.keys()
    assert all(torch.equal(found.gradients[n], g) for n, g in wanted.gradients.items())
    if vision := getattr(model.config, "vision_config", None):
        assert vision._attn_implementation == "eager"


def test_an_encoder_gets_one_that_generates() -> None:
    model = pt.prepare(build("qwen3_vl"))
    assert model.config.vision_config._attn_implementation == "sdpa"
    assert model.config.text_config._attn_implementation == "prefixtree"
    setting = model.set_attn_implementation
    model.set_attn_implementation = lambda _: pytest.fail("set again")
    pt.prepare(model)
    model.set_attn_implementation = setting


def test_a_model_from_a_folder(tmp_path: Path) -> None:
    """transformers' default attention, and the same generation afterwards."""
    build("qwen3", "sdpa").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.tensor([[5, 6, 7]])
    before = model.generate(ids, max_new_tokens=4, do_sample=False)
    pt.prepare(model)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), before)
    scores = pt.batch_logprobs(model, ids, torch.ones_like(ids))
    assert scores.logprobs.isfinite().all()
