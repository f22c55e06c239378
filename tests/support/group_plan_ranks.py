"""One rank of test_plans_in_groups.py: plans of "auto" that the ranks of a group share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import prefixtree as pt
from prefixtree.parallel.ledger import Exchange
from prefixtree.planning.parts import Parts
from prefixtree.recompute import choose
from prefixtree.recompute.counted import LiveBytes
from prefixtree.recompute.plan import RecomputePlan, peaks_of, place_of
from prefixtree.scoring import in_groups as shares
from tests.support import group_cases
from tests.support.full import asked_for
from tests.support.group_cases import FORESTS, Case
from tests.support.group_ranks import run_case, scattered, tried, values_per_token
from tests.support.hooks import place
from tests.support.models import build, pack_sequences, reward_model
from tests.support.state_group_ranks import OWNERS


def _planned(cases: dict[str, Case], *names: str) -> dict[str, Case]:
    return {name: replace(cases[name], recompute="auto") for name in names}


# on two ranks
CASES = _planned(
    group_cases.CASES,
    "experts, their loss, routes",
    "heads, sinks, FSDP2",
    "states, adapters, FSDP2",
)
QUICK = ("heads, sinks, FSDP2",)
# on four
WIDE_CASES = _planned(group_cases.WIDE_CASES, "groups, DDP")
# each in a share of the memory between the least and the most that a plan may need
PEAKS = {
    "scattered": (Case(scattered=True), 0.4),
    "heads": (Case(group_mode="ulysses"), 1.0),
    "values": (Case(forest="values"), 0.4),
}
QUICK_PEAKS = ("scattered",)
QUICK_OWNERS = ("single tokens",)


@contextmanager
def _memory_of_rank(share: float, seen: dict[str, Any]) -> Iterator[None]:
    """Plans of "auto" have a share of the bytes between the least and the most that they may need;
    notes the modes of the last forward, and what it needs by the memory model."""
    planning, running = choose.plan_for, choose.recomputing
    of_plan: dict[str, Any] = {}

    def plan_for(memory: Any, work: Any, available: float, *_: Any, **__: Any) -> Any:
        of_plan["peaks"] = peaks = peaks_of(memory, work)
        least, most = float(peaks[-1, -1]), float(peaks[0, 0])
        seen["own"] = (plan := planning(memory, work, least + share * (most - least) + 1)).modes
        return plan

    def recomputing(model: Any, modes: Any) -> Any:
        seen["modes"] = tuple(modes)
        if of_plan:
            seen["bytes"] = float(of_plan["peaks"][place_of(RecomputePlan(tuple(modes), 0))])
        return running(model, modes)

    with (
        patch.object(choose, "plan_for", plan_for),
        patch.object(choose, "recomputing", recomputing),
    ):
        yield


def _run(case: Case, group: Any, rank: int) -> dict[str, Any]:
    """As the case runs, and the modes: of its own plan, and of what ran."""
    seen: dict[str, Any] = {}
    # the other ranks have memory for less
    with _memory_of_rank(0.5 if dist.get_rank(group) else 1.0, seen):
        return run_case(case, group, rank) | seen


def _peak(case: Case, share: float, group: Any) -> tuple[int, float, tuple[str, ...]]:
    """The most bytes of an update beside weights and gradients, counted; what they were predicted
    to be; the modes."""
    packed = pack_sequences([np.random.default_rng(0).integers(3, 90, 2000)])
    # few scored edges, whose logits are next to nothing
    masks = [np.arange(2000) >= 1992]
    is_classifier = case.forest == "values"
    model = reward_model("gemma2") if is_classifier else build(case.family, num_hidden_layers=4)
    model = model.to(torch.bfloat16).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    seen: dict[str, Any] = {}
    split = scattered if case.scattered else shares.split_slots

    def update() -> None:
        if is_classifier:
            rows = pt.sequence_values(model, packed, recompute="auto", group=group)
        else:
            options = {"loss_mask": masks, "group": group, "group_mode": case.group_mode}
            rows = pt.sequence_logprobs(model, packed, recompute="auto", **options).logprobs
        torch.cat(rows).sum().backward()

    with (
        _memory_of_rank(share, seen),
        patch.object(shares, "split_slots", split),
        patch.object(*place("logits of plans"), 1 << 12),
    ):
        # tables are made once
        update()
        live = LiveBytes(x for p in model.parameters() for x in (p, p.grad))
        with live:
            update()
    return live.most, seen["bytes"], seen["modes"]


def _rows_at_once(owner: str, group: Any) -> tuple[float, float]:
    """Rows of keys and values in float32 that a backward of attention has at once: counted, and as
    "auto" plans them."""
    packed = pack_sequences([np.random.default_rng(0).integers(3, 90, 90)])
    parts = Parts(packed, OWNERS[owner](packed.num_tokens, 2), 2)
    giving_back, planning = Exchange.give_back, choose.plan_for
    seen: dict[str, float] = {}

    def plan_for(memory: Any, work: Any, *given: Any, **options: Any) -> Any:
        seen["planned"] = work.wide
        return planning(memory, work, *given, **options)

    def give_back(self: Exchange, *gradients: torch.Tensor) -> Any:
        live = LiveBytes(gradients)
        with live:
            own = giving_back(self, *gradients)
        row = sum(x[0].nbytes for x in gradients)
        seen["counted"] = len(gradients[0]) + live.most / row
        return own

    model = build("llama")
    with (
        patch.object(choose, "plan_for", plan_for),
        patch.object(Exchange, "give_back", give_back),
        patch.object(shares, "split_slots", lambda *_, **__: parts),
    ):
        rows = pt.sequence_logprobs(model, packed, recompute="auto", group=group).logprobs
        torch.cat(rows).sum().backward()
    return seen["counted"], seen["planned"]


def on_rank(rank: int, folder: Path) -> dict[Any, Any]:
    """Results, or tracebacks."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "cp"))
    if ranks > 2:
        group = mesh["cp"].get_group()
        return {name: tried(_run, case, group, rank) for name, case in WIDE_CASES.items()}
    group = dist.group.WORLD
    asked = asked_for(CASES, QUICK)
    results: dict[Any, Any] = {name: tried(_run, CASES[name], group, rank) for name in asked}
    if asked_for(["values"], []):
        results["values"] = tried(values_per_token, "fsdp2", FORESTS["ragged"](0).sequences, "auto")
    for name in asked_for(PEAKS, QUICK_PEAKS):
        results["peak", name] = tried(_peak, *PEAKS[name], group)
    for owner in asked_for(OWNERS, QUICK_OWNERS):
        results["rows", owner] = tried(_rows_at_once, owner, group)
    return results
