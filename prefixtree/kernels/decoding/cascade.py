"""`cascade_attention`: attention of new tokens to a growing forest's keys, each read once.

Keys that several rows share are read once for all of them; the partial results of a row are joined
by their lse. A registered operator that writes into the pools; torch.compile keeps it in one graph.

Legend: B rows, H query heads, Hk kv heads, D and Dv head dims, C keys of the pools.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from prefixtree.errors import UnsupportedError
from prefixtree.kernels.decoding import eager as decode_eager
from prefixtree.kernels.decoding.eager import DecodeCall
from prefixtree.kernels.decoding.work import DecodeTables, DecodeWork
from prefixtree.kernels.operators import as_given, new_library, register
from prefixtree.kernels.runtime import installed


def _chosen(backend: str, call: DecodeCall) -> Callable[[DecodeCall], torch.Tensor]:
    """The forward of the backend that serves a call; the Triton kernels wherever they do."""
    if backend not in ("auto", "triton", "torch"):
        raise UnsupportedError(f"backend {backend!r} is none of 'auto', 'triton' and 'torch'")
    if backend == "torch" or (backend == "auto" and not call.q.is_cuda):
        return decode_eager.forward
    reason: str | None = "it needs the package triton"
    if installed("triton"):
        from prefixtree.kernels.decoding import launch as decode_launch

        reason = decode_launch.refusal(call)
        if reason is None:
            return decode_launch.forward
    if backend == "triton":
        raise UnsupportedError(f"{reason}; use backend='torch'")
    return decode_eager.forward


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    sinks: torch.Tensor | None,
    tables: list[torch.Tensor],
    scale: float,
    window: int,
    softcap: float,
    block: int,
    narrow_block: int,
    backend: str,
) -> torch.Tensor:
    pools, blocks = (key_pool, value_pool), (block, narrow_block)
    work = DecodeTables(*tables)
    call = DecodeCall(q, k, v, *pools, sinks, work, scale, window, softcap, *blocks)
    with as_given(q):
        return _chosen(backend, call)(call)


def _fake(q, k, v, *_):
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


_CASCADE = register(
    new_library("_decode_library"),
    "cascade_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) key_pool, Tensor(b!) value_pool, Tensor? sinks, "
    "Tensor[] tables, float scale, SymInt window, float softcap, int block, int narrow_block, "
    "str backend) -> Tensor",
    _forward,
    _fake,
)


def cascade_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    work: DecodeWork,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Writes the rows' keys and values into the pools and attends to all that each row sees.

    Every live row's k and v are written at the next key of its tail. Then the row sees its runs and
    its tail up to that key. Call `work.advance()` after the last layer, before the next step. Not
    differentiable.

    Args:
        q: [B, H, D], floating point; B is `work.num_rows`. Any strides.
        k: [B, Hk, D] in q's dtype. H is a multiple of Hk; query head h reads kv head h // (H / Hk).
        v: [B, Hk, Dv] in q's dtype.
        key_pool: [C, Hk, D] in q's dtype, changed in place.
        value_pool: [C, Hk, Dv] in q's dtype, changed in place.
        work: on q's device; its keys are less than C.
        scale: the factor on q k^T. Default: D ** -0.5.
        window: the sliding window, in tokens, as in `tree_attention`; the one that `work` was built
            for. Default: no window.
        softcap: c in c tanh(scale q k^T / c). Default: no soft cap.
        sinks: [H] floating point, one logit per query head that joins the softmax without a value.
            Default: no sinks.
        backend: "triton" (GPUs; contiguous pools), "torch" (any device; it waits for the device),
            or "auto": triton where it can serve the call. Default: "auto".

    Returns:
        [B, H, Dv] in q's dtype; zeros for rows that are not live.

    Raises:
        ValueError: arguments that do not fit together, with what was expected.
        UnsupportedError: a backend that cannot serve this call, with the reason.
        RuntimeError: a gradient would be needed.
    """
    if (window or 0) != work.window:
        raise ValueError(
            f"window is {window}, and the work list was built for {work.window or None}; build one "
            "for each window of the model"
        )
    _check(q, k, v, key_pool, value_pool, work, sinks)
    tensors = q, k, v, key_pool, value_pool, sinks
    scale = q.shape[2] ** -0.5 if scale is None else float(scale)
    numbers = scale, work.window, float(softcap or 0.0), work.block, work.narrow_block
    out: torch.Tensor = _CASCADE(*tensors, list(work.tables), *numbers, backend)
    return out


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    work: DecodeWork,
    sinks: torch.Tensor | None,
) -> None:
    """Raises where tensors do not fit together: kernels would read and write beyond them."""
    rows, keys, (heads, dim), (kv_heads, d_v) = (
        work.num_rows,
        len(key_pool),
        q.shape[1:],
        v.shape[1:],
    )
    expected = {
        "q": (q, [rows, heads, dim]),
        "k": (k, [rows, kv_heads, dim]),
        "v": (v, [rows, kv_heads, d_v]),
        "key_pool": (key_pool, [keys, kv_heads, dim]),
        "value_pool": (value_pool, [keys, kv_heads, d_v]),
    }
    for name, (x, shape) in expected.items():
        found = list(x.shape), x.dtype, x.device
        wanted = shape, q.dtype, work.tables.written.device
        if found != wanted:
            raise ValueError(f"{name} must be {wanted}, as q, v and the work list say, got {found}")
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"cascade_attention has no gradient, and {name} requires one; call it under "
                "torch.no_grad()"
            )
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} kv heads")
    if work.num_keys > keys:
        raise ValueError(f"the work list has keys up to {work.num_keys}, the pools have {keys}")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks must be [{heads}], one per query head, got {list(sinks.shape)}")
