"""The case `update` on the CPU and tiny, in one process and on two ranks: green, and red."""

from __future__ import annotations

import gzip
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import prefixtree.models.attention as adapter
from benchmarks.cases import update
from benchmarks.lib import policy
from prefixtree import CostModel, PrefixForest
from prefixtree.planning.micro_batches import MicroBatchPlan
from tests.benchmarks.support import TINY, causal
from tests.support.benchmark_runs import gpu_check, result
from tests.support.cli_runs import write_rollouts
from tests.support.full import mostly
from tests.support.models import let_wrong_masks_run
from tests.support.spawn import run_ranks

SIDES = ["fa2", "verl", "packed"]
# in float32 the rounding of so small a model does not decide anything
SMALL = [*TINY, "--scale", "0.4", "--dtype", "float32"]


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    return write_rollouts(tmp_path / "rollouts.jsonl")


def rows_of(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    assert [row["side"] for row in data["rows"]] == SIDES
    return {row["side"]: row for row in data["rows"]}


# ---- green ---------------------------------------------------------------------------------------


def test_one_process(rollouts: Path, tmp_path: Path, capsys: Any) -> None:
    out, image = tmp_path / "update.json", tmp_path / "update.png"
    where = ["--rollouts", str(rollouts), "--out", str(out), "--plot", str(image)]
    assert update.main([*SMALL, *where]) == 0
    data = result(out)
    rows = rows_of(data)
    samples = update.Samples.read(
        SimpleNamespace(rollouts=rollouts, tasks=2, scale=0.4, is_tiny=True), 512
    )
    distinct = PrefixForest.from_sequences(samples.sequences).num_tokens
    assert data["ranks"] == 1 and data["sequences"] == len(samples.masks) == 8
    for side, row in rows.items():
        assert row["red"] == [] and row["ranks"] == 1
        assert row["replicated"] == samples.lengths.sum() and row["distinct"] == distinct
        assert row["distinct"] <= row["computed"] <= row["replicated"]
        assert (side == "fa2") == (row["computed"] == row["replicated"])
        assert row["tokens_per_s"] == pytest.approx(row["replicated"] / row["seconds"])
        assert row["speedup"] == pytest.approx(rows["fa2"]["seconds"] / row["seconds"])
        assert row["loss"] == pytest.approx(data["check"]["loss"], rel=1e-5)
        assert 0 < row["errors"]["gradient"] < 1e-5 and row["drift"] < 1e-5
        # weights, gradients and AdamW's states, in float32, and activations
        assert row["predicted_bytes"] > 16 * data["parameters"] and row["modes"]["all"] == 2
    # beside a run on two GPUs
    two = data | {"ranks": 2, "fsdp": True}
    _, table = update.settings(data, two)
    cells = [[column.cell(line) for column in table.columns] for line in table.lines]
    assert [line[2] for line in cells] == ["1"] * 3 + ["2, FSDP2"] * 3
    assert [line[6] for line in cells] == [""] * 3 + ["1.00x"] * 3
    assert rows["fa2"]["micro_batches"] == rows["verl"]["micro_batches"]
    assert rows["packed"]["computed"] < rows["verl"]["computed"]
    assert image.stat().st_size > 10_000
    again = tmp_path / "again.png"
    assert update.main(["--read", str(out), "--plot", str(again)]) == 0
    assert again.stat().st_size > 10_000
    assert capsys.readouterr().out.count("3 green, 0 out of memory, 0 red") == 2


@pytest.mark.full
def test_two_ranks(tmp_path: Path) -> None:
    """Through gpu_check.sh, as on the GPUs: FSDP2, with a rank that has nothing to do in a step."""
    (tmp_path / "files" / "data").mkdir(parents=True)
    packed = tmp_path / "files" / "data" / "airline_rollouts.jsonl.gz"
    packed.write_bytes(gzip.compress(write_rollouts(tmp_path / "rollouts.jsonl").read_bytes()))
    arguments = [*SMALL, "--sides", *SIDES, "group", "--fsdp-unit", "2"]
    words = {"BACKEND": "sdpa", "UPDATE_ARGS": " ".join(arguments)}
    done = gpu_check(tmp_path, "update_2gpu", **words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all done: update_2gpu"
    data = result(tmp_path / "out" / "update_2gpu.json")
    assert data["ranks"] == 2 and data["fsdp"]
    group = data["rows"].pop()
    # every token once, by one of the ranks
    assert group["side"] == "group" and group["computed"] == group["distinct"]
    for row in data["rows"]:
        assert row["predicted_bytes"] > 8 * data["parameters"]
    for row in (group, *rows_of(data).values()):
        assert row["red"] == [] and row["ranks"] == 2 and row["seconds"] > 0
        assert row["loss"] == pytest.approx(data["check"]["loss"], rel=1e-5)
    assert rows_of(data)["packed"]["checked_empty_steps"] >= 1


def test_all_sides_have_all_samples_and_one_loss(rollouts: Path) -> None:
    """However they are dealt; weights that the ranks' mean makes 1 over all scored tokens."""
    options = SimpleNamespace(rollouts=rollouts, tasks=2, scale=1.0, is_tiny=False)
    samples = policy.Samples.read(options, 512)
    cost = CostModel.from_config(policy.config(True))
    for count in (1, 2, 3):
        for side in SIDES:
            found, empty = [], 0
            for rank in range(count):
                ranks = policy.Ranks("cpu", count, rank)
                steps, weights = policy.deal(side, samples, 60, ranks, cost, with_empty=True)
                assert weights == pytest.approx(count / samples.num_scored)
                for indices, forest in steps:
                    found += indices.tolist()
                    empty += not len(indices)
                    lengths = samples.lengths[indices].sum()
                    assert (lengths if side == "verl" else forest.num_tokens) <= 60 or not lengths
            assert sorted(found) == list(range(len(samples.masks)))
            assert side != "packed" or empty > 0


# ---- red -----------------------------------------------------------------------------------------


def red_rows(rollouts: Path, tmp_path: Path, *more: str) -> dict[str, dict[str, Any]]:
    out = tmp_path / "red.json"
    where = ["--rollouts", str(rollouts), "--out", str(out)]
    assert update.main([*SMALL, *where, *more]) == 1
    rows = rows_of(result(out))
    for row in rows.values():
        # no time without a green check
        assert ("seconds" in row) == (row["red"] == []) == ("speedup" in row)
    return rows


@pytest.mark.parametrize("dtype", mostly(["float32", "bfloat16"], ["float32"]))
def test_a_tree_that_is_ignored_is_red(
    rollouts: Path, tmp_path: Path, monkeypatch: Any, dtype: str
) -> None:
    monkeypatch.setattr(adapter, "tree_attention", causal)
    let_wrong_masks_run(monkeypatch)
    rows = red_rows(rollouts, tmp_path, "--dtype", dtype)
    for side in ("verl", "packed"):
        assert {"log-probabilities", "gradient"} <= set(rows[side]["red"])
    assert rows["fa2"]["red"] == []


@pytest.mark.full
@pytest.mark.parametrize("factor", [1.001, float("nan")])
def test_one_wrong_gradient_is_red(
    rollouts: Path, tmp_path: Path, monkeypatch: Any, factor: float
) -> None:
    """Of one small parameter of the last side, a thousandth too large or no number."""
    right, calls = update.gradients_of, []
    name = "model.layers.1.self_attn.q_norm.weight"

    def wrong(model: Any) -> Any:
        calls.append(right(model))
        # float32, the replicated run, then the sides
        if len(calls) == 2 + len(SIDES):
            calls[-1][name] *= factor
        return calls[-1]

    monkeypatch.setattr(update, "gradients_of", wrong)
    rows = red_rows(rollouts, tmp_path)
    # in all gradients together a thousandth of so little does not show
    assert rows["packed"]["red"] == ["gradient"] * (factor != 1.001) + [name]
    assert rows["packed"]["worst_parameter"]["name"] == name
    assert rows["verl"]["red"] == []


@pytest.mark.full
def test_a_weight_of_the_loss_is_seen(rollouts: Path, tmp_path: Path, monkeypatch: Any) -> None:
    right = MicroBatchPlan.loss_weights

    def wrong(self: Any, *arguments: Any) -> np.ndarray:
        weights = right(self, *arguments)
        weights[3] *= 1.01
        return weights

    monkeypatch.setattr(MicroBatchPlan, "loss_weights", wrong)
    red = red_rows(rollouts, tmp_path)["packed"]["red"]
    assert "gradient" in red and "log-probabilities" not in red


@pytest.mark.full
def test_all_samples_are_looked_at(rollouts: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Right where it is checked, wrong in what is timed."""
    right = update.Update.__call__

    def wrong(self: Any) -> dict[int, torch.Tensor]:
        out = right(self)
        if len(self.steps) == 1 or self.steps[0].packed.forest.num_levels > 1:
            out[0] = out[0] - 0.01
        return out

    monkeypatch.setattr(update.Update, "__call__", wrong)
    rows = red_rows(rollouts, tmp_path)
    for side in ("verl", "packed"):
        assert rows[side]["red"][0].startswith("log-probabilities of all samples differ")


@pytest.mark.full
def test_a_replicated_run_that_is_far_off_allows_nothing(
    rollouts: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setitem(update.SANE, "gradient", 1e-9)
    rows = red_rows(rollouts, tmp_path)
    assert all(row["red"] == ["replicated gradient"] for row in rows.values())


def test_limits_in_bf16_have_no_slack() -> None:
    check = update.Check.__new__(update.Check)
    check.base = {"log-probabilities": 0.04, "worst log-probability": 0.2, "gradient": 0.1, "w": 0}
    check._options = SimpleNamespace(dtype="bfloat16")
    expected = {"log-probabilities": 0.06, "worst log-probability": 0.6, "gradient": 0.15, "w": 0}
    assert check.limits() == pytest.approx(expected)


@pytest.mark.full
def test_gradients_that_are_not_averaged_as_weighted_are_red(tmp_path: Path) -> None:
    """On two ranks, of which the first says so."""
    rollouts = write_rollouts(tmp_path / "rollouts.jsonl")
    out = tmp_path / "red.json"
    arguments = [*SMALL, "--fsdp", "--rollouts", str(rollouts), "--out", str(out)]
    ranks = "tests.benchmarks.case_ranks"
    assert run_ranks(ranks, tmp_path, arguments=["update", arguments, False]) == [1, 0]
    rows = rows_of(result(out))
    assert "gradient" in rows["packed"]["red"] and "seconds" not in rows["packed"]
    assert rows["packed"]["errors"]["gradient"] == pytest.approx(0.5, rel=1e-3)
    assert rows["fa2"]["red"] == rows["verl"]["red"] == []


def test_what_is_needed_is_asked_for(rollouts: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        update.main(TINY)
    with pytest.raises(SystemExit):
        update.main([*TINY, "--rollouts", str(rollouts), "--fsdp"])
    assert "--fsdp goes with torchrun" in capsys.readouterr().err
