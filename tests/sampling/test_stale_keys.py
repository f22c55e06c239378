"""`TreeSampler` between updates: models as training has them, and keys of other weights."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import prefixtree as pt
from prefixtree.sampling import Draws, TreeSampler
from tests.sampling.cases import (
    GREEDY,
    generated,
    models,
    same_samples,
)
from tests.support.models import build, enable_checkpointing


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of PEFT
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of dynamo
def test_a_model_as_training_has_it():
    """In training mode with checkpointing, compiled layers and LoRA, between updates."""
    from peft import LoraConfig, get_peft_model

    ours, _ = models()
    model = copy.deepcopy(ours)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"])).train()
    enable_checkpointing(model, use_reentrant=False)
    torch._dynamo.reset()
    counters.clear()
    pt.compile_layers(adapted, backend="eager")
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], 0.5)
    sampler = TreeSampler(adapted, 1000)
    for update in range(2):
        graphs = counters["stats"]["unique_graphs"]
        samples = sampler.sample([[3, 4, 5], [3, 4, 6, 7]], 3, 5, Draws(seed=1))
        # two kinds of layers
        assert counters["stats"]["unique_graphs"] - graphs == (0 if update else 2)
        packed = pt.pack(samples.forest)
        scores = pt.sequence_logprobs(adapted, packed, loss_mask=samples.loss_masks)
        assert counters["stats"]["unique_graphs"] > 0
        for new, old in zip(scores.logprobs, samples.logprobs, strict=True):
            torch.testing.assert_close(new.detach(), old, atol=2e-5, rtol=0)
        sum(p.sum() for p in scores.logprobs).backward()
        optimizer.step()
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of PEFT
def test_keys_of_another_adapter_are_refused():
    from peft import LoraConfig, get_peft_model

    ours, _ = models()
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = get_peft_model(copy.deepcopy(ours), config)
    adapted.add_adapter("other", config)
    adapted.set_adapter("default")
    sampler = TreeSampler(adapted.eval(), 100)

    def rescaled() -> Any:
        layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
        layer.scale_layer(2.0)
        return nullcontext()

    for change in (adapted.disable_adapter, lambda: adapted.set_adapter("other"), rescaled):
        rows = sampler.start(pt.PrefixForest.from_sequences([[3, 4, 5]]))
        rows.generate(2)
        with change() or nullcontext():
            with pytest.raises(RuntimeError, match="weights or adapters changed"):
                rows.generate(2)
            # what was so from the start is fine, and other parts of a model's state are no weights
            rows = sampler.start(pt.PrefixForest.from_sequences([[3, 4, 5]]))
            adapted.train().requires_grad_(False)
            rows.generate(2)
            adapted.eval()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of PEFT
def test_adapters_of_experts():
    """PEFT's forwards set and move the parameters that its adapters of experts belong to."""
    from peft import LoraConfig, get_peft_model

    experts = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    config = LoraConfig(r=2, target_parameters=experts, init_lora_weights=False)
    model = get_peft_model(build("qwen3_moe"), config).eval()
    prompts = [[3, 4, 5], [3, 4, 6, 7]]
    rows = TreeSampler(model, 100).start(pt.PrefixForest.from_sequences(prompts))
    rows.generate(3, GREEDY)
    rows.generate(3, GREEDY)
    found = [sequence.tolist() for sequence in rows.samples().sequences]
    model.set_adapter("default")
    rows.generate(1)
    model.merge_adapter()
    with pytest.raises(
        RuntimeError, match=r"changed since the sampler started \(merged_adapters of"
    ):
        rows.generate(1)
    model.unmerge_adapter()
    model.base_model.model.set_attn_implementation("sdpa")
    expected = generated(model, prompts, 6, [])
    assert found == [p + e for p, e in zip(prompts, expected, strict=True)]


def test_inference_mode_may_come_and_go():
    """The kept keys outlive it."""
    ours, _ = models()
    sampler, forest = TreeSampler(ours, 500), pt.PrefixForest.from_sequences([[3, 4, 5], [3, 9]])
    found = []
    for modes in ((True, False, True), (False, True, False), (False, False, False)):
        with torch.inference_mode(modes[0]):
            rows = sampler.start(forest)
        with torch.inference_mode(modes[1]):
            rows.generate(3)
            rows.append({0: [7, 8]})
            rows.branch(2)
        with torch.inference_mode(modes[2]):
            rows.generate(3)
            found.append(rows.samples())
        assert not found[-1].logprobs[0].is_inference()
    assert same_samples(found[0], found[1]) and same_samples(found[1], found[2])


def test_keys_of_other_weights_are_refused():
    """Fused optimizers and `.data` leave the version of a parameter as it is."""
    ours, _ = models()
    model = copy.deepcopy(ours)
    sampler = TreeSampler(model, 1000)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    fused = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    norm, embedding = model.model.layers[1].input_layernorm, model.model.embed_tokens.weight
    rotary = model.model.rotary_emb

    def added_tokens() -> None:
        """An update of embeddings behind those of which numbers are compared."""
        model.zero_grad()
        embedding.grad = torch.zeros_like(embedding)
        embedding.grad[90:] = 1
        torch.optim.AdamW([embedding], 1e-2, weight_decay=0, fused=True).step()

    changes: list[Any] = [
        lambda: rotary.inv_freq.mul_(1.1),
        lambda: norm.weight.detach().add_(0.1),
        fused.step,
        lambda: norm.weight.data.mul_(1.1),
        lambda: setattr(norm, "weight", copy.deepcopy(norm.weight)),
        added_tokens,
    ]
    for change in changes:
        rows = sampler.start(pt.PrefixForest.from_sequences([[3, 4, 5]]))
        rows.generate(2)
        change()
        with pytest.raises(RuntimeError, match="weights or adapters changed since the sampler"):
            rows.generate(2)
        # the last token of the row is not read yet
        with pytest.raises(RuntimeError, match="weights or adapters changed since the sampler"):
            rows.branch(2)
        assert len(rows) == 1
    again = sampler.start(pt.PrefixForest.from_sequences([[3, 4, 5]]))
    with pytest.raises(RuntimeError, match="keys of these rows are gone: the sampler started"):
        rows.append({0: [4]})
    assert len(rows.samples().sequences[0]) == 5
    again.generate(2)
