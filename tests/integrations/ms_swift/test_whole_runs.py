"""ms-swift's own GRPO from its command's arguments to the last step, packed and as it is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from swift import rlhf_main
from swift.rewards import ORM, orms
from swift.rlhf_trainers.grpo_trainer import GRPOTrainer

from prefixtree.scoring import batches
from tests.support.chat_tokenizer import CHATML, save_tokenizer
from tests.support.models import build

PAGE = Path(__file__).parents[3] / "docs/your-trainer.md"
METHOD = "_get_logps_via_local_forward"
pytestmark = pytest.mark.filterwarnings("ignore")


class Letters(ORM):
    """A reward that all completions of a prompt have another of."""

    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        return [float(sum(map(ord, text)) % 7) for text in completions]


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GRPOTrainer, METHOD, getattr(GRPOTrainer, METHOD))
    monkeypatch.setitem(orms, "letters", Letters)
    monkeypatch.setenv("USE_HF", "1")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """How many tokens stood for one, in each forward."""
    found: list[float] = []
    call: Callable[..., Any] = batches.batch_logprobs

    def count(*args: Any, **kwargs: Any) -> Any:
        scores = call(*args, **kwargs)
        forest = scores.packed.forest
        found.append(forest.num_replicated_tokens / forest.num_tokens)
        return scores

    monkeypatch.setattr(batches, "batch_logprobs", count)
    yield found


def plugin(folder: Path) -> Path:
    """The file of the page."""
    (text,) = re.findall(r"```py\n(# plugin\.py.*?)```", PAGE.read_text(), re.DOTALL)
    file = folder / "plugin.py"
    file.write_text(text)
    return file


def trained(folder: Path, model_type: str, *more: str) -> tuple[list[dict[str, Any]], Any]:
    """Two steps: what was logged, and the weights."""
    model = folder / "model"
    if not model.exists():
        build(model_type, "eager", vocab_size=258, eos_token_id=256).save_pretrained(model)
        save_tokenizer(model, CHATML)
        text = [{"role": "user", "content": f"Be short, please. What is {i}?"} for i in range(8)]
        rows = [json.dumps({"messages": [message]}) for message in text]
        (folder / "data.jsonl").write_text("\n".join(rows))
    kept: list[Any] = []
    arguments = {
        "rlhf_type": "grpo",
        "model": model,
        "model_type": model_type,
        "template": "qwen3",
        "dataset": folder / "data.jsonl",
        "split_dataset_ratio": 0,
        "reward_funcs": "letters",
        "torch_dtype": "float32",
        "tuner_type": "full",
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_completion_length": 12,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-2,
        "beta": 0.04,
        "temperature": 0.9,
        "seed": 1,
        "log_entropy": "true",
        "dataloader_num_workers": 0,
        "save_strategy": "no",
        # would ask ModelScope for a newer one
        "check_model": "false",
        "report_to": "none",
        "output_dir": folder / "out",
    }
    flags = [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
    train = GRPOTrainer.train

    def keep(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = train(self, *args, **kwargs)
        kept.append({n: p.detach().clone() for n, p in self.model.named_parameters()})
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRPOTrainer, "train", keep)
        result = rlhf_main([*flags, *more])
    (weights,) = kept
    return result["log_history"], weights


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("qwen3", ()),
        ("qwen3_moe", ("--num_iterations", "2")),
        ("qwen3", ("--tuner_type", "lora", "--lora_dropout", "0", "--lora_rank", "2")),
    ],
    ids=["dense", "experts, two iterations", "LoRA"],
)
def test_two_steps(tmp_path: Path, counted: list[float], model_type: str, more: tuple[str]) -> None:
    wanted, theirs = trained(tmp_path, model_type, *more)
    assert not counted
    file = str(plugin(tmp_path))
    found, ours = trained(tmp_path, model_type, *more, "--external_plugins", file)
    # policy and reference, two micro-batches a step
    assert len(counted) >= 8 and min(counted) > 1.5
    compared = 0
    for want, got in zip(wanted, found, strict=True):
        for name in ("loss", "grad_norm", "kl", "entropy/mean", "entropy/max", "reward"):
            if name in want:
                assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-6), name
                compared += 1
    assert compared >= 10
    assert theirs.keys() == ours.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, atol=1e-5, rtol=1e-4, msg=name)
