"""The backends as objects, and the choice of one for a call, with the reason.

Each backend imports its code when first asked. "auto" prefers a GPU's kernels, else torch's
operations in chunks.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch

from prefixtree._numbers import integer
from prefixtree.errors import UnsupportedError
from prefixtree.kernels.recurrence.protocol import Call, ConvCall, DeltaCall, Kernels, SsdCall
from prefixtree.kernels.runtime import Backend
from prefixtree.packing.mask import TreeMask, check_mask


def _triton() -> Kernels:
    from prefixtree.kernels.recurrence import conv_triton

    return conv_triton


def _fla() -> Kernels:
    from prefixtree.kernels.recurrence import fla

    return fla


def _flash_qla() -> Kernels:
    from prefixtree.kernels.recurrence import flash_qla

    return flash_qla


def _chunked() -> Kernels:
    from prefixtree.kernels.recurrence import chunked

    return chunked


def _reference() -> Kernels:
    from prefixtree.kernels.recurrence import reference

    return reference


CHUNKED, REFERENCE = Backend("chunked", _chunked), Backend("reference", _reference)
# backends for GPUs alone, which "auto" prefers there
ON_GPU: tuple[Backend[Kernels], ...] = (
    Backend("triton", _triton, package="triton"),
    Backend("flash_qla", _flash_qla, package="triton"),
    Backend("fla", _fla, package="triton"),
)
BACKENDS: tuple[Backend[Kernels], ...] = (*ON_GPU, CHUNKED, REFERENCE)
_NAMED = {backend.name: backend for backend in BACKENDS}
NAMES = ("auto", *_NAMED)


def check_name(name: str) -> None:
    """Raises an UnsupportedError if no backend has this name."""
    if name not in NAMES:
        raise UnsupportedError(
            f"backend {name!r} does not exist for recurrent layers in this version; use one of "
            f"{', '.join(NAMES)}"
        )


def choose(name: str, call: Call) -> Backend[Kernels]:
    """Chooses the backend of a call and its backward; refuses with the reason."""
    # it looks at devices, dtypes and shapes alone, so that compiled code chooses the backend that
    # runs
    if name != "auto":
        check_name(name)
        if (reason := _NAMED[name].refuses(call)) is not None:
            raise UnsupportedError(f"backend {name!r}: {reason}; use backend='chunked'")
        return _NAMED[name]
    if call[0].is_cuda:
        for backend in ON_GPU:
            if backend.refuses(call) is None:
                return backend
    return CHUNKED


def why_slow(call: Call) -> str:
    """Says why no GPU kernel serves a call that "auto" gives to torch's operations."""
    # triton serves the convolution alone; flash_qla serves a part of the calls of fla
    others = ("fla", "flash_qla") if isinstance(call, ConvCall) else ("triton", "flash_qla")
    asked = [backend for backend in ON_GPU if backend.name not in others]
    reasons = [f"backend {backend.name!r}: {backend.refuses(call)}" for backend in asked]
    return "; ".join(reasons) or "this version has no kernels for it"


def warn_if_slow(call: Call, backend: Backend[Kernels]) -> None:
    """Warns once per reason if a GPU runs torch's operations instead of kernels."""
    if backend is CHUNKED and call[0].is_cuda:
        _warn(why_slow(call))


@cache
def _warn(reason: str) -> None:
    warnings.warn(
        f"recurrent layers run through torch's operations on this GPU, which is slow: {reason}",
        stacklevel=2,
    )


OPERATORS = ("tree_conv", "tree_delta_rule", "tree_ssd")


def explain_recurrence(
    mask: TreeMask,
    operator: str = "tree_delta_rule",
    *,
    dtype: torch.dtype | None = None,
    key_dim: int = 128,
    value_dim: int | None = None,
    gate_per_channel: bool = False,
    taps: int = 4,
    backend: str | None = None,
) -> str:
    """Says which backend a recurrent layer would run for these sizes, and why.

    The choice depends on the operator, the device, the dtype and these sizes, and on the installed
    packages.

    Args:
        mask: the packed forest's TreeMask; its device is that of the tensors.
        operator: "tree_conv", "tree_delta_rule" or "tree_ssd".
        dtype: of the tensors. Default: bfloat16 on CUDA and float32 elsewhere.
        key_dim: head dim of query and key; of `tree_ssd` the state's (N).
        value_dim: head dim of value; of `tree_ssd` the head's (P). Default: 64 for `tree_ssd`, 128
            for `tree_delta_rule`.
        gate_per_channel: whether `tree_delta_rule` has one gate per channel of the key (Kimi).
        taps: of `tree_conv`.
        backend: as in the operator. Default: "auto".

    Returns:
        One sentence. If the operator would raise an UnsupportedError, it starts with the operator's
        name and "would refuse", and gives the reason.

    Raises:
        TypeError: a mask that is no TreeMask.
        ValueError: an operator that does not exist; sizes that are no integers >= 1.
    """
    check_mask(mask)
    if operator not in OPERATORS:
        raise ValueError(f"operator must be one of {', '.join(OPERATORS)}, got {operator!r}")
    if value_dim is None:
        value_dim = 64 if operator == "tree_ssd" else 128
    key_dim, value_dim = integer("key_dim", key_dim, 1), integer("value_dim", value_dim, 1)
    taps = integer("taps", taps, 1)
    if dtype is None:
        dtype = torch.bfloat16 if mask.device.type == "cuda" else torch.float32
    tokens = mask.num_tokens
    # one number, expanded to every shape
    number = torch.empty((), dtype=dtype, device=mask.device)
    key, value = number.expand(tokens, 1, key_dim), number.expand(tokens, 1, value_dim)
    gate = number.expand(tokens, 1)
    call: Call
    if operator == "tree_conv":
        channels = number.expand(tokens, key_dim)
        call = ConvCall(channels, number.expand(key_dim, taps), None, None, True)
    elif operator == "tree_ssd":
        call = SsdCall(value, gate, number.expand(1), key, key, None, None)
    else:
        gates = key if gate_per_channel else gate
        call = DeltaCall(key, key, value, gates, gate, None, None, 1.0, True)
    return explanation(operator, call, "auto" if backend is None else backend)


def explanation(operator: str, call: Call, backend: str) -> str:
    """Writes the sentence about a call."""
    try:
        choice = choose(backend, call)
    except UnsupportedError as error:
        return f"{operator} would refuse: {error}."
    if backend != "auto":
        reason = "it was asked for by name"
    elif not call[0].is_cuda:
        reason = f"the mask is on {call[0].device}, and the other backends need a GPU"
    else:
        reason = why_slow(call) if choice is CHUNKED else "it serves this call"
    return f"{operator} would run {choice.name!r}: {reason}."
