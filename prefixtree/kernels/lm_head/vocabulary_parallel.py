"""Log-probabilities of an lm_head whose rows are spread over ranks, and their gradients.

No rank sees a whole row of logits. The ranks tell each other, per row, the largest logit, the sum
of exponentials, and the target's logit, which one of them has.

Legend: R rows, W vocabulary entries of this rank, d hidden size, C columns of the result: log p, or
log p and the entropy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from prefixtree.kernels.lm_head import eager as lm_head
from prefixtree.kernels.lm_head.eager import LogitRule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class VocabularySlice:
    """The part of the vocabulary that this rank scores.

    Every method is a collective: all ranks of the group call it with the same rows. Its functions
    `score` and `gradient` stand for those of `kernels.lm_head.eager`.

    Attributes:
        group: the ranks that together have the whole vocabulary.
        first: the token id of this rank's first row of the weight.
        widest: the number of rows of the largest slice; every rank has at least one.
    """

    group: ProcessGroup
    first: int
    widest: int

    def score(
        self,
        x: torch.Tensor,
        target: torch.Tensor,
        temperature: torch.Tensor,
        rule: LogitRule,
        out: torch.Tensor,
    ) -> None:
        """Writes out [R, C], in whose dtype it computes: log softmax(rule(x) / temperature) at the
        targets; the entropy.

        Args:
            x: [R, W], this rank's columns, overwritten.
            target: int64 [R], ids of the whole vocabulary.
            temperature: float32 [R].
            rule: the family's change to the logits.
            out: float32 or float64, the same on every rank.
        """
        z = self._shifted(rule.apply(x.to(out.dtype)) / temperature[:, None])
        column, is_mine = self._columns(target, z.shape[1])
        p = z.exp()
        sums = [torch.where(is_mine, z.gather(1, column), 0), p.sum(-1, keepdim=True)]
        if out.shape[1] == 2:
            sums.append(p.mul_(z.clamp_(min=lm_head.LEAST)).sum(-1, keepdim=True))
        total = self.summed(torch.cat(sums, 1))
        log_sum = total[:, 1].log()
        out[:, 0] = total[:, 0] - log_sum
        if out.shape[1] == 2:
            out[:, 1] = log_sum - total[:, 2] / total[:, 1]

    def gradient(
        self,
        x: torch.Tensor,
        target: torch.Tensor,
        temperature: torch.Tensor,
        rule: LogitRule,
        out: torch.Tensor,
        grad: torch.Tensor,
        into: torch.Tensor,
    ) -> None:
        """Writes the gradient of x into [R, W], which may be x.

        Args:
            x: [R, W], this rank's columns.
            target: int64 [R], ids of the whole vocabulary.
            temperature: float32 [R].
            rule: the family's change to the logits.
            out: [R, C], what `score` wrote.
            grad: [R, C], the gradient of `out`, the same on every rank.
            into: [R, W].
        """
        logits = rule.apply(x.to(out.dtype))
        z = self._shifted(logits / temperature[:, None])
        z -= self.summed(z.exp().sum(-1, keepdim=True)).log()
        column, is_mine = self._columns(target, z.shape[1])
        hit = torch.where(is_mine, grad[:, :1], 0)
        lm_head.gradient_of_logprobs(logits, z, column, hit, temperature, rule, out, grad, into)

    def summed(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place."""
        from torch.distributed import ReduceOp, all_reduce

        all_reduce(partial, ReduceOp.SUM, group=self.group)
        return partial

    def _shifted(self, z: torch.Tensor) -> torch.Tensor:
        """z [R, W] less the largest of its row over all ranks, in place."""
        from torch.distributed import ReduceOp, all_reduce

        largest = z.amax(-1, keepdim=True)
        all_reduce(largest, ReduceOp.MAX, group=self.group)
        return z.sub_(largest)

    def _columns(self, target: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The column of each target, int64 [R, 1], and whether it is this rank's, bool [R, 1]; some
        column where it is not."""
        column = target[:, None] - self.first
        return column.clamp(0, width - 1), (column >= 0) & (column < width)
