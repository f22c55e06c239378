"""Recorded routes: which experts each layer of a mixture chose for each token, checked and joined.

Legend: S sequences, R replicated tokens, L layers of experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np

from prefixtree._numbers import entries, to_numpy
from prefixtree.errors import ForestError

_LARGEST = 2**15 - 1
# what engines write in the place of an expert that they did not record
_UNRECORDED = -1
_RECORD = (
    "a token that the engine did not record: record the prompt too, or drop the sequence; only the "
    "last row that from_sequences gets may be so, or be left out"
)


def join_routes(routes: Iterable[Any], lengths: np.ndarray) -> np.ndarray:
    """Checks the routes of sequences and puts them one after another.

    Args:
        routes: S integer arrays [n, L, k], or [n - 1, L, k]. Engines record none for a sequence's
            last token, on whose experts none of its scores depends: its row may be left out, or
            be zeros, or -1.
        lengths: int64 [S], the numbers of tokens.

    Returns:
        int16 [R, L, k], each token's experts ascending: their order changes nothing. Experts
        0 .. k - 1 where the last token's are not recorded.

    Raises:
        ForestError: routes of another number or length than the sequences, of several numbers of
            layers or experts per token, experts below 0, or one that is named twice.
    """
    listed = entries("routes", routes, "a list of one array per sequence")
    given = [to_numpy(route, f"routes[{i}]") for i, route in enumerate(listed)]
    if len(given) != len(lengths):
        raise ForestError(
            f"routes must have one array per sequence: got {len(given)} for {len(lengths)} "
            "sequences"
        )
    expected = given[0].shape[1:] if given[0].ndim == 3 else (0, 0)
    for i, (route, length) in enumerate(zip(given, lengths.tolist(), strict=True)):
        _check(route, f"routes[{i}]", length, expected)
        if len(route) == length and (route[-1] == _UNRECORDED).all():
            given[i] = route = route[:-1]
        _check_experts(route, f"routes[{i}]")
    joined = np.zeros((int(lengths.sum()), *expected), np.int16)
    # a row that is not there
    joined[:] = np.arange(expected[1], dtype=np.int16)
    last = np.cumsum(lengths) - 1
    for route, end, length in zip(given, last.tolist(), lengths.tolist(), strict=True):
        joined[end + 1 - length : end + 1 - length + len(route)] = np.sort(route, axis=-1)
    twice = _names_twice(joined)
    joined[last[twice[last]]] = np.arange(expected[1], dtype=np.int16)
    twice[last] = False
    for bad in np.flatnonzero(twice)[:1]:
        i = int(np.searchsorted(last, bad))
        at = bad - (last[i] + 1 - lengths[i])
        _refuse_twice(f"routes[{i}][{at}]", joined[bad])
    return joined


def check_packed_routes(routes: Any, num_tokens: int) -> np.ndarray:
    """The same for one array [T, L, k] of tokens in some order of their own.

    Raises:
        ForestError: as `join_routes`.
    """
    given = to_numpy(routes, "routes")
    _check(given, "routes", num_tokens, given.shape[1:])
    _check_experts(given, "routes")
    if len(given) != num_tokens:
        raise ForestError(f"routes has {len(given)} rows; lengths add up to {num_tokens}")
    given = np.sort(given, axis=-1).astype(np.int16)
    for bad in np.flatnonzero(_names_twice(given))[:1]:
        _refuse_twice(f"routes[{bad}]", given[bad])
    return given


def check_counts(routes: np.ndarray, layers: int, chosen: int, experts: int, setting: str) -> None:
    """Refuses routes [T, L, k] of another model.

    Args:
        layers: of experts, that the model has. chosen: the experts per token. experts: per layer.
        setting: the name of `chosen` in the model's configuration.

    Raises:
        ValueError: with both numbers.
    """
    if routes.shape[1] != layers:
        raise ValueError(OTHER_LAYERS.format(routes.shape[1], layers))
    if routes.shape[2] != chosen:
        raise ValueError(
            f"routes have {routes.shape[2]} experts per token, the model chooses {chosen} "
            f"({setting}): they were recorded with another model"
        )
    if (largest := int(routes.max())) >= experts:
        raise ValueError(
            f"routes name expert {largest}, the model has {experts}, numbered from 0: they were "
            "recorded with another model"
        )


OTHER_LAYERS = (
    "routes have {} layers of experts, the model {}: give one entry per layer that has a router, "
    "first to last"
)


def _names_twice(routes: np.ndarray) -> np.ndarray:
    found: np.ndarray = (routes[..., 1:] == routes[..., :-1]).any((1, 2))
    return found


def _refuse_twice(name: str, row: np.ndarray) -> NoReturn:
    raise ForestError(
        f"{name} names an expert twice: {row.tolist()}; expected the {row.shape[1]} experts that "
        f"each layer chose (a row of zeros is {_RECORD})"
    )


def _check(route: np.ndarray, name: str, length: int, expected: tuple[int, ...]) -> None:
    def refuse(problem: str) -> NoReturn:
        raise ForestError(f"{name} {problem}")

    if route.ndim != 3 or route.dtype.kind not in "iu" or 0 in route.shape[1:]:
        refuse(
            f"has shape {list(route.shape)} of {route.dtype}; expected integers [tokens, layers of "
            "experts, experts per token]"
        )
    if len(route) not in (length, length - 1):
        refuse(
            f"has {len(route)} rows for {length} tokens; expected one per token, or one less where "
            "the last token's is not recorded"
        )
    if route.shape[1:] != expected:
        refuse(
            f"has {route.shape[1]} layers of {route.shape[2]} experts per token, and routes[0] "
            f"{expected[0]} of {expected[1]}; expected those of one model"
        )


def _check_experts(route: np.ndarray, name: str) -> None:
    for bad in np.flatnonzero(((route < 0) | (route > _LARGEST)).any((1, 2)))[:1]:
        lowest, highest = int(route[bad].min()), int(route[bad].max())
        raise ForestError(
            f"{name}[{bad}] names expert {lowest if lowest < 0 else highest}; experts are numbered "
            f"from 0 to at most {_LARGEST}"
            + (f" ({_UNRECORDED} is {_RECORD})" if lowest == _UNRECORDED else "")
        )


def numbers_of(tokens: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """One number per token: equal where token id and key are equal, and only there.

    Args:
        tokens: integers [R]. keys: integers [R, ...].

    Returns:
        int64 [R].
    """
    words = _words(keys)
    generator = np.random.default_rng(0)
    while True:
        # odd factors: rows that differ in one word have other sums
        factors = generator.integers(2**63, size=words.shape[1] + 1, dtype=np.uint64) | np.uint64(1)
        sums = tokens.astype(np.uint64) * factors[0]
        for rows in _blocks(len(words)):
            sums[rows] += words[rows] @ factors[1:]
        _, first, number = np.unique(sums, return_index=True, return_inverse=True)
        same = first[number]
        if (tokens == tokens[same]).all() and all(
            (words[rows] == words[same[rows]]).all() for rows in _blocks(len(words))
        ):
            return number.astype(np.int64)


def _words(keys: np.ndarray) -> np.ndarray:
    """The bytes of each key as uint64 [R, words]."""
    rows = np.ascontiguousarray(keys.reshape(len(keys), -1)).view(np.uint8)
    padded = np.zeros((len(rows), -(-rows.shape[1] // 8) * 8), np.uint8)
    padded[:, : rows.shape[1]] = rows
    return padded.view(np.uint64)


def _blocks(count: int, size: int = 4096) -> list[slice]:
    # few enough rows for a processor's cache
    return [slice(start, start + size) for start in range(0, count, size)]
