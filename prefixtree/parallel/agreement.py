"""Ranks of a group agree on a call before it begins, or all of them refuse it. Ranks that shard a
model agree on an order of their forwards and backwards.

A rank that raised alone, or that computed something else, would leave the others waiting for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from prefixtree.planning import schedule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_T = TypeVar("_T")
_REFUSED, _READY = 0, 1
# most differences that a message names
_NAMED = 4

#: Values that must be the same on all ranks, by name: arrays, or objects with a repr.
Parts = Mapping[str, Any]


def num_ranks(group: Any) -> int:
    """Counts the ranks of a process group that this rank is a member of."""
    import torch.distributed as dist

    if isinstance(group, dist.ProcessGroup):
        if dist.get_rank(group) < 0:
            raise ValueError("this rank is no member of group: expected a group that it belongs to")
        return dist.get_world_size(group)
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "this rank is no member of group: torch.distributed.new_group gave it no process "
            "group; expected a group that it belongs to"
        )
    raise TypeError(
        f"group must be a torch.distributed process group, got {type(group).__name__}; of a device "
        'mesh take a dimension: mesh["cp"].get_group()'
    )


def agree(
    group: ProcessGroup,
    device: torch.device,
    prepare: Callable[[], tuple[_T, Mapping[str, Parts]]],
    facts: Mapping[str, str],
) -> _T:
    """Prepares a call on every rank, and goes on only if it is the same call on all of them.

    One all-gather of a few numbers waits for the slowest rank; all ranks of the group must call.

    Args:
        device: where the group's collectives take tensors.
        prepare: prepares the call, and gives the parts of each fact by its name. It may raise, but
            must not communicate.
        facts: name of each fact that must be the same on all ranks -> the beginning of the error's
            message. The message ends with the ranks that differ from the group's first, and in
            which parts.

    Raises:
        ValueError: on every rank, a fact that differs.
        RuntimeError: on the other ranks, if `prepare` raised on one. This rank's error is raised as
            it is.
    """
    import torch.distributed as dist

    problem: Exception | None = None
    numbers = np.zeros(1 + len(facts), np.int64)
    try:
        prepared, parts = prepare()
        numbers[0] = _READY
        for at, name in enumerate(facts, 1):
            numbers[at] = digest(*parts[name].values())
    except Exception as raised:
        problem = raised
        numbers[0] = _REFUSED
    ranks = dist.get_world_size(group)
    mine = torch.from_numpy(numbers).to(device)
    of_ranks = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(of_ranks, mine, group=group)
    rank_numbers = torch.stack(of_ranks).cpu().numpy()
    if (rank_numbers[:, 0] == _REFUSED).any():
        messages: list[Any] = [None] * ranks
        said = None if problem is None else f"{type(problem).__name__}: {problem}"
        dist.all_gather_object(messages, said, group=group)
        if problem is not None:
            raise problem
        first = next(rank for rank, message in enumerate(messages) if message is not None)
        raise RuntimeError(
            f"rank {first} of the group refused this call, so no rank computes it: "
            f"{messages[first]}"
        )
    for at, (name, message) in enumerate(facts.items(), 1):
        others = np.flatnonzero(rank_numbers[:, at] != rank_numbers[0, at]).tolist()
        if others:
            raise ValueError(f"{message}; {_differences(group, parts[name], others)}")
    return prepared


def _differences(group: ProcessGroup, parts: Parts, others: list[int]) -> str:
    """Names how `others` differ from the group's first rank; a collective call."""
    import torch.distributed as dist

    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    mine = {name: (digest(value), _text(value)) for name, value in parts.items()}
    dist.all_gather_object(of_ranks, mine, group=group)
    first, other = of_ranks[0], of_ranks[others[0]]
    names = [name for name in first | other if first.get(name) != other.get(name)]
    named = [_difference(name, first.get(name), other.get(name)) for name in names[:_NAMED]]
    if len(names) > _NAMED:
        named.append(f"{len(names) - _NAMED} more")
    said = f"rank {others[0]} of the group differs from its rank 0 in {', '.join(named)}"
    return said if len(others) == 1 else f"{said}; so do ranks {', '.join(map(str, others[1:]))}"


def _difference(name: str, *found: tuple[int, str | None] | None) -> str:
    """Names one difference, found on rank 0 and on another."""
    first, other = ("nothing" if one is None else one[1] for one in found)
    return name if first is None or other is None else f"{name} ({other}, on rank 0 {first})"


def _text(value: Any) -> str | None:
    """The repr of a value, if a line can show it."""
    return None if isinstance(value, np.ndarray) else repr(value)[:80]


def digest(*values: Any) -> int:
    """Hashes values to 64 bits: arrays by dtype, shape and bytes, others by their repr."""
    hasher = hashlib.blake2b(digest_size=8)
    for value in values:
        if isinstance(value, np.ndarray):
            hasher.update(f"{value.dtype}{value.shape}".encode())
            hasher.update(np.ascontiguousarray(value).data)
        else:
            hasher.update(repr(value).encode() + b"\0")
    return int.from_bytes(hasher.digest(), "big", signed=True)


# ---- an order of forwards and backwards ----------------------------------------------------------

FORWARD, BACKWARD = "F", "B"
# number that a rank that cannot run sends to the others
_FAILED = -1


def order_of(events: schedule.Schedule) -> str:
    """The forwards and backwards of a rank, "F" and "B", as `common_order` takes them."""
    letters = {
        schedule.FORWARD: FORWARD,
        schedule.KEEP: FORWARD,
        schedule.BACKWARD: BACKWARD,
    }
    return "".join(letters.get(event.kind, "") for event in events)


def among_ranks(events: schedule.Schedule, order: str) -> schedule.Schedule:
    """Adds dummies to a rank's schedule where others run in the common order and it does not."""
    trains = any(event.kind == schedule.BACKWARD for event in events)
    dummies = {FORWARD: schedule.KEEP if trains else schedule.FORWARD, BACKWARD: schedule.BACKWARD}
    upcoming, events_with_dummies = list(order), list[schedule.Event]()
    for event in events:
        if order and (own := order_of([event])):
            while (letter := upcoming.pop(0)) != own:
                events_with_dummies.append(schedule.Event(dummies[letter], schedule.DUMMY))
        events_with_dummies.append(event)
    return events_with_dummies + [
        schedule.Event(dummies[letter], schedule.DUMMY) for letter in upcoming
    ]


def common_order(orders: Sequence[str]) -> str:
    """Finds an order, of "F" forward and "B" backward, in which all ranks can run, with dummies."""
    # wherever any rank's next run is a forward, all run one, so a rank has a dummy's graph to run
    # backward wherever it has no backward of its own; dummies that are left run backward at the end
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
    """The order in which all ranks of some groups run; None if any rank cannot run.

    groups are in an order that all ranks share (a mesh has one per dimension); `order` is this
    rank's, None where it cannot run.
    """
    import torch.distributed as dist

    for group in groups:
        codes = [_FAILED] if order is None else [*order.encode()]
        longest = torch.tensor([len(codes)], device=device)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
        mine = torch.zeros(int(longest), dtype=torch.int64, device=device)
        mine[: len(codes)] = torch.tensor(codes, dtype=torch.int64, device=device)
        of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(of_ranks, mine, group=group)
        rank_codes = torch.stack(of_ranks).tolist()
        if any(_FAILED in codes for codes in rank_codes):
            order = None
        else:
            order = common_order([bytes(c for c in codes if c).decode() for codes in rank_codes])
    return order
