"""Calls whose gradients would not be those of the loss: each warns once, by name."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import prefixtree as pt
from tests.scoring.kept_cases import linear, plan_of, taken
from tests.scoring.steps_cases import score
from tests.support.models import build, ragged_objective, ragged_packed, reward_model


def _in_steps(model: nn.Module) -> None:
    torch.cat(score(model, ragged_objective()).logprobs).sum().backward()


def _in_kept_trunks(model: nn.Module) -> None:
    objective = ragged_objective()
    with pt.kept_trunks(model, plan_of(objective)[0], return_entropy=True) as scored:
        for batch, scores in scored:
            linear(taken(objective, batch), scores).backward()


@pytest.mark.parametrize("way", [_in_steps, _in_kept_trunks])
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_that_see_parts_of_a_gradient(way: Any, register: str) -> None:
    model = build("qwen3")
    weight = model.model.layers[1].mlp.up_proj.weight
    getattr(weight, register)(lambda _: None)
    # one forward has one backward, as torch has it
    torch.cat(pt.sequence_logprobs(model, ragged_packed()).logprobs).sum().backward()
    with pytest.warns(UserWarning, match=r"layers.1.mlp.up_proj.weight has a hook on its gradient"):
        way(model)
    way(model)
    # frozen, it gets no gradient
    other = build("qwen3")
    weight = other.model.layers[1].mlp.up_proj.weight
    getattr(weight, register)(lambda _: None)
    weight.requires_grad_(False)
    way(other)


def test_hooks_of_wrappers_and_trainers_are_known() -> None:
    """By the module of their code: one of transformers' sums what it summed before."""
    for known in ("transformers.trainer", "torch.nn.parallel.distributed", "peft.tuners"):
        model = build("qwen3")
        hook = eval("lambda gradient: None", {"__name__": known})
        model.lm_head.weight.register_hook(hook)
        _in_steps(model)
    for unknown in ("transformers.distributed.tensor_parallel", "torchao.optim"):
        model = build("qwen3")
        hook = eval("lambda gradient: None", {"__name__": unknown})
        model.lm_head.weight.register_post_accumulate_grad_hook(hook)
        with pytest.warns(UserWarning, match="has a hook on its gradient"):
            _in_steps(model)


def _values(model: nn.Module) -> None:
    pt.sequence_values(model, ragged_packed())


def _logprobs(model: nn.Module) -> None:
    pt.sequence_logprobs(model, ragged_packed())


@pytest.mark.parametrize("made, call", [(build, _logprobs), (reward_model, _values)])
def test_a_model_that_is_called_past_its_ddp(made: Any, call: Any) -> None:
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=2)
    try:
        model, alone = made("qwen3"), made("qwen3")
        wrapped = DistributedDataParallel(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call(alone)
            call(wrapped)
            with torch.no_grad():
                call(model)
        with pytest.warns(UserWarning, match="without the DistributedDataParallel around it"):
            call(wrapped.module)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call(wrapped.module)
    finally:
        dist.destroy_process_group()
