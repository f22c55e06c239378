"""Micro-batches of kept trunks beside each in a forward of its own: what their tests share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from prefixtree import (
    MicroBatchPlan,
    kept_trunks,
    plan_micro_batches,
    prepare,
    sequence_logprobs,
)
from prefixtree.scoring import kept_trunks as module
from tests.support.float64 import Float64
from tests.support.hybrid_cases import (
    checkpointed_in_float64,
    in_float64,
    logprobs_alone,
    logprobs_of,
    worst,
)
from tests.support.models import (
    Objective,
    Run,
    assert_same,
    gradients,
    make_objective,
    ragged_objective,
    with_measured,
)
from tests.support.step_ranks import LIGHT, loss_of

MAX_TOKENS = 24


def plan_of(objective: Objective, max_tokens: int = MAX_TOKENS, **options: Any) -> MicroBatchPlan:
    return plan_micro_batches(
        objective.sequences, max_tokens, trunks=True, **{"import_cost": LIGHT, **options}
    )


def taken(objective: Objective, batch: Any) -> Objective:
    """The objective of a micro-batch."""
    masks = objective.loss_masks
    return Objective(
        batch.take(objective.sequences),
        batch.take(objective.temperatures),
        None if masks is None else batch.take(masks),
        batch.take(objective.weights),
    )


def linear(objective: Objective, scores: Any) -> torch.Tensor:
    """A loss that does not depend on the micro-batches."""
    return objective.loss(scores.logprobs, scores.entropy)


def run(
    model: nn.Module,
    objective: Objective | None = None,
    plan: MicroBatchPlan | None = None,
    loss: Callable[[Objective, Any], torch.Tensor] = loss_of,
    **options: Any,
) -> Run:
    """Scores and gradients of the sum over micro-batches."""
    objective = objective or ragged_objective()
    plan = plan or plan_of(objective)
    model.zero_grad(set_to_none=True)
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    per_sequence = objective.temperatures, objective.loss_masks
    with kept_trunks(
        model, plan[0], *per_sequence, return_entropy=True, chunk_size=7, **options
    ) as scored:
        for batch, given in scored:
            scores = with_measured(given)
            pairs = zip(scores.logprobs, scores.entropy, strict=True)
            found |= dict(zip(batch.sequence_indices.tolist(), pairs, strict=True))
            loss(taken(objective, batch), scores).backward()
    return run_of(model, found)


def one_by_one(model: nn.Module, objective: Objective, plan: MicroBatchPlan) -> Run:
    """The same with every micro-batch in a forward of its own."""
    model.zero_grad(set_to_none=True)
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for batch in plan[0]:
        its = taken(objective, batch)
        scores = sequence_logprobs(
            model, batch.packed, its.temperatures, its.loss_masks, return_entropy=True
        )
        assert scores.entropy is not None
        pairs = zip(scores.logprobs, scores.entropy, strict=True)
        found |= dict(zip(batch.sequence_indices.tolist(), pairs, strict=True))
        loss_of(its, scores).backward()
    return run_of(model, found)


def run_of(model: nn.Module, found: dict[int, Any]) -> Run:
    values = ([found[i][column].detach() for i in sorted(found)] for column in (0, 1))
    return Run(*values, gradients(model))


def compare(
    model: nn.Module,
    objective: Objective | None = None,
    tolerance: float = 1e-5,
    **options: Any,
) -> Run:
    """Fails unless kept trunks give what micro-batches alone give; the run."""
    objective = objective or ragged_objective()
    plan = options.pop("plan", None) or plan_of(objective)
    assert plan.stats.trunks.trunks > 0 and plan.stats.packed_tokens == plan.forest.num_tokens
    got = run(model, objective, plan, **options)
    print(assert_same(got, one_by_one(model, objective, plan), tolerance))
    return got


class Forward64:
    """In the place of `ModelForward`, which rounds scores to float32: [u, 1] in float64."""

    def __init__(self, model: nn.Module, _: Any, packed: Any, *others: Any) -> None:
        self._model, self.packed = model, packed
        self.options, self.wings = others

    def __call__(
        self, mask: Any, inputs: dict[str, Any], edges: Any, recompute: Any, own: Any
    ) -> tuple[torch.Tensor]:
        images = self.wings.get("images")
        shown: Any = None if images is None else images.forward(own)
        with Float64(), nullcontext() if shown is None else shown.encoded():
            seen = {} if shown is None else shown.inputs
            logits = self._model(**inputs, **seen).logits[0]
        rows = logits[edges.predictors][edges.to_predictors.rows.long()]
        return (logprobs_of(rows, edges.target)[:, None],)


def worst_in_float64(
    family: str,
    checkpointed: bool,
    again: bool,
    monkeypatch: pytest.MonkeyPatch,
    **changes: Any,
) -> tuple[float, float]:
    """The errors of log-probabilities and gradients, against each sequence alone through eager."""
    objective = make_objective(ragged_objective().sequences, plain=True)
    plan = plan_of(objective, 17)
    assert plan.stats.trunks.trunks > 3
    eager = in_float64(family, "eager", **changes)
    with Float64():
        expected = logprobs_alone(eager, objective.sequences)
        sum(map(_loss, expected, objective.weights)).backward()
    model = prepare(in_float64(family, **changes))
    if checkpointed:
        checkpointed_in_float64(model)
    monkeypatch.setattr(module, "ModelForward", Forward64)
    found: dict[int, torch.Tensor] = {}
    with kept_trunks(model, plan[0], recompute_trunks="again" if again else None) as scored:
        for batch, scores in scored:
            weights = batch.take(objective.weights)
            found |= dict(zip(batch.sequence_indices.tolist(), scores.logprobs, strict=True))
            sum(map(_loss, scores.logprobs, weights)).backward()
    return worst([found[i] for i in sorted(found)], model, expected, eager)


def _loss(logprobs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (logprobs * weight[:, 0].double()).sum() + logprobs.square().sum() / 10
