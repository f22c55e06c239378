"""Experts whose gradients are gathered as their tokens are.

Grouped products want the tokens of an expert side by side. transformers brings them there and back
by indexing, whose gradient adds to one row after another: atomically and rounded each time, or by a
sort. Both ways are permutations of a token's copies, so their gradients are gathers too, and a
token's copies are added up once, in float32. The results of the forward are transformers' to the
bit.

Legend: T packed tokens, k experts per token, D hidden size.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from prefixtree.models.along_tree import AlongTree, along_tree

try:
    from transformers.integrations.moe import (
        ALL_EXPERTS_FUNCTIONS,
        _grouped_linear,
        grouped_mm_experts_forward,
    )
except ImportError:
    ALL_EXPERTS_FUNCTIONS = None


def prepare_experts(transformer: nn.Module) -> None:
    """Gives this way to experts that may run grouped products; others stay as they are."""
    for module in transformer.modules():
        kind: Any = type(module)
        if _chooses_a_function(kind) and "forward" not in vars(module):
            module.__class__ = along_tree(kind, _members)


def _chooses_a_function(kind: type[nn.Module]) -> bool:
    """Whether a class of transformers has one of transformers' functions run its experts."""
    if issubclass(kind, AlongTree) or not hasattr(kind, "_apply_gate"):
        return False
    # experts in float8 choose among others
    among = inspect.getclosurevars(kind.forward).nonlocals.get("experts_interface")
    return among is not None and among is ALL_EXPERTS_FUNCTIONS


def _members(original: Any) -> dict[str, Any]:
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        run = grouped_experts if _runs_grouped(self) else original.forward
        return run(self, hidden_states, top_k_index, top_k_weights)

    return {"forward": forward}


def _runs_grouped(experts: Any) -> bool:
    """Whether transformers would run what `grouped_experts` runs."""
    if getattr(experts, "has_post_expert_norm", False):
        return False
    if getattr(experts, "_is_expert_parallel", False):
        return False
    chosen = ALL_EXPERTS_FUNCTIONS.get(getattr(experts.config, "_experts_implementation", None))
    return chosen is grouped_mm_experts_forward


def grouped_experts(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """transformers' `grouped_mm_experts_forward`, but for the gradients of its gathers.

    Args:
        experts: a module of experts.
        hidden_states: [T, D]. top_k_index, top_k_weights: [T, k].

    Returns:
        [T, D], in the dtype of hidden_states.
    """
    num_tokens, copies = top_k_index.shape
    of_copies, order = torch.sort(top_k_index.reshape(-1))
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    # histc takes floats on a CPU, and integers on a GPU that is to be deterministic
    counted = of_copies.float() if of_copies.device.type in ("cpu", "mps") else of_copies.int()
    counts = torch.histc(counted, bins=experts.num_experts, min=0, max=experts.num_experts - 1)
    offsets = torch.cumsum(counts, 0, dtype=torch.int32)
    # copies for another rank's experts are last; no product reads or writes them
    absent = None
    if not hasattr(experts, "_is_expert_parallel"):
        absent = (of_copies >= experts.num_experts)[:, None]
        of_copies = of_copies.clamp(max=experts.num_experts - 1)

    def linear(weight: str, bias: str, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _grouped_linear(
            x,
            getattr(experts, weight),
            offsets,
            bias=getattr(experts, bias)[of_copies] if experts.has_bias else None,
            is_transposed=experts.is_transposed,
        )
        return out if absent is None else out.masked_fill(absent, 0.0)

    x = _Gathered.apply(hidden_states, order // copies, back, copies)
    if absent is not None:
        x = x.masked_fill(absent, 0.0)
    if experts.has_gate:
        x = experts._apply_gate(linear("gate_up_proj", "gate_up_proj_bias", x))
    else:
        x = experts.act_fn(linear("up_proj", "up_proj_bias", x))
    out = _Gathered.apply(linear("down_proj", "down_proj_bias", x), back, order, 1)
    out = out.view(num_tokens, copies, -1) * top_k_weights[..., None]
    return out.sum(1).to(hidden_states.dtype)


class _Gathered(torch.autograd.Function):
    """x[rows]; its gradient too is gathered, from the places `back` of each row's copies."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, rows: torch.Tensor, back: torch.Tensor, copies: int
    ) -> torch.Tensor:
        ctx.save_for_backward(back)
        ctx.copies = copies
        return x[rows]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        grad = grad[back]
        if ctx.copies > 1:
            # torch adds up in float32
            grad = grad.view(-1, ctx.copies, grad.shape[1]).sum(1)
        return grad, None, None, None
