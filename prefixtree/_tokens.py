"""Token ids and labels as people hold them, turned into flat numpy arrays and checked."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from prefixtree._numbers import entries, to_numpy
from prefixtree.errors import ForestError

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
    """All token ids one after another, and the length of each sequence int64 [S].

    `label` names sequence i in an error. Default: name[i].
    """
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
    """int64 [S]: equal labels get equal numbers, counted from 0 as they first appear.

    Args:
        labels: S hashable labels, in a list, a numpy array or a torch tensor.
        name: what the argument is called, in the plural.
        count: S.
        none_is_no_label: None gets -1.

    Raises:
        ForestError: another number of labels than S, or one that is not hashable or NaN.
    """
    given = entries(name, labels, f"a list that names one {name.removesuffix('s')} per sequence")
    # elements of arrays and tensors would hash by identity
    labels = [label.tolist() if hasattr(label, "tolist") else label for label in given]
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
    """The first column and the number of tokens of each row, int64 [B], of a mask bool [B, L].

    Raises:
        ForestError: a row with a hole.
    """
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
