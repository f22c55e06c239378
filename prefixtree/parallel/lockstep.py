"""Ranks that run a sharded model in lockstep, each with forwards and backwards of its own number.

Sharded parameters are gathered by all ranks at once, in each forward and in each backward. So all
ranks must run forwards and backwards in one order; a rank that has none when others run one runs a
dummy. torch.distributed is imported where it is first needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

FORWARD, BACKWARD = "F", "B"
# what a rank that cannot run tells the others
_FAILED = -1


def common_order(orders: Sequence[str]) -> str:
    """An order of forwards and backwards in which all ranks can run, with dummies between theirs.

    Wherever any rank's next run is a forward, all run one; so a rank has a dummy's graph to run
    backward wherever it has no backward of its own. Dummies that are left run backward at the end.

    Args:
        orders: of each rank, at least one, "F" for a forward and "B" for a backward.
    """
    places = [0] * len(orders)
    common = []
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        upcoming = [order[place : place + 1] for place, order in zip(places, orders, strict=True)]
        kind = FORWARD if FORWARD in upcoming else BACKWARD
        common.append(kind)
        places = [place + (own == kind) for place, own in zip(places, upcoming, strict=True)]
    without = max(order.count(FORWARD) - order.count(BACKWARD) for order in orders)
    left = common.count(FORWARD) - common.count(BACKWARD) - without
    return "".join(common) + BACKWARD * left


def agree_on_order(groups: Sequence[Any], device: torch.device, order: str | None) -> str | None:
    """The order in which all ranks of some groups run.

    Args:
        groups: process groups, in an order that all ranks share; a mesh has one per dimension.
        device: where their collectives take tensors.
        order: of this rank; None where it cannot run.

    Returns:
        The common order; None where any rank cannot run.
    """
    import torch.distributed as dist

    for group in groups:
        codes = [_FAILED] if order is None else [*order.encode()]
        most = torch.tensor([len(codes)], device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        mine = torch.zeros(int(most), dtype=torch.int64, device=device)
        mine[: len(codes)] = torch.tensor(codes, dtype=torch.int64, device=device)
        of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(of_ranks, mine, group=group)
        found = torch.stack(of_ranks).tolist()
        if any(_FAILED in codes for codes in found):
            order = None
        else:
            order = common_order([bytes(c for c in codes if c).decode() for codes in found])
    return order
