"""Mistakes that must turn a case red, and the row after an error or with too little memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.cases import (
    depth,
    head,
    model,
    parallel,
    peers,
    planning,
)
from benchmarks.lib import (
    against,
    replicated,
    runs,
)
from prefixtree import PrefixForest, TreeMask, tree_attention
from tests.benchmarks.support import TINY, case_named, causal
from tests.support.benchmark_runs import result
from tests.support.models import let_wrong_masks_run


@pytest.mark.parametrize(("attend", "is_right"), [(tree_attention, True), (causal, False)])
def test_what_runs_over_the_forest_is_checked_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attend: Any, is_right: bool
) -> None:
    monkeypatch.setattr(replicated, "missing", lambda side, device: None)
    monkeypatch.setattr(against, "flex", lambda mask: partial(attend, mask=mask))
    some = ["--workloads", "4K then 4-2-2-1 x 1K", "--scale", "0.01", "--ceilings"]
    out = tmp_path / "peers.json"
    code = peers.main([*TINY, *some, "--sides", "own", "flex", "--out", str(out)])
    (row,) = result(out)["rows"]
    assert code == (not is_right) and ("flex out" in row["red"]) == (not is_right)
    sides = {"own", "flex"} if is_right else {"own"}
    assert set(row["speedup"]) == sides and set(row["times"]) == {"packed", *sides}
    assert set(row["efficiency"]) == {"own"}


@pytest.mark.full
@pytest.mark.parametrize("factor", [1.0, 0.99])
def test_steps_are_red_where_a_gradient_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    right = parallel.sequence_logprobs

    def off(*given: Any, max_step_tokens: int | None = None, **options: Any) -> Any:
        scores = right(*given, max_step_tokens=max_step_tokens, **options)
        if max_step_tokens is None:
            return scores
        # the same values, another gradient
        wrong = [factor * x + (1 - factor) * x.detach() for x in scores.logprobs]
        return replace(scores, logprobs=wrong)

    monkeypatch.setattr(parallel, "sequence_logprobs", off)
    out = tmp_path / "steps.json"
    some = ["--dtype", "float32", "--workloads", "chain 128K", "--scale", "0.001"]
    code = parallel.main([*TINY, *some, "--sides", "whole", "steps", "--out", str(out)])
    _, steps = result(out)["rows"]
    assert code == (factor != 1) and steps["red"] == ([] if factor == 1 else ["gradient"])
    assert ("seconds" in steps) == (factor == 1)


@pytest.mark.full
@pytest.mark.parametrize("wrong", ["score", "gradient"])
def test_a_head_is_red_where_its_kernels_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    from prefixtree.kernels.lm_head import kernels as fused

    right = getattr(fused, wrong)

    def off(*given: Any) -> None:
        right(*given)
        # what a kernel writes comes last
        given[-1].mul_(1.01)

    monkeypatch.setattr(fused, wrong, off)
    out = tmp_path / "head.json"
    some = ["--dtype", "float16", "--heads", "Qwen3-0.6B", "--sides", "triton", "torch"]
    assert head.main([*TINY, *some, "--out", str(out)]) == 1
    first, second = result(out)["rows"]
    assert first["red"] and "ms" not in first and second["red"] == []


def test_depth_is_red_where_the_tree_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(against, "tree_attention", causal)
    out = tmp_path / "depth.json"
    assert depth.main([*TINY, "--depths", "4", "--nodes", "--out", str(out)]) == 1
    row = result(out)["rows"][0]
    assert "out" in row["red"] and "times" not in row and "speedup" not in row
    assert "RED: red: out" in capsys.readouterr().out


@pytest.mark.full
def test_depth_is_red_where_the_replicated_side_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_sequence(lengths: Any, device: Any, dtype: Any) -> Any:
        return "wrong", right([sum(lengths)], device, dtype)[1]

    right = replicated.replicated_attention
    monkeypatch.setattr(replicated, "replicated_attention", one_sequence)
    out = tmp_path / "depth.json"
    assert depth.main([*TINY, "--depths", "4", "--nodes", "--out", str(out)]) == 1
    row = result(out)["rows"][0]
    assert "fa2 out" in row["red"] and set(row["times"]) == {"packed", "own"}
    assert set(row["speedup"]) == {"own"}


@pytest.mark.full
@pytest.mark.parametrize("name", ["layer", "model", "memory"])
def test_models_are_red_where_the_tree_is_ignored(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packed side alone: its forest is a tree, those of the others are chains."""
    from prefixtree.models import attention as integration

    def ignoring(q: Any, k: Any, v: Any, mask: TreeMask, **options: Any) -> Any:
        # chains stay what they are: their first token's subtree ends before another's begins. On
        # the host, because memory is traced through here too, on tensors without numbers
        ends = mask.host.subtree_end
        is_tree = bool((ends[1:] < ends[:-1]).any())
        return (causal if is_tree else tree_attention)(q, k, v, mask, **options)

    monkeypatch.setattr(integration, "tree_attention", ignoring)
    let_wrong_masks_run(monkeypatch)
    out = tmp_path / "out.json"
    few = {
        "layer": ["--prompts", "5120", "--micro-batches", "2", "--sides", "packed", "own"],
        "model": ["--layers", "1", "--cases", "longreason", "--sides", "own", "packed"],
        "memory": ["--layers", "1", "--prompts", "2048", "--counts", "4"],
    }[name]
    assert case_named(name).main([*TINY, *few, "--out", str(out)]) == 1
    for row in result(out)["rows"]:
        assert bool(row["red"]) == (row["side"] == "packed")
        if row["red"]:
            assert not {"ms", "seconds", "peak_bytes"} & set(row)


def test_log_probabilities_that_drift_are_red() -> None:
    mine = {b"a": torch.tensor([-1.0, 0.0, -2.0]), b"b": torch.tensor([-3.0])}
    theirs = {b"a": torch.tensor([-2.5, 0.0, -2.0]), b"b": torch.tensor([-3.0])}
    # one of three scored tokens differs
    assert model.drift(mine, theirs) == pytest.approx(1.5 / 3)
    assert model.drift(mine, theirs) > model.DRIFT


def test_planning_is_red_where_the_forest_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Sequences in another order, and a forest without any sharing."""
    sequences = planning.groups(3000)
    ends = lambda f: np.repeat(f.node_subtree_end, f.node_length)  # noqa: E731
    turned = PrefixForest.from_sequences(sequences[::-1])
    assert planning.check(sequences, turned, ends(turned)) == ["sequences"]
    apart = PrefixForest.from_sequences(sequences, namespaces=range(len(sequences)))
    assert planning.check(sequences, apart, ends(apart)) == ["distinct tokens"]
    right = PrefixForest.from_sequences(sequences)
    assert planning.check(sequences, right, ends(right)) == []
    flex = planning.flex_mask
    with monkeypatch.context() as patch:
        patch.setattr(planning, "flex_mask", lambda end: flex(torch.full_like(end, len(end))))
        assert planning.check(sequences, right, ends(right)) == ["tiles"]
    monkeypatch.setattr(planning, "check", lambda *_: ["sequences"])
    out = tmp_path / "planning.json"
    assert planning.main(["--sizes", "3000", "--out", str(out)]) == 1
    assert all("steps" not in row for row in result(out)["rows"])
    assert "RED: sequences" in capsys.readouterr().out


@pytest.mark.full
def test_out_of_memory_is_a_row_and_the_case_runs_with_fewer_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    right = model.Update.learn

    def learn(self: Any, step: Any, old: Any) -> Any:
        layers = self.model.config.num_hidden_layers
        if layers > 1 and step.packed.num_tokens > 900:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore")
        return right(self, step, old)

    monkeypatch.setattr(model.Update, "learn", learn)
    out = tmp_path / "model.json"
    some = ["--layers", "2", "1", "--micro-batches", "32", "--sides", "own", "packed"]
    some += ["--cases", "longreason"]
    assert model.main([*TINY, *some, "--out", str(out)]) == 0
    rows = result(out)["rows"]
    told = [(row["layers"], row["side"], "seconds" in row) for row in rows]
    assert told == [(2, "own", False), (2, "packed", True), (1, "own", True), (1, "packed", True)]
    assert rows[0]["out_of_memory"] == "CUDA out of memory. Tried to allocate 9 GiB."
    assert "of_bound" not in rows[1] and "of_bound" in rows[3]
    assert "3 green, 1 out of memory, 0 red or failed" in capsys.readouterr().out


def test_an_error_is_a_failed_row(tmp_path: Path) -> None:
    options = runs.parse(runs.parser("x"), ["--out", str(tmp_path / "o.json")])
    report = runs.Report(options)

    def broken() -> dict[str, Any]:
        raise RuntimeError("an illegal address")

    row = report.attempt({"case": 1}, broken)
    assert row == {"case": 1, "failed": "RuntimeError: an illegal address"}
    assert result(tmp_path / "o.json")["rows"] == [row]
    assert report.finish(lambda data: []) == 1
