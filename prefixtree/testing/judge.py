"""The judgement of `verify`: how far packed may be from replicated, or from float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prefixtree.models.families import family_of
from prefixtree.testing.compare import (
    Run,
    whole_gradient_difference,
    worst_difference,
)


@dataclass(frozen=True)
class Limits:
    """How far packed may be off: from replicated, or from float64 beyond twice replicated's error.

    Attributes:
        scores: of log p and entropy, absolute.
        parameter: of the gradient of each parameter, relative by norm.
        whole: of the gradients of all parameters as one vector, likewise.
    """

    scores: float
    parameter: float
    whole: float

    @classmethod
    def alike(cls, limit: float) -> Limits:
        """Makes one limit of all."""
        return cls(limit, limit, limit)


# Measured on a pretrained SmolLM2-135M, in 20 slices of real text (docs/exactness.md, Check yours).
# A parameter: replicated itself missed float64 by more than 1e-4 in 12 slices, by up to 2.6e-4 (a
# norm's weight); two right runs may differ by twice that, and there may be no memory for float64.
# All parameters as one vector: rounding is 4e-5 at most. A key hidden from one token, which barely
# looked at it, shows in log p first: 2e-3 was seen there, 8e-4 in the worst parameter and
# 2e-4 in all. The weight of a token shows in gradients alone (0.1 in all), and nowhere if the model
# was certain of the token.
FLOAT32 = Limits(scores=1e-4, parameter=1e-3, whole=2e-4)
# for families whose layers carry a state: transformers' recurrences multiply exponentials of long
# sums; a tiny Qwen3.5 was off from float64 by 7.5e-5 in its decays' gradient, packed by 5e-6. They
# cast to float32 in a float64 run too, and no pretrained one was measured
FLOAT32_OF_STATES = Limits.alike(1e-3)


@dataclass(frozen=True)
class Check:
    """One line of the verdict: green where value <= limit.

    Attributes:
        where: the worst parameter, where there is one.
        replicated: how far the replicated run is off in the same place; None where it is itself
            what packed is compared with.
    """

    name: str
    value: float
    limit: float
    where: str | None = None
    replicated: float | None = None

    @property
    def passed(self) -> bool:
        """Whether it is green; a value that is not finite never is."""
        return math.isfinite(self.value) and self.value <= self.limit


def float32_limits(config: Any) -> Limits:
    """Chooses the limits of two runs in float32."""
    has_states = bool(family_of(config.get_text_config()).functions)
    return FLOAT32_OF_STATES if has_states else FLOAT32


def judge(
    packed: Run,
    replicated: Run,
    exact: Run,
    limits: Limits,
    in_float64: Callable[[], Run | None],
) -> tuple[list[Check], Run | None]:
    """Compares packed with `exact`, and with float64 where rounding of `exact` may be to blame.

    Where `exact` is the replicated run itself and packed is farther from it than the limits, both
    are compared with a run in float64, which is made then: packed may be off by twice the error of
    replicated and the limit. The same holds in a shorter dtype, where `exact` is a float32 run.

    Returns:
        the checks, and the run in float64; None where none was needed, or could be made.
    """
    checks = compare(packed, replicated, exact, limits)
    if exact is not replicated or all(check.passed for check in checks):
        return checks, None
    longer = in_float64()
    if longer is None:
        return checks, None
    return compare(packed, replicated, longer, limits), longer


def compare(packed: Run, replicated: Run, exact: Run, limits: Limits) -> list[Check]:
    """Compares packed with `exact`: its error may be twice that of replicated plus the limit."""

    def check(
        name: str, value: float, error: float, least: float, where: str | None = None
    ) -> Check:
        of_replicated = None if exact is replicated else error
        return Check(name, value, 2 * error + least, where, of_replicated)

    checks = []
    for name in ("logprobs", "entropy"):
        value, error = (
            worst_difference(getattr(run, name), getattr(exact, name))
            for run in (packed, replicated)
        )
        checks.append(check(name, value, error, limits.scores))
    (whole, gaps), (whole_error, errors) = (
        whole_gradient_difference(run.gradients, exact.gradients) for run in (packed, replicated)
    )
    parameters = [
        check("gradients", gaps[name], errors[name], limits.parameter, name) for name in gaps
    ]

    def excess(check: Check) -> float:
        # where replicated is not finite, the limit is infinite, and others are worse
        return check.value / check.limit if math.isfinite(check.value) else math.inf

    checks.append(max(parameters, key=excess))
    checks.append(check("whole gradient", whole, whole_error, limits.whole))
    return checks
