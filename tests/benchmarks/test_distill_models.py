"""An update by distillation: every side green, and red without a part of its gradient."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases import distill_models
from tests.benchmarks.support import TINY, agent_rollouts
from tests.support.benchmark_runs import result


def run(folder: Path, *more: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and what was written."""
    out = folder / "distill_models.json"
    some = ["--layers", "1", "--rollouts", str(agent_rollouts(folder)), "--out", str(out)]
    return distill_models.main([*TINY, *some, *more]), result(out)


@pytest.mark.full
def test_distill_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, data = run(tmp_path)
    # TRL is there in its own environment
    sides = [side for side in distill_models.SIDES if side != "trl" or find_spec("trl")]
    assert code == 0 and [row["side"] for row in data["rows"]] == sides
    for row in data["rows"]:
        assert row["seconds"] > 0 and row["red"] == [] and row["drift"] < 0.05
        assert 0 < data["checks"][row["side"]]["value error"] < 0.1
    assert f"{len(sides)} green" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        distill_models.main(TINY)


@pytest.mark.full
def test_distill_models_are_red_where_a_gradient_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = distill_models.sequence_logprobs

    def off(*given: Any, **options: Any) -> Any:
        scores = right(*given, **options)
        assert scores.measured is not None
        wrong = [0.8 * x + 0.2 * x.detach() for x in scores.measured]
        return replace(scores, measured=wrong)

    monkeypatch.setattr(distill_models, "sequence_logprobs", off)
    code, data = run(tmp_path, "--sides", "packed")
    (row,) = data["rows"]
    assert code == 1 and "seconds" not in row
    assert len(row["red"]) == 1 and row["red"][0].startswith("gradient is")
