"""Checks of arguments that several functions of `packing` take."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from prefixtree.errors import ForestError
from prefixtree.packing.layout import PackedForest


def at_least_one(name: str, value: Any) -> int:
    """The value as an integer.

    Raises:
        ValueError: it is none, or below 1.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}") from None
    if number < 1 or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
    return number


def check_packed(packed: Any, caller: str) -> None:
    """Checks that this is a packed forest whose queries are all its tokens.

    Raises:
        TypeError: it is no packed forest.
        ForestError: its mask holds a subset of the queries.
    """
    if not isinstance(packed, PackedForest):
        raise TypeError(
            f"{caller} takes a packed forest, got {type(packed).__name__}; "
            "pack(PrefixForest.from_sequences(sequences)) makes one"
        )
    if packed.mask.query_tokens is not None:
        raise ForestError(
            f"{caller} takes a packed forest whose mask is for all queries, got a mask for "
            f"{packed.mask.num_queries} of {packed.num_tokens}; every part makes such a mask of "
            "its own, so leave for_queries out"
        )


def check_indices(name: str, values: np.ndarray, end: int, of_what: str) -> None:
    """Checks that these are 1-D integers within 0 .. end - 1.

    Raises:
        ForestError: they are not.
    """
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
        raise ForestError(
            f"{name} must be 1-D integers, got shape {list(values.shape)} of {values.dtype}"
        )
    if values.size and (values.min() < 0 or values.max() >= end):
        bad = int(np.flatnonzero((values < 0) | (values >= end))[0])
        raise ForestError(
            f"{name}[{bad}] is {values[bad]}; expected 0 to {end - 1}, as there are {end} {of_what}"
        )
