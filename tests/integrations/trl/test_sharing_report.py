"""A run that saves nothing says so once, with the reason and what to set."""

from __future__ import annotations

import warnings
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.utils import logging
from trl import GRPOTrainer

from prefixtree.forest import PrefixForest
from prefixtree.integrations.core.batch import Batch
from prefixtree.integrations.trl import (
    PrefixTreeDPOTrainer,
    PrefixTreeGRPOTrainer,
    PrefixTreeSFTTrainer,
)
from prefixtree.integrations.trl.distillation import PrefixTreeDistillationTrainer
from prefixtree.integrations.trl.kept_windows import KeptWindow
from prefixtree.integrations.trl.micro_batches import sharing_advice
from prefixtree.integrations.trl.sharing_report import SharingReport
from tests.integrations.trl.distillation_runs import make_distillation
from tests.integrations.trl.runs import SameOrder, make, rollouts, sharing_report, train
from tests.integrations.trl.sample_runs import make_dpo, make_sft

FIRST = "the first optimiser step"


def saw(report: SharingReport, sequences: list[list[int]]) -> None:
    """A batch of which the policy sampled nothing."""
    masks = [np.zeros(len(sequence), bool) for sequence in sequences]
    report.saw(PrefixForest.from_sequences(sequences), masks)


def warned(kind: type[GRPOTrainer], folder: Path, **arguments: Any) -> list[str]:
    """The warnings of a run of two steps about its first."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = {"options": {"rollout_func": rollouts}, "max_steps": 2, **arguments}
        assert train(kind, folder, **options).state.global_step == 2
    return [text for each in caught if (text := str(each.message)).startswith(FIRST)]


def test_completions_that_are_alone(folder: Path) -> None:
    alone = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    # those of an optimiser step share trunks, unless that is switched off
    assert warned(PrefixTreeGRPOTrainer, folder, **alone) == []
    options = {"rollout_func": rollouts, "keep_trunks": False}
    (message,) = warned(PrefixTreeGRPOTrainer, folder, **alone, options=options)
    assert "shared nothing" in message and "(replication ratio 1.00)" in message
    assert "set per_device_train_batch_size to a multiple of num_generations=4 (it is 1)" in message


def test_groups_that_share_their_prompt(folder: Path) -> None:
    assert warned(PrefixTreeGRPOTrainer, folder) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"packing": True}, "(bfd) puts samples together by their lengths"),
        ({"packing": True, "packing_strategy": "wrapped"}, "(wrapped) cuts samples wherever a row"),
        ({"padding_free": True, "max_length": None}, None),
    ],
)
def test_packing_scatters_samples(
    folder: Path, arguments: dict[str, Any], words: str | None
) -> None:
    """Said when the trainer is made, and once more where nothing is left to share."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_sft(PrefixTreeSFTTrainer, folder, max_steps=1, **arguments).train()
    messages = {
        text: Path(each.filename).name
        for each in caught
        if "samples" in (text := str(each.message))
    }
    found = [text for text in messages if text.startswith("packing=True")]
    assert len(found) == (words is not None)
    assert all(words in text and "set packing=False" in text for text in found if words)
    assert all(messages[text] == "sample_runs.py" for text in found)
    nothing = [text for text in messages if "shared nothing" in text]
    assert len(nothing) == ("packing_strategy" in arguments)
    assert all("saves nothing; set packing=False, or" in text for text in nothing)


@pytest.mark.parametrize("is_dpo", [False, True])
def test_the_start_says_that_packing_is_on(
    folder: Path, is_dpo: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, with the kernel and the plan; not where the user wants errors alone."""
    maker: Any = make_dpo if is_dpo else make
    kind = PrefixTreeDPOTrainer if is_dpo else PrefixTreeGRPOTrainer
    options: dict[str, Any] = {"recompute": "all"}
    options |= {} if is_dpo else {"max_tokens": 500}
    for level in ("passive", "error"):
        caplog.clear()
        maker(kind, folder, max_steps=1, log_level=level, options=options).train()
        lines = [r.getMessage() for r in caplog.records if r.name == "prefixtree"]
        assert len(lines) == (level == "passive")
        for line in lines:
            assert line.startswith("packing is on") and "would run 'sdpa': q is on cpu" in line
            assert all(f"{name}={value!r}" in line for name, value in options.items())
    # the last run's
    logging.set_verbosity_warning()


@pytest.mark.parametrize(
    ("maker", "kind", "scores"),
    [
        (partial(make, options={"keep_trunks": False}), PrefixTreeGRPOTrainer, Batch),
        # micro-batches of half a group
        (partial(make, per_device_train_batch_size=2), PrefixTreeGRPOTrainer, KeptWindow),
        (make_dpo, PrefixTreeDPOTrainer, Batch),
        (make_distillation, PrefixTreeDistillationTrainer, Batch),
    ],
    ids=["GRPO, alone", "GRPO, trunks", "DPO", "distillation"],
)
def test_a_forward_is_launched_before_anything_is_counted(
    folder: Path, maker: Any, kind: Any, scores: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def note(owner: type, name: str) -> None:
        real = getattr(owner, name)

        def noted(*args: Any, **options: Any) -> Any:
            found = real(*args, **options)
            order.extend([name] * torch.is_grad_enabled())
            return found

        monkeypatch.setattr(owner, name, noted)

    note(scores, "score")
    note(SharingReport, "saw")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*micro-batch")
        maker(kind, folder, max_steps=1, gradient_accumulation_steps=2).train()
    assert order == ["score", "saw"] * 2


def test_another_forward(folder: Path) -> None:
    """Of a subclass that has another attention too, or the first batch would be refused."""

    class Bypassing(SameOrder):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.add_callback(self._sharing)

    (message,) = warned(Bypassing, folder)
    assert "packed nothing: a subclass or a mixin computes log-probabilities" in message


def test_who_warns_and_when() -> None:
    """The main process, of tokens that are repeated by less than half a per cent."""

    def step(report: SharingReport, main: bool) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report.on_step_end(None, SimpleNamespace(is_world_process_zero=main), None)
        return [str(each.message) for each in caught]

    # 400 tokens, of which two, and then one, are there twice
    forests = [[[1] * shared + [2] * (200 - shared), [1] * shared + [3] * 200] for shared in (2, 1)]
    for sequences, counts in zip(forests, (0, 1), strict=True):
        report = sharing_report()
        saw(report, sequences)
        assert step(report, main=False) == []
        report = sharing_report()
        saw(report, sequences)
        messages = step(report, main=True)
        assert len(messages) == counts and all(m.endswith("; set more") for m in messages)
        assert step(report, main=True) == []


@pytest.mark.parametrize(
    ("rows", "advice"), [(6, "multiple of num_generations=4"), (8, "prompts are short beside")]
)
def test_advice(rows: int, advice: str) -> None:
    args = SimpleNamespace(per_device_train_batch_size=rows, num_generations=4)
    assert advice in sharing_advice(args)


def test_what_is_logged_of_a_batch() -> None:
    """A timestamp parts what is the same again. Nothing that nobody measured, as seconds saved."""
    metrics: dict[str, list[float]] = defaultdict(list)
    report = sharing_report(metrics)
    same = list(range(5, 65))
    saw(report, [[1, 2, *same], [1, 3, *same]])
    saw(report, [[1, 2, 3], [1, 2, 4], [1, 2, 5]])
    saw(report, [[7, 8], [7, 8]])
    logged = {name.partition("/")[2]: values for name, values in metrics.items()}
    assert logged["tokens_computed"] == [123, 5, 2]
    assert logged["tokens_saved"] == [1, 4, 2]
    assert logged["replication_ratio"] == [124 / 123, 9 / 5, 2.0]
    assert logged["tokens_to_win"] == [60, 0, 0]
    assert len(logged) == 4
