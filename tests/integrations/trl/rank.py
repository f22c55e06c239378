"""What test_distributed.py runs on every rank.

Cases run one after the other, each with both trainers; how far they are apart comes back.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.utils import merge_fsdp_weights
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from prefixtree.integrations.trl import PrefixTreeGRPOTrainer
from tests.integrations.trl import rloo_runs, sampled_runs
from tests.integrations.trl.cpu_ranks import fsdp_on_a_cpu
from tests.integrations.trl.distillation_runs import DISTILLATION, GKD
from tests.integrations.trl.runs import (
    SameOrder,
    make,
    names_prefixtree,
    parameters,
    plain_name,
    prompts,
    rollouts,
    save_model,
    squared_distance,
    tiny_config,
    tiny_hybrid,
    tiny_mixture,
    worst_metric,
    worst_parameter,
)
from tests.integrations.trl.sample_runs import KTO, REWARD, SFT, compare_on_ranks

CONFIGS = {
    "tied": lambda: tiny_config(tie_word_embeddings=True),
    "hybrid": lambda: tiny_hybrid("qwen3_5_text"),
    "experts": tiny_mixture,
}
ARGUMENTS = {
    "optim": "sgd",
    "learning_rate": 0.3,
    # one generation, whose second iteration has a policy that has moved
    "max_steps": 2,
    # per rank 2 micro-batches of 4: every rank has whole groups
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "ddp_find_unused_parameters": False,
    "shuffle_dataset": False,
}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
# of groups of 4
CUT = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
HALVES = {"steps_per_generation": 2, "num_iterations": 1}
# the second generation is of a policy that has moved
TWO_GENERATIONS = {"num_iterations": 1}
# with moments, which a checkpoint has to hold
SAVING = {
    "optim": "adamw_torch",
    "learning_rate": 1e-3,
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 2,
}


@dataclass(frozen=True)
class Case:
    """A run of a trainer.

    Attributes:
        arguments: of the GRPOConfig, beside ARGUMENTS.
        fsdp: its fsdp_config. None: DDP.
        model: the folder with the model, below the one with a Qwen3.
        lora: whether an adapter is trained. options: of the trainer.
        rollout: makes completions. None: the model generates, or the trainers are given some.
        kinds: ours, and one that runs TRL's forward on our batches.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    fsdp: dict[str, Any] | None = None
    model: str = "."
    lora: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    rollout: Callable[..., Any] | None = rollouts
    kinds: tuple[type, type] = (PrefixTreeGRPOTrainer, SameOrder)

    def trainer(self, kind: type[GRPOTrainer], folder: Path, **changes: Any) -> GRPOTrainer:
        options = dict(self.options)
        if self.rollout is not None:
            options["rollout_func"] = self.rollout
        if self.lora:
            options["peft_config"] = adapter()
        arguments: dict[str, Any] = {**ARGUMENTS, **self.arguments, **changes}
        if self.fsdp is not None:
            arguments |= {"fsdp": True, "fsdp_config": dict(self.fsdp)}
        return make(kind, folder / self.model, options=options, **arguments)

    def train(self, kind: type[GRPOTrainer], folder: Path, **changes: Any) -> GRPOTrainer:
        trainer = self.trainer(kind, folder, **changes)
        trainer.train()
        assert trainer.accelerator.num_processes == dist.get_world_size()
        return trainer


def adapter() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"])


def longer_on_rank_1(chats: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
    """Rollouts of which rank 1 has longer ones, and nothing to score in every other group."""
    batch = rollouts(chats, trainer)
    if dist.get_rank() == 1:
        for row in range(len(chats)):
            batch["prompt_ids"][row] *= 3
            if row // trainer.num_generations % 2:
                batch["env_mask"][row] = [0] * len(batch["env_mask"][row])
    return batch


# ---- what is asked of a case ---------------------------------------------------------------------


def compare(case: Case, folder: Path) -> dict[str, Any]:
    """Our trainer against TRL's forward on the same batches."""
    start = parameters(AutoModelForCausalLM.from_pretrained(folder / case.model))
    ours, theirs = (case.train(kind, folder) for kind in case.kinds)
    shapes: list[Any] = [None] * dist.get_world_size()
    batch = (ours._buffered_inputs or [])[0]
    dist.all_gather_object(
        shapes, [list(batch[f"{part}_ids"].shape) for part in ("prompt", "completion")]
    )
    trained = parameters(ours.model)
    result = {
        **_ways(ours),
        "parameters": worst_parameter(ours, theirs)[0],
        # of an adapter, which starts with B at 0
        "moved": max(
            float((p - start.get(plain_name(name), torch.zeros(()))).abs().max())
            for name, p in trained.items()
            if not case.lora or "lora_B" in name
        ),
        "trained": len(trained),
        "shapes": shapes,
    }
    # metrics are gathered, and logged on one rank
    if dist.get_rank() == 0:
        logs = [log for log in ours.state.log_history if "loss" in log]
        result["metrics"] = worst_metric(ours, theirs)
        result["evaluated"] = sum("eval_loss" in log for log in ours.state.log_history)
        result["ratio"] = min(log["prefixtree/replication_ratio"] for log in logs)
        # RLOO's is of a generation, and may be negative
        result["kl"] = max(abs(log.get("kl", 0)) for log in logs)
    return result


def resume(case: Case, folder: Path) -> dict[str, Any]:
    """Four steps at once against two from the checkpoint of the second, and what files hold."""
    out = folder / case.model / f"out-{(case.fsdp or {}).get('state_dict_type')}"
    whole = case.train(PrefixTreeGRPOTrainer, folder, output_dir=str(out))
    resumed = case.trainer(PrefixTreeGRPOTrainer, folder, output_dir=str(out))
    resumed.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    expected = parameters(whole.model)
    result = {
        **_ways(resumed),
        "steps": resumed.state.global_step,
        "parameters": worst_parameter(resumed, whole)[0],
    }
    saved = out / "checkpoint-4"
    if (shards := saved / "pytorch_model_fsdp_0").exists():
        # of all ranks, as they wait for each other in it
        merge_fsdp_weights(str(shards), str(saved))
        if dist.get_rank() == 0:
            # a sharded checkpoint has none
            shutil.copy(folder / case.model / "config.json", saved)
    if dist.get_rank() == 0:
        result["names"] = names_prefixtree(saved)
        loaded = AutoModelForCausalLM.from_pretrained(saved)
        result["loaded"] = [type(loaded).__name__, loaded.config._attn_implementation]
        start = AutoModelForCausalLM.from_pretrained(folder / case.model)
        for name, model in (("saved", loaded), ("moved", start)):
            state = model.state_dict()
            result[name] = max(float((state[n] - p).abs().max()) for n, p in expected.items())
    return result


def in_bfloat16(case: Case, folder: Path) -> dict[str, Any]:
    """How far both trainers' parameters are from a float32 run, squared."""
    exact = parameters(case.train(SameOrder, folder).model)
    ours, theirs = (
        case.train(kind, folder, bf16=True) for kind in (PrefixTreeGRPOTrainer, SameOrder)
    )
    policy = ours.accelerator.state.fsdp_plugin.mixed_precision_policy
    return {
        **_ways(ours),
        "policy": [str(policy.param_dtype), str(policy.output_dtype)],
        "ours": squared_distance(parameters(ours.model), exact),
        "theirs": squared_distance(parameters(theirs.model), exact),
    }


def sampled(case: Case, folder: Path) -> dict[str, Any]:
    """Samples on the forest, before every generation's update, against one process's model."""
    watch = sampled_runs.Watch(folder / case.model, adapter() if case.lora else None)
    trainer = replace(case, rollout=watch).train(PrefixTreeGRPOTrainer, folder)
    return {**_ways(trainer), **watch.result(trainer)}


def samples(case: Case, folder: Path) -> dict[str, Any]:
    """The trainers for DPO and SFT against TRL's."""
    return compare_on_ranks(folder, **_sharded(case))


def joined(case: Case, folder: Path) -> dict[str, Any]:
    """The trainer for SFT on rows of several samples against TRL's."""
    return compare_on_ranks(folder, {"sft": SFT}, **_sharded(case))


def other_samples(case: Case, folder: Path) -> dict[str, Any]:
    """The trainers for KTO and rewards against TRL's."""
    return compare_on_ranks(folder, {"kto": KTO, "reward": REWARD}, **_sharded(case))


def distilled(case: Case, folder: Path) -> dict[str, Any]:
    """The trainers for distillation against TRL's."""
    return compare_on_ranks(folder, {"on policy": DISTILLATION, "gkd": GKD}, **_sharded(case))


def _sharded(case: Case) -> dict[str, Any]:
    """The arguments of trainers of samples."""
    if case.fsdp is None:
        return dict(case.arguments)
    return {**case.arguments, "fsdp": True, "fsdp_config": dict(case.fsdp)}


def _ways(trainer: GRPOTrainer) -> dict[str, Any]:
    """Whether the run was what it was meant to be."""
    parts = [
        isinstance(p, DTensor) and p.to_local().numel() < p.numel()
        for p in trainer.model.parameters()
    ]
    return {
        "wrapper": type(trainer.model_wrapped).__name__,
        "reference": type(trainer.ref_model).__name__,
        "fsdp": trainer.is_fsdp_enabled,
        "sharded": sum(parts) / len(parts),
        "checkpointed": any("_checkpoint_wrapped" in n for n, _ in trainer.model.named_modules()),
    }


Ask = Callable[[Case, Path], dict[str, Any]]
FULL, SHARDED = ({"state_dict_type": f"{kind}_STATE_DICT"} for kind in ("FULL", "SHARDED"))
CASES: dict[str, tuple[Ask, Case]] = {
    "ddp": (compare, Case({"max_steps": 4}, rollout=None)),
    "generation": (
        compare,
        Case(
            {"max_steps": 4, **EVALUATING},
            {},
            options={"eval_dataset": prompts()},
            rollout=None,
        ),
    ),
    "rollouts": (compare, Case({}, {})),
    "unequal ranks": (compare, Case({}, {}, rollout=longer_on_rank_1)),
    # trunks of a step are kept, in other numbers on each rank
    "cut groups": (compare, Case({**CUT}, rollout=longer_on_rank_1)),
    # several generations in a step: trunks end within no_sync
    "cut groups, generations": (compare, Case({**CUT, **HALVES})),
    "cut groups, sharded": (compare, Case({**CUT, **HALVES}, {}, rollout=longer_on_rank_1)),
    "FSDP's checkpointing, kept whole, loaded by rank 0": (
        compare,
        Case(
            {"gradient_checkpointing": False},
            {
                "activation_checkpointing": True,
                "reshard_after_forward": False,
                "cpu_ram_efficient_loading": True,
            },
        ),
    ),
    "tied, reference follows": (
        compare,
        Case({"max_steps": 4, "sync_ref_model": True, "ref_model_sync_steps": 2}, {}, "tied"),
    ),
    # accelerate looks for the vision layers of the family unless told which to shard
    "hybrid": (
        compare,
        Case({}, {"transformer_layer_cls_to_wrap": "Qwen3_5DecoderLayer"}, "hybrid"),
    ),
    # with their load-balancing loss; one micro-batch per generation
    "experts": (
        compare,
        Case({"router_aux_loss_coef": 3.0, "gradient_accumulation_steps": 1}, {}, "experts"),
    ),
    "lora": (compare, Case({"learning_rate": 1.0}, {}, lora=True)),
    "resume, full": (resume, Case(SAVING, FULL, rollout=None)),
    "resume, sharded": (resume, Case(SAVING, SHARDED, rollout=None)),
    # one iteration: a token that rounding puts on the other side of a clip drowns the rest
    "bfloat16": (in_bfloat16, Case({"max_steps": 4, "num_iterations": 1}, {})),
    # two and no clip: TRL fails if the first forward is that of the reference, without the adapter
    "lora, bfloat16": (
        in_bfloat16,
        Case({"max_steps": 4, "learning_rate": 1.0, "epsilon": 1e6}, {}, lora=True),
    ),
    # an evaluation leaves the head whole
    "tree": (
        sampled,
        Case(
            {**EVALUATING, **TWO_GENERATIONS},
            {},
            options={"eval_dataset": prompts()},
        ),
    ),
    "tree, hybrid": (
        sampled,
        Case(TWO_GENERATIONS, {"transformer_layer_cls_to_wrap": "Qwen3_5DecoderLayer"}, "hybrid"),
    ),
    "tree, experts": (sampled, Case(TWO_GENERATIONS, {}, "experts")),
    "tree, lora": (sampled, Case({"learning_rate": 1.0, **TWO_GENERATIONS}, {}, lora=True)),
    "tree, tied, FSDP's checkpointing": (
        sampled,
        Case(
            {"gradient_checkpointing": False, **TWO_GENERATIONS},
            {"activation_checkpointing": True},
            "tied",
        ),
    ),
    "tree, lora, bfloat16": (
        sampled,
        Case({"bf16": True, "learning_rate": 1.0, **TWO_GENERATIONS}, {}, lora=True),
    ),
    "rloo": (compare, Case(rloo_runs.ON_RANKS, rollout=None, kinds=rloo_runs.KINDS)),
    "rloo, sharded": (compare, Case(rloo_runs.ON_RANKS, {}, rollout=None, kinds=rloo_runs.KINDS)),
    "kto and rewards": (other_samples, Case()),
    "kto and rewards, sharded": (other_samples, Case(fsdp={})),
    "dpo and sft": (samples, Case()),
    "dpo and sft, sharded": (samples, Case(fsdp={})),
    "joined rows": (joined, Case({"padding_free": True, "max_length": None})),
    "joined rows, sharded": (joined, Case({"packing": True, "max_length": 400}, {})),
    "distillation": (distilled, Case({"per_device_train_batch_size": 3})),
    "distillation, sharded": (
        distilled,
        Case({"per_device_train_batch_size": 3, "temperature": 0.7, "beta": 0.5}, {}),
    ),
    # four ranks: the prompts suffice for one micro-batch per rank
    "hsdp": (
        compare,
        Case(
            {
                "parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
                "gradient_accumulation_steps": 1,
            },
            {},
        ),
    ),
}


def on_rank(rank: int, folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The results by case."""
    results = {}
    for name in names:
        ask, case = CASES[name]
        if case.model in CONFIGS and rank == 0:
            save_model(folder / case.model, CONFIGS[case.model]())
        dist.barrier()
        with nullcontext() if case.fsdp is None else fsdp_on_a_cpu():
            results[name] = ask(case, folder)
    return results
