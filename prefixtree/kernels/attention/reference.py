"""Dense tree attention in plain torch, differentiable by autograd: the oracle for the others.

It takes T x T memory, any dtype up to float64 and any device. Legend: T packed tokens, Tq query
rows, H query heads, Hk kv heads, D head dim.
"""

from __future__ import annotations

import torch

from prefixtree.kernels.attention.protocol import AttentionCall, gradient_dtype
from prefixtree.kernels.chosen import from_bits
from prefixtree.packing.mask import dense_mask


def refusal(call: AttentionCall) -> None:
    """Returns None: this backend serves every call."""
    return None


def forward(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes out [Tq, H, Dv] in q's dtype and lse [H, Tq] over the keys, for autograd."""
    visible = dense_mask(call.mask, call.q.device, call.window)
    if call.chosen is not None:
        position = call.mask.on(call.q.device)["position_ids"].long()
        visible &= from_bits(call.chosen, 0, call.mask.deepest)[:, position]
    return dense_attention(
        call.q, call.k, call.v, visible, scale=call.scale, softcap=call.softcap, sinks=call.sinks
    )


def backward(
    call: AttentionCall,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Computes dq, dk, dv as `Kernels` says, and dsinks; it computes out and lse again."""
    k, v = (x.to(gradient_dtype(call)) for x in (call.k, call.v))
    inputs = (call.q, k, v) + (() if call.sinks is None else (call.sinks,))
    with torch.enable_grad():
        q, k, v, *sinks = leaves = [x.detach().requires_grad_() for x in inputs]
        out, lse = forward(call._replace(q=q, k=k, v=v, sinks=sinks[0] if sinks else None))
    outputs, output_grads = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
    grads = torch.autograd.grad(outputs, leaves, output_grads)
    dq, dk, dv, *dsinks = (grad.contiguous() for grad in grads)
    return dq, dk, dv, dsinks[0] if dsinks else None


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes softmax(softcap(scale q k^T) + mask) v, every pair written out.

    q [Tq, H, D], k [T, Hk, D], v [T, Hk, Dv], visible bool [Tq, T] with at least one key per query,
    sinks [H]. Returns out [Tq, H, Dv] in q's dtype, contiguous, and lse [H, Tq] over the keys,
    without the sink; computed in float32, float64 for float64 inputs.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    key = k.to(dtype).repeat_interleave(group, 1)
    value = v.to(dtype).repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q.to(dtype), key) * scale  # [H, Tq, T]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    total = lse if sinks is None else torch.logaddexp(lse, sinks.to(dtype)[:, None])
    out = torch.einsum("hqk,khd->qhd", torch.exp(scores - total[..., None]), value)
    # models take views of out
    return out.to(q.dtype).contiguous(), lse
