"""The recurrent layers token by token along paths, differentiable by autograd: the oracle.

Any dtype up to float64, any device; computed in float32, float64 for float64 inputs. Legend: T
packed tokens, W taps, H heads, K and V head dims.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from prefixtree.kernels.recurrence.protocol import Call, Computed, ConvCall, DeltaCall, SsdCall
from prefixtree.packing.segments import segments_of


def refusal(call: Call) -> str | None:
    """Returns None: this backend serves every call."""
    return None


def saves(call: Call) -> list[torch.Tensor]:
    """Returns nothing: the backward computes the forward again."""
    return []


def forward(call: Call) -> Computed:
    """Computes out and the states that leave, with autograd's history; saves nothing."""
    assert call.mask is not None
    before = call.mask.predictor.tolist()
    if isinstance(call, ConvCall):
        return Computed(_conv(call, before), [])
    states = _States(call)
    if isinstance(call, DeltaCall):
        out = _delta_rule(call, before, states)
    else:
        out = _ssd(call, before, states)
    return Computed(out, [], states.final())


def backward(
    call: Call, dout: torch.Tensor, saved: list[torch.Tensor], dfinal: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Computes a gradient for each tensor of the call; computes the forward again."""
    with torch.enable_grad():
        inputs: dict[str, Any] = {
            name: x.detach().requires_grad_()
            for name, x in call._asdict().items()
            if isinstance(x, torch.Tensor)
        }
        out, _, final = forward(call._replace(**inputs))
    results = {out: dout} if dfinal is None or final is None else {out: dout, final: dfinal}
    # without an exit or an entry some results depend on nothing
    results = {x: grad for x, grad in results.items() if x.requires_grad}
    grads = torch.autograd.grad(
        list(results),
        list(inputs.values()),
        list(results.values()),
        allow_unused=True,
        materialize_grads=True,
    )
    return [grad.contiguous() for grad in grads]


class _States:
    """The states after the tokens so far, of a delta rule or of Mamba-2."""

    def __init__(self, call: DeltaCall | SsdCall) -> None:
        assert call.mask is not None
        self._found = segments = segments_of(call.mask)
        like = call.value if isinstance(call, DeltaCall) else call.x
        self._wide = torch.promote_types(like.dtype, torch.float32)
        self._zeros = like.new_zeros(call.state_shape, dtype=self._wide)
        self._initial, self._leave = call.initial, call.num_final is not None
        self._entry = dict(zip(segments.start[:-1].tolist(), segments.entry.tolist(), strict=True))
        self._behind: list[torch.Tensor] = []

    def before(self, token: int, above: int) -> torch.Tensor:
        """Gives the state from which a token starts, [H, K, V]; `above` is the token before it."""
        if above >= 0:
            return self._behind[above]
        row = self._entry[token]
        if row < 0:
            return self._zeros
        assert self._initial is not None
        return self._initial[row]

    def append(self, state: torch.Tensor) -> None:
        """Appends the state after the next token."""
        self._behind.append(state)

    def final(self) -> torch.Tensor | None:
        """Stacks the states that leave."""
        if not self._leave:
            return None
        last = (self._found.start[self._found.exits + 1] - 1).tolist()
        leaving = [self._behind[token] for token in last]
        return torch.stack(leaving) if leaving else self._zeros.new_empty(0, *self._zeros.shape)


def _conv(call: ConvCall, before: list[int]) -> torch.Tensor:
    wide = torch.promote_types(call.x.dtype, torch.float32)
    x, weight = call.x.to(wide), call.weight.to(wide)
    # cast once, or autograd would sum the tokens' gradients in the dtype of the bias
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


def _delta_rule(call: DeltaCall, before: list[int], states: _States) -> torch.Tensor:
    wide = torch.promote_types(call.value.dtype, torch.float32)
    query, key, value, g, beta = (x.to(wide) for x in call[:5])
    if call.qk_l2norm:
        query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    group = value.shape[1] // key.shape[1]
    query, key = ((x.repeat_interleave(group, 1)) for x in (query * call.scale, key))
    if g.ndim == 2:
        g = g[..., None]
    rows = []
    for t, above in enumerate(before):
        state = g[t].exp()[..., None] * states.before(t, above)
        change = beta[t, :, None] * (value[t] - torch.einsum("hk,hkv->hv", key[t], state))
        state = state + key[t, :, :, None] * change[:, None]
        states.append(state)
        rows.append(torch.einsum("hk,hkv->hv", query[t], state))
    return _stacked(rows, value).to(call.value.dtype)


def _ssd(call: SsdCall, before: list[int], states: _States) -> torch.Tensor:
    wide = torch.promote_types(call.x.dtype, torch.float32)
    x, dt, A, B, C = (x.to(wide) for x in call[:5])
    group = x.shape[1] // B.shape[1]
    B, C = (x.repeat_interleave(group, 1) for x in (B, C))
    rows = []
    for t, above in enumerate(before):
        decay = (dt[t] * A).exp()[:, None, None]
        change = B[t, :, :, None] * (dt[t, :, None] * x[t])[:, None]
        state = decay * states.before(t, above) + change
        states.append(state)
        rows.append(torch.einsum("hn,hnp->hp", C[t], state))
    return _stacked(rows, x).to(call.x.dtype)


def _stacked(rows: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.stack(rows) if rows else like * 1
