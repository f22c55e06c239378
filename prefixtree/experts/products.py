"""Experts whose gradients are gathered as their tokens are.

Grouped products want the tokens of an expert side by side. transformers brings them there and back
by indexing, whose gradient adds to one row after another: atomically and rounded each time, or by a
sort. Both ways are permutations of a token's copies. So their gradients are gathers too, and a
token's copies are added up once, in float32. Uncompiled, the results of the forward are
transformers' to the bit. Compiled, copies are weighted before the last product, within the kernel
of the activation. So the product's output is not kept for the weights' gradient.

Legend: T packed tokens, k experts per token, D hidden size.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from prefixtree.kernels import expert_products
from prefixtree.models.along_tree import AlongTree, along_tree

try:
    from transformers.activations import SiLUActivation
    from transformers.integrations.moe import (
        ALL_EXPERTS_FUNCTIONS,
        _default_apply_gate,
        _grouped_linear,
        grouped_mm_experts_forward,
    )
except ImportError:
    ALL_EXPERTS_FUNCTIONS = None

_NUMBERS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# ways to run experts that are computed in torch, or that say why they cannot be traced
_ON_SHAPES = (None, "eager", "batched_mm", "grouped_mm")


def prepare_layers(transformer: nn.Module, config: Any) -> None:
    """Gives this way to experts that may run grouped products; others stay as they are."""
    for module in transformer.modules():
        kind: Any = type(module)
        if _chooses_a_function(kind) and "forward" not in vars(module):
            module.__class__ = along_tree(kind, _members)


def traced_as(config: Any) -> str | None:
    """Names how experts run on tensors without numbers: grouped products for GPU-only kernels."""
    chosen: str | None = getattr(config, "_experts_implementation", None)
    return chosen if chosen in _ON_SHAPES else "grouped_mm"


def set_experts(config: Any, chosen: str | None) -> None:
    """Sets the way in which a model made from a config runs its experts."""
    config._experts_implementation = chosen


def _chooses_a_function(kind: type[nn.Module]) -> bool:
    """Whether a class of transformers has one of transformers' functions run its experts."""
    if issubclass(kind, AlongTree) or not hasattr(kind, "_apply_gate"):
        return False
    # experts in float8 choose among other functions
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
    """Whether transformers would run the products of `grouped_experts`."""
    if getattr(experts, "has_post_expert_norm", False):
        return False
    # ranks with a part of the experts mark tokens of other ranks' experts by an absent number
    if experts.num_experts not in [getattr(experts.config, name, None) for name in _NUMBERS]:
        return False
    chosen = ALL_EXPERTS_FUNCTIONS.get(getattr(experts.config, "_experts_implementation", None))
    return chosen is grouped_mm_experts_forward


def grouped_experts(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Computes transformers' `grouped_mm_experts_forward`, but for the gradients of its gathers.

    hidden_states [T, D], top_k_index and top_k_weights [T, k] give [T, D] in hidden_states' dtype.
    """
    copies = top_k_index.shape[1]
    of_copies, order = torch.sort(top_k_index.reshape(-1))
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    # histc takes floats on a CPU, and integers on a deterministic GPU
    counted = of_copies.float() if of_copies.device.type in ("cpu", "mps") else of_copies.int()
    counts = torch.histc(counted, bins=experts.num_experts, min=0, max=experts.num_experts - 1)
    offsets = torch.cumsum(counts, 0, dtype=torch.int32)

    def linear(
        weight: str, bias: str, x: torch.Tensor, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows = getattr(experts, bias)[of_copies] if experts.has_bias else None
        if scale is not None:
            x = (x * scale).to(x.dtype)
            rows = None if rows is None else (rows * scale).to(rows.dtype)
        return _grouped_linear(x, getattr(experts, weight), offsets, rows, experts.is_transposed)

    by_token = back.view(top_k_index.shape)
    if _is_swiglu(experts):
        parameters = experts.gate_up_proj, experts.down_proj
        if expert_products.refusal(hidden_states, *parameters) is None:
            starts = torch.nn.functional.pad(offsets, (1, 0))
            rows = (order // copies).int()
            tensors = hidden_states, *parameters, top_k_weights, order, rows, by_token, starts
            return _Gated.apply(*tensors).to(hidden_states.dtype)
    x = _Spread.apply(hidden_states, order, back, copies)
    if experts.has_gate:
        x = experts._apply_gate(linear("gate_up_proj", "gate_up_proj_bias", x))
    else:
        x = experts.act_fn(linear("up_proj", "up_proj_bias", x))
    last = "down_proj", "down_proj_bias", x
    if torch.compiler.is_compiling():
        scale = _Spread.apply(top_k_weights.reshape(-1, 1), order, back, 1)
        out = _Combined.apply(linear(*last, scale), None, order, by_token)
    else:
        out = _Combined.apply(linear(*last), top_k_weights, order, by_token)
    return out.to(hidden_states.dtype)


def _is_swiglu(experts: Any) -> bool:
    """Whether experts have neither biases nor a gate or a layout of their own."""
    return (
        experts.has_gate
        and not experts.has_bias
        and not experts.is_transposed
        and getattr(experts, "is_concatenated", True)
        and type(experts)._apply_gate is _default_apply_gate
        and isinstance(experts.act_fn, nn.SiLU | SiLUActivation)
    )


class _Gated(torch.autograd.Function):
    """Sums each token's experts, [T, D], by QuACK's products."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        weights: torch.Tensor,
        order: torch.Tensor,
        rows: torch.Tensor,
        by_token: torch.Tensor,
        starts: torch.Tensor,
    ) -> torch.Tensor:
        preact, h = expert_products.up(x, gate_up, rows, starts)
        ctx.save_for_backward(x, gate_up, down, weights, order, rows, by_token, starts, preact)
        return _summed(expert_products.product(h, down.mT, starts, False), by_token, weights)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # with create_graph, the products below must not be taken for constants
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("experts by QuACK's products are differentiable once, not twice")
        x, gate_up, down, weights, order, rows, by_token, starts, preact = ctx.saved_tensors
        grad = grad.to(x.dtype).contiguous()
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = weights.reshape(-1)[order].to(wide)
        dpreact, h, dweights = expert_products.act_gradient(grad, down, preact, scale, rows, starts)
        dx = dgate_up = ddown = None
        if ctx.needs_input_grad[0]:
            dx = _summed(expert_products.product(dpreact, gate_up, starts, True), by_token, None)
        if ctx.needs_input_grad[1]:
            dgate_up = expert_products.weight_gradient(x, rows, dpreact, starts, True)
        if ctx.needs_input_grad[2]:
            ddown = expert_products.weight_gradient(grad, rows, h, starts, False)
        dweights = dweights[by_token].to(weights.dtype)
        return dx, dgate_up, ddown, dweights, None, None, None, None


class _Spread(torch.autograd.Function):
    """Copies each token, [T * k, D], in the order of experts."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, order: torch.Tensor, back: torch.Tensor, copies: int
    ) -> torch.Tensor:
        ctx.save_for_backward(back)
        ctx.copies = copies
        return x[order // copies]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        return _summed(grad, back.view(-1, ctx.copies), None), None, None, None


class _Combined(torch.autograd.Function):
    """Sums each token's copies, [T, D], weighted where weights [T, k] are given."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weights: torch.Tensor | None,
        order: torch.Tensor,
        back: torch.Tensor,
    ) -> torch.Tensor:
        ctx.copies = back.shape[1]
        if weights is None:
            ctx.save_for_backward(order)
        else:
            ctx.save_for_backward(order, back, x, weights)
        return _summed(x, back, weights)

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        order, *others = ctx.saved_tensors
        # in the order of experts, so that neither x nor its gradient has to be permuted
        rows = grad[order // ctx.copies]
        if not others:
            return rows, None, None, None
        back, x, weights = others
        dx = rows * weights.reshape(-1)[order, None]
        dweights = None
        if ctx.needs_input_grad[1]:
            dweights = (x * rows).sum(-1)[back].to(weights.dtype)
        return dx.to(x.dtype), dweights, None, None


def _summed(x: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Sums x[rows], weighted, in float32: [T, D]; rows and weights are [T, k]."""
    if not torch.compiler.is_compiling():
        chosen = x[rows]
        return (chosen if weights is None else chosen * weights[..., None]).sum(1)
    # inductor's kernel of a single sum does not read along D, and takes four times as long
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.new_zeros(len(rows), x.shape[1], dtype=wide)
    for i in range(rows.shape[1]):
        term = x[rows[:, i]].to(wide)
        total = total + (term if weights is None else term * weights[:, i, None].to(wide))
    dtype = x.dtype if weights is None else torch.promote_types(x.dtype, weights.dtype)
    # compiled by torch 2.11, a Function has no gradient if it returns an unchanged `to`
    return total if total.dtype == dtype else total.to(dtype)
