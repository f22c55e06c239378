"""The benchmark `verl_update` on a CPU and tiny: green on one rank and two, and red."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.cases import verl_update
from benchmarks.lib import verl_check, verl_worker
from benchmarks.lib.policy import Ranks
from prefixtree import PrefixForest
from tests.integrations.verl.runs import PRELOAD
from tests.support.benchmark_runs import gpu_check, result
from tests.support.cli_runs import write_rollouts
from tests.support.hooks import wrap
from tests.support.spawn import run_ranks

TINY = ["--device", "cpu", "--scale", "0.4", "--repeats", "1"]


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    return write_rollouts(tmp_path / "rollouts.jsonl")


@pytest.fixture
def turns(rollouts: Path) -> verl_worker.Turns:
    options = SimpleNamespace(rollouts=rollouts, tasks=2, scale=0.4, is_tiny=True)
    return verl_worker.Turns.of(*verl_update.turn_samples(options, 512))


def check_green(data: dict[str, Any], turns: verl_worker.Turns, ranks: int) -> None:
    errors = data["check"]["errors"]
    assert data["check"]["red"] == [] and data["check"]["updates"] == 4
    assert max(errors["packed, float32"].values()) < 5e-5
    for engine in ("verl, bf16", "packed, bf16"):
        assert 1e-3 < errors[engine]["log_probs"] < 0.1, engine
    # the clip acts, and every update has its own loss
    first = data["check"]["metrics"]["verl, float32"]
    assert all(share > 0 for share in first["actor/pg_clipfrac"])
    assert len(set(first["loss"])) == 4
    assert data["packages"]["verl"] == "0.9.1" and data["ranks"] == ranks
    assert data["cross_entropy"] == "torch, row by row"
    rows = {row["side"]: row for row in data["rows"]}
    assert list(rows) == ["verl", "packed"]
    distinct = PrefixForest.from_sequences(turns.sequences).num_tokens
    for side, row in rows.items():
        assert row["red"] == [] and row["ranks"] == ranks and row["distinct"] == distinct
        assert row["replicated"] == turns.lengths.sum()
        assert distinct <= row["computed"] <= row["replicated"]
        assert (side == "verl") == (row["computed"] == row["replicated"])
        assert row["micro_batches"] >= ranks
        # the slowest rank of each
        assert 0 < row["seconds"] <= row["log_prob_seconds"] + row["update_seconds"] + 1e-6
        assert row["loss"] == pytest.approx(rows["verl"]["loss"], rel=0.05)
        assert row["grad_norm"] == pytest.approx(rows["verl"]["grad_norm"], rel=0.2)
    assert 0 < rows["packed"]["drift"] < 0.1
    (text, table) = verl_update.headline(data)
    assert "8 samples of 2 tasks" in text and len(table.lines) == 1


@pytest.mark.full
def test_one_rank(
    rollouts: Path,
    turns: verl_worker.Turns,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "")
    out = tmp_path / "verl.json"
    where = ["--rollouts", str(rollouts), "--out", str(out), "--folder", str(tmp_path / "model")]
    assert verl_update.main([*TINY, *where]) == 0
    check_green(result(out), turns, 1)
    assert "2 green, 0 out of memory, 0 red or failed" in capsys.readouterr().out
    # the group of the process stays
    assert dist.is_initialized()


@pytest.mark.full
def test_two_ranks(rollouts: Path, turns: verl_worker.Turns, tmp_path: Path) -> None:
    """With what gpu_check.sh gives torchrun on the GPUs."""
    words = {"ROLLOUTS": str(rollouts), "VERL_ARGS": " ".join(TINY)}
    done = gpu_check(tmp_path, "verl_2gpu", python='printf "%s\\n" "$@"', **words)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "all done: verl_2gpu"
    # behind it a line says how long it took, and the last one
    at = lines.index("verl_update")
    assert lines[at - 4 : at] == ["--nproc-per-node", "2", "-m", "benchmarks"]
    rank = "tests.integrations.verl.benchmark_rank"
    found = run_ranks(rank, tmp_path, arguments=[lines[at + 1 : -2]], preload=PRELOAD)
    assert found == [0, 0]
    check_green(result(tmp_path / "out" / "verl_2gpu.json"), turns, 2)


# ---- red -----------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_gradient_that_is_too_large_is_red(
    rollouts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a hundredth, with the right log-probabilities; there is no time then."""
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "")

    def wrong(right: Any, *given: Any) -> dict[str, Any]:
        outputs = right(*given)
        logprobs = outputs["log_probs"]
        values = logprobs.values()
        values = values + 0.01 * (values - values.detach())
        outputs["log_probs"] = torch.nested.nested_tensor_from_jagged(values, logprobs.offsets())
        return outputs

    wrap(monkeypatch, "output of verl's engine", wrong)
    out = tmp_path / "verl.json"
    assert verl_update.main([*TINY, "--rollouts", str(rollouts), "--out", str(out)]) == 1
    rows = {row["side"]: row for row in result(out)["rows"]}
    assert any(red.startswith("float32 grad_norm") for red in rows["packed"]["red"])
    assert not any("log_probs" in red for red in rows["packed"]["red"])
    assert "seconds" in rows["verl"] and "seconds" not in rows["packed"]


def test_what_is_red() -> None:
    names = ("log_probs", "entropy", *verl_check.METRICS, "parameters")
    found = {
        "packed, float32": dict.fromkeys(names, 1e-4),
        "verl, bf16": dict.fromkeys(names, 0.01),
        "packed, bf16": dict.fromkeys(names, 0.019),
    }
    assert verl_check.judged(found) == []
    # one number may be far off if the others are near
    found["packed, bf16"] |= dict.fromkeys(verl_check.METRICS, 0.001) | {"loss": 0.04}
    assert verl_check.judged(found) == []
    for engine, name, value in (
        ("packed, float32", "kl_loss", 2e-3),
        ("packed, float32", "parameters", float("nan")),
        ("packed, bf16", "entropy", 0.021),
        ("packed, bf16", "loss", 0.07),
    ):
        wrong = found | {engine: found[engine] | {name: value}}
        assert len(verl_check.judged(wrong)) == 1, (engine, name)


# ---- what the benchmark gives verl ---------------------------------------------------------------


def test_samples_are_dealt_as_the_trainers_do(turns: verl_worker.Turns) -> None:
    """Each sample once; ours keeps the samples of a task together."""
    ranks = Ranks("cpu", 2)
    for engine in ("verl", "prefixtree"):
        dealt = verl_worker.dealt(turns, engine, ranks)
        assert [len(part) for part in dealt] == [4, 4]
        assert sorted(i for part in dealt for i in part) == list(range(8))
    assert [len({turns.groups[i] for i in part}) for part in dealt] == [1, 1]


def test_a_batch_is_prompt_and_response(turns: verl_worker.Turns) -> None:
    rewards = [mask.float() for mask in turns.response_masks]
    data = turns.batch(advantages=rewards, temperature=0.5)
    rows = zip(
        turns.sequences,
        turns.masks,
        *(data[name].unbind() for name in ("prompts", "responses", "response_mask", "loss_mask")),
        strict=True,
    )
    for sequence, mask, prompt, response, response_mask, loss_mask in rows:
        assert torch.cat([prompt, response]).tolist() == sequence.tolist()
        assert loss_mask.tolist() == mask.tolist()
        assert response_mask[0] == 1 and response_mask.sum() == mask.sum()
    old, reference = turns.beside(rewards)
    gaps = torch.cat(old) - torch.cat(rewards)
    assert set(gaps.tolist()) == {-1.0, 0.0, 1.0}
    assert 0.1 < float((torch.cat(reference) - torch.cat(rewards)).std()) < 0.6


def test_the_replicated_attention_sees_one_sequence(turns: verl_worker.Turns) -> None:
    """Against SDPA of every sequence alone; the second call has what the first looked up."""
    from transformers import AttentionInterface

    attend = AttentionInterface()[verl_worker.varlen("fa2")]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, 12, 8, generator=generator) for h in (4, 2, 2))
    position_ids = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3, 4, 0, 1, 2]])
    expected = torch.cat(
        [
            torch.nn.functional.scaled_dot_product_attention(
                *(x[:, :, a:b] for x in (q, k, v)), is_causal=True, enable_gqa=True
            ).transpose(1, 2)
            for a, b in ((0, 3), (3, 4), (4, 9), (9, 12))
        ],
        1,
    )
    for _ in range(2):
        out, _weights = attend(None, q, k, v, None, position_ids=position_ids)
        np.testing.assert_allclose(out, expected, atol=1e-6)
