"""The judgement of `verify`: which line turns red, and when float64 is asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prefixtree.testing.compare import Run
from prefixtree.testing.judge import FLOAT32, Check, Limits, judge

NAMES = ["logprobs", "entropy", "gradients", "whole gradient"]


def _run(
    score: float = 0.0, *, large: float = 0.0, small: float = 0.0, spoilt: bool = False
) -> Run:
    """A run whose log p, and two parameters' gradients, are off by so much."""
    gradients: dict[str, torch.Tensor | None] = {
        "large": torch.tensor([1.0 + large]),
        "small": torch.tensor([float("nan") if spoilt else 0.01 * (1 + small)]),
    }
    scores = [torch.tensor([-1.0 + score])], [torch.tensor([2.0])]
    return Run(*scores, gradients, 0.0, 0.0, None)


def _never() -> Run:
    raise AssertionError("a run in float64 that nobody needs")


def _red(checks: list[Check]) -> list[str]:
    assert [check.name for check in checks] == NAMES
    return [check.name for check in checks if not check.passed]


@pytest.mark.parametrize(
    ("packed", "red"),
    [
        (_run(2e-4), ["logprobs"]),
        # the noise of one norm's weight, and a mistake that every parameter has a little of
        (_run(small=9e-4), []),
        (_run(large=9e-4), ["whole gradient"]),
        (_run(small=5e-3), ["gradients"]),
    ],
)
def test_each_line_has_its_limit(packed: Run, red: list[str]) -> None:
    exact = _run()
    checks, longer = judge(packed, exact, exact, FLOAT32, _run if red else _never)
    assert _red(checks) == red
    assert (longer is not None) is bool(red)


def test_rounding_of_replicated_is_no_mistake_of_packed() -> None:
    replicated = _run(3e-4, large=-4e-4, small=-2e-3)
    checks, longer = judge(
        _run(-3e-4, large=5e-4, small=3e-3), replicated, replicated, FLOAT32, _run
    )
    assert longer is not None and not _red(checks)
    (parameter,) = (check for check in checks if check.name == "gradients")
    assert parameter.where == "small" and parameter.replicated == pytest.approx(2e-3, rel=1e-3)
    assert parameter.limit == pytest.approx(5e-3, rel=1e-3)
    # farther than twice that and the limit, it is
    checks, _ = judge(_run(-8e-4, large=2e-3, small=7e-3), replicated, replicated, FLOAT32, _run)
    assert _red(checks) == ["logprobs", "gradients", "whole gradient"]
    # without the memory for float64, the first comparison stands
    checks, longer = judge(_run(-3e-4), replicated, replicated, FLOAT32, lambda: None)
    assert longer is None and "logprobs" in _red(checks)


def test_the_worst_parameter_is_named() -> None:
    exact: Any = _run()
    for packed, where in ((_run(large=2e-3, small=9e-3), "small"), (_run(0.1, large=0.5), "large")):
        checks, _ = judge(packed, exact, exact, FLOAT32, lambda: None)
        assert [check.where for check in checks] == [None, None, where, None]
    # not the one that replicated spoilt, whose limit is infinite
    checks, _ = judge(_run(large=0.5), _run(spoilt=True), exact, Limits.alike(1e-2), _never)
    assert "gradients" in _red(checks) and checks[2].where == "large"
