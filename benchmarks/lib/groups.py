"""Ranks of a group that gather all keys and values; what ranks exchange, counted or left out.

`gathering()` makes `sequence_logprobs(group=)` do what torch's context parallelism and others with
an all-gather do: every rank has some chunks of the queries, and gets all keys and values. The
kernels, the mask and the rest of the model are ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from prefixtree import PackedForest
from prefixtree.packing.copies import RowRuns
from prefixtree.parallel import heads, ranks, transport
from prefixtree.parallel.attention import PartMask
from prefixtree.parallel.ledger import CellExchanges
from prefixtree.parallel.states import part_mask
from prefixtree.planning.parts import Parts
from prefixtree.scoring import in_groups as shares

# of queries in the kernels
_TILE = 128


def chunk_owner(num_tokens: int, ranks: int) -> np.ndarray:
    """int64 [T], the rank of each packed token: two equal chunks per rank, the r-th and the r-th
    from the end, which balances a chain."""
    owner = np.concatenate([np.arange(ranks), np.arange(ranks)[::-1]])
    tile = _TILE if num_tokens >= 16 * _TILE * ranks else 1
    tiles = -(-num_tokens // tile)
    chunk = np.arange(tiles) * len(owner) // tiles
    return np.repeat(owner[chunk], tile)[:num_tokens]


class GatheredParts(Parts):
    """Every part borrows all tokens that it does not own."""

    def _init(
        self, packed: PackedForest, start: np.ndarray, part: np.ndarray, num_parts: int
    ) -> None:
        super()._init(packed, start, part, num_parts)
        border, owner = self.runs
        pieces = np.stack([border[:-1], np.diff(border), owner], 1)
        self._pieces = np.tile(pieces, (num_parts, 1))
        self._ptr = np.arange(num_parts + 1) * len(pieces)
        self._importer = np.repeat(np.arange(num_parts), len(pieces))


class GatherExchange:
    """The exchange of one rank: an all-gather of keys and values, and a reduce-scatter of their
    gradients in float32. Ranks with fewer tokens than others send padding."""

    def __init__(self, parts: Parts, index: int, group: Any) -> None:
        self.part, self._index, self._group = parts[index], index, group
        self._most = int(parts.num_own_tokens.max())
        border, owner = parts.runs
        device = parts.packed.device
        self._of_ranks = [
            RowRuns(border[:-1][owner == r], np.diff(border)[owner == r], device)
            for r in range(len(parts))
        ]

    def _pieces(
        self, rank: int, numbers: torch.Tensor, both: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Keys and values [own rows, Hk, D] of a rank in its row of a buffer."""
        sizes = [self._most * x[0].numel() for x in both]
        return tuple(
            piece.view(self._most, *x.shape[1:])[: self._of_ranks[rank].count]
            for x, piece in zip(both, numbers.split(sizes), strict=True)
        )

    def _room(self, both: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        size = self._most * sum(x[0].numel() for x in both)
        return both[0].new_zeros(len(self._of_ranks), size, dtype=dtype)

    def import_rows(
        self, own_key: torch.Tensor, own_value: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        own = own_key, own_value
        numbers = self._room(own, own_key.dtype)
        mine = self._pieces(self._index, numbers[self._index], own)
        for x, piece in zip(own, mine, strict=True):
            piece.copy_(x)
        all_gather(numbers, self._index, self._group)
        joined = tuple(x.new_empty(self.part.num_rows, *x.shape[1:]) for x in own)
        for rank, rows in enumerate(self._of_ranks):
            pieces = self._pieces(rank, numbers[rank], own)
            for out, piece in zip(joined, pieces, strict=True):
                rows.put(out, piece)
        return joined

    def give_back(self, dkey: torch.Tensor, dvalue: torch.Tensor) -> tuple[torch.Tensor, ...]:
        both = dkey, dvalue
        numbers = self._room(both, torch.promote_types(dkey.dtype, torch.float32))
        for rank, rows in enumerate(self._of_ranks):
            pieces = self._pieces(rank, numbers[rank], both)
            for x, piece in zip(both, pieces, strict=True):
                rows.take(x, piece)
        mine = reduce_scatter(numbers, self._index, self._group)
        return self._pieces(self._index, mine, both)


def all_gather(numbers: torch.Tensor, index: int, group: Any) -> None:
    """Fills [n, ...], of which this rank has the row `index`, in place."""
    # renamed in torch 2.13, where the old name warns
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(numbers.flatten(), numbers[index].clone(), group=group)


def reduce_scatter(numbers: torch.Tensor, index: int, group: Any) -> torch.Tensor:
    """The sum over the ranks of row `index` of [n, ...]."""
    out = torch.empty_like(numbers[index])
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(out, numbers.flatten(), group=group)
    return out


@contextmanager
def gathering() -> Iterator[None]:
    """Within it, `group_mode="parts"` gathers all keys and values, whatever is borrowed."""

    def split(packed: PackedForest, border: Any, ranks: int, *_: Any, **__: Any) -> Parts:
        return GatheredParts(packed, chunk_owner(packed.num_tokens, ranks), ranks)

    def mask(exchanges: CellExchanges, by_heads: bool) -> PartMask:
        ledger = exchanges.ledger
        exchange: Any = GatherExchange(ledger.division.parts, ledger.rank, ledger.group)
        return PartMask(exchange.part, lambda module: exchange, part_mask(exchanges).states_of)

    with patch.object(shares, "split_slots", split), patch.object(shares, "part_mask", mask):
        yield


# ---- what travels --------------------------------------------------------------------------------


class _Done:
    def wait(self) -> None:
        pass


@contextmanager
def wire(cut: bool = False) -> Iterator[list[int]]:
    """Notes the bytes that this rank gets of others in layers and for the scores.

    Args:
        cut: whether nothing is moved. In the place of what should have arrived are own rows, so
            results are wrong, and ranks wait for nobody. (They are numbers, because a GPU that
            multiplies NaN draws less power, and runs faster.)
    """
    arrived: list[int] = []
    start, gather, scatter = ranks.start_all_to_all, all_gather, reduce_scatter

    def started(rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> Any:
        foreign = sum(received) - received[dist.get_rank(group)]
        row = rows[:1].numel() if rows.ndim > 1 and len(rows) else 1
        arrived.append(foreign * row * rows.element_size())
        if not cut:
            return start(rows, sent, received, group)
        count = sum(received)
        if not len(rows):
            return rows.new_zeros(count, *rows.shape[1:]), _Done()
        own = rows.detach().repeat(-(-count // len(rows)), *[1] * (rows.ndim - 1))
        return own[:count], _Done()

    def gathered(numbers: torch.Tensor, index: int, group: Any) -> None:
        arrived.append((len(numbers) - 1) * numbers[0].nbytes)
        if cut:
            numbers.copy_(numbers[index].clone().expand_as(numbers))
        else:
            gather(numbers, index, group)

    def scattered(numbers: torch.Tensor, index: int, group: Any) -> torch.Tensor:
        arrived.append((len(numbers) - 1) * numbers[0].nbytes)
        return numbers[index].clone() if cut else scatter(numbers, index, group)

    with ExitStack() as stack:
        for module in (heads, ranks, transport):
            stack.enter_context(patch.object(module, "start_all_to_all", started))
        stack.enter_context(patch(f"{__name__}.all_gather", gathered))
        stack.enter_context(patch(f"{__name__}.reduce_scatter", scattered))
        yield arrived
