"""The two flags through verl's own configuration and worker: Hydra's ppo_trainer.yaml composed as
`main_ppo` does, ActorRolloutRefWorker as its trainer makes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.workers.engine_workers import ActorRolloutRefWorker

from prefixtree.integrations.verl import PackedActorEngine
from prefixtree.integrations.verl.refusals import check_settings
from prefixtree.integrations.verl.trainer import GroupedTrainerSync
from tests.integrations.verl.compare import difference
from tests.integrations.verl.runs import FULL, batch_of, jagged, parameters, rollouts

# what a user sets, as in docs/verl.md
FLAGS = [
    "actor_rollout_ref.model.external_lib=prefixtree.integrations.verl",
    "+actor_rollout_ref.model.override_config.attn_implementation=prefixtree",
]
STOCK = ["+actor_rollout_ref.model.override_config.attn_implementation=sdpa"]


def configuration(path: Path, flags: list[str]) -> DictConfig:
    """verl's GRPO configuration for a CPU."""
    precision = "{" + ",".join(f"{k}:{v}" for k, v in FULL.items()) + "}"
    overrides = [
        f"actor_rollout_ref.model.path={path}",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_coef=0.1",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "actor_rollout_ref.actor.optim.optimizer=SGD",
        "actor_rollout_ref.actor.optim.lr=0.1",
        "actor_rollout_ref.actor.optim.weight_decay=0",
        "actor_rollout_ref.actor.optim.total_training_steps=4",
        *flags,
    ]
    for role in ("actor", "ref"):
        overrides += [
            f"actor_rollout_ref.{role}.fsdp_config.use_torch_compile=False",
            f"actor_rollout_ref.{role}.fsdp_config.model_dtype=fp32",
            f"+actor_rollout_ref.{role}.fsdp_config.mixed_precision={precision}",
        ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides)


def step(vendor: str, path: Path, flags: list[str]) -> dict[str, Any]:
    """Old and reference log-probabilities and one update, through ActorRolloutRefWorker."""
    os.environ["VERL_ENGINE_VENDOR"] = vendor
    config = configuration(path, flags).actor_rollout_ref
    actor = ActorRolloutRefWorker(config, role="actor")
    actor.init_model()
    reference = ActorRolloutRefWorker(config, role="ref")
    reference.init_model()
    rows = rollouts(3, groups=2, size=4)
    common = {"temperature": 0.8, "global_token_num": None}
    old = actor.compute_log_prob(
        batch_of(rows, compute_loss=False, calculate_entropy=True, **common)
    )
    ref = reference.compute_ref_log_prob(batch_of(rows, compute_loss=False, **common))
    spans = list(zip(rows["prompts"], rows["responses"], strict=True))

    def responses(values: torch.Tensor) -> list[torch.Tensor]:
        return [
            v[len(p) - 1 : len(p) + len(r) - 1]
            for v, (p, r) in zip(values.unbind(), spans, strict=True)
        ]

    out = {"old": responses(old["log_probs"]), "ref": responses(ref["log_probs"])}
    generator = torch.Generator().manual_seed(0)
    advantages = [torch.randn(len(r), generator=generator) for r in rows["responses"]]
    batch = batch_of(
        rows,
        old_log_probs=jagged([v + 0.01 for v in out["old"]]),
        ref_log_prob=jagged([v - 0.05 for v in out["ref"]]),
        advantages=jagged(advantages),
        calculate_entropy=True,
        global_batch_size=8,
        mini_batch_size=8,
        epochs=1,
        seed=1,
        dataloader_kwargs={"shuffle": False},
        **common,
    )
    metrics = tu.get(actor.update_actor(batch), "metrics")
    return {**out, "metrics": metrics, "parameters": parameters(actor.actor), "actor": actor.actor}


def test_the_two_flags_switch_packing_on_and_give_the_same(models: Path) -> None:
    stock = step("stock", models / "qwen3", STOCK)
    packed = step("prefixtree", models / "qwen3", FLAGS)
    assert type(packed["actor"].engine) is PackedActorEngine
    assert packed["actor"].engine.packs
    assert packed["metrics"]["prefixtree/replicated_over_packed"][0] > 1.5
    for name in ("old", "ref"):
        assert difference(stock[name], packed[name]) < 1e-5
    for name in ("loss", "grad_norm", "kl_loss", "actor/pg_loss", "actor/entropy_loss"):
        assert difference(stock["metrics"][name], packed["metrics"][name]) < 1e-5
    for name, parameter in stock["parameters"].items():
        assert float((parameter - packed["parameters"][name]).abs().max()) < 1e-6


def test_the_library_alone_registers_the_engines_for_nvidia(models: Path) -> None:
    # in a process of its own, on the platform that a GPU machine has
    code = f"""
from verl.workers.config import HFModelConfig
from verl.workers.engine import EngineRegistry
def engines():
    kinds = ("language_model", "value_model")
    return [EngineRegistry.get_engine_cls(k, b).__name__ for k in kinds for b in ("fsdp", "fsdp2")]
print(*engines())
HFModelConfig(path={str(models / "qwen3")!r}, external_lib="prefixtree.integrations.verl")
print(*engines())
"""
    environment = {**os.environ, "VERL_PLATFORM": "nvidia"}
    environment.pop("VERL_ENGINE_VENDOR", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.strip().splitlines()[-2:]
    assert before.split() == ["FSDPEngineWithLMHead"] * 2 + ["FSDPEngineWithValueHead"] * 2
    assert after.split() == ["PackedActorEngine"] * 2 + ["PackedCriticEngine"] * 2


def test_the_critic_has_flags_of_its_own(models: Path) -> None:
    flags = [
        flag.replace("actor_rollout_ref.model", "critic.model")
        for flag in (f"actor_rollout_ref.model.path={models / 'qwen3'}", *FLAGS)
    ]
    critic = omega_conf_to_dataclass(configuration(models / "qwen3", [*STOCK, *flags]).critic)
    assert critic.model.hf_config._attn_implementation == "prefixtree"
    check_settings(critic.model, critic.engine, "values")


def test_the_example_is_a_configuration_of_verl(models: Path, tmp_path: Path) -> None:
    # a python3 that writes down what it is called with
    stub = tmp_path / "bin" / "python3"
    stub.parent.mkdir()
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    (tmp_path / "train.parquet").touch()
    environment = {
        **os.environ,
        "PATH": f"{stub.parent}{os.pathsep}{os.environ['PATH']}",
        "MODEL": str(models / "qwen3"),
        "DATA": str(tmp_path),
        "GPUS": "4",
    }
    script = Path(__file__).parents[3] / "examples" / "verl_grpo.sh"
    done = subprocess.run(
        ["bash", str(script), "trainer.total_epochs=1"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    module, name, *overrides = done.stdout.splitlines()
    assert (module, name) == ("-m", "verl.trainer.main_ppo")
    assert set(FLAGS) < set(overrides)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides)
    validate_config(config, use_reference_policy=True, use_critic=False)
    assert config.trainer.total_epochs == 1
    assert config.trainer.n_gpus_per_node == 4
    assert get_trainer_cls(config.trainer.v1.trainer_mode) is GroupedTrainerSync
    variables = config.ray_kwargs.ray_init.runtime_env.env_vars
    assert GroupedTrainerSync.__module__ == variables.VERL_USE_EXTERNAL_MODULES
    # what the engines would refuse is not set
    model_config = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    check_settings(model_config, actor.engine, "log_probs")
    assert model_config.hf_config._attn_implementation == "prefixtree"
