"""What test_deepspeed.py runs on every rank: ZeRO under both trainers.

accelerate starts DeepSpeed only where it found an accelerator. `_gloo` tells it that gloo serves
the CPU, and all that follows (process group, plugin, engine) is accelerate's and DeepSpeed's.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, training_args
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import GRPOTrainer

import prefixtree as pt
from prefixtree.integrations.trl import PrefixTreeGRPOTrainer, ShareDropout
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.integrations.trl import rloo_runs
from tests.integrations.trl.distillation_runs import DISTILLATION, GKD
from tests.integrations.trl.rank import adapter
from tests.integrations.trl.runs import SameOrder, make, parameters, rollouts, worst_metric
from tests.integrations.trl.sample_runs import DPO, KTO, REWARD, SFT, Maker, ratios

ARGUMENTS: dict[str, Any] = {
    "optim": "sgd",
    "learning_rate": 0.3,
    "max_steps": 2,
    # 2 ranks x 2 micro-batches of 4: every rank has groups of its own
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 40,
    "shuffle_dataset": False,
    # DeepSpeed asks for it, and finds the CPU by DS_ACCELERATOR
    "use_cpu": False,
    # as people load models: within the trainer, so that ZeRO-3 partitions them while loading
    "model_init_kwargs": {"dtype": "float32"},
}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "up_proj"], "modules_to_save": ["lm_head"]}
Weights = dict[str, torch.Tensor]


def zero(stage: int, **changes: Any) -> dict[str, Any]:
    """A configuration of DeepSpeed; at stage 3 every weight is partitioned."""
    optimization: dict[str, Any] = {"stage": stage, **changes}
    if stage == 3:
        # what has fewer elements is kept whole: by default all of a tiny model
        optimization["stage3_param_persistence_threshold"] = 0
        optimization["stage3_gather_16bit_weights_on_model_save"] = True
    return {
        "zero_optimization": optimization,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_allow_untested_optimizer": True,
        # its Adam for offloaded states would be compiled
        "zero_force_ds_cpu_optimizer": False,
    }


@dataclass(frozen=True)
class Case:
    """A run of a trainer.

    Attributes:
        config: DeepSpeed's. arguments: of the GRPOConfig, beside ARGUMENTS.
        rollout: makes completions. None: the model generates.
        model: the folder with the model, below the one with a Qwen3.
        lora: whether an adapter and the lm_head are trained.
        dropout: the adapter's, shared by a callback.
        kinds: ours, and one that runs TRL's forward on our batches.
    """

    config: dict[str, Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    rollout: Callable[..., Any] | None = rollouts
    model: str = "."
    lora: bool = False
    dropout: float = 0.0
    kinds: tuple[type, type] = (PrefixTreeGRPOTrainer, SameOrder)

    def trainer(
        self, kind: type[GRPOTrainer], folder: Path, seed: int = 3, **changes: Any
    ) -> GRPOTrainer:
        options: dict[str, Any] = {}
        if self.rollout is not None:
            options["rollout_func"] = self.rollout
        if self.lora:
            from peft import LoraConfig

            options["peft_config"] = LoraConfig(**LORA, lora_dropout=self.dropout)
        if self.dropout:
            options["callbacks"] = [ShareDropout(seed)]
        config = {k: dict(v) if isinstance(v, dict) else v for k, v in self.config.items()}
        arguments = {**ARGUMENTS, "output_dir": str(folder / "out"), **self.arguments, **changes}
        model = folder / self.model
        arguments = {"deepspeed": config, **arguments}
        return make(kind, model, model=str(model), options=options, **arguments)

    def train(
        self, kind: type[GRPOTrainer], folder: Path, *seed: int, **changes: Any
    ) -> GRPOTrainer:
        trainer = self.trainer(kind, folder, *seed, **changes)
        trainer.train()
        return trainer

    def starting_weights(self, folder: Path) -> Weights:
        return load_file(folder / self.model / "model.safetensors")


def unequal(chats: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
    """Rollouts of which rank 1 has longer prompts, and no completion that ends."""
    batch = rollouts(chats, trainer)
    if dist.get_rank() == 1:
        for row in range(len(chats)):
            batch["prompt_ids"][row] *= 3
            # every second rollout ends with the end of text
            end = len(batch["completion_ids"][row]) - row % 2
            batch["completion_ids"][row] = batch["completion_ids"][row][:end]
            batch["env_mask"][row] = batch["env_mask"][row][:end]
    return batch


def by_step(chats: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
    """Completions that depend on the optimiser's step, so that a resumed run gets the same."""
    ids: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": None}
    for row, chat in enumerate(chats):
        draw = random.Random(str((trainer.state.global_step, row, chat[-1]["content"])))
        ids["prompt_ids"].append(list(chat[-1]["content"].encode()))
        ids["completion_ids"].append([draw.randrange(256) for _ in range(draw.randint(3, 9))])
    return ids


# ---- what is asked of a case ---------------------------------------------------------------------


def compare(case: Case, folder: Path) -> dict[str, Any]:
    """Our trainer against TRL's forward on the same batches."""
    runs = [case.train(kind, folder) for kind in case.kinds]
    return _differences(*runs, case.starting_weights(folder))


def dropped(case: Case, folder: Path) -> dict[str, Any]:
    """Our trainer against itself without DeepSpeed, and how far that is from other masks."""
    ours, other = (case.train(PrefixTreeGRPOTrainer, folder, seed) for seed in (3, 4))
    weights = whole(other)
    # what transformers tells accelerate
    unset_hf_deepspeed_config()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "false"
    plain = case.train(PrefixTreeGRPOTrainer, folder, deepspeed=None)
    result = _differences(ours, plain, case.starting_weights(folder))
    # one more, as of another adapter, when the engine is there
    lora = next(m for m in ours.model.modules() if getattr(m, "lora_dropout", None))
    lora.lora_dropout["default"] = torch.nn.Dropout(0.2)
    try:
        pt.share_dropout(ours.model, 0)
        said = "nothing"
    except pt.UnsupportedError as error:
        said = str(error)
    return {
        **result,
        "beside": type(plain.model_wrapped).__name__,
        "other masks": largest_difference(weights, whole(plain)),
        "later": said,
    }


def generate(case: Case, folder: Path) -> dict[str, Any]:
    """As `compare`, and again without gathering all of the model to generate.

    TRL's own forward cannot be asked then: its fused head reads a weight that is partitioned.
    """
    start, theirs = case.starting_weights(folder), case.train(SameOrder, folder)
    ours, layered = (
        _differences(case.train(PrefixTreeGRPOTrainer, folder, **how), theirs, start)
        for how in ({}, {"ds3_gather_for_generation": False})
    )
    return {**ours, "layer by layer": layered}


def _differences(ours: GRPOTrainer, theirs: GRPOTrainer, start: Weights) -> dict[str, Any]:
    wanted = whole(theirs)
    result = {"parameters": largest_difference(whole(ours), wanted)}
    # metrics are gathered, and logged on one rank
    if dist.get_rank() == 0:
        result["metrics"], result["metric"] = worst_metric(ours, theirs)
    scored: list[Any] = [None] * dist.get_world_size()
    masks = [batch["completion_mask"] for batch in ours._buffered_inputs or []]
    dist.all_gather_object(scored, int(sum(mask.sum() for mask in masks)))
    # the head's weight is read by an autograd function of ours
    head = next(name for name in wanted if "lm_head" in name or "embed_tokens" in name)
    before = start.get("lm_head.weight", start["model.embed_tokens.weight"])
    logs = [log for log in ours.state.log_history if "loss" in log]
    return {
        **result,
        **_ways(ours),
        "head moved": float((wanted[head] - before).abs().max()),
        "trained": len(wanted),
        "scored": scored,
        "kl": max(abs(log.get("kl", 0)) for log in logs),
        "ratio": min(log["prefixtree/replication_ratio"] for log in logs),
    }


def distilled(case: Case, folder: Path) -> dict[str, Any]:
    """The trainers for distillation against TRL's; the teacher is saved, so that every one of them
    loads it as DeepSpeed wants it."""
    makers = {"on policy": DISTILLATION, "gkd": GKD}
    if case.config["zero_optimization"]["stage"] == 2:
        # where both teachers are whole
        del makers["on policy"]
    return _made(makers, case, folder, teacher_model=str(folder / "teacher"))


def samples(case: Case, folder: Path) -> dict[str, Any]:
    """The trainers of samples against TRL's; at stage 2, where weights are whole, one with a
    reference and one with values."""
    makers = {"dpo": DPO, "reward": REWARD}
    if case.config["zero_optimization"]["stage"] == 3:
        makers |= {"sft": SFT, "kto": KTO}
    return _made(makers, case, folder)


def referring(case: Case, folder: Path) -> dict[str, Any]:
    """Those with a reference: a second model, the policy without its adapter, or kept numbers."""
    return _made({"dpo": DPO, "kto": KTO}, case, folder)


def joined(case: Case, folder: Path) -> dict[str, Any]:
    """The trainer for SFT on rows of several samples against TRL's."""
    return _made({"sft": SFT}, case, folder)


def _made(
    makers: dict[str, Maker], case: Case, folder: Path, **options: Any
) -> dict[str, dict[str, Any]]:
    found = {}
    for name, maker in makers.items():
        runs = []
        for kind in (maker.ours, maker.stock):
            given = {**options, "peft_config": adapter()} if case.lora else dict(options)
            if "precompute_ref_log_probs" in case.arguments:
                # in other data, or the second trainer finds the numbers that the first has kept
                rows = maker.data(4)
                given["train_dataset"] = rows.add_column("of", [f"{kind}"] * len(rows))
            config = {k: dict(v) if isinstance(v, dict) else v for k, v in case.config.items()}
            arguments = {"model": str(folder / case.model), "deepspeed": config, **case.arguments}
            runs.append(maker.make(kind, folder, options=given, **arguments))
            random.seed(0)
            runs[-1].train()
        others = (getattr(runs[0], name, None) for name in ("teacher_model", "ref_model"))
        models = [runs[0].model_wrapped, *(m for m in others if m is not None)]
        parts = [p for model in models for p in model.parameters()]
        start, ends = case.starting_weights(folder), [whole(run) for run in runs]
        found[name] = {
            "parameters": largest_difference(*ends),
            # an adapter starts with B at 0
            "moved": max(
                float((p - start.get(n, torch.zeros(()))).abs().max())
                for n, p in ends[1].items()
                if n in start or "lora_B" in n
            ),
            "models": [type(model).__name__ for model in models],
            "partitioned": sum(p.shape == (0,) for p in parts) / len(parts),
            "ratio": min(ratios(runs[0])),
        }
        if dist.get_rank() == 0:
            found[name]["metrics"] = worst_metric(*runs, wanted=_is_compared)[0]
    return found


def _is_compared(metric: str) -> bool:
    """Not FLOPs of the weights that happen to be gathered, nor accuracies of equal rewards."""
    return metric not in ("total_flos", "rewards/accuracies")


def resume(case: Case, folder: Path) -> dict[str, Any]:
    """Four steps at once against two from the checkpoint of the second, and what files hold."""
    out = folder / f"saved-{case.config['zero_optimization']['stage']}"
    complete = whole(case.train(PrefixTreeGRPOTrainer, folder, output_dir=str(out)))
    resumed = case.trainer(PrefixTreeGRPOTrainer, folder, output_dir=str(out))
    resumed.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    files = {step: load_file(out / f"checkpoint-{step}" / "model.safetensors") for step in (2, 4)}
    result = {
        **_ways(resumed),
        "steps": resumed.state.global_step,
        "parameters": largest_difference(whole(resumed), complete),
        "second half": largest_difference(files[2], complete),
    }
    # without what would partition it too
    unset_hf_deepspeed_config()
    loaded = AutoModelForCausalLM.from_pretrained(out / "checkpoint-4")
    result["attention"] = loaded.config._attn_implementation
    result["loaded"] = largest_difference(parameters(loaded), complete)
    return result


def in_bfloat16(case: Case, folder: Path) -> dict[str, Any]:
    """How far both trainers' parameters are from a float32 run, squared."""
    # transformers asks CUDA whether it has bfloat16
    training_args.is_torch_bf16_gpu_available = lambda: True
    exact = whole(case.train(SameOrder, folder))
    runs = [case.train(kind, folder, bf16=True) for kind in (PrefixTreeGRPOTrainer, SameOrder)]
    errors = [
        sum(float((p - exact[name]).square().sum()) for name, p in whole(run).items())
        for run in runs
    ]
    dtypes = {str(p.dtype) for p in runs[0].model.parameters()}
    return {**_ways(runs[0]), "ours": errors[0], "theirs": errors[1], "dtypes": sorted(dtypes)}


def without_hooks(case: Case, folder: Path) -> dict[str, Any]:
    """A model that ZeRO-3 partitioned while it was loaded, before DeepSpeed prepares it."""
    packed = pt.pack(pt.PrefixForest.from_sequences([[1, 2, 3], [1, 2, 4]]))
    model = case.trainer(PrefixTreeGRPOTrainer, folder).model
    try:
        sequence_logprobs(model, packed)
        message = ""
    except pt.UnsupportedError as error:
        message = str(error)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        gathered = sequence_logprobs(model, packed).logprobs
    unset_hf_deepspeed_config()
    plain = AutoModelForCausalLM.from_pretrained(
        folder / case.model, attn_implementation="prefixtree"
    )
    wanted = sequence_logprobs(plain, packed).logprobs
    return {
        "message": message,
        "error": max(float((a - b).abs().max()) for a, b in zip(gathered, wanted, strict=True)),
    }


def whole(trainer: GRPOTrainer) -> Weights:
    """The trained parameters, gathered: every rank must ask."""
    parts = [p for p in trainer.model.parameters() if hasattr(p, "ds_id")]
    with deepspeed.zero.GatheredParameters(parts):
        return {name: p.float() for name, p in parameters(trainer.model).items()}


def largest_difference(a: Weights, b: Weights) -> float:
    assert a.keys() == b.keys() and a
    return max(float((p.float() - b[name].float()).abs().max()) for name, p in a.items())


def _ways(trainer: GRPOTrainer) -> dict[str, Any]:
    """Whether the run was what it was meant to be."""
    models = [trainer.model] + [trainer.ref_model] * (trainer.ref_model is not None)
    return {
        "processes": trainer.accelerator.num_processes,
        "wrappers": [type(trainer.model_wrapped).__name__, type(trainer.ref_model).__name__],
        "stage": trainer.model_wrapped.zero_optimization_stage(),
        # between two forwards, in all ranks
        "partitioned": [
            sum(p.shape == (0,) for p in model.parameters()) / len(list(model.parameters()))
            for model in models
        ],
    }


def _gloo(self: PartialState, *args: Any, **kwargs: Any) -> tuple[str, DistributedType]:
    return "gloo", DistributedType.MULTI_CPU


OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
LONG = {"max_steps": 4}
# with moments, which a checkpoint has to hold
SAVING = {
    **LONG,
    "optim": "adamw_torch",
    "learning_rate": 1e-3,
    "save_strategy": "steps",
    "save_steps": 2,
}
SHORT = {"max_completion_length": 10}
# with the load-balancing loss
BALANCED = {"router_aux_loss_coef": 3.0}
TRUNCATED = {"mask_truncated_completions": True}
LOADED = {"use_cpu": False, "model_init_kwargs": {"dtype": "float32"}}
DISTIL = {**LOADED, "per_device_train_batch_size": 3, "temperature": 0.7}
CASES: dict[str, tuple[Callable[..., dict[str, Any]], Case]] = {
    "stage 1": (compare, Case(zero(1), SHORT, None)),
    "stage 2": (compare, Case(zero(2), LONG)),
    "stage 3": (compare, Case(zero(3), LONG)),
    "rloo": (compare, Case(zero(3), rloo_runs.ON_RANKS, None, kinds=rloo_runs.KINDS)),
    "generation": (generate, Case(zero(3), SHORT, None)),
    "unequal ranks": (compare, Case(zero(2), TRUNCATED, unequal)),
    "unequal ranks, tied": (compare, Case(zero(3), TRUNCATED, unequal, "tied")),
    "offload": (compare, Case(zero(3, **OFFLOAD), {"gradient_checkpointing": False})),
    "hybrid": (compare, Case(zero(3), {}, rollouts, "hybrid")),
    "experts": (compare, Case(zero(3), BALANCED, rollouts, "experts")),
    "lora 2": (compare, Case(zero(2), {"learning_rate": 1.0}, lora=True)),
    "lora 3": (compare, Case(zero(3), {"learning_rate": 1.0, **SHORT}, None, lora=True)),
    "dropout 2": (dropped, Case(zero(2), {"learning_rate": 1.0}, lora=True, dropout=0.2)),
    "dropout 3": (dropped, Case(zero(3), {"learning_rate": 1.0}, lora=True, dropout=0.2)),
    "distillation 2": (distilled, Case(zero(2), DISTIL)),
    "distillation 3": (distilled, Case(zero(3), DISTIL)),
    "samples 2": (samples, Case(zero(2), LOADED)),
    "samples 3": (samples, Case(zero(3), LOADED)),
    "joined rows": (joined, Case(zero(3), {**LOADED, "padding_free": True, "max_length": None})),
    "references, experts": (referring, Case(zero(3), {**LOADED, **BALANCED}, model="experts")),
    "references, lora": (referring, Case(zero(3), {**LOADED, "learning_rate": 3.0}, lora=True)),
    "references, kept": (referring, Case(zero(3), {**LOADED, "precompute_ref_log_probs": True})),
    "resume 2": (resume, Case(zero(2), SAVING, by_step)),
    "resume 3": (resume, Case(zero(3), SAVING, by_step)),
    # one iteration: a token that rounding puts on the other side of a clip drowns the rest
    "bfloat16": (in_bfloat16, Case(zero(3), {"num_iterations": 1})),
    "without hooks": (without_hooks, Case(zero(3), {"beta": 0.0})),
}


def on_rank(rank: int, folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The results by case."""
    PartialState._prepare_backend = _gloo
    results = {}
    for name in names:
        ask, case = CASES[name]
        results[name] = ask(case, folder)
        # what the next trainer does not want
        unset_hf_deepspeed_config()
    return results
