"""verl's distillation from a teacher's top k tokens, once per edge.

verl gives its loss function whole logits, and gets numbers per token. Here a measure gives it the
logits of a block of edges and the teacher's rows for them. Copies of an edge may have different
rows, as a server rounds differently in another batch. So an edge is measured once per distinct row.

Legend: B sequences, n tokens of one, R tokens of all, N scored copies of E edges, M the most
distinct rows of an edge, k the teacher's tokens, r edges of a block, Q numbers of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.ulysses import (
    get_ulysses_sequence_parallel_group,
    set_ulysses_sequence_parallel_group,
)

from prefixtree.kernels.lm_head.measures import MeasuredEdges
from prefixtree.packing.layout import PackedForest
from prefixtree.scoring.edges import SequenceScores

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


def wants_topk(data: TensorDict) -> bool:
    """Whether the batch asks for a loss of the teacher's top k."""
    return bool(tu.get_non_tensor_data(data=data, key="distillation_use_topk", default=False))


class TopK:
    """The loss of a batch's edges, as verl's engine asks its loss function for it.

    Args:
        loss_function: verl's, called with student_logits [1, r, V], which returns name -> [1, r].
        data: teacher_ids and teacher_logprobs jagged [B, n, k]: row t is the distribution of token
            t + 1.
        packed: the batch's forest, on the device.
        loss_mask: bool [n] per sequence, the scored tokens. Default: all.
    """

    def __init__(
        self,
        loss_function: Callable[..., Any],
        data: TensorDict,
        packed: PackedForest,
        loss_mask: Sequence[np.ndarray] | None,
    ) -> None:
        self._loss = loss_function
        self._ids = data["teacher_ids"].values().to(packed.device)
        self._logprobs = data["teacher_logprobs"].values().to(packed.device)
        self._names: list[str] = []
        edges = packed.edges(loss_mask)
        number = torch.full((packed.num_tokens,), -1, device=packed.device)
        number[edges.token] = torch.arange(len(edges.token), device=packed.device)
        edge_of = packed.unpack(number)
        if loss_mask is not None:
            edge_of = [
                torch.where(torch.from_numpy(mask).to(e.device), e, -1)
                for e, mask in zip(edge_of, loss_mask, strict=True)
            ]
        # -1 for the first token of a sequence, which has no predictor
        flat = torch.cat([torch.cat([e.new_full((1,), -1), e[1:]]) for e in edge_of])
        copies = (flat >= 0).nonzero()[:, 0]
        of_copies, self._rows = _distinct(flat[copies], copies - 1, self._ids, self._logprobs)
        used = self._ids[self._rows[self._rows >= 0]]
        self._largest = int(used.max()) if used.numel() else -1
        flat = torch.zeros_like(flat).index_copy_(0, copies, of_copies)
        self._which = [w[1:] for w in flat.split([len(e) for e in edge_of])]

    def measure(self, logits: torch.Tensor, edges: MeasuredEdges) -> torch.Tensor:
        """Measures edges: [r, M Q], Q numbers per distinct row; 0 for rows that an edge lacks."""
        if self._largest >= logits.shape[1]:
            raise ValueError(
                f"teacher_ids names token {self._largest}, and the actor has {logits.shape[1]}: "
                "the teacher's lm_head is padded further; lower distillation_loss.topk until its "
                "top k holds no padding, or resize the teacher (resize_token_embeddings)"
            )
        outputs: list[torch.Tensor] = []
        for row in self._rows[edges.edge].unbind(1):
            if not outputs:
                outputs.append(self._of(logits, row))
                continue
            has = (row >= 0).nonzero()[:, 0]
            values = self._of(logits[has], row[has])
            outputs.append(torch.zeros_like(outputs[0]).index_copy(0, has, values))
        return torch.cat(outputs, 1)

    def outputs(
        self, scores: SequenceScores, sequences: Sequence[int]
    ) -> dict[str, list[torch.Tensor]]:
        """The loss's entries of verl's output: [n - 1] per sequence, 0 where nothing is scored."""
        assert scores.measured is not None
        of_copies = []
        for values, sequence in zip(scores.measured, sequences, strict=True):
            row = self._which[sequence]
            per_row = values.unflatten(1, (self._rows.shape[1], -1))
            index = row[:, None, None].expand(-1, 1, per_row.shape[2])
            of_copies.append(per_row.gather(1, index)[:, 0])
        return {
            name: [values[:, at] for values in of_copies] for at, name in enumerate(self._names)
        }

    def _of(self, logits: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """Computes the loss function for the teacher's rows int64 [r]: [r, Q]."""
        offsets = torch.tensor([0, len(row)], device=row.device)
        teacher = {
            name: torch.nested.nested_tensor_from_jagged(values[row], offsets)
            for name, values in (("teacher_ids", self._ids), ("teacher_logprobs", self._logprobs))
        }
        with _all_rows():
            numbers = self._loss(student_logits=logits[None], data=teacher)
        self._names = list(numbers)
        return torch.stack([value[0].to(logits.dtype) for value in numbers.values()], 1)


@contextmanager
def _all_rows() -> Iterator[None]:
    """A context in which verl's loss takes all rows given: Ulysses would cut out a rank's share."""
    group = get_ulysses_sequence_parallel_group()
    set_ulysses_sequence_parallel_group(None)
    try:
        yield
    finally:
        set_ulysses_sequence_parallel_group(group)


def _distinct(
    edge: torch.Tensor, row: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers the distinct teacher's rows, ids and logprobs [R, k], of every edge.

    Args:
        edge, row: int64 [N], those of every scored copy; every edge has one.

    Returns:
        int64 [N], the number of a copy's row among its edge's; and int64 [E, M], one copy's row for
            each number, -1 where an edge has fewer.
    """
    if len(edge) == 0:
        return edge, edge.new_zeros((0, 1))
    content = torch.cat([ids[row].long(), logprobs[row].double().view(torch.int64)], 1)
    # brings equal rows together; those that are not equal are told apart below
    power = _ODD * (2 * torch.arange(content.shape[1], device=edge.device) + 1)
    order = (content * power).sum(1).argsort(stable=True)
    order = order[edge[order].argsort(stable=True)]
    edge, content = edge[order], content[order]
    new_edge = torch.ones_like(edge, dtype=torch.bool)
    new_edge[1:] = edge[1:] != edge[:-1]
    new = new_edge.clone()
    new[1:] |= (content[1:] != content[:-1]).any(1)
    # the number among all distinct rows, less those before the edge's first
    number = new.cumsum(0) - 1
    number = number - number[new_edge][new_edge.cumsum(0) - 1]
    rows = edge.new_full((int(edge[-1]) + 1, int(number.max()) + 1), -1)
    rows[edge[new], number[new]] = row[order][new]
    return torch.empty_like(number).index_copy_(0, order, number), rows
