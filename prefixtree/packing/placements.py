"""Where tokens of one forest stand in another, by their paths, and where a packed forest places the
pictures of its sequences.

What stands at the tokens of a forest, in rows or in numbers, may be read for another forest where
both are compared: the same, one that was cut out of it, one of more sequences.

Legend: T packed tokens, Q tokens of the forest that reads, K placements, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from prefixtree import loops
from prefixtree._forest_inputs import numbers_of
from prefixtree.errors import ForestError
from prefixtree.forest import PrefixForest
from prefixtree.packing.layout import PackedForest
from prefixtree.pictures import Pictures


class Found(NamedTuple):
    """The tokens of another forest that have the paths of a forest's tokens.

    Attributes:
        at: int64 [Q], its token with the same path, the first of several; -1 where there is none.
        is_one_of_several: bool [Q], whether it has the path more than once, as under `namespaces=`.
    """

    at: np.ndarray
    is_one_of_several: np.ndarray


class _Paths(NamedTuple):
    """The paths of a forest's tokens, sorted by their hashes.

    Attributes:
        above, value: int64 [T], the token before each, and what makes tokens the same.
        hashes, first: those of its tokens, ascending, and the first token with each.
        first_of: int64 [T], the first token with the hash of each; is_equal: whether it has its
            path, bool [T].
        comes_again: bool [T], of a first token, whether others have its hash.
    """

    above: np.ndarray
    value: np.ndarray
    hashes: np.ndarray
    first: np.ndarray
    first_of: np.ndarray
    is_equal: np.ndarray
    comes_again: np.ndarray

    @classmethod
    def of(cls, forest: PrefixForest, value: np.ndarray) -> _Paths:
        above = _token_above(forest)
        every = loops.sequence_copies.hashes(above, value)
        hashes, first, inverse = np.unique(every, return_index=True, return_inverse=True)
        first_of = first[inverse]
        is_equal = loops.sequence_copies.are_equal(first_of, above, value)
        comes_again = np.bincount(first_of, minlength=len(above)) > 1
        return cls(above, value, hashes, first, first_of, is_equal, comes_again)


_paths: WeakKeyDictionary[PrefixForest, _Paths] = WeakKeyDictionary()


def find_paths(forest: PrefixForest, other: PrefixForest) -> Found:
    """Looks each token of a forest up in another one.

    Paths are equal where their token ids are, and their routes, if the other forest has some. Of
    two forests that are alike, in the order of their nodes too, token t is token t.

    Args:
        forest: whose tokens are looked up. other: in which.
    """
    if _is_alike(forest, other):
        return Found(np.arange(forest.num_tokens), np.zeros(forest.num_tokens, bool))
    nothing = Found(np.full(forest.num_tokens, -1), np.zeros(forest.num_tokens, bool))
    if forest.tokens is None or other.tokens is None:
        return nothing
    value, other_value = forest.tokens, other.tokens
    if other.routes is not None:
        if forest.routes is None or forest.routes.shape[1:] != other.routes.shape[1:]:
            return nothing
        both = np.concatenate([value, other_value]), np.concatenate([forest.routes, other.routes])
        value, other_value = np.split(numbers_of(*both), [len(value)])
    # numbers of routes are those of this pair of forests
    paths = _paths.get(other) if other.routes is None else None
    if paths is None:
        paths = _Paths.of(other, other_value)
        if other.routes is None:
            _paths[other] = paths
    above = _token_above(forest)
    wanted = loops.sequence_copies.hashes(above, value)
    place = np.searchsorted(paths.hashes, wanted).clip(max=len(paths.hashes) - 1)
    at = np.where(paths.hashes[place] == wanted, paths.first[place], -1)
    others = paths.first_of, paths.is_equal, paths.above, paths.value
    loops.sequence_copies.keep_equal(at, above, value, *others)
    return Found(at, (at >= 0) & paths.comes_again[at])


def _is_alike(a: PrefixForest, b: PrefixForest) -> bool:
    """Whether the packed tokens of both are the same, number by number."""
    if a is b:
        return True
    pairs = [(a.node_parent, b.node_parent), (a.node_length, b.node_length), (a.tokens, b.tokens)]
    if b.routes is not None:
        pairs.append((a.routes, b.routes))
    return all(
        x is y or (x is not None and y is not None and np.array_equal(x, y)) for x, y in pairs
    )


def _token_above(forest: PrefixForest) -> np.ndarray:
    """int64 [T], the token before each on its path, -1 for none."""
    above = np.arange(-1, forest.num_tokens - 1)
    parent = forest.node_parent
    last = forest.node_start + forest.node_length - 1
    above[forest.node_start] = np.where(parent < 0, -1, last[parent])
    return above


def described(forest: PrefixForest, token: int) -> str:
    """A packed token, for messages: its id, its position and the first sequence that holds it."""
    node = int(np.searchsorted(forest.node_start, token, side="right")) - 1
    ends = forest.node_start[forest.sequence_node]
    below = (ends >= forest.node_start[node]) & (ends < forest.node_subtree_end[node])
    position = int(forest.node_position[node]) + token - int(forest.node_start[node])
    name = "" if forest.tokens is None else f" (id {forest.tokens[token]})"
    return f"token {position}{name} of sequence {int(below.argmax())}"


@dataclass(frozen=True)
class Placements:
    """The runs of placeholders of a packed forest, in packed order: a picture that two branches
    hold is placed twice, and a video whose frames are apart once per frame.

    Attributes:
        start: int64 [K], the first packed token of each run.
        number: int64 [K], its picture.
        frame: int64 [K], which of the picture's runs it is.
    """

    start: np.ndarray
    number: np.ndarray
    frame: np.ndarray

    def shown_by(self, own: np.ndarray, pictures: Pictures) -> Placements:
        """Those with a token among some packed tokens, int64 [t], ascending."""
        lengths = np.array([pictures.distinct[n].run_tokens for n in self.number], np.int64)
        first, last = (np.searchsorted(own, x) for x in (self.start, self.start + lengths))
        shown = first < last
        return Placements(self.start[shown], self.number[shown], self.frame[shown])


@dataclass(frozen=True)
class PathPictures:
    """A sequence of a packed forest, with its pictures.

    Attributes:
        tokens: int64 [n], ids of `Pictures.sequences`.
        numbers: its pictures in order, a video once.
    """

    tokens: np.ndarray
    numbers: list[int]


def place(packed: PackedForest, pictures: Pictures) -> tuple[Placements, list[PathPictures]]:
    """Finds the pictures of a packed forest.

    Args:
        packed: a forest of `pictures.sequences`, or of a part of them.
        pictures: the pictures of the batch.

    Returns:
        The placements, and S sequences; equal sequences are the same object.

    Raises:
        ForestError: pictures of another batch, or a sequence that is cut inside a picture, or that
            begins as none of `pictures.sequences`.
    """
    forest = packed.forest
    if forest.tokens is None:
        raise ForestError("pictures need a forest with token ids: give from_parents its tokens=")
    _, chosen, same = np.unique(forest.sequence_node, return_index=True, return_inverse=True)
    index, counts = packed.copy_index(chosen)
    tokens = forest.tokens.astype(np.int64)[index]
    # a run ends where the id changes, and where its sequence ends
    first = np.zeros(len(tokens), bool)
    first[np.cumsum(counts) - counts] = True
    starts = np.flatnonzero(first | (np.diff(tokens, prepend=-1) != 0))
    lengths = np.diff(starts, append=len(tokens))
    number = tokens[starts] - pictures.first_id
    pictured = number >= 0
    starts, lengths, number = starts[pictured], lengths[pictured], number[pictured]
    if len(number) and number.max() >= len(pictures):
        pictures.with_placeholders(tokens)
    sequence = np.searchsorted(np.cumsum(counts), starts, side="right")
    runs, run_tokens = (
        np.array([getattr(p, name) for p in pictures.distinct], np.int64)[number]
        for name in ("runs", "run_tokens")
    )
    for bad in np.flatnonzero(lengths != run_tokens)[:1]:
        raise ForestError(
            f"a sequence holds {lengths[bad]} placeholders of picture {number[bad]}, which has "
            f"{run_tokens[bad]}: it is cut inside a picture, or of other pictures; make the forest "
            "of pictures.sequences as they are"
        )
    _check_paths(packed, pictures)
    frame = _frames(sequence, number, runs)
    whole, of_whole = number[frame == 0], sequence[frame == 0]
    held = np.split(whole, np.searchsorted(of_whole, np.arange(1, len(chosen))))
    parts = np.split(tokens, np.cumsum(counts)[:-1])
    paths = [PathPictures(part, n.tolist()) for part, n in zip(parts, held, strict=True)]
    start, at = np.unique(index[starts].astype(np.int64), return_index=True)
    return Placements(start, number[at], frame[at]), [paths[i] for i in same.tolist()]


def _check_paths(packed: PackedForest, pictures: Pictures) -> None:
    """Refuses numbers of pictures that other pictures gave: a forest of another batch."""
    forest = packed.forest
    assert forest.tokens is not None
    shows = np.flatnonzero(forest.tokens >= pictures.first_id)
    if not len(shows):
        return
    at = find_paths(forest, pictures.forest).at[shows]
    for bad in shows[at < 0][:1].tolist():
        raise ForestError(
            f"{described(forest, bad)} shows picture {forest.tokens[bad] - pictures.first_id} "
            "behind tokens that none of pictures.sequences has: the forest is of another batch, or "
            "in other words; make it of pictures.sequences, with these pictures"
        )


def _frames(sequence: np.ndarray, number: np.ndarray, runs: np.ndarray) -> np.ndarray:
    """Which run of its picture each run is: those of a picture follow one another on a path, and
    begin anew where the picture comes again."""
    frame = np.zeros(len(number), np.int64)
    met: dict[tuple[int, int], int] = {}
    for i in np.flatnonzero(runs > 1).tolist():
        key = int(sequence[i]), int(number[i])
        frame[i] = met.get(key, 0) % runs[i]
        met[key] = met.get(key, 0) + 1
    for (_, n), count in met.items():
        frames = int(runs[number == n][0])
        if count % frames:
            raise ForestError(
                f"a sequence holds {count % frames} of the {frames} frames of video {n}: it is cut "
                "inside the video; make the forest of pictures.sequences as they are"
            )
    return frame
