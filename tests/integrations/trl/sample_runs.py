"""Runs of TRL's trainers of samples and of the adapter's, from the same weights and seeds."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from prefixtree.integrations.trl import (
    PrefixTreeDPOTrainer,
    PrefixTreeKTOTrainer,
    PrefixTreeRewardTrainer,
    PrefixTreeSFTTrainer,
)
from tests.integrations.trl.runs import (
    assert_equal_runs,
    moved,
    parameters,
    worst_metric,
    worst_parameter,
)

SYSTEM = {"role": "system", "content": "Count the letters."}


def letters(seed: Any, least: int, most: int) -> str:
    draw = random.Random(str(seed))
    return "".join(draw.choice("abcdefgh ") for _ in range(draw.randint(least, most)))


def pairs(prompts: int = 4, each: int = 2) -> Dataset:
    """Neighbouring pairs of one prompt; the answers of a pair, of several lengths, begin alike."""
    rows = []
    for prompt in range(prompts):
        chat = [SYSTEM, {"role": "user", "content": letters(prompt, 6, 20)}]
        for pair in range(each):
            start = letters((prompt, pair), 0, 4)
            answers = [start + letters((prompt, pair, side), 2, 14) for side in "cr"]
            chosen, rejected = ([{"role": "assistant", "content": text}] for text in answers)
            rows.append({"prompt": chat, "chosen": chosen, "rejected": rejected})
    return Dataset.from_list(rows)


def answers(prompts: int = 4, each: int = 2) -> Dataset:
    """The answers of `pairs`, one sample each."""
    rows = []
    for pair in pairs(prompts, each):
        for side in ("chosen", "rejected"):
            row = {"completion": pair[side], "label": side == "chosen"}
            rows.append({"prompt": pair["prompt"], **row})
    return Dataset.from_list(rows)


def turns(conversations: int = 4, each: int = 3) -> Dataset:
    """A sample per turn of an agent's conversation: everything before it, and its answer."""
    rows = []
    for conversation in range(conversations):
        chat = [SYSTEM]
        for turn in range(each):
            seed = (conversation, turn)
            chat = [*chat, {"role": "user", "content": letters((*seed, "user"), 3, 9)}]
            answer = {"role": "assistant", "content": letters((*seed, "assistant"), 2, 12)}
            rows.append({"prompt": chat, "completion": [answer]})
            chat = [*chat, answer]
    return Dataset.from_list(rows)


# as tests/integrations/trl/runs.py has them for GRPO
SMALL: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "gradient_accumulation_steps": 2,
    "optim": "sgd",
    "learning_rate": 0.3,
    "adam_epsilon": 1e-6,
    "gradient_checkpointing": True,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}


def make_dpo(
    trainer: type[DPOTrainer],
    folder: Path,
    *,
    model: Any = None,
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> DPOTrainer:
    """A DPO trainer with small defaults: two steps of two batches, each of two pairs. `arguments`
    are the DPOConfig's, `options` the trainer's."""
    small = {"per_device_train_batch_size": 2, "max_steps": 2, "output_dir": str(folder / "out")}
    return trainer(
        model=AutoModelForCausalLM.from_pretrained(folder) if model is None else model,
        args=DPOConfig(**{**SMALL, **small, **arguments}),
        **{
            "processing_class": AutoTokenizer.from_pretrained(folder),
            "train_dataset": pairs(),
            **(options or {}),
        },
    )


def make_sft(
    trainer: type[SFTTrainer],
    folder: Path,
    *,
    model: Any = None,
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> SFTTrainer:
    """An SFT trainer with small defaults: two steps of two batches, each of two conversations of
    three turns. `arguments` are the SFTConfig's, `options` the trainer's."""
    small = {
        "per_device_train_batch_size": 6,
        "max_steps": 2,
        "train_sampling_strategy": "sequential",
        "output_dir": str(folder / "out"),
    }
    return trainer(
        model=AutoModelForCausalLM.from_pretrained(folder) if model is None else model,
        args=SFTConfig(**{**SMALL, **small, **arguments}),
        **{
            "processing_class": AutoTokenizer.from_pretrained(folder),
            "train_dataset": turns(),
            **(options or {}),
        },
    )


def make_kto(
    trainer: type[KTOTrainer],
    folder: Path,
    *,
    model: Any = None,
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> KTOTrainer:
    """A KTO trainer, as `make_dpo`: two steps of two batches, each of four answers."""
    small = {
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "train_sampling_strategy": "sequential",
        "output_dir": str(folder / "out"),
    }
    return trainer(
        model=AutoModelForCausalLM.from_pretrained(folder) if model is None else model,
        args=KTOConfig(**{**SMALL, **small, **arguments}),
        **{
            "processing_class": AutoTokenizer.from_pretrained(folder),
            "train_dataset": answers(),
            **(options or {}),
        },
    )


def classifier(folder: Path) -> Any:
    """The saved model with a head for rewards, the same each time."""
    torch.manual_seed(3)
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)


def make_reward(
    trainer: type[RewardTrainer],
    folder: Path,
    *,
    model: Any = None,
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> RewardTrainer:
    """A trainer of rewards, as `make_dpo`."""
    small = {"per_device_train_batch_size": 2, "max_steps": 2, "output_dir": str(folder / "out")}
    return trainer(
        model=classifier(folder) if model is None else model,
        args=RewardConfig(**{**SMALL, **small, **arguments}),
        **{
            "processing_class": AutoTokenizer.from_pretrained(folder),
            "train_dataset": pairs(),
            **(options or {}),
        },
    )


class Maker(NamedTuple):
    """Makes the trainers of a method, ours and TRL's, from the same arguments.

    Attributes:
        make: `make_dpo` or one of its kind. ours, stock: their first argument. data: a data set.
    """

    make: Callable[..., Any]
    ours: type
    stock: type
    data: Callable[[int], Dataset]

    def both(self, folder: Path, **arguments: Any) -> list[Any]:
        return [self.make(kind, folder, **arguments) for kind in (self.ours, self.stock)]

    def trained(self, folder: Path, **arguments: Any) -> list[Any]:
        runs = []
        for kind in (self.ours, self.stock):
            run = self.make(kind, folder, **arguments)
            # the constructor seeds torch, by which they sample; GKD draws by Python's generator
            random.seed(0)
            run.train()
            runs.append(run)
        assert type(runs[1]) is self.stock
        return runs


DPO = Maker(make_dpo, PrefixTreeDPOTrainer, DPOTrainer, pairs)
SFT = Maker(make_sft, PrefixTreeSFTTrainer, SFTTrainer, turns)
KTO = Maker(make_kto, PrefixTreeKTOTrainer, KTOTrainer, answers)
REWARD = Maker(make_reward, PrefixTreeRewardTrainer, RewardTrainer, pairs)


def ratios(trainer: Any) -> list[float]:
    """The replication ratio of every step."""
    return [
        log["prefixtree/replication_ratio"] for log in trainer.state.log_history if "loss" in log
    ]


def rows_of_calls(model: Any) -> list[int]:
    """A list that grows by the rows of every batch the model is called with: 1 if it is packed."""
    rows: list[int] = []
    embedding = model.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[0]))
    return rows


def compare_with_adapter(
    maker: Maker, folder: Path, pretrained: bool, **arguments: Any
) -> list[int]:
    """Trains both with LoRA, whose reference is the policy with its adapter switched off, or the
    adapter's first weights. Returns `rows_of_calls` of ours."""
    peft = pytest.importorskip("peft")
    runs = []
    for kind in (maker.ours, maker.stock):
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"])
        given: dict[str, Any] = {"options": {"peft_config": config}}
        if pretrained:
            torch.manual_seed(2)
            model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(p, std=0.02)
            given = {"model": model}
        runs.append(maker.make(kind, folder, **given, **arguments))
    rows = rows_of_calls(runs[0].model)
    start = parameters(runs[0].model)
    for run in runs:
        run.train()
    assert runs[0].ref_model is None
    for run in runs:
        trained = parameters(run.model)
        assert max(float((trained[name] - start[name]).abs().max()) for name in start) > 1e-3
    assert_equal_runs(*runs)
    return rows


def callers(monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> list[type]:
    """A list that grows by the class of the trainer that calls a method of TRL's."""
    calls: list[type] = []
    original = getattr(kind, name)

    # the adapter looks at its signature
    @wraps(original)
    def noted(self: Any, *args: Any) -> Any:
        calls.append(type(self))
        return original(self, *args)

    monkeypatch.setattr(kind, name, noted)
    return calls


def compare_on_ranks(
    folder: Path, makers: Mapping[str, Maker] | None = None, **arguments: Any
) -> dict[str, dict[str, Any]]:
    """Both trainers of every method, on every rank of a process group: how far they are apart.

    Args:
        folder: the saved model.
        makers: of the methods. Default: "dpo" and "sft".
        arguments: of all configs.

    Returns:
        method -> "wrapper", "parameters", "moved", "ratio", and "metrics" on the logging rank.
    """
    arguments = {
        "ddp_find_unused_parameters": False,
        "output_dir": str(folder / f"out{os.environ['RANK']}"),
        **arguments,
    }
    found: dict[str, dict[str, Any]] = {}
    for name, maker in (makers or {"dpo": DPO, "sft": SFT}).items():
        runs = maker.trained(folder, **arguments)
        found[name] = {
            "wrapper": type(runs[0].model_wrapped).__name__,
            "parameters": worst_parameter(*runs)[0],
            "moved": moved(runs[1], folder),
            "ratio": ratios(runs[0]),
        }
        if runs[0].accelerator.is_main_process:
            found[name]["metrics"] = worst_metric(*runs)[0]
    return found
