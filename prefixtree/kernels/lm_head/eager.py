"""The way from an lm_head's output to log-probabilities, entropies and statistics, by torch.

Statistics are for logs and weights and have no gradients. They are computed from a chunk's logits
before these are scored. A call that asks for none pays nothing. If rows are spread over ranks, the
ranks tell each other, per row, the largest logit, the sum of exponentials and the target's logit.

Legend: R rows, V vocabulary, W vocabulary entries of this rank, d hidden size, C columns of the
result: log p, or log p and the entropy; K statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


#: Below it a log-probability is that of 0 in float64 too. A logit of -inf is clamped to it, and so
#: has no part in an entropy and its gradient, where 0 times -inf would be NaN.
LEAST = -1e4


@dataclass(frozen=True)
class LogitRule:
    """The rule from the lm_head's output x to logits: scale x, softcap tanh(scale x / softcap)."""

    scale: float = 1.0
    softcap: float = 0.0

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the logits, out of place."""
        x = x * self.scale if self.scale != 1.0 else x
        return self.softcap * torch.tanh(x / self.softcap) if self.softcap else x

    def grad(self, logits: torch.Tensor) -> torch.Tensor | float:
        """Computes d logits / d x from the logits."""
        if not self.softcap:
            return self.scale
        return self.scale * (1 - (logits / self.softcap) ** 2)


def score(
    x: torch.Tensor,
    target: torch.Tensor,
    temperature: torch.Tensor,
    rule: LogitRule,
    out: torch.Tensor,
) -> None:
    """Writes log p at targets, and the entropy, to out [R, C]; overwrites x [R, V]."""
    z = rule.apply(x.to(out.dtype))
    z /= temperature[:, None]
    # not z - logsumexp(z): between large logits that cancels
    z = torch.log_softmax(z, -1)
    out[:, 0] = z.gather(1, target[:, None])[:, 0]
    if out.shape[1] == 2:
        out[:, 1] = -z.exp().mul_(z.clamp_(min=LEAST)).sum(-1)


def gradient(
    x: torch.Tensor,
    target: torch.Tensor,
    temperature: torch.Tensor,
    rule: LogitRule,
    out: torch.Tensor,
    grad: torch.Tensor,
    into: torch.Tensor,
) -> None:
    """Writes the gradient of x into [R, V], which may be x; grad [R, C] is out's, in its dtype."""
    logits = rule.apply(x.to(out.dtype))
    log_p = torch.log_softmax(logits / temperature[:, None], -1)
    hit = grad[:, :1]
    gradient_of_logprobs(logits, log_p, target[:, None], hit, temperature, rule, out, grad, into)


def gradient_of_logprobs(
    logits: torch.Tensor,
    log_p: torch.Tensor,
    column: torch.Tensor,
    hit: torch.Tensor,
    temperature: torch.Tensor,
    rule: LogitRule,
    out: torch.Tensor,
    grad: torch.Tensor,
    into: torch.Tensor,
) -> None:
    """Writes `gradient`, given the log-probabilities of all columns, which are overwritten.

    logits [R, V] are before the temperature, in out's dtype as all but `into`. hit [R, 1], the
    gradient of log p at the target, goes to `column`; 0 if another rank has it.
    """
    p = torch.exp(log_p)
    # d logp / dz = onehot - p; d entropy / dz = -p (log p + entropy)
    dz = p * -grad[:, :1]
    if grad.shape[1] == 2:
        dz -= p * (log_p.clamp_(min=LEAST) + out[:, 1:]) * grad[:, 1:]
    dz.scatter_add_(1, column, hit)
    dz *= rule.grad(logits) / temperature[:, None]
    into.copy_(dz)


# float32 logits held at once in addition to the chunk's
_BLOCK = 1 << 25

#: Name -> the statistic [R] of logits / temperature, float32 [R, V], and targets, int64 [R, 1].
_STATISTICS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean_logits": lambda z, target: z.mean(-1),
    # argmax takes the first of equal logits
    "is_top1": lambda z, target: z.argmax(-1, keepdim=True).eq(target)[:, 0],
    # sum p^2 = sum e^(2 log p)
    "log_sum_sq_probs": lambda z, target: torch.logsumexp(2 * torch.log_softmax(z, -1), -1),
}


def check_statistics(names: Sequence[str]) -> tuple[str, ...]:
    """Checks names of statistics and returns them as a tuple; ValueError for others."""
    if isinstance(names, str) or (unknown := [n for n in names if n not in _STATISTICS]):
        came = repr(names) if isinstance(names, str) else ", ".join(map(repr, unknown))
        raise ValueError(
            f"return_statistics takes a sequence of names among {', '.join(_STATISTICS)}; "
            f"got {came}"
        )
    return tuple(names)


@torch.no_grad()
def write_statistics(
    x: torch.Tensor,
    target: torch.Tensor,
    temperature: torch.Tensor,
    rule: LogitRule,
    names: Sequence[str],
    out: torch.Tensor,
) -> None:
    """Writes K statistics of rule(x) / temperature to out, float32 [R, K]; x [R, V] stays."""
    if not names:
        return
    rows = max(1, _BLOCK // x.shape[1])
    for at in range(0, x.shape[0], rows):
        part = slice(at, at + rows)
        z = rule.apply(x[part].float()) / temperature[part, None]
        for column, name in enumerate(names):
            out[part, column] = _STATISTICS[name](z, target[part, None])


@dataclass(frozen=True)
class VocabularySlice:
    """The part of the vocabulary that this rank scores, with `score` and `gradient` of its own."""

    # each method is a collective: all ranks of the group call it with the same rows

    group: ProcessGroup
    # the token id of this rank's first row of the weight
    first: int
    # rows of the largest slice; each rank has at least one
    widest: int

    def score(
        self,
        x: torch.Tensor,
        target: torch.Tensor,
        temperature: torch.Tensor,
        rule: LogitRule,
        out: torch.Tensor,
    ) -> None:
        """Computes `score` for this rank's columns x [R, W]; out is alike on all ranks."""
        z = self._shifted(rule.apply(x.to(out.dtype)) / temperature[:, None])
        column, is_mine = self._columns(target, z.shape[1])
        p = z.exp()
        sums = [torch.where(is_mine, z.gather(1, column), 0), p.sum(-1, keepdim=True)]
        if out.shape[1] == 2:
            sums.append(p.mul_(z.clamp_(min=LEAST)).sum(-1, keepdim=True))
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
        """Computes `gradient` for this rank's columns [R, W]; grad is alike on all ranks."""
        logits = rule.apply(x.to(out.dtype))
        z = self._shifted(logits / temperature[:, None])
        z -= self.summed(z.exp().sum(-1, keepdim=True)).log()
        column, is_mine = self._columns(target, z.shape[1])
        hit = torch.where(is_mine, grad[:, :1], 0)
        gradient_of_logprobs(logits, z, column, hit, temperature, rule, out, grad, into)

    def summed(self, partial: torch.Tensor) -> torch.Tensor:
        """Sums over the ranks, in place."""
        from torch.distributed import ReduceOp, all_reduce

        all_reduce(partial, ReduceOp.SUM, group=self.group)
        return partial

    def _shifted(self, z: torch.Tensor) -> torch.Tensor:
        """Subtracts from z [R, W] the largest of its row over all ranks, in place."""
        from torch.distributed import ReduceOp, all_reduce

        largest = z.amax(-1, keepdim=True)
        all_reduce(largest, ReduceOp.MAX, group=self.group)
        return z.sub_(largest)

    def _columns(self, target: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Finds each target's column, int64 [R, 1], and whether it is this rank's, bool [R, 1]."""
        column = target[:, None] - self.first
        return column.clamp(0, width - 1), (column >= 0) & (column < width)
