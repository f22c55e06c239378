"""Ranks of a group agree on a call before it begins, or all of them refuse it.

A rank that raised alone, or that computed something else, would leave the others waiting for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_T = TypeVar("_T")
_REFUSED, _READY = 0, 1


def num_ranks(group: Any) -> int:
    """The number of ranks of a process group that this rank is a member of.

    Raises:
        TypeError: anything else, with the way to a group.
        ValueError: a group without this rank.
    """
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
    prepare: Callable[[], tuple[_T, Mapping[str, int]]],
    facts: Mapping[str, str],
) -> _T:
    """Prepares a call on every rank, and goes on only if it is the same call on all of them.

    It costs one all-gather of a few numbers, which waits for the slowest rank.

    Args:
        group: the process group. All its ranks must call this.
        device: where the group's collectives take tensors.
        prepare: prepares the call, and gives a digest (`digest`) by the name of each fact. It may
            raise, but must not communicate.
        facts: name of each fact that must be the same on all ranks -> the message of the error
            where it is not; "{ranks}" stands for the ranks that differ from the group's first.

    Returns:
        What `prepare` returned.

    Raises:
        ValueError: on every rank, a fact that differs.
        RuntimeError: on the other ranks, if `prepare` raised on one. This rank's error is raised as
            it is.
    """
    import torch.distributed as dist

    problem: Exception | None = None
    numbers = np.zeros(1 + len(facts), np.int64)
    try:
        prepared, digests = prepare()
        numbers[0] = _READY
        for at, name in enumerate(facts, 1):
            numbers[at] = digests[name]
    except Exception as raised:
        problem = raised
        numbers[0] = _REFUSED
    ranks = dist.get_world_size(group)
    mine = torch.from_numpy(numbers).to(device)
    of_ranks = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(of_ranks, mine, group=group)
    found = torch.stack(of_ranks).cpu().numpy()
    if (found[:, 0] == _REFUSED).any():
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
    for at, message in enumerate(facts.values(), 1):
        others = np.flatnonzero(found[:, at] != found[0, at]).tolist()
        if others:
            raise ValueError(message.format(ranks=", ".join(map(str, others))))
    return prepared


def digest(*values: Any) -> int:
    """64 bits that tell values apart: arrays by dtype, shape and bytes, others by their repr."""
    found = hashlib.blake2b(digest_size=8)
    for value in values:
        if isinstance(value, np.ndarray):
            found.update(f"{value.dtype}{value.shape}".encode())
            found.update(np.ascontiguousarray(value).data)
        else:
            found.update(repr(value).encode() + b"\0")
    return int.from_bytes(found.digest(), "big", signed=True)
