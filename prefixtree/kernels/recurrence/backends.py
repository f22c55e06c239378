"""The backends as objects, and which of them runs a call. Each imports its code when first asked.

Order of preference of "auto": a GPU's kernels, else torch's operations in chunks.
"""

from __future__ import annotations

import warnings
from functools import cache

from prefixtree.errors import UnsupportedError
from prefixtree.kernels.recurrence.protocol import Call, ConvCall, Kernels
from prefixtree.kernels.runtime import Backend


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
# those for GPUs alone, which "auto" prefers there
ON_GPU: tuple[Backend[Kernels], ...] = (
    Backend("triton", _triton, package="triton"),
    Backend("flash_qla", _flash_qla, package="triton"),
    Backend("fla", _fla, package="triton"),
)
BACKENDS: tuple[Backend[Kernels], ...] = (*ON_GPU, CHUNKED, REFERENCE)
_NAMED = {backend.name: backend for backend in BACKENDS}
NAMES = ("auto", *_NAMED)


def check_name(name: str) -> None:
    """Raises UnsupportedError if no backend has this name."""
    if name not in NAMES:
        raise UnsupportedError(
            f"backend {name!r} does not exist for recurrent layers in this version; use one of "
            f"{', '.join(NAMES)}"
        )


def choose(name: str, call: Call) -> Backend[Kernels]:
    """The backend for a call; the same for a backward as for its forward.

    Looks at devices, dtypes and shapes alone, so that compiled code chooses what will run.

    Raises:
        UnsupportedError: `name` does not exist or cannot serve the call, with the reason.
    """
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
    """Why no kernel of a GPU serves a call that "auto" gives to torch's operations."""
    # the convolution is triton's alone, and nothing else is; flash_qla serves a part of what fla
    # serves
    others = ("fla", "flash_qla") if isinstance(call, ConvCall) else ("triton", "flash_qla")
    asked = [backend for backend in ON_GPU if backend.name not in others]
    reasons = [f"backend {backend.name!r}: {backend.refuses(call)}" for backend in asked]
    return "; ".join(reasons) or "this version has no kernels for it"


def warn_if_slow(call: Call, backend: Backend[Kernels]) -> None:
    """Says once per reason that a GPU runs torch's operations where kernels would serve it."""
    if backend is CHUNKED and call[0].is_cuda:
        _warn(why_slow(call))


@cache
def _warn(reason: str) -> None:
    warnings.warn(
        f"recurrent layers run through torch's operations on this GPU, which is slow: {reason}",
        stacklevel=2,
    )
