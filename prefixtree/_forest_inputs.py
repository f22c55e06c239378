"""Inputs of a forest: token ids and labels as people hold them, and recorded routes, turned into
flat numpy arrays and checked; and the invariants of every `PrefixForest`, however it was made.

Routes say which experts each layer of a mixture chose for each token.

Legend: S sequences, R replicated tokens, L layers of experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from prefixtree import loops
from prefixtree._numbers import entries, selection, to_numpy
from prefixtree.errors import ForestError

# ---- token ids and labels ------------------------------------------------------------------------

_LARGEST = 2**63 - 1


def is_nested(tokens: Any) -> bool:
    """Whether these are sequences rather than numbers."""
    return isinstance(tokens, (list, tuple)) and len(tokens) > 0 and np.ndim(tokens[0]) > 0


def check_tokens(flat: np.ndarray, name: str = "token ids") -> np.ndarray:
    """Token ids as contiguous int32 or int64, checked."""
    if flat.dtype.kind not in "iu":
        raise ForestError(f"{name} must be integers, got {flat.dtype}")
    if flat.dtype.kind == "i" and flat.min() < 0:
        raise ForestError(f"{name} must be >= 0, got {flat.min()}; is it padding?")
    if flat.dtype == np.uint64 and flat.max() > _LARGEST:
        raise ForestError(f"{name} must be below 2^63, got {flat.max()}")
    if flat.dtype not in (np.int32, np.int64):
        flat = flat.astype(np.int64)
    return np.ascontiguousarray(flat)


def flatten(
    sequences: Iterable[Any], name: str, label: Callable[[int], str] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Joins token ids; gives also int64 [S] lengths. `label` names sequence i in errors."""
    label = label or (lambda i: f"{name}[{i}]")
    if isinstance(sequences, (str, bytes)) or not isinstance(sequences, Iterable):
        raise ForestError(
            f"{name} must be a list of token id sequences, got {type(sequences).__name__}"
        )
    if isinstance(sequences, Mapping):
        raise ForestError(
            f"{name} must be a list of token id sequences, got {type(sequences).__name__} with the "
            f"keys {', '.join(map(repr, sequences))}; give its token ids: one list per sequence, "
            "without padding"
        )
    if getattr(sequences, "is_nested", False):
        raise ForestError(f"{name} is a nested tensor: give its parts, list({name}.unbind())")
    is_array = hasattr(sequences, "ndim") and getattr(sequences, "dtype", None) != np.dtype(object)
    if is_array:
        raise ForestError(
            f"{name} must be a list of 1-D sequences, got one array of shape "
            f"{list(getattr(sequences, 'shape', []))}; for a padded batch use from_padded"
        )
    arrays: list[np.ndarray] = []
    for sequence in sequences:
        if isinstance(sequence, Mapping):
            raise ForestError(
                f"{label(len(arrays))} is a {type(sequence).__name__}; expected 1-D token ids: "
                'give its "input_ids"'
            )
        try:
            arrays.append(sequence if type(sequence) is np.ndarray else to_numpy(sequence, name))
        except ForestError:
            # its name is made only now that there is a culprit
            to_numpy(sequence, label(len(arrays)))
            raise
    if not arrays:
        raise ForestError(f"{name} is empty; expected at least one sequence of token ids")

    def refuse(i: int, problem: str) -> NoReturn:
        raise ForestError(f"{label(i)} {problem}")

    if any(a.ndim != 1 for a in arrays):
        i = next(i for i, a in enumerate(arrays) if a.ndim != 1)
        if arrays[i].dtype == object:
            refuse(i, "holds no numbers; expected 1-D token ids: a list, an array or a tensor")
        if arrays[i].dtype.kind in "US":
            refuse(i, "is text; expected token ids: tokenise it first")
        if arrays[i].ndim == 0 and arrays[i].dtype.kind in "iuf":
            refuse(
                i,
                f"is one number, {arrays[i]}; {name} is a list of sequences of token ids: put one "
                "sequence into a list too, as [[1, 2, 3]]",
            )
        refuse(i, f"has shape {list(arrays[i].shape)}; expected 1-D token ids")
    lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
    if lengths.min() == 0:
        refuse(int(lengths.argmin()), "is empty; drop it or give it at least one token")
    kinds = {a.dtype for a in arrays}
    if any(kind.kind not in "iu" for kind in kinds):
        i = next(i for i, a in enumerate(arrays) if a.dtype.kind not in "iu")
        refuse(i, f"has {arrays[i].dtype} values; token ids are integers")
    if np.dtype(np.uint64) in kinds and len(kinds) > 1:
        # numpy would join unsigned and signed 64 bits to floating point
        arrays = [check_tokens(a) for a in arrays]
    flat = np.concatenate(arrays)
    try:
        return check_tokens(flat), lengths
    except ForestError:
        # find the culprit only now that there is one
        for i, a in enumerate(arrays):
            if a.min() < 0:
                refuse(i, f"has the negative token id {a.min()}; remove padding first")
            if a.max() > _LARGEST:
                refuse(i, f"has the token id {a.max()}; token ids are below 2^63")
        raise


def label_numbers(
    labels: Sequence[Hashable], name: str, count: int, none_is_no_label: bool = False
) -> np.ndarray:
    """Numbers S labels, int64 [S]: equal labels get equal numbers, from 0 as they first appear.

    `none_is_no_label`: None gets -1. Other counts than S, and labels unhashable or NaN, are
    ForestErrors.
    """
    listed = entries(name, labels, f"a list that names one {name.removesuffix('s')} per sequence")
    # elements of arrays and tensors would hash by identity
    labels = [label.tolist() if hasattr(label, "tolist") else label for label in listed]
    if len(labels) != count:
        raise ForestError(
            f"{name} must name one {name.removesuffix('s')} per sequence: got {len(labels)} {name} "
            f"for {count} sequences"
        )
    for bad in (i for i, label in enumerate(labels) if isinstance(label, float) and label != label):
        raise ForestError(f"{name}[{bad}] is nan, which equals no other label; give it a name")
    numbers: dict[Hashable, int] = {None: -1} if none_is_no_label else {}
    unlabelled = len(numbers)
    try:
        return np.array(
            [numbers.setdefault(label, len(numbers) - unlabelled) for label in labels], np.int64
        )
    except TypeError as problem:
        raise ForestError(f"{name} must be hashable: {problem}") from None


def unbroken_runs(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Finds each row's first column and tokens, int64 [B], in a mask bool [B, L]; refuses holes."""
    if not mask.size:
        return np.zeros(len(mask), np.int64), np.zeros(len(mask), np.int64)
    lengths, first = mask.sum(1), mask.argmax(1)
    last = mask.shape[1] - 1 - mask[:, ::-1].argmax(1)
    for bad in np.flatnonzero((lengths > 0) & (last - first + 1 != lengths))[:1]:
        raise ForestError(
            f"row {bad} of attention_mask has a hole between columns {first[bad]} and {last[bad]}; "
            "expected one unbroken run of ones (left or right padding)"
        )
    return first, lengths


# ---- routes --------------------------------------------------------------------------------------

_LARGEST_EXPERT = 2**15 - 1
# what engines write in the place of an expert that they did not record, and forests in that of all
_UNRECORDED = -1
_RECORD = (
    "a token that the engine did not record: record it too, or drop the sequence; rows at the end "
    "may be so, or be left out, where from_sequences(..., loss_mask=) scores no token after them"
)


def join_routes(
    routes: Iterable[Any], lengths: np.ndarray, loss_mask: Iterable[Any] | None = None
) -> np.ndarray:
    """Checks the routes of sequences and puts them one after another.

    Args:
        routes: S integer arrays [n, L, k] or with fewer rows. Rows on which no scored token depends
            may be left out, or be zeros, or -1.
        lengths: int64 [S], the numbers of tokens.
        loss_mask: S masks [n], the scored tokens. Default: all.

    Returns:
        int16 [R, L, k], each token's experts ascending: their order changes nothing. -1 where none
            are recorded.
    """
    listed = entries("routes", routes, "a list of one array per sequence")
    arrays = [to_numpy(route, f"routes[{i}]") for i, route in enumerate(listed)]
    if len(arrays) != len(lengths):
        raise ForestError(
            f"routes must have one array per sequence: got {len(arrays)} for {len(lengths)} "
            "sequences"
        )
    expected = arrays[0].shape[1:] if arrays[0].ndim == 3 else (0, 0)
    needed = lengths - 1 if loss_mask is None else _last_scored(loss_mask, lengths)
    joined = np.full((int(lengths.sum()), *expected), _UNRECORDED, np.int16)
    first = np.cumsum(lengths) - lengths
    for i, (route, n, least, at) in enumerate(
        zip(arrays, lengths.tolist(), needed.tolist(), first.tolist(), strict=True)
    ):
        name = f"routes[{i}]"
        _check(route, name, n, expected, least)
        in_order = np.sort(route, axis=-1)
        twice = _names_twice(in_order)
        recorded = ~(twice | (route == _UNRECORDED).all((1, 2)))
        recorded[:least] = True
        _check_experts(route, name, recorded)
        for bad in np.flatnonzero(twice & recorded)[:1]:
            _refuse_twice(f"{name}[{bad}]", in_order[bad])
        joined[at : at + len(route)][recorded] = in_order[recorded]
    return joined


def _last_scored(loss_mask: Iterable[Any], lengths: np.ndarray) -> np.ndarray:
    """The index of each sequence's last scored token, int64 [S]; 0 without one."""
    masks = entries("loss_mask", loss_mask, "a list of one mask per sequence")
    if len(masks) != len(lengths):
        raise ForestError(f"loss_mask has {len(masks)} masks for {len(lengths)} sequences")
    last = np.zeros(len(lengths), np.int64)
    for i, n in enumerate(lengths.tolist()):
        mask = selection(f"loss_mask[{i}]", masks[i])
        if mask.shape != (n,):
            raise ForestError(
                f"loss_mask[{i}] has shape {list(mask.shape)}; expected the sequence's length {n}"
            )
        last[i] = np.flatnonzero(mask).max(initial=0)
    return last


def check_packed_routes(routes: Any, num_tokens: int) -> np.ndarray:
    """Checks and sorts routes that come as one array [T, L, k]; rows of -1 are not recorded."""
    array = to_numpy(routes, "routes")
    _check(array, "routes", num_tokens, array.shape[1:], num_tokens - 1)
    recorded = (array != _UNRECORDED).any((1, 2))
    _check_experts(array, "routes", recorded)
    if len(array) != num_tokens:
        raise ForestError(f"routes has {len(array)} rows; lengths add up to {num_tokens}")
    array = np.sort(array, axis=-1).astype(np.int16)
    for bad in np.flatnonzero(_names_twice(array) & recorded)[:1]:
        _refuse_twice(f"routes[{bad}]", array[bad])
    return array


def check_counts(routes: np.ndarray, layers: int, chosen: int, experts: int, setting: str) -> None:
    """Refuses routes [T, L, k] of a model with other layers, experts per token or experts.

    `setting`: the name of `chosen`, the experts per token, in the model's configuration.
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


def _check(
    route: np.ndarray, name: str, length: int, expected: tuple[int, ...], least: int
) -> None:
    """Refuses another shape than [least to length, *expected]."""

    def refuse(problem: str) -> NoReturn:
        raise ForestError(f"{name} {problem}")

    if route.ndim != 3 or route.dtype.kind not in "iu" or 0 in route.shape[1:]:
        refuse(
            f"has shape {list(route.shape)} of {route.dtype}; expected integers [tokens, layers of "
            "experts, experts per token]"
        )
    if not least <= len(route) <= length:
        refuse(
            f"has {len(route)} rows for {length} tokens; expected one per token, or at least the "
            f"{least} before the last scored one"
        )
    if route.shape[1:] != expected:
        refuse(
            f"has {route.shape[1]} layers of {route.shape[2]} experts per token, and routes[0] "
            f"{expected[0]} of {expected[1]}; expected those of one model"
        )


def _check_experts(route: np.ndarray, name: str, recorded: np.ndarray) -> None:
    outside = ((route < 0) | (route > _LARGEST_EXPERT)).any((1, 2))
    for bad in np.flatnonzero(outside & recorded)[:1]:
        lowest, highest = int(route[bad].min()), int(route[bad].max())
        raise ForestError(
            f"{name}[{bad}] names expert {lowest if lowest < 0 else highest}; experts are numbered "
            f"from 0 to at most {_LARGEST_EXPERT}"
            + (f" ({_UNRECORDED} is {_RECORD})" if lowest == _UNRECORDED else "")
        )


def numbers_of(tokens: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Numbers tokens, int64 [R]: equal exactly where ids [R] and keys [R, ...] are equal."""
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


# ---- rules of every forest -----------------------------------------------------------------------


def check_invariants(forest: Any) -> None:
    """Checks the arrays of a `PrefixForest`, which lists the rules; an error names the node."""
    parent, start, length = forest.node_parent, forest.node_start, forest.node_length
    n = len(parent)
    per_node = (start, length, forest.node_position, forest.node_subtree_end)
    if n == 0 or any(len(a) != n for a in per_node) or len(forest.sequence_node) == 0:
        raise ForestError(
            "a forest needs at least one node and one sequence, and node arrays with one entry "
            f"per node; got {n} parents, {[len(a) for a in per_node]} other entries and "
            f"{len(forest.sequence_node)} sequences"
        )
    child, end = parent >= 0, start + length
    above = np.where(child, parent, 0)

    def require(holds: np.ndarray, rule: str) -> None:
        for bad in np.flatnonzero(~holds)[:1]:
            raise ForestError(f"node {bad} breaks the forest: {rule}")

    require((parent >= -1) & (parent < np.arange(n)), "parents precede children")
    require(length >= 1, "a node has at least one token")
    require(start == np.concatenate([[0], end[:-1]]), "nodes lie side by side from 0")
    position = np.where(child, forest.node_position[above] + length[above], 0)
    require(forest.node_position == position, "its position is its parent's position + length")
    subtree_end = forest.node_subtree_end
    limit = np.where(child, subtree_end[above], end[-1])
    require((subtree_end >= end) & (subtree_end <= limit), "subtree ends nest")
    weight = loops.trie.subtree_weights(parent, length)
    require(
        subtree_end - start == weight,
        "its subtree holds its tokens and its descendants'",
    )
    leaf = subtree_end == end
    ends = forest.sequence_node
    if ends.min() < 0 or ends.max() >= n:
        raise ForestError(f"sequence_node must name nodes below {n}")
    ended = np.zeros(n, bool)
    ended[ends] = True
    require(~leaf | ended, "a leaf ends at least one sequence; name it in sequence_ends")
    if forest.tokens is not None and forest.tokens.shape != (int(end[-1]),):
        raise ForestError(f"tokens must hold {end[-1]} ids, got shape {forest.tokens.shape}")
    if forest.routes is not None and (
        forest.routes.ndim != 3 or len(forest.routes) != end[-1] or forest.tokens is None
    ):
        raise ForestError(
            f"routes must be [{end[-1]}, layers, experts per token], beside tokens; got shape "
            f"{forest.routes.shape}"
        )
