"""The textbook's log-probabilities and entropies, for the tests of the head."""

from __future__ import annotations

import torch

from prefixtree.kernels.lm_head.eager import LogitRule


def columns_of(z: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """log p of the targets and the entropy, of logits z [R, V] in their dtype. [R, 2]"""
    logp = z.log_softmax(-1)
    chosen = logp.gather(1, target[:, None])[:, 0]
    return torch.stack([chosen, -(logp.exp() * logp).sum(-1)], -1)


def exact_columns(
    x: torch.Tensor,
    target: torch.Tensor,
    temperature: torch.Tensor,
    rule: LogitRule,
    grad: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64: the columns that grad [R, 1 or 2] is of, and x's gradient by it."""
    exact = x.double().requires_grad_()
    out = columns_of(rule.apply(exact) / temperature[:, None], target)[:, : grad.shape[1]]
    (dx,) = torch.autograd.grad((out * grad).sum(), exact)
    return out.detach(), dx
