"""The benchmark `run` on a CPU and tiny: green, red, and what it gives the trainers; TRL's side of
`distill`."""

from __future__ import annotations

import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.cases import distill, first_step, learn, run
from benchmarks.lib import trl_check, trl_first_step
from benchmarks.lib.trl_steps import (
    PARTS,
    REPLY,
    TURN,
    Side,
    Work,
    generate_rollouts,
    make_trainer,
    model_of,
    tokenizer_of,
)
from prefixtree.integrations.trl import PrefixTreeGRPOTrainer, tree_rollouts
from tests.integrations.trl.runs import tiny_config
from tests.support.benchmark_runs import result
from tests.support.byte_tokenizer import byte_tokenizer

TINY = ["--device", "cpu", "--scale", "0.02", "--dtype", "float32", "--repeats", "2"]
SIDES = ["trl", "prefixtree", "prefixtree+tree+auto"]
OPTIONS = Namespace(
    device="cpu", is_tiny=True, layers=None, lr=1e-3, compile_options={}, fsdp=False
)


@pytest.mark.full
def test_whole_steps(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "run.json"
    assert run.main([*TINY, "--sides", *SIDES, "--out", str(out)]) == 0
    data = result(out)
    errors = data["check"]["errors"]
    assert data["check"]["red"] == [] and max(errors["prefixtree, float32"].values()) < 1e-4
    assert 1e-4 < errors["trl, bf16"]["parameters"] < 0.1
    rows = {row["side"]: row for row in data["rows"]}
    assert list(rows) == SIDES
    for row in rows.values():
        assert row["red"] == [] and len(row["steps"]) == len(row["rewards"]) == 3
        for step in row["steps"]:
            parts = [step[name] for name in PARTS]
            assert min(parts) >= 0 and sum(parts) == pytest.approx(step["seconds"])
            assert step["generate"] > 0 and step["update"] > 0
        assert row["seconds"] in [step["seconds"] for step in row["steps"][1:]]
        assert row["first_seconds"] == row["steps"][0]["seconds"]
        assert row["speedup"] == pytest.approx(rows["trl"]["seconds"] / row["seconds"])
        assert all(0.2 < reward < 0.8 for reward in row["rewards"])
    # the class alone changes no token and no weight: both learn the same
    assert rows["prefixtree"]["rewards"] == pytest.approx(rows["trl"]["rewards"], abs=1e-6)
    assert rows["prefixtree"]["losses"] == pytest.approx(rows["trl"]["losses"], abs=1e-5)
    assert "replication_ratio" not in rows["trl"] and rows["prefixtree"]["replication_ratio"] > 1.5
    assert run.main(["--read", str(out)]) == 0
    assert capsys.readouterr().out.count("3 green, 0 out of memory, 0 red") == 2


@pytest.mark.full
@pytest.mark.parametrize("task", ["sums", "coins"])
def test_learning_a_task(task: str, tmp_path: Path, capsys: Any) -> None:
    """A random model learns nothing: what is asked, played, logged and drawn."""
    tokenizer = byte_tokenizer()
    config = tiny_config(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    out, plot = tmp_path / "learn.json", tmp_path / "learn.png"
    files = ["--model", str(tmp_path / "model"), "--out", str(out), "--plot", str(plot)]
    assert learn.main([*TINY[:4], *files, "--task", task, "--sides", *SIDES]) == 0
    data = result(out)
    assert data["check"]["red"] == [] and data["model"] == "model"
    assert [row["side"] for row in data["rows"]] == SIDES
    for row in data["rows"]:
        assert len(row["steps"]) == len(row["rewards"]) == len(row["right"]) == 2
        assert row["right"] == [0.0, 0.0] and learn.minutes(row)[-1] > 0
    assert plot.stat().st_size > 10_000
    assert learn.main(["--read", str(out)]) == 0
    assert capsys.readouterr().out.count("3 green, 0 out of memory, 0 red") == 2


def test_a_curve_is_a_mean_of_the_last_steps() -> None:
    assert learn.smooth([1.0, 0.0, 2.0]) == [1.0, 0.5, 1.0]
    assert learn.smooth([0.0] * learn.WINDOW + [1.0])[-1] == 1 / learn.WINDOW


@pytest.mark.full
def test_a_gradient_that_is_too_large_is_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a hundredth, with the right log-probabilities; there is no time then."""
    right = PrefixTreeGRPOTrainer._get_per_token_logps_and_entropies

    def wrong(self: Any, *given: Any, **options: Any) -> Any:
        logps, *rest = right(self, *given, **options)
        return logps + 0.01 * (logps - logps.detach()), *rest

    monkeypatch.setattr(PrefixTreeGRPOTrainer, "_get_per_token_logps_and_entropies", wrong)
    out = tmp_path / "run.json"
    assert run.main([*TINY, "--sides", "trl", "prefixtree", "--out", str(out)]) == 1
    trl, ours = result(out)["rows"]
    assert any(red.startswith("float32 grad_norm") for red in ours["red"])
    assert "seconds" in trl and "seconds" not in ours


def test_what_is_red() -> None:
    names = (*trl_check.METRICS, "parameters")
    found = {
        "prefixtree, float32": dict.fromkeys(names, 1e-4),
        "trl, bf16": dict.fromkeys(names, 0.01),
        "prefixtree, bf16": dict.fromkeys(names, 0.019),
    }
    assert trl_check.judged(found) == []
    for which, name, value in (
        ("prefixtree, float32", "loss", 2e-3),
        ("prefixtree, float32", "parameters", float("nan")),
        ("prefixtree, bf16", "parameters", 0.021),
        ("prefixtree, bf16", "grad_norm", 0.08),
    ):
        wrong = found | {which: found[which] | {name: value}}
        assert len(trl_check.judged(wrong)) == 1, (which, name)


@pytest.mark.full
def test_the_environment_of_both_is_one(tmp_path: Path) -> None:
    """Greedy rollouts with replies, by TRL's generation of every turn and by the tree."""
    work = Work(2, 2, 20, 120, 4, 1, 2, 512)
    found: dict[str, Any] = {}
    for name, function in (("trl", generate_rollouts), ("prefixtree", tree_rollouts)):
        side = Side.of(name)
        model = model_of(side, OPTIONS, "float32", work.ends())
        trainer = make_trainer(side, work, OPTIONS, model, 1, tmp_path, None, temperature=1e-5)
        # greedy tokens of random weights repeat themselves: more of them end a turn
        trainer.eos_token_ids = list(range(0, 512, 3))
        trainer.generation_config.eos_token_id = trainer.eos_token_ids
        reply = partial(answer, work)
        texts = [row["prompt"] for row in work.data(1) for _ in range(2)]
        found[name] = function(texts, trainer, reply=reply)
    ours, theirs = found["prefixtree"], found["trl"]
    assert ours["completion_ids"] == theirs["completion_ids"]
    assert ours["env_mask"] == theirs["env_mask"]
    assert any(0 in mask for mask in ours["env_mask"])


def answer(work: Work, row: int, completion: list[int]) -> list[int] | None:
    """The environment's, whose turns are counted by its own replies."""
    before = sum(token % TURN == TURN - 1 for token in completion) // REPLY
    reply = work.reply()
    assert reply is not None
    return reply(row, [0] * (before + 1)) if before < work.replies else None


@pytest.mark.full
def test_first_steps_cold_and_warm(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "first.json"
    arguments = [*TINY[:-2], "--trainer", "trl", "--steps", "3", "--stock-steps", "2"]
    assert first_step.main([*arguments, "--sides", SIDES[-1], "trl", "--out", str(out)]) == 0
    rows = result(out)["rows"]
    cold, warm, *stock = rows
    assert [row["caches"] for row in rows] == ["cold", "warm"] * 2
    # numba compiles our loops in the first process alone, and TRL has none
    assert cold["loops"] > 1 and [row["loops"] for row in (warm, *stock)] == [0.0] * 3
    for row in rows:
        parts = row["import"] + row["model"] + row["first"]["seconds"]
        assert 0 <= row["total"] - parts < 0.2 * row["total"]
        assert len(row["steps"]) == (2 if row["side"] == "trl" else 3)
    assert warm["later"] == warm["steps"][2]["seconds"] and stock[0]["later"] is None
    assert capsys.readouterr().out.count("4 green, 0 out of memory, 0 red") == 1


def first_steps(side: str) -> dict[str, Any]:
    options = Namespace(**vars(OPTIONS), dtype="float32")
    return trl_first_step.run(time.time(), side, [2, 4, 20, 8, 4, 2, 0, 512], 2, options)


def test_a_first_step_whose_log_p_is_off_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    row = first_steps("prefixtree+tree")
    assert row["red"] == [] and row["errors"]["side"] < 1e-5
    right = PrefixTreeGRPOTrainer._get_per_token_logps_and_entropies

    def off(self: Any, *given: Any, **options: Any) -> Any:
        logps, *rest = right(self, *given, **options)
        return logps + 0.002, *rest

    monkeypatch.setattr(PrefixTreeGRPOTrainer, "_get_per_token_logps_and_entropies", off)
    row = first_steps("prefixtree+tree")
    assert row["red"] == ["log p of the first step 0.002 off, at most 0.001"] and "first" not in row
    errors = {"side": 0.1, "plain": 0.04}
    assert trl_first_step.wrong("trl", [0.0, 0.1], 2, errors) == []
    assert trl_first_step.wrong("prefixtree", [0.0, 0.1], 2, errors) != []
    assert trl_first_step.wrong("trl", [0.0, float("nan")], 2, errors) != []
    assert trl_first_step.wrong("trl", [0.0], 1, {"side": float("nan"), "plain": 0.0}) != []


def test_replies() -> None:
    work = Work(2, 2, 20, 100, 4, 1, 2, 512)
    reply = work.reply()
    assert reply is not None
    ends = work.ends()
    assert ends is not None and ends[:2] == [0, TURN]
    first, second = reply(0, [1, 2, 64]), reply(1, [1, 64, 3, 128])
    assert first is not None and second is not None and first != second
    assert len(first) == REPLY and not set(first + second) & set(ends)
    # after the last reply, and where the room ended and not a turn
    assert reply(0, [64, 64, 64]) is None and reply(0, [1, 2]) is None
    assert Work(2, 2, 20, 100, 4, 1, 0, 512).reply() is None


def test_a_prompt_has_as_many_tokens_as_it_should() -> None:
    work = Work(3, 2, 17, 8, 4, 1, 0, 512)
    rows = list(work.data(2)["prompt"])
    ids = tokenizer_of(512)(text=rows)["input_ids"]
    assert len(ids) == 6 and {len(row) for row in ids} == {17}
    assert len({tuple(row) for row in ids}) == 6
    assert torch.tensor(ids).max() < 511


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--sides", "trl+tree"], "no side 'trl[+]tree': trl with static"),
        (["--rows", "24"], "multiple of --samples 16"),
    ],
)
def test_bad_options(arguments: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        run.main(["--device", "cpu", *arguments])
    assert message.replace("[+]", "+") in capsys.readouterr().err


def test_the_divergence_by_trls_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearer to float32 than logits that are rounded; red where a weight's gradient is off."""
    out = tmp_path / "distill.json"
    some = ["--device", "cpu", "--scale", "0.01", "--repeats", "1", "--out", str(out)]
    assert distill.main([*some, "--sides", "measure", "trl"]) == 0
    ours, theirs = result(out)["rows"]
    assert theirs["red"] == [] and 100 * theirs["exact error"] < ours["exact error"] < 1e-2
    right = distill.Case.results

    def off(self: distill.Case, side: str) -> list[torch.Tensor]:
        value, hidden, weight = right(self, side)
        return [value, hidden, 1.02 * weight]

    monkeypatch.setattr(distill.Case, "results", off)
    assert distill.main([*some, "--sides", "trl"]) == 1
    (row,) = result(out)["rows"]
    assert "ms" not in row and len(row["red"]) == 1 and row["red"][0].startswith("weight")
