"""The benchmarks of decoding, on the CPU and tiny."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from benchmarks.cases import decode, decode_peers
from benchmarks.lib import decoding
from benchmarks.lib.decoding import Inputs, Step
from benchmarks.lib.shapes import Shape
from prefixtree import PrefixForest
from prefixtree.sampling import Draws
from tests.benchmarks.support import TINY
from tests.support.benchmark_runs import result

SOME = ["--heads", "4x2x16", "--prompts", "2048", "--trees", "2", "--backend", "torch"]


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    path = tmp_path / "rollouts.jsonl.gz"
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 9, 300).tolist()
    with gzip.open(path, "wt") as file:
        for i in range(3):
            tokens = [*prompt, i, *rng.integers(0, 9, 500).tolist()]
            line = {"group": str(i), "token_ids": tokens, "turn_ends": [400, 700]}
            file.write(json.dumps(line) + "\n")
    return path


def test_decode(tmp_path: Path, rollouts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "decode.json"
    options = [*TINY, *SOME, "--dtype", "float32", "--out", str(out), "--rollouts", str(rollouts)]
    assert decode.main(options) == 0
    data = result(out)
    assert data["environment"]["skipped"] == ["fa4"] and data["level"] == 0
    rows = {(row["case"], row["side"]): row for row in data["rows"]}
    assert set(rows) == {("8 x 2,048", side) for side in ("cascade", "row", "sdpa")} | {
        ("airline", side) for side in ("cascade", "row")
    }
    for row in rows.values():
        assert row["red"] == [] and row["ms"] > 0 and row["error"] < 1e-5
    cascade, each = rows["8 x 2,048", "cascade"], rows["8 x 2,048", "row"]
    assert cascade["keys"] == 2 * 41 + 32 * 11 and each["keys"] == 32 * (41 + 11)
    assert cascade["bytes"] == cascade["keys"] * 2 * 32 * 4
    # two items of shared keys, and one per row; then each row reads its keys
    assert cascade["capacity"]["slots"] == 64 and each["capacity"]["slots"] == 32
    assert decode.main(["--read", str(out)]) == 0
    assert "5 green, 0 out of memory, 0 red" in capsys.readouterr().out


def test_a_wrong_side_has_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    right = decoding.cascade_attention
    monkeypatch.setattr(
        decoding, "cascade_attention", lambda *a, **options: right(*a, **options) * 1.001
    )
    assert decode.main([*TINY, *SOME, "--dtype", "float32", "--sides", "row", "--tail", "500"]) == 1


def test_a_step_of_a_forest() -> None:
    """Runs, tails and keys by rows, by hand: a history that is a prefix of another among them."""
    forest = PrefixForest.from_sequences([[1, 2, 3, 4], [1, 2], [5], [1, 2, 3, 6, 7]])
    step = Step.of(forest, 2, 3)
    paths = sorted(len(step.keys_of(r)) for r in range(8))
    assert paths == sorted(2 * [4 + 4, 2 + 4, 1 + 4, 5 + 4])
    assert step.replicated == sum(paths) and step.distinct == forest.num_tokens + 8 * 4
    shape = Shape(2, 1, 8)
    inputs = Inputs.draw(step, shape, torch.float64, "cpu", 0)
    want = decoding.exact(step, inputs, np.arange(8))
    for side in ("cascade", "row"):
        found = decoding.attend(side, step, inputs, shape, "auto")()
        torch.testing.assert_close(found, want, atol=1e-12, rtol=0)


def test_other_constants_and_tiles_can_be_tried() -> None:
    from prefixtree.kernels.attention.triton import configs
    from prefixtree.kernels.decoding import work as decode_work

    shipped = configs.choose_decode((9, 0), 128, 128, 2)
    options = SimpleNamespace(programs=9, share_from=7, wide=None, narrow="32,2,4,128")
    changes = list(decode.changed(options))
    for change in changes:
        change.start()
    try:
        wide, narrow = configs.choose_decode((9, 0), 128, 128, 2)
        assert wide == shipped[0] and (narrow.keys, narrow.registers) == (32, 128)
        assert (decode_work.PROGRAMS, decode_work.SHARE_FROM) == (9, 7)
    finally:
        patch.stopall()
    assert configs.choose_decode((9, 0), 128, 128, 2) == shipped


@pytest.mark.full
def test_decode_peers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "peers.json"
    some: list[Any] = ["--layers", "1", "--compile-backend", "eager", "--out", str(out)]
    sides = ["dynamic", "static+gqa", "dynamic+prefixtree"]
    some += ["--padding", "3"]
    monkeypatch.setattr(decode_peers, "WARM_STEPS", 3)
    assert decode_peers.main([*TINY, "--scale", "0.005", *some, "--sides", *sides]) == 0
    data = result(out)
    rows = {row["side"]: row for row in data["rows"]}
    assert {*rows, *data["environment"]["skipped"]} == set(sides)
    for side, row in rows.items():
        assert row["step_ms"] > 0 and (row["compile_seconds"] > 0) == (
            side.split("+")[0] == "static"
        )
        assert row["tokens_per_second"] == pytest.approx(4 * 5 / row["seconds"])
    assert decode_peers.main(["--read", str(out)]) == 0
    assert "green, 0 out of memory, 0 red" in capsys.readouterr().out


OURS = ["--dtype", "float32", "--layers", "1"]


@pytest.mark.full
def test_samplers(tmp_path: Path, rollouts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts beside `generate`, and the histories of rollouts."""
    out = tmp_path / "tree.json"
    sides = ["tree", "tree-eager", "rows", "dynamic"]
    small = [*TINY, "--scale", "0.005", *OURS, "--out", str(out)]
    assert decode_peers.main([*small, "--sides", *sides]) == 0
    rows = {row["side"]: row for row in result(out)["rows"]}
    assert set(rows) == set(sides)
    for row in rows.values():
        assert row["red"] == [] and row["tokens_per_second"] == pytest.approx(
            4 * 5 / row["seconds"]
        )
    hybrid = ["--shape", "qwen3.5-9b", "--sides", "tree", "dynamic"]
    assert decode_peers.main([*TINY, "--scale", "0.005", *hybrid, "--out", str(out)]) == 0
    data = result(out)
    assert data["workload"].startswith("qwen3.5-9b, 2 prompts")
    assert data["rows"][0]["red"] == [] and data["rows"][0]["over_bound"] > 0
    assert decode_peers.main([*small, "--rollouts", str(rollouts)]) == 0
    data = result(out)
    assert data["workload"].startswith("histories x 2 samples of 3")
    assert [row["side"] for row in data["rows"]] == ["tree", "rows"]
    for row in data["rows"]:
        assert row["tokens_per_second"] == pytest.approx(6 * 2 * 3 / row["seconds"])
    with pytest.raises(SystemExit):
        decode_peers.main([*small, "--rollouts", str(rollouts), "--sides", "static"])
    assert "['static'] take prompts of one length" in capsys.readouterr().err


def test_slow_recurrences_are_named() -> None:
    """On GPUs they make a side of `generate` red: here is no fla."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as family

    found = decode_peers.slow_recurrences(family.Qwen3_5Model.__new__(family.Qwen3_5Model))
    rules = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
    assert found == [f"{rule} is the reference" for rule in rules]


@pytest.mark.full
def test_whole_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "steps.json"
    small = [*TINY, "--scale", "0.005", "--dtype", "float32", "--trees", "2", "--out", str(out)]
    # compiled layers have a case of their own in the tests of the sampler
    sides = ["tree", "tree-eager", "rows"]
    assert decode.main(["--level", "1", *small, "--sides", *sides]) == 0
    rows = result(out)["rows"]
    assert [row["side"] for row in rows] == sides * 2
    with pytest.raises(SystemExit):
        decode.main(["--level", "1", *small, "--sides", "fa4"])
    assert "no sides of level 1: fa4" in capsys.readouterr().err
    for row in rows:
        # half of the timed steps from the end
        keys = 2 * 10 + 4 * (3 + 64 - 20)
        assert row["rows"] == 4 and row["keys"] == keys and row["over_bound"] > 0
    whole = rows[-1]["bytes"] - 4 * 2 * 2 * 2 * 16 * keys
    # attention, MLP, norms of two layers; the embedding is the head
    layer = 64 * 16 * (4 + 2 + 2 + 4) + 3 * 64 * 96 + 2 * 64 + 2 * 16
    assert whole == 4 * (2 * layer + 64 + 512 * 64)
    assert decode.main(["--read", str(out)]) == 0
    assert "over bound" in capsys.readouterr().out


@pytest.mark.parametrize("mistake", ["tokens", "log-probabilities"])
def test_a_wrong_sampler_has_no_times(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "tree.json"
    right = Draws.choose

    def wrong(draws: Draws, logits: torch.Tensor, *rows: torch.Tensor) -> Any:
        if mistake == "tokens":
            logits = logits.roll(1, -1)
        tokens, logprobs, *more = right(draws, logits, *rows)
        return tokens, logprobs + 1e-3 * (mistake == "log-probabilities"), *more

    monkeypatch.setattr(Draws, "choose", wrong)
    small = [*TINY, "--scale", "0.005", *OURS, "--out", str(out), "--sides", "tree"]
    assert decode_peers.main(small) == 1
    (row,) = result(out)["rows"]
    assert any(mistake in red for red in row["red"]) and "seconds" not in row
