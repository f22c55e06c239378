"""The recurrent layers token by token along paths, differentiable by autograd: the oracle.

Any dtype up to float64, any device; computed in float32, float64 for float64 inputs. Legend: T
packed tokens, W taps, H heads, K and V head dims.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from prefixtree.kernels.recurrence.protocol import Call, ConvCall, DeltaCall, SsdCall


def refusal(call: Call) -> str | None:
    """None: it serves every call."""
    return None


def saves(call: Call) -> list[torch.Tensor]:
    """Nothing: the backward computes the forward again."""
    return []


def forward(call: Call) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """-> out, with autograd's history; and nothing that is saved."""
    assert call.mask is not None
    before = call.mask.predictor.tolist()
    if isinstance(call, ConvCall):
        return _conv(call, before), []
    out = _delta_rule(call, before) if isinstance(call, DeltaCall) else _ssd(call, before)
    return out, []


def backward(call: Call, dout: torch.Tensor, saved: list[torch.Tensor]) -> list[torch.Tensor]:
    """-> a gradient for each tensor of the call. The forward is computed again."""
    with torch.enable_grad():
        inputs: dict[str, Any] = {
            name: x.detach().requires_grad_()
            for name, x in call._asdict().items()
            if isinstance(x, torch.Tensor)
        }
        out, _ = forward(call._replace(**inputs))
    grads = torch.autograd.grad(
        out, list(inputs.values()), dout, allow_unused=True, materialize_grads=True
    )
    return [grad.contiguous() for grad in grads]


def _conv(call: ConvCall, before: list[int]) -> torch.Tensor:
    wide = torch.promote_types(call.x.dtype, torch.float32)
    x, weight = call.x.to(wide), call.weight.to(wide)
    # once, or autograd would sum the tokens' gradients in the dtype of the bias
    bias = x.new_zeros(x.shape[1]) if call.bias is None else call.bias.to(wide)
    rows = []
    for t in range(len(before)):
        total = bias
        for tap in range(weight.shape[1] - 1, -1, -1):
            total = total + weight[:, tap] * x[t]
            t = before[t]
            if t < 0:
                break
        rows.append(F.silu(total) if call.silu else total)
    return _stacked(rows, x).to(call.x.dtype)


def _delta_rule(call: DeltaCall, before: list[int]) -> torch.Tensor:
    wide = torch.promote_types(call.value.dtype, torch.float32)
    query, key, value, g, beta = (x.to(wide) for x in call[:5])
    if call.qk_l2norm:
        query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    group = value.shape[1] // key.shape[1]
    query, key = ((x.repeat_interleave(group, 1)) for x in (query * call.scale, key))
    if g.ndim == 2:
        g = g[..., None]
    states: list[torch.Tensor] = []  # [H, K, V]
    rows = []
    for t, above in enumerate(before):
        state = value.new_zeros(key.shape[1:] + value.shape[2:]) if above < 0 else states[above]
        state = g[t].exp()[..., None] * state
        change = beta[t, :, None] * (value[t] - torch.einsum("hk,hkv->hv", key[t], state))
        states.append(state + key[t, :, :, None] * change[:, None])
        rows.append(torch.einsum("hk,hkv->hv", query[t], states[t]))
    return _stacked(rows, value).to(call.value.dtype)


def _ssd(call: SsdCall, before: list[int]) -> torch.Tensor:
    wide = torch.promote_types(call.x.dtype, torch.float32)
    x, dt, A, B, C = (x.to(wide) for x in call[:5])
    group = x.shape[1] // B.shape[1]
    B, C = (x.repeat_interleave(group, 1) for x in (B, C))
    states: list[torch.Tensor] = []  # [H, N, P]
    rows = []
    for t, above in enumerate(before):
        state = x.new_zeros(B.shape[1:] + x.shape[2:]) if above < 0 else states[above]
        decay = (dt[t] * A).exp()[:, None, None]
        states.append(decay * state + B[t, :, :, None] * (dt[t, :, None] * x[t])[:, None])
        rows.append(torch.einsum("hn,hnp->hp", C[t], states[t]))
    return _stacked(rows, x).to(call.x.dtype)


def _stacked(rows: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.stack(rows) if rows else like * 1
