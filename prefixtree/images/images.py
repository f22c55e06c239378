"""Images and videos in token sequences: two placeholders are one token if they show the same.

Processors write one placeholder id for every image. `Images` gives each distinct image an id
of its own, beyond the vocabulary. Then two sequences have a common prefix exactly where text and
images are equal, and forests, plans and reports of these ids need to know nothing of images.

This module needs no model and not transformers. `images.vision` runs images in a model.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from prefixtree._forest_inputs import flatten
from prefixtree.errors import ForestError
from prefixtree.forest import PrefixForest
from prefixtree.images.inputs import Image, ImageRule, Modality, image_key

__all__ = ["Image", "Images", "image_key"]


class Images:
    """The distinct images of a batch, and its sequences with an id for each. Made by `from_batch`.

        images = Images.from_batch(sequences, pixel_values, image_grid_thw, model.config)
        packed = pack(PrefixForest.from_sequences(images.sequences))
        scores = sequence_logprobs(model, packed, images=images)

    Attributes:
        sequences: S integer arrays. The placeholders of distinct image n are `first_id` + n.
        distinct: the distinct images and videos, in the order in which they first come.
        of_sequences: S lists, the numbers of the images that a sequence holds, in its order.
        first_id: the id of image 0, beyond the vocabulary.
        placeholders: by modality, the id that the model knows.
        model_type: of the model whose processor gave the images.
    """

    def __init__(
        self,
        sequences: list[np.ndarray],
        distinct: list[Image],
        of_sequences: list[list[int]],
        first_id: int,
        placeholders: dict[Modality, int],
        model_type: str,
    ) -> None:
        self.sequences = sequences
        self.distinct = distinct
        self.of_sequences = of_sequences
        self.first_id = first_id
        self.placeholders = placeholders
        self.model_type = model_type

    @classmethod
    def from_batch(
        cls,
        sequences: Iterable[Any],
        pixel_values: Any,
        image_grid_thw: Any,
        config: Any,
        *,
        pixel_values_videos: Any = None,
        video_grid_thw: Any = None,
        second_per_grid_ts: Any = None,
        image_position_ids: Any = None,
        image_keys: Sequence[Hashable] | None = None,
        video_keys: Sequence[Hashable] | None = None,
    ) -> Images:
        """Numbers the distinct images of a batch.

        Two images are one where modality, grid, dtype, shape, pixels and seconds per grid step
        are equal. Their hashes (SHA-256) are compared. Placeholders of images without any images,
        and of videos without any videos, stay as they are: text, as in transformers.

        Args:
            sequences: S sequences of token ids with the processor's placeholders (lists, numpy
                arrays or torch tensors), without padding.
            pixel_values: the images of all sequences, in the order of their placeholders; an image
                that several sequences hold comes once for each. [patches, values] as processors
                give it, or a list of one such tensor per image: a tensor that stands in the list
                several times is hashed once. Gemma 4: [images, patches, values]. None: no images.
            image_grid_thw: integers [images, 3], the patches of each in time, height and width.
                None: no images, or Gemma 4.
            config: the model's configuration, `model.config`. Read are model_type, image_token_id,
                video_token_id, text_config and vision_config.
            pixel_values_videos: the videos, as the images. Default: no videos.
            video_grid_thw: integers [videos, 3]. Default: no videos.
            second_per_grid_ts: [videos], seconds per grid step in time, which Qwen2.5-VL turns into
                positions. Default: the model's.
            image_position_ids: integers [images, patches, 2], which Gemma 4 has in the place of
                image_grid_thw: the position of each patch, -1 for padding.
            image_keys: one hashable key per image, equal where images are; their pixels are not
                hashed then. Default: their hashes.
            video_keys: the same of the videos. Default: their hashes.

        Returns:
            The images.

        Raises:
            UnsupportedError: a model type whose images, or whose videos, are not verified.
            ForestError: placeholders that do not match the images: another number of images,
                another size, a sequence that is cut inside an image, two images without a token
                between them; a token id beyond the vocabulary.
            ValueError: tensors that do not fit one another; two grids or sizes for one key.
        """
        rule = ImageRule(config)
        read: dict[Modality, list[Image]] = {
            "image": rule.read(
                "image",
                pixel_values,
                _one_of(rule, image_grid_thw, image_position_ids),
                keys=image_keys,
            ),
            "video": rule.read(
                "video", pixel_values_videos, video_grid_thw, second_per_grid_ts, video_keys
            ),
        }
        flat, lengths = flatten(sequences, "sequences")
        ends = np.cumsum(lengths)
        for bad in np.flatnonzero(flat >= rule.first_id)[:1]:
            i = int(np.searchsorted(ends, bad, side="right"))
            raise ForestError(
                f"sequences[{i}] has the token id {flat[bad]}; ids from {rule.first_id} on are "
                "beyond the vocabulary and stand for images: give the processor's token ids"
            )
        rows = np.split(flat.copy(), ends[:-1])
        walk = _Walk(rule, read)
        of_sequences = [walk.number(i, row) for i, row in enumerate(rows)]
        walk.check_all_are_held()
        return cls(
            rows, walk.distinct, of_sequences, rule.first_id, rule.placeholders, rule.model_type
        )

    @cached_property
    def forest(self) -> PrefixForest:
        """The forest of `sequences`."""
        return PrefixForest.from_sequences(self.sequences)

    @property
    def num_given(self) -> int:
        """The number of images in all sequences, copies included."""
        return sum(map(len, self.of_sequences))

    def with_placeholders(self, tokens: np.ndarray) -> np.ndarray:
        """Replaces ids of images in integers of any shape by the placeholders that the model knows.

        Raises:
            ForestError: an id beyond the images.
        """
        number = tokens - self.first_id
        if tokens.size and number.max() >= len(self.distinct):
            raise ForestError(
                f"the sequences hold image {number.max()} (token id {tokens.max()}), and there "
                f"are {len(self.distinct)}: the forest is of other images; make it of "
                "images.sequences, with these images"
            )
        known = [self.placeholders[image.modality] for image in self.distinct]
        return np.where(number >= 0, np.array([*known, 0], tokens.dtype)[number.clip(-1)], tokens)

    def __len__(self) -> int:
        return len(self.distinct)

    def __repr__(self) -> str:
        return (
            f"Images({len(self.distinct)} distinct of {self.num_given}, "
            f"{len(self.sequences)} sequences)"
        )


def _one_of(rule: ImageRule, grids: Any, positions: Any) -> Any:
    """The grids, or the positions of patches if the family has these in their place."""
    expected, other = rule.grid_name, positions
    chosen = grids
    if expected == "image_position_ids":
        chosen, other = positions, grids
    if other is not None:
        wrong = "image_grid_thw" if expected == "image_position_ids" else "image_position_ids"
        raise ValueError(f"model type {rule.model_type!r} takes {expected}, not {wrong}")
    return chosen


class _Walk:
    """Meets the images in the order of their placeholders, and numbers the distinct ones."""

    def __init__(self, rule: ImageRule, given: dict[Modality, list[Image]]) -> None:
        self.distinct: list[Image] = []
        self._rule, self._given = rule, given
        self._number: dict[Hashable, int] = {}
        self._met: dict[Modality, int] = {"image": 0, "video": 0}

    def number(self, index: int, row: np.ndarray) -> list[int]:
        """Writes ids over a sequence's placeholders, in place; returns its images' numbers."""
        numbers: list[int] = []
        # for a video whose frames are apart: its number, and the runs that are still to come
        video, missing = -1, 0
        at = 0
        for modality, start, end in self._runs(row):
            where = f"sequences[{index}], tokens {start} to {end - 1}:"
            if start == at > 0:
                raise ForestError(
                    f"{where} this {modality} follows the one before it without a token between, "
                    "so that a model takes both for one; processors put an end and a start there"
                )
            at = end
            if modality == "video" and missing:
                number, missing = video, missing - 1
            else:
                number = self._meet(modality, where)
                numbers.append(number)
                if modality == "video":
                    video, missing = number, self.distinct[number].runs - 1
            self._check_length(self.distinct[number], start, end, len(row), where)
            row[start:end] = self._rule.first_id + number
        if missing:
            raise ForestError(
                f"sequences[{index}] is cut inside a video: {missing} of its "
                f"{self.distinct[video].runs} frames are missing; drop the sequence, or allow more "
                "tokens"
            )
        return numbers

    def check_all_are_held(self) -> None:
        """Raises a ForestError for images that no placeholder stands for."""
        for modality, images in self._given.items():
            if (met := self._met[modality]) < len(images):
                raise ForestError(
                    f"{len(images)} {modality}s were given, and the sequences hold {met}: give the "
                    f"{modality}s of these sequences alone, one that several hold once for each"
                )

    def _runs(self, row: np.ndarray) -> Iterator[tuple[Modality, int, int]]:
        """Finds each run of equal placeholders: modality, first token, one past the last."""
        # without images of a modality, its placeholders are text
        modalities = [m for m in self._rule.placeholders if self._given[m]]
        kind = np.zeros(len(row) + 1, np.int8)
        for value, modality in enumerate(modalities, 1):
            kind[:-1][row == self._rule.placeholders[modality]] = value
        edges = np.flatnonzero(np.diff(kind, prepend=0))
        for start, end in itertools.pairwise(edges.tolist()):
            if kind[start]:
                yield modalities[kind[start] - 1], start, end

    def _meet(self, modality: Modality, where: str) -> int:
        """Takes the next image, and returns its number."""
        images, at = self._given[modality], self._met[modality]
        if at == len(images):
            raise ForestError(
                f"{where} placeholders of {modality} {at} of the batch, and {at} {modality}s were "
                f"given; give every sequence its {modality}s, also those that others hold too"
                + self._if_sampled(modality)
            )
        self._met[modality] += 1
        image = images[at]
        number = self._number.setdefault(image.key, len(self.distinct))
        if number == len(self.distinct):
            self.distinct.append(image)
        elif not _alike(image, self.distinct[number]):
            first = self.distinct[number]
            raise ValueError(
                f"{modality}s of one key must be equal: those of key {image.key!r} have grids "
                f"{_short(first.grid)} and {_short(image.grid)}, pixels of shapes "
                f"{list(first.pixels.shape)} and {list(image.pixels.shape)}"
            )
        return number

    def _check_length(self, image: Image, start: int, end: int, length: int, where: str) -> None:
        placeholders, expected = end - start, image.run_tokens
        if placeholders == expected:
            return
        message = f"{where} {placeholders} placeholders of one {image.modality} with {expected}"
        if image.runs > 1:
            message += " per frame"
        if placeholders < expected and end == length:
            raise ForestError(
                f"{message}: the sequence is cut inside an image; drop it, or allow more tokens"
            )
        raise ForestError(
            f"{message} (grid {_short(image.grid)}): the image is of another size, another one "
            "is missing before it, or two stand side by side without a token between"
            + self._if_sampled(image.modality)
        )

    def _if_sampled(self, modality: Modality) -> str:
        token = self._rule.placeholders[modality]
        return (
            f". A placeholder that a policy sampled shows no {modality}, and transformers refuses "
            f"it beside {modality}s too: drop the sequence, and keep the policy from sampling it "
            f"(generate(suppress_tokens=[{token}]), in vLLM logit_bias={{{token}: -100}})"
        )


def _alike(a: Image, b: Image) -> bool:
    """Whether two images of one key can be one."""
    same_form = a.pixels.shape == b.pixels.shape and a.pixels.dtype == b.pixels.dtype
    return same_form and a.grid.equal(b.grid) and a.seconds == b.seconds


def _short(grid: torch.Tensor) -> str:
    """Shows a grid; positions of patches are too many to be shown."""
    if grid.ndim == 1:
        return str(grid.tolist())
    real = grid[(grid != -1).all(-1)]
    return f"of {len(real)} patches up to {real.amax(0).tolist()}"
