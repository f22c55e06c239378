"""torchao's own layers: weights alone and a scale per token run, one scale for all is refused.

Run by `make test-trainers`: transformers imports torchao wherever it is installed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torchao.quantization as ao
from torch import nn
from torchao.float8 import CastConfig, Float8LinearConfig, ScalingType, convert_to_float8_training
from torchao.prototype.quantized_training import bitnet_training, int8_mixed_precision_training
from torchao.quantization.qat import (
    Float8FakeQuantizeConfig,
    IntxFakeQuantizeConfig,
    QATConfig,
)
from transformers import AutoModelForCausalLM, TorchAoConfig

import prefixtree as pt
from prefixtree import UnsupportedError
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.support.models import (
    Run,
    assert_same,
    build,
    ragged_objective,
    ragged_packed,
    run_packed,
    run_replicated,
    with_random_lora,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning",
    "ignore::DeprecationWarning",
    # about adapters that are merged
    "ignore:TorchaoLoraLinear was instantiated:UserWarning",
)
Change = Callable[[nn.Module], Any]
INT4 = {"weight_dtype": torch.int4, "granularity": ao.PerGroup(32)}


def quantised(config: Any, head: bool = True) -> Change:
    return lambda model: ao.quantize_(model, config, lambda m, name: _taken(m, name, head))


def float8(recipe: str, **changes: Any) -> Change:
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True, **changes)
    return lambda model: convert_to_float8_training(
        model, config=config, module_filter_fn=lambda m, name: _taken(m, name, False)
    )


def _taken(module: nn.Module, name: str, head: bool) -> bool:
    return isinstance(module, nn.Linear) and (head or "lm_head" not in name)


def made(change: Change, implementation: str = "prefixtree", lora: bool = False) -> Any:
    """A tiny model whose layers take blocks of 32."""
    model = build("llama", implementation, hidden_size=64, intermediate_size=128)
    change(model)
    return with_random_lora(model, "q_proj", "v_proj", "up_proj") if lora else model


def both(change: Change, lora: bool = False) -> tuple[Run, Run]:
    """Of the packed forest, and of each sequence alone."""
    objective = ragged_objective()
    expected = run_replicated(made(change, "eager", lora), objective)
    return run_packed(made(change, lora=lora), ragged_packed(), objective), expected


def distance(one: Run, other: Run) -> float:
    """Of log p, the largest."""
    return float((torch.cat(one.logprobs) - torch.cat(other.logprobs)).abs().max())


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    "config",
    [ao.Int8WeightOnlyConfig(), ao.Float8WeightOnlyConfig(), ao.IntxWeightOnlyConfig(**INT4)],
    ids=["int8", "float8", "int4"],
)
def test_weights_alone(config: Any, lora: bool) -> None:
    """The lm_head's too, which is no weight to multiply by."""
    found, expected = both(quantised(config), lora)
    assert_same(found, expected)
    assert len(found.gradients) > 15
    assert distance(found, both(lambda model: None, lora)[1]) > 1e-2


@pytest.mark.parametrize("config", [int8_mixed_precision_training(), bitnet_training()])
def test_weights_that_are_trained(config: Any) -> None:
    """A product with BitNet's weight passes no gradient that its `linear` gives."""
    found, expected = both(quantised(config))
    assert_same(found, expected)
    assert "lm_head.weight" in found.gradients


def test_float8_training() -> None:
    """Rowwise: the forward of each sequence. A shared token's gradient is summed, then rounded: as
    far from the one without float8 as the batch's."""
    found, expected = both(float8("rowwise"))
    assert distance(found, expected) < 1e-4
    exact = both(lambda model: None)[1]

    def of(run: Run) -> float:
        pairs = [(g - exact.gradients[n], exact.gradients[n]) for n, g in run.gradients.items()]
        off, size = (torch.cat([p[i].flatten() for p in pairs]).norm() for i in (0, 1))
        return float(off / size)

    assert 0.01 < of(found) < 1.1 * of(expected)
    # nothing of the backward rounded
    plain = CastConfig(scaling_type=ScalingType.DISABLED)
    sides = ("input_for_grad_weight", "weight_for_grad_input", "grad_output")
    off = {f"cast_config_{side}": plain for side in (*sides, "grad_output_for_grad_weight")}
    assert_same(*both(float8("rowwise", **off)), 2e-5)


def test_one_scale_for_all_tokens_is_refused() -> None:
    per_tensor = ao.Int8DynamicActivationInt8WeightConfig(granularity=ao.PerTensor())
    fake = QATConfig(
        activation_config=Float8FakeQuantizeConfig(granularity=ao.PerTensor()),
        weight_config=IntxFakeQuantizeConfig(torch.int4, group_size=32),
        step="prepare",
    )
    for change, message in (
        (float8("tensorwise"), "one scale for all tokens"),
        (quantised(per_tensor), "one scale for all tokens"),
        # by no name
        (quantised(fake), "another output when other tokens"),
    ):
        with pytest.raises(UnsupportedError, match=rf"layers\.0\.self_attn.*{message}.*rowwise"):
            sequence_logprobs(made(change), ragged_packed())
    experts = build("qwen3_moe", hidden_size=64, moe_intermediate_size=64)
    named = OrderedDict({r"re:.*experts\.down_proj": per_tensor})
    ao.quantize_(experts, ao.FqnToConfig(named), filter_fn=None)
    with pytest.raises(UnsupportedError, match=r"mlp\.experts .*one scale for all tokens"):
        pt.prepare(experts)


def test_tokens_that_are_quantised_give_no_gradient() -> None:
    """A scale per token is exact without gradients; with them, layers before it would get none."""
    change = quantised(ao.Int8DynamicActivationIntxWeightConfig(torch.int4, ao.PerGroup(32)))
    for lora in (False, True):
        with pytest.raises(UnsupportedError, match=r"gives its input no gradient.*weights alone"):
            sequence_logprobs(made(change, lora=lora), ragged_packed())
    model = made(change).requires_grad_(False)
    scores = sequence_logprobs(model, ragged_packed())
    model.set_attn_implementation("eager")
    for tokens, logprobs in zip(ragged_objective().sequences, scores.logprobs, strict=True):
        ids = torch.from_numpy(tokens)[None]
        log_p = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        torch.testing.assert_close(
            logprobs, log_p.gather(1, ids[0, 1:, None])[:, 0], atol=1e-4, rtol=0
        )


def test_a_head_trains_behind_tokens_that_are_quantised() -> None:
    """It needs no gradient of theirs."""
    config = ao.Int8DynamicActivationIntxWeightConfig(torch.int4, ao.PerGroup(32))

    def only_the_head(implementation: str) -> Any:
        model = made(quantised(config, head=False), implementation).requires_grad_(False)
        model.lm_head.requires_grad_(True)
        return model

    objective = ragged_objective()
    found = run_packed(only_the_head("prefixtree"), ragged_packed(), objective)
    assert_same(found, run_replicated(only_the_head("eager"), objective), 1e-3)
    assert found.gradients.keys() == {"lm_head.weight"}
    with pytest.raises(UnsupportedError, match="gives its input no gradient"):
        model = only_the_head("prefixtree")
        model.model.embed_tokens.requires_grad_(True)
        sequence_logprobs(model, ragged_packed())


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
def test_loaded_by_transformers(tmp_path: Path, model_type: str) -> None:
    """`TorchAoConfig`, with LoRA."""
    build(model_type, "eager").save_pretrained(tmp_path)

    def loaded(implementation: str) -> Any:
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path,
            quantization_config=TorchAoConfig(ao.Int8WeightOnlyConfig()),
            attn_implementation=implementation,
            device_map="cpu",
            dtype=torch.float32,
        )
        return with_random_lora(model, "q_proj", "o_proj")

    expected = run_replicated(loaded("eager"), ragged_objective())
    assert_same(run_packed(loaded("prefixtree"), ragged_packed(), ragged_objective()), expected)
    assert len(expected.gradients) == 12
    model = loaded("prefixtree").train()
    planned = run_packed(model, ragged_packed(), ragged_objective(), recompute="auto")
    assert_same(planned, expected)
