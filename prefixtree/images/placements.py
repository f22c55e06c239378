"""Placements of images in a packed forest.

Legend: K placements, S sequences, t own tokens of a part, n tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefixtree.errors import ForestError
from prefixtree.images.images import Images
from prefixtree.packing.layout import PackedForest
from prefixtree.packing.same_paths import described, find_paths


@dataclass(frozen=True)
class Placements:
    """The runs of placeholders of a packed forest, in packed order.

    An image that two branches hold is placed twice, and a video whose frames are apart once per
    frame.

    Attributes:
        start: int64 [K], the first packed token of each run.
        number, frame: int64 [K], its image, and which of the image's runs it is.
    """

    start: np.ndarray
    number: np.ndarray
    frame: np.ndarray

    def shown_by(self, own: np.ndarray, images: Images) -> Placements:
        """Selects placements with a token among some packed tokens, int64 [t] ascending."""
        lengths = np.array([images.distinct[n].run_tokens for n in self.number], np.int64)
        first, last = (np.searchsorted(own, x) for x in (self.start, self.start + lengths))
        shown = first < last
        return Placements(self.start[shown], self.number[shown], self.frame[shown])


@dataclass(frozen=True)
class PathImages:
    """A sequence's ids, int64 [n], as `Images.sequences` has them, and its images, a video once."""

    tokens: np.ndarray
    numbers: list[int]


def place(packed: PackedForest, images: Images) -> tuple[Placements, list[PathImages]]:
    """Finds the placements in a packed forest of `images.sequences`, and its S sequences.

    Equal sequences are the same object. Raises ForestError for images of another batch, and for a
    sequence that is cut inside an image or begins as none of `images.sequences`.
    """
    forest = packed.forest
    if forest.tokens is None:
        raise ForestError("images need a forest with token ids: give from_parents its tokens=")
    _, chosen, same = np.unique(forest.sequence_node, return_index=True, return_inverse=True)
    index, counts = packed.copy_index(chosen)
    tokens = forest.tokens.astype(np.int64)[index]
    # a run ends where its id changes or its sequence ends
    first = np.zeros(len(tokens), bool)
    first[np.cumsum(counts) - counts] = True
    starts = np.flatnonzero(first | (np.diff(tokens, prepend=-1) != 0))
    lengths = np.diff(starts, append=len(tokens))
    number = tokens[starts] - images.first_id
    image_of = number >= 0
    starts, lengths, number = starts[image_of], lengths[image_of], number[image_of]
    if len(number) and number.max() >= len(images):
        images.with_placeholders(tokens)
    sequence = np.searchsorted(np.cumsum(counts), starts, side="right")
    runs, run_tokens = (
        np.array([getattr(p, name) for p in images.distinct], np.int64)[number]
        for name in ("runs", "run_tokens")
    )
    for bad in np.flatnonzero(lengths != run_tokens)[:1]:
        raise ForestError(
            f"a sequence holds {lengths[bad]} placeholders of image {number[bad]}, which has "
            f"{run_tokens[bad]}: it is cut inside an image, or of other images; make the forest "
            "of images.sequences as they are"
        )
    _check_paths(packed, images)
    frame = _frames(sequence, number, runs)
    image, of_sequence = number[frame == 0], sequence[frame == 0]
    images_of = np.split(image, np.searchsorted(of_sequence, np.arange(1, len(chosen))))
    parts = np.split(tokens, np.cumsum(counts)[:-1])
    paths = [PathImages(part, n.tolist()) for part, n in zip(parts, images_of, strict=True)]
    start, at = np.unique(index[starts].astype(np.int64), return_index=True)
    return Placements(start, number[at], frame[at]), [paths[i] for i in same.tolist()]


def _check_paths(packed: PackedForest, images: Images) -> None:
    """Refuses numbers of images that other images gave: a forest of another batch."""
    forest = packed.forest
    assert forest.tokens is not None
    shows = np.flatnonzero(forest.tokens >= images.first_id)
    if not len(shows):
        return
    at = find_paths(forest, images.forest).at[shows]
    for bad in shows[at < 0][:1].tolist():
        raise ForestError(
            f"{described(forest, bad)} shows image {forest.tokens[bad] - images.first_id} "
            "behind tokens that none of images.sequences has: the forest is of another batch, or "
            "in other words; make it of images.sequences, with these images"
        )


def _frames(sequence: np.ndarray, number: np.ndarray, runs: np.ndarray) -> np.ndarray:
    """Numbers each run within its image on its path, anew where the image comes again."""
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
                "inside the video; make the forest of images.sequences as they are"
            )
    return frame
