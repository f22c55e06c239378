"""What the ranks of a group found, against one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from prefixtree.models.checks import find_causal_lm
from prefixtree.models.layers import layers_of
from tests.support.group_cases import FORESTS, Case, num_groups, objective_of, packed_of
from tests.support.group_ranks import values_weight
from tests.support.models import (
    Run,
    assert_same,
    attentions,
    gradients,
    reward_model,
    run_packed,
    tolerance,
)

Results = list[dict[Any, Any]]


@cache
def run_alone(case: Case) -> list[Run]:
    """One process, the forest of each group."""
    model = case.model()
    objectives = [objective_of(case, place) for place in range(num_groups(case))]
    return [run_packed(model, packed_of(case, o), o) for o in objectives]


def check(results: Results, name: str, case: Case) -> None:
    """Every rank has all scores of its forest, and the ranks' mean gradient is the whole one's."""
    alone = run_alone(case)
    mean = {
        key: sum(run.gradients[key] for run in alone) / len(alone) for key in alone[0].gradients
    }
    for rank, result in enumerate(results):
        assert isinstance(result[name], dict), result[name]
        mine = alone[rank * len(alone) // len(results)]
        found = Run(**result[name]["run"])
        if sum(len(p) for p in mine.logprobs):
            reference = Run(mine.logprobs, mine.entropy, mean)
            worst = assert_same(found, reference, tolerance(case.family))
            print(f"{name}, rank {rank}: {worst}")
        else:
            assert [len(p) for p in found.logprobs] == [0]
            assert all(g.abs().max() == 0 for g in found.gradients.values())
        # averaged over ranks, to the bit
        first = results[0][name]["run"]["gradients"]
        assert all(torch.equal(g, first[n]) for n, g in found.gradients.items())


def check_exchanges(
    results: Results, name: str, case: Case, modes: Sequence[Any] | None = None
) -> None:
    """The ranks did compute parts, and exchanged rows in every layer that was computed.

    Args:
        modes: what layers recomputed. Default: as the case says.
    """
    model = case.model()
    attends = [bool(attentions(layer)) for layer in layers_of(find_causal_lm(model))]
    size = len(results) // num_groups(case)
    modes = modes or getattr(case.recompute, "modes", (case.recompute,) * len(attends))
    recomputed = [
        bool(case.checkpointing) or mode in ("all", "all_but_attention") for mode in modes
    ]
    layers = sum(attends)
    again = sum(a and r for a, r in zip(attends, recomputed, strict=True))
    for place in range(num_groups(case)):
        calls = [result[name]["calls"] for result in results[place * size : (place + 1) * size]]
        assert all(len(of_rank) == layers + again for of_rank in calls)
        own, came = (sum(of_rank[0][i] for of_rank in calls) for i in range(2))
        assert own == max(packed_of(case, objective_of(case, place)).num_tokens, size)
        if case.group_mode == "ulysses":
            assert came == own * (size - 1)
        else:
            assert (came > 0) == (case.forest not in ("one token", "trees apart"))
        if case.scattered:
            # from one another, and so not one after another
            assert all(of_rank[0][1] > 0 for of_rank in calls)


def check_values(results: Sequence[Any], name: str) -> None:
    """Values of a reward model and their gradients, of a forest by its name."""
    model, values = reward_model("gemma2", "eager"), []
    for tokens in FORESTS[name](0).sequences:
        states = model.model(torch.from_numpy(tokens)[None], use_cache=False).last_hidden_state
        values.append(model.score(states)[0])
    flat = torch.cat(values)
    (flat * values_weight(flat)).sum().backward()
    expected = Run([flat.detach()], [flat.detach()], gradients(model))
    for got in results:
        assert isinstance(got, dict), got
        assert_same(Run([got["values"]], [got["values"]], got["gradients"]), expected)
