"""Forests scored in steps beside one forward: what the tests of steps share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from prefixtree import PackedForest
from prefixtree.models import families
from prefixtree.parallel.ledger import CellExchanges, Ledger
from prefixtree.parallel.run import Run as PartRun
from prefixtree.parallel.states import part_mask
from prefixtree.planning import schedule
from prefixtree.planning.costs import ImportCost
from prefixtree.planning.division import Division
from prefixtree.planning.steps import plan_steps
from prefixtree.recompute.plan import RecomputePlan
from prefixtree.scoring.in_groups import part_inputs
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.support.float64 import Float64
from tests.support.hybrid_cases import logprobs_of
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

MAX_STEP_TOKENS = 20
PLAN = RecomputePlan(("all",), 0)


def score(model: nn.Module, objective: Objective, packed: Any = None, **options: Any) -> Any:
    """Log-probabilities and entropies; in steps unless `max_step_tokens` is None."""
    options = {"max_step_tokens": MAX_STEP_TOKENS, "import_cost": LIGHT, **options}
    if options["max_step_tokens"] is None:
        options["import_cost"] = None
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
    expected = run(model, objective, **{**whole, "max_step_tokens": None})
    got = run(model, objective, **options)
    print(assert_same(got, expected))
    return got


def number_of_steps(max_step_tokens: int = MAX_STEP_TOKENS) -> int:
    """Of the ragged forest."""
    return len(plan_steps(ragged_packed(), max_step_tokens, import_cost=LIGHT))


def logprobs_in_steps(model: Any, packed: PackedForest, budget: int) -> list[torch.Tensor]:
    """Log-probabilities of each sequence in float64, which `sequence_logprobs` rounds; an imported
    token counts a tenth of an own one."""
    cost = ImportCost(token_bytes=10 * ImportCost().weight * 559_928)
    steps = plan_steps(packed, budget, import_cost=cost)
    assert len(steps) >= 4
    inputs = packed.model_inputs()
    if (rows := families.family_of(model.config).position_rows) > 1:
        inputs["position_ids"] = inputs["position_ids"].expand(rows, 1, -1)
    edges = packed.edges()
    scored = [part.scored(edges.predictor) for part in steps]

    def compute(step: int, exchanges: CellExchanges | None, _: bool) -> tuple[torch.Tensor]:
        assert exchanges is not None
        part = steps[step]
        which, at = (torch.from_numpy(x) for x in scored[step])
        with Float64():
            logits = model(**part_inputs(inputs, part, part_mask(exchanges))).logits[0]
        return (logprobs_of(logits[at], packed.input_ids[edges.token[which].long()])[:, None],)

    events = schedule.steps(len(steps), trains=True)
    ledger, parts = Ledger(Division(steps), events, parks=True), [range(len(steps))]
    found = PartRun(events, ledger, parts, compute, lambda: None, inline=True).give()
    assert found is not None
    of_edges = torch.cat([rows[:, 0] for (rows,) in found])
    which = torch.from_numpy(np.concatenate([which for which, _ in scored]))
    of_tokens = of_edges.new_zeros(packed.num_tokens)
    of_tokens = of_tokens.index_copy(0, edges.token.long()[which], of_edges)
    return [part[1:] for part in packed.unpack(of_tokens)]
