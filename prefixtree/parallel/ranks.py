"""What ranks of a process group exchange: borrowed keys and values, their gradients, and scores.

Every sum over ranks is taken in the order of ranks, so results are the same in every run.
torch.distributed is imported where a function first needs it. Legend: t own tokens, K rows of the
part, n ranks, Hk kv heads, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from prefixtree.packing.parts import Parts
from prefixtree.parallel.attention import PartMask

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class RankExchange:
    """The exchange of one rank: one all-to-all-v per forward of a layer, and one per backward.

    All layers may share it, as it keeps nothing. Part r of `parts` belongs to the rank that is the
    group's r-th. All ranks must call it as often as one another, in the same order.

    Args:
        parts: the forest divided among the ranks of the group.
        index: this rank's place in the group.
        group: the process group.
    """

    def __init__(self, parts: Parts, index: int, group: ProcessGroup) -> None:
        self.part = parts[index]
        self._group = group
        # known to all ranks
        self._is_needed = bool(parts.borrowed.any())
        exchange = self.part.exchange
        self._sent, self._received = exchange.send_counts.tolist(), exchange.receive_counts.tolist()

    def borrow(
        self, own_key: torch.Tensor, own_value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._is_needed:
            return own_key, own_value
        key, value = own_key.shape[1:], own_value.shape[1:]
        own = torch.cat([own_key.flatten(1), own_value.flatten(1)], 1)
        lent = own.index_select(0, self._rows.sent)
        rows = own.new_empty(self.part.num_rows, own.shape[1])
        rows[self._rows.own] = own
        rows[self._rows.received] = all_to_all(lent, self._sent, self._received, self._group)
        # views: the kernels take any strides
        keys, values = rows.split([key.numel(), value.numel()], 1)
        return keys.unflatten(1, key), values.unflatten(1, value)

    def give_back(
        self, dkey: torch.Tensor, dvalue: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._is_needed:
            return dkey, dvalue
        key, value = dkey.shape[1:], dvalue.shape[1:]

        def taken(rows: torch.Tensor) -> torch.Tensor:
            both = [x.index_select(0, rows).flatten(1) for x in (dkey, dvalue)]
            return torch.cat(both, 1)

        own, borrowed = taken(self._rows.own), taken(self._rows.received)
        # whoever lends or borrows has them in float32 already
        borrowed = borrowed.to(torch.promote_types(borrowed.dtype, torch.float32))
        returned = all_to_all(borrowed, self._received, self._sent, self._group)
        pieces = (x.split(self._sent) for x in (self._rows.sent, returned))
        for rows, gradient in zip(*pieces, strict=True):
            if len(rows):
                # no row stands twice in what one borrower returns
                own.index_add_(0, rows, gradient)
        keys, values = own.split([key.numel(), value.numel()], 1)
        return keys.unflatten(1, key), values.unflatten(1, value)

    @cached_property
    def _rows(self) -> _Rows:
        return _Rows(self.part.mask.device, self.part)


class _Rows:
    """Row numbers of a part, int64 on a device: an indexed write takes nothing narrower."""

    def __init__(self, device: torch.device, part: Any) -> None:
        tables = part.tables(device)
        self.own = tables.own_rows.long()
        self.sent = tables.send_rows.long()
        self.received = tables.receive_rows.long()


def rank_mask(parts: Parts, index: int, group: ProcessGroup) -> PartMask:
    """What a model's forward takes in the place of the mask on one rank of a group."""
    exchange = RankExchange(parts, index, group)
    return PartMask(exchange.part, lambda module: exchange)


def gather_rows(
    own: torch.Tensor, counts: Sequence[int], index: int, group: ProcessGroup
) -> torch.Tensor:
    """Gives every rank the rows of all ranks.

    The gradient of a row is the sum, over the ranks, of what each rank's backward gives it. So each
    rank may compute another loss, and the parameters' gradients, averaged over the ranks, are those
    of the mean of the losses.

    Args:
        own: [counts[index], C], this rank's rows.
        counts: the rows of each rank.
        index: this rank's place in the group.
        group: the process group. All ranks must call this, and run its backward.

    Returns:
        [sum(counts), C], rank by rank.
    """
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
    """Sends rows to all ranks of a group, and receives rows of each.

    Args:
        rows: [sum(sent), C], rank by rank.
        sent: the rows for each rank.
        received: the rows of each rank.
        group: the process group.

    Returns:
        [sum(received), C], rank by rank.
    """
    import torch.distributed as dist

    out = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


def arrival(owner: np.ndarray, num_ranks: int) -> tuple[np.ndarray, list[int]]:
    """Where items that ranks hold stand once `gather_rows` has gathered them.

    Args:
        owner: [U] integers, the rank that holds each item; a rank holds its items in ascending
            order.
        num_ranks: n.

    Returns:
        int64 [U], the row of each item; and the number of items of each rank.
    """
    row = np.empty(len(owner), np.int64)
    row[np.argsort(owner, kind="stable")] = np.arange(len(owner))
    return row, np.bincount(owner, minlength=num_ranks).tolist()
