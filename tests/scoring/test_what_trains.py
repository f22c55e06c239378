"""What trains is any subset of the parameters: each way to run gives the gradients of plain eager
runs, to these parameters alone. `python -m tests.scoring.trained_subsets 300` tries many more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import prefixtree as pt
from tests.scoring.kept_cases import plan_of
from tests.scoring.trained_subsets import Draw, check, draw, run_groups
from tests.support.models import make_objective, pack_sequences, skips_of
from tests.support.picture_cases import build as build_with_tower
from tests.support.step_ranks import LIGHT

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

DRAWS = [draw(seed) for seed in range(5000, 5036)]


def _parameters(cases: list[Draw]) -> list[Any]:
    return [
        pytest.param(case, id=f"{case.seed}-{case.family}-{case.subset}-{case.way}-{case.mode}")
        for case in cases
        if not skips_of(case.family)
    ]


@pytest.mark.parametrize("case", _parameters([x for x in DRAWS if x.way != "group"]))
def test_any_subset_gets_its_gradients(case: Draw) -> None:
    pytest.importorskip("peft")
    check(case)


def test_any_subset_gets_its_gradients_in_groups(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    cases = [x for x in DRAWS if x.way == "group" and not skips_of(x.family)]
    assert len(cases) > 2
    for case, run in zip(cases, run_groups(cases, tmp_path), strict=True):
        assert not isinstance(run, str), (case, run)
        check(case, run)


@pytest.mark.parametrize("way", ["steps", "trunks"])
@pytest.mark.parametrize(
    ("family", "name"),
    [
        # shapes states, and is no input of the recurrence
        pytest.param("nemotron_h", "dt_bias", marks=skips_of("nemotron_h")),
        # the convolution below all that trains: what it borrows needs no gradient
        pytest.param("nemotron_h", "conv1d.weight", marks=skips_of("nemotron_h")),
        pytest.param("qwen3_5", "conv1d.weight", marks=skips_of("qwen3_5")),
    ],
)
def test_a_first_recurrent_layer_of_which_one_parameter_trains(
    family: str, name: str, way: str
) -> None:
    check(Draw(3, family, name, way, None))


@pytest.mark.parametrize("again", [None, "again"])
def test_scores_that_nothing_that_trains_reaches_have_no_graph(again: Any) -> None:
    """A vision tower alone trains, and there are no pictures: as in one forward."""
    model = build_with_tower("qwen3_vl")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".visual." in name)
    pt.prepare(model)
    objective = make_objective([s.numpy() for s in torch.arange(3, 43).view(2, 20)], plain=True)
    objective.sequences[1][:12] = objective.sequences[0][:12]
    packed = pack_sequences(objective.sequences)
    whole = pt.sequence_logprobs(model, packed)
    in_steps = pt.sequence_logprobs(model, packed, max_tokens=16, borrow_cost=LIGHT)
    for scores in (whole, in_steps):
        assert not any(x.requires_grad for x in scores.logprobs)
    assert torch.allclose(torch.cat(in_steps.logprobs), torch.cat(whole.logprobs))
    plan = plan_of(objective, 22)
    assert plan.stats.trunks.trunks > 0
    with pt.kept_trunks(model, plan[0], recompute_trunks=again) as scored:
        for _, scores in scored:
            loss = torch.cat(scores.logprobs).sum()
            # of a trunk that runs again it is not known yet
            assert loss.requires_grad == bool(again)
            if again:
                loss.backward()
    assert all(p.grad is None for p in model.parameters())
