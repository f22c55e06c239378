"""`tree_conv`, `tree_delta_rule`, `tree_ssd`: they check their arguments and call the operators.

Legend: T packed tokens, D channels, W taps, Hk key heads, Hv value heads, K and V head dims, H
heads, G groups, P head dim, N state dim.
"""

from __future__ import annotations

import math
from typing import Any, overload

import torch
import torch.nn.functional as F

from prefixtree._numbers import entries, number
from prefixtree.errors import UnsupportedError
from prefixtree.kernels.recurrence import operator
from prefixtree.kernels.recurrence.backends import check_name
from prefixtree.packing.mask import TreeMask, check_mask
from prefixtree.packing.state_borders import StateBorders

_ACTIVATIONS = {None: False, "silu": True, "swish": True}


def tree_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mask: TreeMask,
    activation: str | None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Computes a causal depthwise convolution over each token's path: itself and W - 1 ancestors.

    There are zeros before a root. It is computed in float32 (float64 for float64 x), and
    differentiable once.

    Args:
        x: [T, D], floating point.
        weight: [D, W]; tap W - 1 is the token's own, tap 0 the farthest ancestor's.
        bias: [D], or None.
        mask: the packed forest's TreeMask, on the device of x.
        activation: None, "silu" or "swish", which is the same as "silu".
        backend: "triton" (GPUs), "chunked" (torch's operations, any device), "reference" (token by
            token), or "auto". Default: "auto". `explain_recurrence` says what it takes.

    Returns:
        [T, D] in x's dtype.

    Raises:
        TypeError, ValueError: arguments that do not fit together, each with what was expected.
        UnsupportedError: a mask for some of the queries, an unknown activation or backend, a
            backend that cannot serve the call.
    """
    backend = _check_common("tree_conv", mask, backend, x=x, weight=weight, bias=bias)
    _check_shape("x", x, (mask.num_tokens, None), "[tokens, channels]")
    channels = x.shape[1]
    _check_shape("weight", weight, (channels, None), "[channels, taps]")
    if weight.shape[1] < 1:
        raise ValueError("weight must have at least one tap, got [channels, taps] with none")
    if bias is not None:
        _check_shape("bias", bias, (channels,), "[channels]")
    if activation not in _ACTIVATIONS:
        raise UnsupportedError(
            f"tree_conv applies None, 'silu' or 'swish', got activation={activation!r}; ask for "
            "None and apply it to the result"
        )
    out, _, _ = operator.TREE_CONV.forward(
        x, weight, bias, mask.handle, _ACTIVATIONS[activation], backend
    )
    return out


@overload
def tree_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    mask: TreeMask,
    *,
    scale: float | None = ...,
    qk_l2norm: bool = ...,
    backend: str | None = ...,
    initial: None = ...,
) -> torch.Tensor: ...
@overload
def tree_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    mask: StateBorders,
    *,
    scale: float | None = ...,
    qk_l2norm: bool = ...,
    backend: str | None = ...,
    initial: torch.Tensor | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def tree_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    mask: TreeMask | StateBorders,
    *,
    scale: float | None = None,
    qk_l2norm: bool = False,
    backend: str | None = None,
    initial: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes the gated delta rule along every path of the forest.

    With S the predecessor's state (zeros before a root) and S' = exp(g) S, a token's state is
    S_t = S' + key (beta (value - key S')), and out = scale query S_t. States and sums are float32
    (float64 for float64 inputs). The gradient of a branch's state is the sum over its children, in
    a fixed order. It is differentiable once.

    Args:
        query: [T, Hk, K].
        key: as query.
        value: [T, Hv, V], Hv a multiple of Hk: value head h reads key head h // (Hv / Hk).
        g: [T, Hv] floating point, log of the decay, at most 0 (gated delta rule); or [T, Hv, K],
            one per channel of the key (Kimi delta attention).
        beta: [T, Hv] floating point.
        mask: the packed forest's TreeMask, on the device of the others; or its StateBorders, if
            states enter from elsewhere or leave.
        scale: factor on the query. Default: K ** -0.5.
        qk_l2norm: whether query and key are first divided by sqrt(sum of squares + 1e-6).
        backend: "flash_qla" (Hopper, with the packages fla-core and flash-qla; one gate per head,
            head dims of 128), "fla" (GPUs, with fla-core), "chunked" (torch's operations, any
            device), "reference" (token by token), or "auto". Default: "auto".
            `explain_recurrence` says what it takes.
        initial: [I, Hv, K, V] float32 (float64 for float64 value), the states that enter. None
            without borders, or if no state enters.

    Returns:
        [T, Hv, V] in value's dtype. With borders also the states that leave, [F, Hv, K, V] in the
        dtype of `initial`; gradients pass through both.

    Raises:
        TypeError, ValueError: arguments that do not fit together, each with what was expected.
        UnsupportedError: a mask for some of the queries, an unknown backend, or one that cannot
            serve the call.
    """
    mask, borders = _mask_of(mask)
    backend = _check_common(
        "tree_delta_rule", mask, backend, query=query, key=key, value=value, g=g, beta=beta
    )
    tokens = mask.num_tokens
    _check_shape("key", key, (tokens, None, None), "[tokens, key heads, head dim]")
    _check_shape("query", query, tuple(key.shape), "[tokens, key heads, head dim], as key's")
    _check_shape("value", value, (tokens, None, None), "[tokens, value heads, head dim]")
    _check_one_dtype(query=query, key=key, value=value)
    (_, key_heads, dim), heads = key.shape, value.shape[1]
    if key_heads == 0 or heads % key_heads != 0:
        raise ValueError(
            "the value heads must be a multiple of the heads that query and key share, got "
            f"{heads} heads of value and {key_heads} of key"
        )
    per_channel = g.ndim == 3
    _check_shape(
        "g",
        g,
        (tokens, heads, dim) if per_channel else (tokens, heads),
        "[tokens, value heads] or, one per channel of the key, [tokens, value heads, head dim]",
    )
    _check_shape("beta", beta, (tokens, heads), "[tokens, value heads]")
    scale = dim**-0.5 if scale is None else float(number("scale", scale, or_none=True))
    handle, num_final = _check_states(mask, borders, initial, (heads, dim, value.shape[2]), value)
    out, final, _ = operator.TREE_DELTA_RULE.forward(
        query, key, value, g, beta, initial, handle, scale, qk_l2norm, num_final, backend
    )
    return (out, *final) if final else out


@overload
def tree_ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    mask: TreeMask,
    *,
    D: torch.Tensor | None = ...,
    dt_bias: torch.Tensor | None = ...,
    dt_softplus: bool = ...,
    dt_limit: tuple[float, float] = ...,
    backend: str | None = ...,
    initial: None = ...,
) -> torch.Tensor: ...
@overload
def tree_ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    mask: StateBorders,
    *,
    D: torch.Tensor | None = ...,
    dt_bias: torch.Tensor | None = ...,
    dt_softplus: bool = ...,
    dt_limit: tuple[float, float] = ...,
    backend: str | None = ...,
    initial: torch.Tensor | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def tree_ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    mask: TreeMask | StateBorders,
    *,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    backend: str | None = None,
    initial: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes Mamba-2's recurrence (SSD) along every path of the forest.

    With S the predecessor's state (zeros before a root) and dt as below, a token's state is
    S_t = exp(dt A) S + B (dt x), and out = C S_t + D x. States and sums are float32 (float64 for
    float64 x). The gradient of a branch's state is the sum over its children, in a fixed order. It
    is differentiable once.

    Args:
        x: [T, H, P].
        dt: [T, H] floating point; used as clamp(softplus(dt + dt_bias), *dt_limit), in float32.
        A: [H], below 0.
        B: [T, G, N], H a multiple of G: head h reads group h // (H / G).
        C: as B.
        mask: as for `tree_delta_rule`.
        D: [H] or [H, P], a factor of x that is added; or None.
        dt_bias: [H], or None.
        dt_softplus: whether softplus is applied to dt.
        dt_limit: (least, greatest) dt.
        backend: as for `tree_delta_rule`, without "flash_qla".
        initial: [I, H, N, P], as for `tree_delta_rule`.

    Returns:
        [T, H, P] in x's dtype. With borders also the states that leave, [F, H, N, P].

    Raises:
        TypeError, ValueError, UnsupportedError: as for `tree_delta_rule`.
    """
    mask, borders = _mask_of(mask)
    backend = _check_common(
        "tree_ssd", mask, backend, x=x, dt=dt, A=A, B=B, C=C, D=D, dt_bias=dt_bias
    )
    tokens = mask.num_tokens
    _check_shape("x", x, (tokens, None, None), "[tokens, heads, head dim]")
    heads = x.shape[1]
    _check_shape("dt", dt, (tokens, heads), "[tokens, heads]")
    _check_shape("A", A, (heads,), "[heads]")
    _check_shape("B", B, (tokens, None, None), "[tokens, groups, state dim]")
    _check_shape("C", C, tuple(B.shape), "[tokens, groups, state dim], as B's")
    _check_one_dtype(x=x, B=B, C=C)
    groups = B.shape[1]
    if groups == 0 or heads % groups != 0:
        raise ValueError(
            "the heads must be a multiple of the groups that B and C share, got "
            f"{heads} heads of x and {groups} groups of B"
        )
    if D is not None:
        _check_shape("D", D, (heads, x.shape[2]) if D.ndim == 2 else (heads,), "[heads]")
    if dt_bias is not None:
        _check_shape("dt_bias", dt_bias, (heads,), "[heads]")
    low, high = _limits(dt_limit)
    if not low <= high:
        raise ValueError(f"dt_limit must be (least, greatest), got {dt_limit}")
    wide = torch.promote_types(x.dtype, torch.float32)
    sizes = step_sizes(dt, dt_bias, dt_softplus, (low, high), wide)
    handle, num_final = _check_states(mask, borders, initial, (heads, B.shape[2], x.shape[2]), x)
    out, final, _ = operator.TREE_SSD.forward(
        x, sizes, A, B, C, initial, handle, num_final, backend
    )
    out = with_skip(out, x, D)
    return (out, *final) if final else out


def step_sizes(
    dt: torch.Tensor,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    wide: torch.dtype,
) -> torch.Tensor:
    """Computes Mamba-2's step sizes in `wide`: bias, softplus and limits applied to dt [.., H]."""
    low, high = dt_limit
    sizes = dt.to(wide)
    if dt_bias is not None:
        sizes = sizes + dt_bias.to(wide)
    if dt_softplus:
        sizes = F.softplus(sizes)
    # softplus is above 0 already
    if low > (0 if dt_softplus else -math.inf) or high < math.inf:
        sizes = sizes.clamp(low, high)
    return sizes


def with_skip(out: torch.Tensor, x: torch.Tensor, D: torch.Tensor | None) -> torch.Tensor:
    """Adds D x to out, both [.., H, P]; D [H] or [H, P], or None."""
    if D is None:
        return out
    wide = torch.promote_types(x.dtype, torch.float32)
    return (out.to(wide) + x.to(wide) * (D if D.ndim == 2 else D[:, None]).to(wide)).to(x.dtype)


def _mask_of(mask: Any) -> tuple[TreeMask, StateBorders | None]:
    return (mask.mask, mask) if isinstance(mask, StateBorders) else (mask, None)


def _check_states(
    mask: TreeMask,
    borders: StateBorders | None,
    initial: torch.Tensor | None,
    state: tuple[int, int, int],
    like: torch.Tensor,
) -> tuple[torch.Tensor, int | None]:
    """Gives the handle of a call's mask with borders, and how many states leave; None without."""
    if borders is None:
        if initial is not None:
            raise ValueError(
                "initial states come with borders, which say where they enter: give the operator "
                "StateBorders(mask, entries) in the place of the mask"
            )
        return mask.handle, None
    if (initial is None) != (borders.num_entries == 0):
        got = "None" if initial is None else list(initial.shape)
        raise ValueError(
            f"initial must hold the {borders.num_entries} states that enter, and be None where "
            f"none does; got {got}"
        )
    if initial is not None:
        shape = (borders.num_entries, *state)
        _check_shape("initial", initial, shape, "[states, heads, key dim, value dim]")
        wide = torch.promote_types(like.dtype, torch.float32)
        if (initial.dtype, initial.device) != (wide, like.device):
            raise ValueError(
                f"initial must be {wide} on {like.device}, got {initial.dtype} on {initial.device}"
            )
    return borders.handle, borders.num_exits


def _limits(dt_limit: Any) -> tuple[float, float]:
    pair = entries("dt_limit", dt_limit, "(least, greatest)")
    if len(pair) != 2:
        raise ValueError(f"dt_limit must be (least, greatest), got {dt_limit}")
    low, high = (number("dt_limit", bound, finite=False) for bound in pair)
    return low, high


def _check_common(
    name: str, mask: TreeMask, backend: str | None, **tensors: torch.Tensor | None
) -> str:
    """Checks mask, backend, devices and dtypes for all three operators; returns the backend."""
    check_mask(mask)
    if mask.query_tokens is not None:
        raise UnsupportedError(
            f"{name} needs every packed token, got a mask that is for_queries ({mask.num_queries} "
            f"of {mask.num_tokens} tokens); give it the whole mask and select rows of the result"
        )
    for key, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{key} must be a tensor, got {type(tensor).__name__}")
        if not tensor.dtype.is_floating_point:
            raise ValueError(f"{key} must be floating point, got {tensor.dtype}")
        if tensor.device != mask.device:
            raise ValueError(
                f"{key} is on {tensor.device}, the mask on {mask.device}; "
                f"use packed.to({tensor.device})"
            )
    backend = "auto" if backend is None else backend
    check_name(backend)
    return backend


def _check_shape(name: str, x: torch.Tensor, shape: tuple[int | None, ...], meaning: str) -> None:
    """Raises unless x has this shape; None fits any size."""
    if x.ndim == len(shape) and all(
        n is None or n == m for n, m in zip(shape, x.shape, strict=True)
    ):
        return
    wanted = ", ".join("any" if n is None else str(n) for n in shape)
    batch = x.ndim == len(shape) + 1
    raise ValueError(
        f"{name} must be {meaning}: [{wanted}], got {list(x.shape)}"
        + ("; a batch is one packed forest: drop the batch dimension" if batch else "")
    )


def _check_one_dtype(**tensors: torch.Tensor) -> None:
    if len({x.dtype for x in tensors.values()}) > 1:
        raise ValueError(
            f"{', '.join(tensors)} must share one dtype, got "
            f"{', '.join(str(x.dtype) for x in tensors.values())}"
        )
