"""Forests scored in steps beside one forward: what the tests of steps share."""

from __future__ import annotations

from typing import Any

from torch import nn

from prefixtree.planning.steps import plan_steps
from prefixtree.recompute.plan import RecomputePlan
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.support.models import (
    Objective,
    Run,
    assert_same,
    gradients,
    pack_sequences,
    ragged_objective,
    ragged_packed,
)
from tests.support.step_ranks import LIGHT, loss_of

MAX_TOKENS = 20
PLAN = RecomputePlan(("all",), 0)


def score(model: nn.Module, objective: Objective, packed: Any = None, **options: Any) -> Any:
    """Log-probabilities and entropies; in steps unless `max_tokens` is None."""
    options = {"max_tokens": MAX_TOKENS, "borrow_cost": LIGHT, **options}
    if options["max_tokens"] is None:
        options["borrow_cost"] = None
    return sequence_logprobs(
        model,
        pack_sequences(objective.sequences) if packed is None else packed,
        objective.temperatures,
        objective.loss_masks,
        return_entropy=True,
        chunk_size=7,
        output_router_logits=bool(objective.balance) or None,
        **options,
    )


def run(model: nn.Module, objective: Objective | None = None, **options: Any) -> Run:
    """Scores and gradients of a loss that is no sum over tokens."""
    objective = objective or ragged_objective()
    model.zero_grad(set_to_none=True)
    scores = score(model, objective, **options)
    loss_of(objective, scores).backward()
    detached = ([x.detach() for x in of] for of in (scores.logprobs, scores.entropy))
    return Run(*detached, gradients(model))


def compare(model: nn.Module, objective: Objective | None = None, **options: Any) -> Run:
    """Fails unless steps give what one forward gives; the run in steps."""
    whole = {key: options[key] for key in ("packed", "recompute") if key in options}
    expected = run(model, objective, **{**whole, "max_tokens": None})
    got = run(model, objective, **options)
    print(assert_same(got, expected))
    return got


def number_of_steps(max_tokens: int = MAX_TOKENS) -> int:
    """Of the ragged forest."""
    return len(plan_steps(ragged_packed(), max_tokens, borrow_cost=LIGHT))
