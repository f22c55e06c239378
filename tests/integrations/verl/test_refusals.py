"""Refusals of what is not verified: each names the setting to change, before any computation."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from verl.utils import tensordict_utils as tu
from verl.workers.config import McoreEngineConfig, MtpConfig, QATEngineConfig
from verl.workers.engine.fsdp import transformer_impl

from prefixtree.errors import UnsupportedError, refuse
from prefixtree.integrations.verl import batches, refusals
from prefixtree.integrations.verl.batches import shown_of
from prefixtree.integrations.verl.images import images_of
from prefixtree.integrations.verl.version import check_version
from tests.integrations.verl.cases import CASES, Settings
from tests.integrations.verl.image_runs import patches_taken_back, shown
from tests.integrations.verl.runs import batch_of, jagged, make_worker, rollouts, worker_config
from tests.support.refusals import check_cases, pattern, rows_of

SETTINGS = CASES["grpo"]
VISION = Settings(model="qwen3_vl", tokens=120)
COMMON = {"temperature": 1.0, "global_token_num": None, "compute_loss": False}


# ---- every row of the tables ---------------------------------------------------------------------


def _set(config: Any, settings: dict[str, Any]) -> Any:
    """The configuration with other settings; verl freezes its own."""
    for name, value in settings.items():
        *path, last = name.split(".")
        owner = config
        for part in path:
            owner = getattr(owner, part)
        object.__setattr__(owner, last, value)
    return config


Case = Callable[[Path], Any]


def of_fsdp(model: dict[str, Any], output: str = "log_probs", **engine: Any) -> Case:
    def case(models: Path) -> None:
        config = worker_config("prefixtree", models / "qwen3", SETTINGS)
        settings = _set(config.model_config, model), _set(config.engine_config, engine)
        refusals.check_settings(*settings, output)

    return case


def of_megatron(model: dict[str, Any], engine: dict[str, Any]) -> Case:
    """test_megatron.py has the engine itself."""

    def case(models: Path) -> None:
        config = worker_config("prefixtree", models / "qwen3", SETTINGS).model_config
        settings = _set(config, model), _set(McoreEngineConfig(), engine)
        refusals.check_megatron_settings(*settings)

    return case


def of_batch(**extra: Any) -> Case:
    def case(models: Path) -> None:
        data = batch_of(rollouts(1, groups=1, size=2), **COMMON)
        for name, value in extra.items():
            if isinstance(value, (torch.Tensor, list)):
                data[name] = tu.get_tensordict({"x": value})["x"]
            else:
                tu.assign_non_tensor(data, **{name: value})
        refusals.check_batch(data)

    return case


def of_loss(dynamic: bool = True, **config: Any) -> Case:
    """test_losses.py has verl's losses, and their gradients."""
    loss = partial(lambda config: None, config=SimpleNamespace(**config))
    return lambda models: refusals.check_loss(loss, dynamic)


def overridden(name: str, value: Any, is_served: bool = False, strategy: str = "fsdp2") -> None:
    refusals.check_override(name, value, is_served, strategy=strategy)


IMAGES = {"hf_config.vision_config": object()}
NORMALISES = {
    "loss_type": "reinforce",
    "rollout_is": "token",
    "rollout_is_batch_normalize": True,
}
CASES_OF_ROWS: dict[str, tuple[Case, ...]] = {
    "EVERY_ENGINE: model.mtp.enable": (
        of_fsdp({"mtp": MtpConfig(enable=True)}),
        of_megatron({"mtp": MtpConfig(enable=True)}, {}),
    ),
    "EVERY_ENGINE: qat.enable": (of_fsdp({}, qat=QATEngineConfig(enable=True)),),
    "FSDP: use_liger": (of_fsdp({"use_liger": True, "hf_config.model_type": "olmoe"}),),
    "FSDP: enable_activation_offload": (of_fsdp({"enable_activation_offload": True}),),
    "FSDP: model with images": (of_fsdp(IMAGES),),
    "FSDP: critic with images": (
        of_fsdp({**IMAGES, "hf_config.model_type": "qwen3_vl"}, "values"),
    ),
    "MEGATRON: vanilla_mbridge": (of_megatron({}, {"vanilla_mbridge": True}),),
    "MEGATRON: context_parallel_size": (
        of_megatron({}, {"context_parallel_size": 2}),
        of_megatron({}, {"dynamic_context_parallel": True}),
    ),
    "MEGATRON: use_megatron_fsdp": (of_megatron({}, {"use_megatron_fsdp": True}),),
    "MEGATRON: router_replay of a critic": (
        of_megatron({"model_type": "value_model"}, {"router_replay.mode": "R2"}),
    ),
    "MEGATRON: router_replay of virtual stages": (
        of_megatron({}, {"router_replay.mode": "R2", "virtual_pipeline_model_parallel_size": 2}),
    ),
    "MEGATRON: lora.rank": (of_megatron({"lora": {"rank": 8}}, {}),),
    "MEGATRON: model with images": (of_megatron(IMAGES, {}),),
    "PROVIDER: calculate_per_token_loss": (
        lambda models: refuse(refusals.PROVIDER, SimpleNamespace(calculate_per_token_loss=True)),
    ),
    "OVERRIDES: prefixtree_recompute": (lambda models: overridden(refusals.RECOMPUTE, "auto"),),
    "OVERRIDES: prefixtree_compile": (lambda models: overridden(refusals.COMPILE, True),),
    "OVERRIDES: prefixtree_compile under FSDP1": (
        lambda models: overridden(refusals.COMPILE, True, True, strategy="fsdp"),
    ),
    "IMAGES: strategy": (lambda models: refusals.check_images(SimpleNamespace(strategy="fsdp")),),
    "BATCHES: distillation_use_topk": (
        of_batch(distillation_use_topk=True),
        of_batch(distillation_only=True),
    ),
    "BATCHES: calculate_sum_pi_squared": (of_batch(calculate_sum_pi_squared=True),),
    "BATCHES: force_group_size": (of_batch(force_group_size=2),),
    "BATCHES: pad_mode": (of_batch(pad_mode="left_right"),),
    "BATCHES: multi_modal_inputs": (
        of_batch(multi_modal_inputs=[{"pixel_values": torch.zeros(1, 3)}, {}]),
    ),
    "BATCHES: position_ids": (
        of_batch(position_ids=jagged([torch.arange(3) + 1, torch.arange(4)])),
    ),
    "LOSSES: loss_agg_mode": (
        of_loss(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=None),
    ),
    "LOSSES: geo_mean": (of_loss(policy_loss={"loss_mode": "geo_mean"}),),
    "LOSSES: rollout_is_batch_normalize": (
        of_loss(policy_loss={"loss_mode": "bypass_mode", "rollout_correction": NORMALISES}),
    ),
}
ROWS = rows_of(refusals)


def test_every_row_has_a_case() -> None:
    check_cases(ROWS, CASES_OF_ROWS)


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name in ROWS for case in CASES_OF_ROWS.get(name, ())]
)
def test_rows(name: str, case: Case, models: Path) -> None:
    with pytest.raises(UnsupportedError, match=pattern(ROWS[name])):
        case(models)


def test_what_is_served(models: Path) -> None:
    of_fsdp({})(models)
    of_megatron({}, {})(models)
    of_batch()(models)
    of_loss(False, policy_loss={"loss_mode": "geo_mean"})(models)


def test_other_vision_checkpoints_and_unknown_families(models: Path) -> None:
    worker = make_worker("prefixtree", models / "qwen3", SETTINGS)
    model_config, engine_config = worker.model_config, worker.engine_config
    refusals.check_settings(model_config, engine_config, "log_probs")
    hf_config = model_config.hf_config
    hf_config.vision_config = object()
    with pytest.raises(UnsupportedError, match=r"qwen3 takes images, .* only qwen2_5_vl, qwen3_5"):
        refusals.check_settings(model_config, engine_config, "log_probs")
    del hf_config.vision_config
    hf_config.model_type = "stablelm"
    with pytest.raises(UnsupportedError, match="'stablelm' is not served"):
        refusals.check_settings(model_config, engine_config, "log_probs")


def test_ligers_layers_where_they_are_verified(models: Path) -> None:
    worker = make_worker("prefixtree", models / "qwen3", SETTINGS)
    model_config, engine_config = worker.model_config, worker.engine_config
    object.__setattr__(model_config, "use_liger", True)  # frozen
    refusals.check_settings(model_config, engine_config, "log_probs")
    model_config.hf_config.model_type = "olmoe"
    with pytest.raises(UnsupportedError, match=r"use_liger=True is not verified .* of olmoe"):
        refusals.check_settings(model_config, engine_config, "log_probs")


def test_attention_dropout_is_refused_for_training_alone(models: Path) -> None:
    dropout = {"attn_implementation": "prefixtree", "attention_dropout": 0.1}
    settings = replace(SETTINGS, model_options={"override_config": dropout})
    with pytest.raises(UnsupportedError, match=r"attention_dropout is 0\.1"):
        make_worker("prefixtree", models / "qwen3", settings)
    make_worker("prefixtree", models / "qwen3", settings, forward_only=True)


def test_images_for_a_model_of_text(models: Path) -> None:
    worker = make_worker("prefixtree", models / "qwen3", SETTINGS)
    images = [{"pixel_values": torch.zeros(1, 3)}, {"pixel_values": torch.zeros(1, 3)}]
    data = batch_of(rollouts(1, groups=1, size=2), multi_modal_inputs=images, **COMMON)
    with pytest.raises(UnsupportedError, match="the engine's model takes none"):
        worker.infer_batch(data)
    # what text-only batches carry where others have images
    text = batch_of(rollouts(1, groups=1, size=2), multi_modal_inputs=[{}, None], **COMMON)
    assert len(worker.infer_batch(text)["log_probs"].unbind()) == 2


# ---- checkpoints with a vision encoder -----------------------------------------------------------


@pytest.fixture(scope="module")
def seeing(sees: Path) -> Any:
    """A worker of a model with a vision encoder; nothing is trained."""
    return make_worker("prefixtree", sees / "qwen3_vl", VISION)


def shown_batch(sees: Path, with_images: bool = True) -> Any:
    rows = shown(rollouts(1, groups=4, size=4), sees / "qwen3_vl", with_images)
    return batch_of(rows, **COMMON)


def test_a_critic_that_sees(sees: Path) -> None:
    with pytest.raises(UnsupportedError, match="transformers has none of qwen3_vl"):
        make_worker("prefixtree", sees / "qwen3_vl", VISION, "value_model")


@pytest.mark.parametrize("with_images", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        # of the model's own rows one alone
        (lambda p: p + torch.tensor([[0], [0], [1], [0]]), "position_ids of sequence 0 are not"),
        (lambda p: p + 1, "position_ids must count 0, 1, 2"),
        (lambda p: p[1:], "position_ids must count 0, 1, 2"),
    ],
)
def test_positions_that_are_not_the_types_own(
    change: Any, message: str, with_images: bool, sees: Path, seeing: Any
) -> None:
    data = shown_batch(sees, with_images)
    data["position_ids"] = jagged([change(row) for row in data["position_ids"].unbind()])
    data["position_ids"]._ragged_idx = 2
    with pytest.raises(UnsupportedError, match=message):
        seeing.infer_batch(data)


def test_positions_of_text_where_there_are_images(sees: Path, seeing: Any) -> None:
    """One row of positions is right for text alone."""
    for with_images in (False, True):
        data = shown_batch(sees, with_images)
        data["position_ids"] = jagged([row[0] for row in data["position_ids"].unbind()])
        if with_images:
            with pytest.raises(UnsupportedError, match="sequence 0 are not those that qwen3_vl"):
                seeing.infer_batch(data)
        else:
            assert len(seeing.infer_batch(data)["log_probs"].unbind()) == 16


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        ({"image_bound": torch.zeros(1, 2)}, UnsupportedError, "multi_modal_inputs has image_bou"),
        ({"input_features": torch.zeros(1, 2)}, UnsupportedError, "has input_features: under verl"),
        ({"video_grid_thw": torch.zeros(1, 3)}, UnsupportedError, "has video_grid_thw: under verl"),
        ({"pixel_values": torch.zeros(3, 96)}, ValueError, "has 3 patches in pixel_values and 32"),
        ({"image_grid_thw": None}, ValueError, "pixel_values without image_grid_thw"),
        ({"image_grid_thw": torch.tensor([[1, 4, 8]] * 2)}, ValueError, "32 patches .* and 64 by"),
        ({"pixel_values": None, "image_grid_thw": None}, UnsupportedError, "sequence 0 are not th"),
    ],
)
def test_arguments_of_other_processors(
    extra: dict[str, Any], error: Any, message: str, sees: Path, seeing: Any
) -> None:
    data = shown_batch(sees)
    rows = shown_of(data)
    rows[0] = rows[0] | extra
    data["multi_modal_inputs"] = tu.get_tensordict({"x": rows})["x"]
    if "pixel_values" in extra and extra["pixel_values"] is None:
        # placeholders are text then, and their positions are not
        data["multi_modal_inputs"] = tu.get_tensordict({"x": [{} for _ in rows]})["x"]
    with pytest.raises(error, match=message):
        seeing.infer_batch(data)


def test_what_follows_from_tokens_and_grids_is_left_out(sees: Path, seeing: Any) -> None:
    """And a tensor that several rows hold is hashed once."""
    data = shown_batch(sees)
    rows = shown_of(data)
    expected = seeing.infer_batch(data.clone())["log_probs"].values()
    copies = [row | {"images_seqlens": torch.tensor([32])} if row else row for row in rows]
    for row in copies[1:4]:
        row["pixel_values"] = copies[0]["pixel_values"]
    data["multi_modal_inputs"] = tu.get_tensordict({"x": copies})["x"]
    assert torch.equal(seeing.infer_batch(data)["log_probs"].values(), expected)
    images = images_of(data, batches.rows_of(data), seeing.model_config.hf_config, None)
    assert len(images) == 3
    assert images.num_given == 14


def test_classes_that_verl_patched(sees: Path, seeing: Any) -> None:
    """As it makes an engine of its own, before the packed one or after it."""
    data = shown_batch(sees, False)
    with patches_taken_back():
        make_worker("stock", sees / "qwen3_vl", VISION)
        with pytest.raises(UnsupportedError, match=r"Qwen3VL\w+\.\w+ is verl's .*Run no other"):
            seeing.infer_batch(data)
    seeing.infer_batch(data)


def test_a_load_balancing_loss_that_verl_does_not_read(models: Path) -> None:
    """Its FSDP engine takes log-probabilities from logits, whatever the configuration asks for."""
    assert "aux_loss" not in inspect.getsource(transformer_impl)
    asks = {"attn_implementation": "prefixtree", "output_router_logits": True}
    found = []
    for config in (asks, {"attn_implementation": "prefixtree"}):
        settings = replace(SETTINGS, model_options={"override_config": config})
        worker = make_worker("prefixtree", models / "qwen3_moe", settings)
        data = batch_of(rollouts(1, groups=1, size=2), **COMMON)
        found.append(worker.infer_batch(data)["log_probs"].values())
    assert torch.equal(*found)


def test_positions_that_are_not_indices(models: Path) -> None:
    worker = make_worker("prefixtree", models / "qwen3", SETTINGS)
    data = batch_of(rollouts(1, groups=1, size=2), **COMMON)
    rows = [row.clone() for row in data["position_ids"].unbind()]
    rows[1] += 1
    data["position_ids"] = jagged(rows)
    with pytest.raises(UnsupportedError, match="position_ids must count 0, 1, 2"):
        worker.infer_batch(data)
    three = [torch.arange(len(row)).expand(3, -1) for row in rows]
    data["position_ids"] = torch.nested.as_nested_tensor(
        [row.T for row in three], layout=torch.jagged
    )
    with pytest.raises(UnsupportedError, match="multi-dimensional"):
        refusals.check_batch(data)


@pytest.mark.parametrize("model_type", ["language_model", "value_model"])
def test_adapters(model_type: str, models: Path) -> None:
    """As a checkpoint given as lora_adapter_path may hold them."""
    worker = make_worker("prefixtree", models / "qwen3", SETTINGS, model_type)
    data = batch_of(rollouts(1, groups=1, size=2), **COMMON)
    worker.infer_batch(data)
    config = peft.LoraConfig(target_modules=["q_proj"])
    peft.inject_adapter_in_model(config, worker.engine.module)
    config.peft_type = peft.PeftType("LILY")
    with pytest.raises(UnsupportedError, match="PEFT method LILY of adapter 'default'"):
        worker.infer_batch(data)


def test_a_temperature_of_zero(models: Path) -> None:
    worker = make_worker("prefixtree", models / "qwen3", SETTINGS)
    data = batch_of(rollouts(1, groups=1, size=2), **{**COMMON, "temperature": 0.0})
    with pytest.raises(ValueError, match="above 0"):
        worker.infer_batch(data)


def test_a_sequence_beyond_the_budget(models: Path) -> None:
    # where trunks are not kept
    padded = {"pad_to_length": True, "pad_to_length_bucket": 32}
    settings = replace(SETTINGS, tokens=12, engine=padded)
    worker = make_worker("prefixtree", models / "qwen3", settings)
    with pytest.raises(ValueError, match="more than max_token_len_per_gpu=12"):
        worker.infer_batch(batch_of(rollouts(1, groups=1, size=2), **COMMON))


def test_a_fixed_size_that_does_not_divide(models: Path) -> None:
    worker = make_worker("prefixtree", models / "qwen3", Settings(tokens=None, size=3))
    with pytest.raises(ValueError, match="4 sequences on a rank do not divide"):
        worker.infer_batch(batch_of(rollouts(1, groups=1, size=4), **COMMON))


@pytest.mark.parametrize("version", ["0.9.0", "0.9.2", "0.10.0"])
def test_other_versions_of_verl(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_version()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(UnsupportedError, match=rf"this is verl {version},.* install verl==0\.9\.1"):
        check_version()
