"""Runs of TRL's own trainer and of the adapter's, from the same weights and seeds.

Everything is made here and downloaded from nowhere. The byte tokenizer has 256 tokens and a few.
"""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)
from trl import GRPOConfig, GRPOTrainer

from prefixtree.experts.routers import RouterLoss
from prefixtree.integrations.trl import PrefixTreeGRPOTrainer
from prefixtree.integrations.trl.sharing_report import SharingReport
from tests.support.chat_tokenizer import CHATML, save_tokenizer
from tests.support.family_configs import FAMILIES, TINY

VOCABULARY = 260
# what a run took, and what the adapter adds
UNCOMPARED = {
    "step_time",
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
    "eval_runtime",
    "eval_samples_per_second",
    "eval_steps_per_second",
    *(f"prefixtree/{name}" for name in ("replication_ratio", "tokens_computed", "tokens_saved")),
    "prefixtree/tokens_to_win",
}


class OnRows:
    """A base before ours: TRL's own forward on sdpa attention, behind the adapter's shuffle: the
    very same batches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._get_per_token_logps_and_entropies: Any = partial(
            self.trl_class._get_per_token_logps_and_entropies, self
        )
        for model in (m for m in (self.model, self.ref_model) if m is not None):
            model.set_attn_implementation("sdpa")
        # it packs nothing, as it should
        self.remove_callback(SharingReport)


class SameOrder(OnRows, PrefixTreeGRPOTrainer): ...


def sharing_report(metrics: dict[str, list[float]] | None = None) -> SharingReport:
    """One that belongs to no trainer, and logs into `metrics`."""
    logged = defaultdict(list) if metrics is None else metrics
    trainer = SimpleNamespace(
        _metrics={"train": logged},
        add_callback=lambda report: None,
    )
    return SharingReport(trainer, "set more")


def tiny_config(**changes: Any) -> Qwen3Config:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": False,
        # unlike the default, answers depend on the context
        "initializer_range": 0.2,
    }
    return Qwen3Config(**{**sizes, **changes})


def tiny_mixture() -> Qwen3MoeConfig:
    dense = tiny_config().to_dict()
    shared = ("vocab_size", "hidden_size", "num_hidden_layers", "head_dim", "initializer_range")
    return Qwen3MoeConfig(
        **{name: dense[name] for name in shared},
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
    )


def tiny_hybrid(family: str) -> PreTrainedConfig:
    """Of a family with recurrent layers or indexers, as "qwen3_5_text" or "glm_moe_dsa"."""
    config = FAMILIES[family.removesuffix("_text")]
    config = {**TINY, **config.get("text_config", config), "vocab_size": VOCABULARY}
    lists = {name: list(value) for name, value in config.items() if isinstance(value, tuple)}
    # or that token's embedding were 0, and so its index queries, whose scores would tie
    lists["pad_token_id"] = None
    return AutoConfig.for_model(family, **{**config, **lists}, initializer_range=0.2)


def tiny_vision(family: str) -> PreTrainedConfig:
    """A whole vision model: "qwen2_5_vl", "qwen3_vl" or "qwen3_5"."""
    text = tiny_hybrid("qwen3_5_text") if family == "qwen3_5" else tiny_config()
    sizes = text.to_dict()
    if family != "qwen3_5":
        mrope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
        sizes |= {"rope_parameters": mrope}
    del sizes["model_type"]
    encoder = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    encoder["out_hidden_size"] = text.hidden_size
    if family == "qwen3_vl":
        encoder["deepstack_visual_indexes"] = [0]
    return AutoConfig.for_model(family, text_config=sizes, vision_config=encoder)


def save_model(folder: Path, config: Any = None) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config or tiny_config()).save_pretrained(folder)
    return save_tokenizer(folder, CHATML)


def prompts() -> Dataset:
    """Chat prompts of several lengths, so that rows are padded."""
    system = {"role": "system", "content": "Count."}
    words = ("a", "bcd" * 4, "efghi", "jk" * 6)
    return Dataset.from_dict(
        {"prompt": [[system, {"role": "user", "content": word}] for word in words]}
    )


def count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load-balancing losses that count every packed token once, which is wrong."""

    right = RouterLoss.of

    def wrong(loss: RouterLoss, packed: Any, logits: Any) -> torch.Tensor:
        once: Any = SimpleNamespace(
            multiplicity=torch.ones_like(packed.multiplicity), forest=packed.forest
        )
        return right(loss, once, logits)

    monkeypatch.setattr(RouterLoss, "of", wrong)


def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Something that differs within every group."""
    return [sum(token % 3 == 0 for token in ids) / len(ids) for ids in completion_ids]


def rollouts(chats: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
    """Multi-turn rollouts: the completions of a prompt share turns at several depths, with an
    answer of the environment (env_mask 0) after every turn; every other one ends of itself. The
    same for every trainer."""
    ids: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "env_mask": [], "logprobs": None}
    group = trainer.num_generations
    for row, chat in enumerate(chats):
        prompt = list(chat[-1]["content"].encode())
        completion: list[int] = []
        mask: list[int] = []
        for depth in range(3):
            # half, then a quarter of the group goes on together
            branch = (row % group) * 2**depth // group
            draw = random.Random(str((trainer._step, row // group, depth, branch)))
            for scored, length in ((1, draw.randint(2, 6)), (0, draw.randint(1, 4))):
                completion += [draw.randrange(256) for _ in range(length)]
                mask += [scored] * length
        if row % 2:
            completion.append(trainer.eos_token_ids[0])
            mask.append(1)
        ids["prompt_ids"].append(prompt)
        ids["completion_ids"].append(completion)
        ids["env_mask"].append(mask)
    return ids


def make(
    trainer: type[GRPOTrainer],
    folder: Path,
    *,
    model: PreTrainedModel | Any = None,
    options: dict[str, Any] | None = None,
    config: type = GRPOConfig,
    **arguments: Any,
) -> Any:
    """A trainer with small defaults: two iterations a generation, two micro-batches of a group
    each, a reference, gradient checkpointing. `arguments` are those of `config`, `options` the
    trainer's."""
    small: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "gradient_accumulation_steps": 2,
        "num_iterations": 2,
        "max_steps": 4,
        "beta": 0.04,
        "max_completion_length": 10,
        "learning_rate": 3e-4,
        # Adam divides rounding by gradients that are hardly larger: by no less than this
        "adam_epsilon": 1e-6,
        "gradient_checkpointing": True,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    settings = {**small, **arguments}
    if model is None:
        model = AutoModelForCausalLM.from_pretrained(folder)
    return trainer(
        model=model,
        args=config(**settings),
        **{
            "processing_class": AutoTokenizer.from_pretrained(folder),
            "reward_funcs": reward,
            "train_dataset": prompts(),
            **(options or {}),
        },
    )


def train(trainer: type[GRPOTrainer], folder: Path, **arguments: Any) -> GRPOTrainer:
    made = make(trainer, folder, **arguments)
    made.train()
    return made


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The trained parameters, whole: every rank must ask, as shards are gathered."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def plain_name(name: str) -> str:
    """A parameter's name without those of wrappers."""
    return name.replace("_checkpoint_wrapped_module.", "").removeprefix("module.")


def worst_metric(
    ours: GRPOTrainer, theirs: GRPOTrainer, wanted: Callable[[str], bool] = lambda name: True
) -> tuple[float, str]:
    """The largest difference of any logged number (relative where it is above 1), and its name;
    both must have logged the same names."""
    worst = (0.0, "")
    assert len(ours.state.log_history) == len(theirs.state.log_history) > 1
    for a, b in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        assert a.keys() - UNCOMPARED == b.keys() - UNCOMPARED
        for name in filter(wanted, b.keys() - UNCOMPARED):
            if a[name] is not None or b[name] is not None:
                worst = max(worst, (abs(a[name] - b[name]) / max(1.0, abs(b[name])), name))
    return worst


def worst_parameter(ours: GRPOTrainer, theirs: GRPOTrainer) -> tuple[float, str]:
    a, b = parameters(ours.model), parameters(theirs.model)
    assert a.keys() == b.keys() and a
    return max((float((a[name] - b[name]).abs().max()), name) for name in a)


def assert_equal_runs(ours: Any, theirs: Any, tolerance: float = 1e-5, **options: Any) -> None:
    """All logged numbers (or those that are `wanted`) and all parameters."""
    metric, parameter = worst_metric(ours, theirs, **options), worst_parameter(ours, theirs)
    print(f"metrics {metric}, parameters {parameter}")
    assert metric[0] < tolerance, metric
    assert parameter[0] < tolerance, parameter


def moved(trainer: GRPOTrainer, folder: Path) -> float:
    """How far training has moved any parameter that the folder has (a head for rewards is not
    there): what the differences are small against."""
    start = parameters(AutoModelForCausalLM.from_pretrained(folder))
    trained = parameters(trainer.model)
    return max(float((trained[n] - start[n]).abs().max()) for n in start.keys() & trained.keys())


def squared_distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Of all parameters together."""
    assert a.keys() == b.keys() and a
    return sum(float((a[name] - b[name]).square().sum()) for name in a)


class ScalesLosses:
    """`fp16=True` on a CPU, where accelerate leaves out both autocast and the loss scale."""

    scale = 2.0**16

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        scaler = torch.amp.GradScaler("cpu", init_scale=self.scale, backoff_factor=2.0**-24)
        self.accelerator.native_amp = True
        self.accelerator.scaler = scaler


def check_half_precision(
    trained: Callable[..., Any],
    kinds: Sequence[type],
    folder: Path,
    patch: pytest.MonkeyPatch,
    most: float = 1.5,
) -> None:
    """`fp16=True`: as near to a float32 run as TRL's own; steps that overflow are skipped.

    Args:
        trained: as `train`. kinds: ours and TRL's. most: times as far as TRL's own.
    """
    scaled = [type(kind.__name__, (ScalesLosses, kind), {}) for kind in kinds]
    exact = trained(kinds[1], folder)
    ours, theirs = (trained(kind, folder, fp16=True) for kind in scaled)
    wanted = parameters(exact.model)
    errors = [squared_distance(parameters(run.model), wanted) for run in (ours, theirs)]
    print(f"squared distance from float32: ours {errors[0]:.2e}, TRL's {errors[1]:.2e}")
    assert 0.5 * errors[1] < errors[0] < most * errors[1]
    # half precision it was, and finer than bfloat16
    assert 1e-5 < worst_parameter(ours, exact)[0] < 0.05 * moved(exact, folder)
    assert ours.accelerator.scaler.get_scale() == 2.0**16
    # gradients of float16 overflow
    patch.setattr(ScalesLosses, "scale", 2.0**40)
    ours, theirs = (trained(kind, folder, fp16=True) for kind in scaled)
    for run in (ours, theirs):
        norms = [log["grad_norm"] for log in run.state.log_history if "grad_norm" in log]
        assert not math.isfinite(norms[0]) and all(map(math.isfinite, norms[1:]))
        assert run.accelerator.scaler.get_scale() == 2.0**16
    assert moved(theirs, folder) > 10 * worst_parameter(ours, theirs)[0]


def names_prefixtree(checkpoint: Path) -> list[str]:
    """The JSON files of a checkpoint that name prefixtree, but for the logged metrics."""
    contents = {file.name: json.loads(file.read_text()) for file in checkpoint.glob("*.json")}
    assert contents
    for content in contents.values():
        content.pop("log_history", None)
    return [name for name, content in contents.items() if "prefixtree" in json.dumps(content)]
