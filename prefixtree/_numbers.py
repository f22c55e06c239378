"""Readers of the numbers that a caller gives, alone or in lists, arrays and tensors.

A reader is told the argument's name, and says what it expected and what came. It takes nothing else
for a number: no text, None, truth value, NaN, hidden entry of a masked array, complex number, or
tensor whose gradient would be lost. `expected`, `note` and `or_none` only word the message, and
`wrong` is the error for what is no number at all.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Set
from typing import Any

import numpy as np

from prefixtree.errors import ForestError

_INFINITY = float("inf")
_LONGEST = 80


def integer(
    name: str,
    value: Any,
    least: int | None = None,
    *,
    or_none: bool = False,
    note: str = "",
    wrong: type[Exception] = ValueError,
) -> int:
    """Reads one integer of Python, numpy or torch; raises a ValueError below `least`."""
    # an int as it is: operator.index would fix one that torch.compile holds as a symbol
    whole = value if type(value) is int else _index(value)
    if whole is None or (least is not None and whole < least):
        expected = f"{'None or ' * or_none}an integer" + ("" if least is None else f" >= {least}")
        error = wrong if whole is None else ValueError
        raise error(f"{name} must be {expected}{note}, got {_shown(value)}")
    return whole


def number(
    name: str,
    value: Any,
    least: float | None = None,
    *,
    above: float | None = None,
    most: float | None = None,
    finite: bool = True,
    or_none: bool = False,
    note: str = "",
    wrong: type[Exception] = ValueError,
) -> float:
    """Reads one real number; raises a ValueError unless >= `least`, > `above` and <= `most`."""
    # a float as it is, which torch.compile may hold as a symbol
    real: float | None = value if type(value) in (int, float) else _real(name, value)
    if real is None:
        raise wrong(f"{name} must be {'None or ' * or_none}a number{note}, got {_shown(value)}")
    holds = (
        (least is None or real >= least)
        and (above is None or real > above)
        and (most is None or real <= most)
        and (not finite or -_INFINITY < real < _INFINITY)
    )
    if not holds:
        bounds = {">=": least, "above": above, "at most": most}
        expected = [f"{word} {bound}" for word, bound in bounds.items() if bound is not None]
        if finite and most is None:
            expected.append("finite")
        wanted = f"{'None or ' * or_none}{' and '.join(expected)}"
        raise ValueError(f"{name} must be {wanted}, got {_shown(value)}")
    return real


def numbers(
    name: str, values: Any, expected: str, wrong: type[Exception] = ValueError
) -> np.ndarray:
    """Reads real numbers of any shape as float64; the caller judges NaN and infinity."""
    array = to_numpy(values, name)
    if array.dtype.kind not in "iuf":
        raise wrong(f"{name} must be {expected}, got {_shown(values)}")
    return array.astype(np.float64)


def integers(name: str, values: Any, end: int | None = None, of_what: str = "") -> np.ndarray:
    """Reads 1-D integers as int64; with `end` they must be 0 .. end - 1, indices of `of_what`."""
    # numpy makes numbers of truth values that stand among numbers
    mixed = isinstance(values, (list, tuple)) and any(isinstance(v, bool) for v in values)
    array = to_numpy(values, name)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu") or mixed:
        raise ForestError(
            f"{name} must be 1-D integers, got shape {list(array.shape)} of "
            f"{'bool' if mixed else array.dtype}"
        )
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise ForestError(f"{name} must be integers below 2^63, got {array.max()}")
    wide = array.astype(np.int64)
    if end is not None and wide.size and (wide.min() < 0 or wide.max() >= end):
        bad = int(np.flatnonzero((wide < 0) | (wide >= end))[0])
        raise ForestError(
            f"{name}[{bad}] is {wide[bad]}; expected 0 to {end - 1}, as there are {end} {of_what}"
        )
    return wide


def selection(name: str, values: Any) -> np.ndarray:
    """Reads a mask of 0 and 1, of any shape, as bool. A weight is no mask."""
    array = to_numpy(values, name)
    if array.dtype.kind == "b" or array.size == 0:
        return array.astype(bool)
    if array.dtype.kind not in "iuf":
        raise ForestError(f"{name} must be 0 or 1 per token, got {array.dtype} values")
    selected: np.ndarray = array == 1
    if not (selected | (array == 0)).all():
        where = np.argwhere(~(selected | (array == 0)))[0]
        raise not_a_mask(name + "".join(f"[{i}]" for i in where), array[tuple(where)])
    return selected


def not_a_mask(name: str, value: Any) -> ForestError:
    """Makes the error for an entry of a mask that is neither 0 nor 1."""
    return ForestError(
        f"{name} is {value}; a mask is 0 or 1 (or truth values): weights belong in the loss"
    )


def entries(name: str, values: Any, expected: str, *, ordered: bool = True) -> list[Any]:
    """Lists what an iterable holds; refuses text, mappings and, if `ordered`, sets."""
    check_unmasked(name, values, nested=False)
    refused = (str, bytes, Mapping, Set) if ordered else (str, bytes, Mapping)
    try:
        if isinstance(values, refused):
            raise TypeError
        return list(values)
    except TypeError:
        raise ForestError(f"{name} must be {expected}, got {_shown(values)}") from None
    except RuntimeError:
        # jagged tensors can be listed, strided ones that are nested cannot
        _check_dense(name, values)
        raise


def to_numpy(values: Any, name: str) -> np.ndarray:
    """Makes a numpy array of a list, an array or a torch tensor on any device."""
    if hasattr(values, "detach"):
        check_without_gradient(name, values)
        _check_dense(name, values)
        values = values.detach().cpu()
        # numpy has no bfloat16; floating point is refused by its kind where it matters
        array: np.ndarray = (values.float() if values.is_floating_point() else values).numpy()
        return array
    check_unmasked(name, values)
    try:
        return np.asarray(values)
    except ValueError:
        raise ForestError(f"{name} is ragged; expected one rectangular array") from None
    except (TypeError, RuntimeError):
        # tensors within a list: on a device, or with a gradient
        return np.asarray([to_numpy(value, f"{name}[{i}]") for i, value in enumerate(values)])


def check_without_gradient(name: str, tensor: Any) -> None:
    """Refuses a tensor that asks for a gradient, which would be lost."""
    import torch

    if tensor.requires_grad and torch.is_grad_enabled():
        raise ForestError(
            f"{name} requires a gradient, and gets none here; detach it if it is a constant"
        )


def _check_dense(name: str, tensor: Any) -> None:
    """Refuses a tensor that numpy cannot hold."""
    import torch

    if tensor.is_nested:
        raise ForestError(f"{name} is a nested tensor: give its parts, list({name}.unbind())")
    if tensor.layout != torch.strided:
        raise ForestError(f"{name} is a sparse tensor: give {name}.to_dense()")
    if tensor.is_meta:
        raise ForestError(f"{name} is on the meta device, which holds no numbers")


def check_unmasked(name: str, values: Any, nested: bool = True) -> None:
    """Refuses a masked array with hidden entries, also within lists."""
    is_list = nested and isinstance(values, (list, tuple)) and len(values) > 0
    # lists of plain numbers are long, and numpy makes NaN of what is hidden among them
    if is_list and type(values[0]) not in (int, float, bool):
        for i, value in enumerate(values):
            check_unmasked(f"{name}[{i}]", value)
    if isinstance(values, np.ma.MaskedArray) and np.ma.getmaskarray(values).any():
        raise ForestError(
            f"{name} is a masked array, whose hidden entries have no number; fill them "
            "(.filled(0)) or leave them out (.compressed())"
        )


def _index(value: Any) -> int | None:
    """Gives the value of one integer, or None for anything else."""
    if _is_truth_value(value) or isinstance(value, np.ma.MaskedArray):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _is_truth_value(value: Any) -> bool:
    dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
    return isinstance(value, (bool, np.bool_)) or dtype == "bool"


def _real(name: str, value: Any) -> float | None:
    """Gives the value of one real number, or None for anything else."""
    if _is_truth_value(value) or getattr(value, "ndim", 0) != 0:
        return None
    if isinstance(value, (int, float, np.integer, np.floating)):
        return float(value)
    if hasattr(value, "detach") or isinstance(value, np.ndarray):
        array = to_numpy(value, name)
        return float(array) if array.dtype.kind in "iuf" else None
    return None


def _shown(value: Any) -> str:
    """Writes the value that came, in about a line."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
