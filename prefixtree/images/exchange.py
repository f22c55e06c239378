"""Features of images, each of which one rank of a group encodes.

Legend: n ranks, F features of the distinct images of one modality, N of these images, H their
columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from prefixtree.packing.copies import GatherIndex, gather
from prefixtree.parallel.ranks import all_to_all, arrival

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def holders_of(patches: Sequence[int], num_ranks: int) -> np.ndarray:
    """Divides images among ranks, int64 [N], largest first to the rank with the fewest patches."""
    load = np.zeros(num_ranks, np.int64)
    holder = np.empty(len(patches), np.int64)
    for image in np.argsort(-np.asarray(patches, np.int64), kind="stable"):
        holder[image] = load.argmin()
        load[holder[image]] += patches[image]
    return holder


class FeatureExchange:
    """The exchange of one modality: one all-to-all-v per forward, and one per backward.

    A feature goes once to each rank whose tokens show it. Its gradient is the sum over these ranks,
    in their order. All ranks must call it equally often, in the same order.

    Args:
        holder: int64 [F], the rank that computes each feature, in ascending order of features.
        shown: by rank, the features that its own tokens show, integers [*], also several times.

    Attributes:
        fetched: int64 [*], the features that come to this rank, in order of arrival.
    """

    def __init__(
        self,
        holder: np.ndarray,
        shown: Sequence[np.ndarray],
        index: int,
        group: ProcessGroup,
        device: torch.device,
    ) -> None:
        ranks = len(shown)
        row, held = arrival(holder, ranks)
        row_of_holder = row - np.repeat([0, *np.cumsum(held)[:-1]], held)[row]

        def wanted(features: np.ndarray) -> np.ndarray:
            distinct = np.unique(features)
            return distinct[np.argsort(holder[distinct], kind="stable")]

        sent = [features[holder[features] == index] for features in map(wanted, shown)]
        self.fetched = wanted(shown[index])
        self._sent = [len(features) for features in sent]
        self._received = np.bincount(holder[self.fetched], minlength=ranks).tolist()
        # a rank without images has the feature of a blank image
        count = max(1, held[index])
        rows = row_of_holder[np.concatenate(sent)].astype(np.int32)
        self._rows, self._group = GatherIndex(rows, count, device), group

    def fetch(self, features: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Brings features [held, H] to ranks that show them, [fetched, H]; differentiable once."""
        rows = gather(torch.cat([*features], 1), self._rows)
        rows = exchange_rows(rows, self._sent, self._received, self._group)
        return list(rows.split([x.shape[1] for x in features], 1))


def exchange_rows(
    rows: torch.Tensor, sent: list[int], received: list[int], group: ProcessGroup
) -> torch.Tensor:
    """Exchanges rows by `all_to_all`, differentiable once; all ranks must run its backward too."""
    out: torch.Tensor = _ExchangeRows.apply(rows, sent, received, group)
    return out


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return all_to_all(rows, sent, received, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return all_to_all(gradient, ctx.received, ctx.sent, ctx.group), None, None, None
