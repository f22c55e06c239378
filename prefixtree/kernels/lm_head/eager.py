"""From an lm_head's output to log-probabilities and entropies, and back, by torch's operations.

Legend: R rows, V vocabulary, C columns of the result: log p, or log p and the entropy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Below it a log-probability is that of 0 in float64 too: a logit of -inf, put here, has no part in
#: an entropy and its gradient, where 0 times -inf would be NaN.
LEAST = -1e4


@dataclass(frozen=True)
class LogitRule:
    """From the lm_head's output x to logits: softcap tanh(scale x / softcap); 0 for no softcap."""

    scale: float = 1.0
    softcap: float = 0.0

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """The logits, out of place."""
        x = x * self.scale if self.scale != 1.0 else x
        return self.softcap * torch.tanh(x / self.softcap) if self.softcap else x

    def grad(self, logits: torch.Tensor) -> torch.Tensor | float:
        """d logits / d x, from the logits."""
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
    """Writes out [R, C], in whose dtype it computes: log softmax(rule(x) / temperature) at the
    targets; the entropy.

    Args:
        x [R, V], overwritten. target: int64 [R]. temperature: float32 [R].
    """
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
    """Writes the gradient of x into [R, V], which may be x; grad [R, C], in out's dtype, is
    out's."""
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
    """`gradient` once the log-probabilities of all columns are known.

    Args:
        logits: [R, V], before the temperature, in out's dtype as all but `into`.
        log_p: [R, V], overwritten.
        column: int64 [R, 1], where `hit` goes.
        hit: [R, 1], the gradient of log p at the target; 0 where another rank has it.
        temperature: float32 [R].
        rule: the family's change to the logits.
        out: float32 or float64 [R, C].
        grad: [R, C], out's.
        into: [R, V].
    """
    p = torch.exp(log_p)
    # d logp / dz = onehot - p; d entropy / dz = -p (log p + entropy)
    dz = p * -grad[:, :1]
    if grad.shape[1] == 2:
        dz -= p * (log_p.clamp_(min=LEAST) + out[:, 1:]) * grad[:, 1:]
    dz.scatter_add_(1, column, hit)
    dz *= rule.grad(logits) / temperature[:, None]
    into.copy_(dz)
