"""Exchanges of rows between the ranks of a process group.

Every sum over ranks is taken in the order of ranks, so results are the same in every run.
torch.distributed is imported where a function first needs it. Legend: n ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def gather_rows(
    own: torch.Tensor, counts: Sequence[int], index: int, group: ProcessGroup
) -> torch.Tensor:
    """Gives every rank the rows of all ranks, [sum(counts), C], rank by rank.

    own is [counts[index], C], index this rank's place in the group. All ranks must call this, and
    run its backward.
    """
    # the gradient of a row is the sum of the gradients of all ranks' backwards, so each rank may
    # compute another loss; the parameters' gradients, averaged over the ranks, are those of the
    # mean of the losses
    out: torch.Tensor = _GatherRows.apply(own, list(counts), index, group)
    return out


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own: torch.Tensor, counts: list[int], index: int, group: ProcessGroup
    ) -> torch.Tensor:
        ctx.counts, ctx.index, ctx.group = counts, index, group
        ranks = len(counts)
        return all_to_all(own.repeat(ranks, 1), [counts[index]] * ranks, counts, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        ranks, own = len(ctx.counts), ctx.counts[ctx.index]
        of_ranks = all_to_all(gradient, ctx.counts, [own] * ranks, ctx.group)
        return of_ranks.view(ranks, own, gradient.shape[1]).sum(0), None, None, None


def all_to_all(
    rows: torch.Tensor, sent: list[int], received: list[int], group: ProcessGroup
) -> torch.Tensor:
    """Sends rows [sum(sent), ...] to ranks, and gives [sum(received), ...], rank by rank."""
    out, on_its_way = start_all_to_all(rows, sent, received, group)
    on_its_way.wait()
    return out


def start_all_to_all(
    rows: torch.Tensor, sent: list[int], received: list[int], group: ProcessGroup
) -> tuple[torch.Tensor, Any]:
    """Starts an `all_to_all` that overlaps with what follows: the received rows, and a handle.

    wait() on the handle, which holds the sent rows, before the result is read. On a GPU the stream
    waits, not the host.
    """
    import torch.distributed as dist

    out = rows.new_empty(sum(received), *rows.shape[1:])
    work: Any = dist.all_to_all_single(
        out, rows.contiguous(), received, sent, group=group, async_op=True
    )
    return out, work


def arrival(owner: np.ndarray, num_ranks: int) -> tuple[np.ndarray, list[int]]:
    """The row of each item after `gather_rows`, int64 [U], and how many items each rank holds.

    owner [U] integers is the rank that holds each item; it holds its items in ascending order.
    """
    row = np.empty(len(owner), np.int64)
    row[np.argsort(owner, kind="stable")] = np.arange(len(owner))
    return row, np.bincount(owner, minlength=num_ranks).tolist()
