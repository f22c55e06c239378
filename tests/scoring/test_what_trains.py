"""What trains is one parameter of a first layer, or nothing that scores reach; other subsets are an
axis of `ways`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import prefixtree as pt
from tests.scoring.kept_cases import plan_of
from tests.scoring.ways import AXES
from tests.scoring.ways_runs import check, run
from tests.support.image_cases import build as build_with_encoder
from tests.support.models import make_objective, pack_sequences, skips_of
from tests.support.step_ranks import LIGHT


@pytest.mark.parametrize(
    ("way", "layers", "name"),
    [
        # shapes states, and is no input of the recurrence
        pytest.param("steps", "Mamba-2", "dt_bias", marks=skips_of("nemotron_h")),
        # the convolution below all that trains: what it imports needs no gradient
        pytest.param("kept trunks", "Mamba-2", "conv1d.weight", marks=skips_of("nemotron_h")),
        pytest.param("steps", "delta rule", "conv1d.weight", marks=skips_of("qwen3_5")),
        pytest.param("kept trunks", "delta rule", "conv1d.weight", marks=skips_of("qwen3_5")),
    ],
)
def test_a_first_recurrent_layer_of_which_one_parameter_trains(
    way: str, layers: str, name: str
) -> None:
    plain = {axis: levels[0] for axis, levels in AXES.items()}
    case = plain | {"way": way, "layers": layers, "trained": name}
    check(case, run(case))


@pytest.mark.parametrize("again", [None, "again"])
def test_scores_that_nothing_that_trains_reaches_have_no_graph(again: Any) -> None:
    """A vision encoder alone trains, and there are no images: as in one forward."""
    model = build_with_encoder("qwen3_vl")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".visual." in name)
    pt.prepare(model)
    objective = make_objective([s.numpy() for s in torch.arange(3, 43).view(2, 20)], plain=True)
    objective.sequences[1][:12] = objective.sequences[0][:12]
    packed = pack_sequences(objective.sequences)
    whole = pt.sequence_logprobs(model, packed)
    in_steps = pt.sequence_logprobs(model, packed, max_step_tokens=16, import_cost=LIGHT)
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
