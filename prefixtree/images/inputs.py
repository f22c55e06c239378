"""Images as processors give them: patches and grids, checked, one object per image.

Legend: N images of one modality, P patches, D values per patch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from prefixtree._numbers import check_unmasked, number, numbers, to_numpy
from prefixtree.errors import UnsupportedError

Modality = Literal["image", "video"]

#: model types whose processors give a grid per image -> whether they write the frames of a
#: video apart, with their times as text between them
GRIDS = {
    "glm46v": True,
    "glm4v": True,
    "qwen2_5_vl": False,
    "qwen3_5": True,
    "qwen3_5_moe": True,
    "qwen3_vl": True,
    "qwen3_vl_moe": True,
}
# types of these that write the frames of a video with the placeholder of images
_ONE_PLACEHOLDER = ("glm46v", "glm4v")
#: model types whose processors give a position per patch, and pad all images to as many patches
_POSITIONS = ("gemma4",)

_BOTH_WAYS = (
    "tokens of an image see the later tokens of that image, and the mask of a forest lets a "
    "token see only what is before it"
)
_UNSERVED = {
    "gemma3": _BOTH_WAYS,
    "gemma4_unified": _BOTH_WAYS,
    "paligemma": "it attends both ways in its prompt",
}


@dataclass(frozen=True, eq=False)
class Image:
    """A distinct image or video.

    Attributes:
        modality: "image" or "video".
        pixels: [P, D], its patches as the processor gave them.
        grid: int64 [3], patches in time, height and width; for Gemma 4 int64 [P, 2], the position
            of each patch, -1 for padding.
        runs: the number of runs of placeholders that it has in a sequence: the frames of a video
            that are written apart, otherwise 1.
        run_tokens: placeholders per run.
        seconds: the seconds per grid step in time of a video, as they were given; None without.
        key: tells it from other images.
    """

    modality: Modality
    pixels: torch.Tensor
    grid: torch.Tensor
    runs: int
    run_tokens: int
    seconds: Any
    key: Hashable


def image_key(pixels: Any, grid: Any, modality: Modality = "image", seconds: Any = None) -> bytes:
    """Hashes an image for comparison; the hash is the same in every process.

    Args:
        pixels: [P, D], the patches of one image, a tensor or an array.
        grid: its grid [3], or the positions of its patches [P, 2].
        modality: "image" or "video".
        seconds: the seconds per grid step in time of a video. Default: not given.

    Returns:
        32 bytes (SHA-256).

    Raises:
        ValueError: pixels or seconds that are no numbers, or a grid that is no integers.
    """
    pixels = _pixels("pixels", pixels).detach().cpu().contiguous()
    steps = np.ascontiguousarray(_integers("grid", grid))
    time = None if seconds is None else float(number("seconds", seconds, or_none=True))
    head = modality, str(pixels.dtype), tuple(pixels.shape), steps.shape, time
    digest = hashlib.sha256(repr(head).encode())
    digest.update(steps.tobytes())
    digest.update(pixels.view(torch.uint8).numpy())
    return digest.digest()


class ImageRule:
    """The form in which a family's processor gives images, by the model's configuration.

    Attributes:
        placeholders: by modality, the token id that the model knows.
        first_id: the first token id beyond the vocabulary and the placeholders.
        grid_name: the argument that says how large images are.
    """

    def __init__(self, config: Any) -> None:
        self.model_type = str(getattr(config, "model_type", None))
        text: Any = getattr(config, "text_config", None)
        check_served(self.model_type, text)
        self.placeholders: dict[Modality, int] = {"image": int(config.image_token_id)}
        video = getattr(config, "video_token_id", None)
        if video is not None and self.model_type not in _ONE_PLACEHOLDER:
            self.placeholders["video"] = int(video)
        self.first_id = max(int(text.vocab_size), *(t + 1 for t in self.placeholders.values()))
        self.grid_name = "image_grid_thw"
        if self.model_type in _POSITIONS:
            self.grid_name = "image_position_ids"
        self._vision = config.vision_config

    def read(
        self,
        modality: Modality,
        pixels: Any,
        grids: Any,
        seconds: Any = None,
        keys: Sequence[Hashable] | None = None,
    ) -> list[Image]:
        """Reads the N images of one modality as they are given, copies included.

        Args:
            pixels: [sum of P, D] of N images or a list of N tensors [P, D]; for Gemma 4 [N, P, D].
            grids: integers [N, 3]; for Gemma 4 [N, P, 2].
            seconds, keys: N each.
        """
        names = self._names(modality)
        if pixels is None and grids is None:
            return []
        if pixels is None or grids is None:
            present, missing = (names[1], names[0]) if pixels is None else (names[0], names[1])
            raise ValueError(f"{present} came without {missing}: give both, or neither")
        if modality == "video" and self.model_type in (*_POSITIONS, *_ONE_PLACEHOLDER):
            raise UnsupportedError(
                f"videos are not verified in model type {self.model_type!r}: give images alone"
            )
        steps = torch.from_numpy(_integers(names[1], grids))
        read = self._by_positions if self.model_type in _POSITIONS else self._by_grids
        parts, sizes = read(modality, pixels, steps)
        others = {"second_per_grid_ts": seconds, f"{modality}_keys": keys}
        for name, values in others.items():
            if values is not None and len(values) != len(steps):
                raise ValueError(
                    f"{name} must have one entry per {modality}: got {len(values)} for {len(steps)}"
                )
        if seconds is not None:
            read_seconds = numbers("second_per_grid_ts", seconds, "one number per video")
            if not np.isfinite(read_seconds).all():
                raise ValueError(f"second_per_grid_ts must be finite, got {read_seconds.tolist()}")
        images: list[Image] = []
        known: dict[Hashable, bytes] = {}
        for i, (part, (runs, tokens)) in enumerate(zip(parts, sizes, strict=True)):
            second = None if seconds is None else seconds[i]
            key: Hashable
            if keys is not None:
                key = modality, keys[i]
            else:
                # a tensor that a list names several times is read once
                same = id(part), steps[i].numpy().tobytes(), str(second)
                key = known.get(same) or image_key(part, steps[i], modality, second)
                known[same] = key
            images.append(Image(modality, part, steps[i], runs, tokens, second, key))
        return images

    def _names(self, modality: Modality) -> tuple[str, str]:
        """The names of the arguments that hold pixels and grids."""
        if modality == "video":
            return "pixel_values_videos", "video_grid_thw"
        return "pixel_values", self.grid_name

    def _by_grids(
        self, modality: Modality, pixels: Any, grids: torch.Tensor
    ) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
        """Cuts patches per image, with (runs, placeholders per run)."""
        pixel_name, grid_name = self._names(modality)
        merge = int(self._vision.spatial_merge_size)
        if grids.ndim != 2 or grids.shape[1] != 3:
            raise ValueError(
                f"{grid_name} must be [{modality}s, 3] (patches in time, height and width), got "
                f"shape {list(grids.shape)}"
            )
        wrong = (grids < 1).any(1) | (grids[:, 1:] % merge != 0).any(1)
        for i in wrong.nonzero()[:1, 0].tolist():
            raise ValueError(
                f"{grid_name}[{i}] is {grids[i].tolist()}; expected positive numbers of patches, "
                f"height and width multiples of {merge} (spatial_merge_size)"
            )
        patches = grids.prod(1).tolist()
        parts = _parts(pixels, patches, pixel_name, grid_name, modality)
        apart = modality == "video" and GRIDS[self.model_type]
        runs = grids[:, 0].tolist() if apart else [1] * len(grids)
        return parts, [(n, p // n // merge**2) for n, p in zip(runs, patches, strict=True)]

    def _by_positions(
        self, modality: Modality, pixels: Any, positions: torch.Tensor
    ) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
        pixel_name, position_name = self._names(modality)
        pooled = int(self._vision.pooling_kernel_size) ** 2
        shape = list(getattr(pixels, "shape", [len(pixels)]))
        if positions.ndim != 3 or positions.shape[2] != 2:
            raise ValueError(
                f"{position_name} must be [images, patches, 2], got shape {list(positions.shape)}"
            )
        if len(shape) not in (1, 3) or shape[:2] != list(positions.shape[: min(2, len(shape))]):
            raise ValueError(
                f"{pixel_name} of shape {shape} and {position_name} of shape "
                f"{list(positions.shape)} do not fit: expected [images, patches, values] and "
                "[images, patches, 2]"
            )
        parts = [_pixels(f"{pixel_name}[{i}]", part) for i, part in enumerate(pixels)]
        real = (positions != -1).all(-1).sum(1)
        for i, (part, count) in enumerate(zip(parts, real.tolist(), strict=True)):
            if part.ndim != 2 or len(part) != positions.shape[1]:
                raise ValueError(
                    f"{pixel_name}[{i}] has shape {list(part.shape)}; expected "
                    f"[{positions.shape[1]}, values], as {position_name} has"
                )
            if count == 0 or count % pooled:
                raise ValueError(
                    f"{position_name}[{i}] has {count} patches that are no padding; expected a "
                    f"positive multiple of {pooled} (pooling_kernel_size squared)"
                )
        return parts, [(1, count // pooled) for count in real.tolist()]


def check_served(model_type: str, text_config: Any) -> None:
    """Refuses a family whose images are not verified, with the reason where it is known."""
    both_ways = getattr(text_config, "use_bidirectional_attention", None) == "vision"
    if both_ways or model_type in _UNSERVED:
        setting = ' with use_bidirectional_attention="vision"' if both_ways else ""
        raise UnsupportedError(
            f"images of model type {model_type!r}{setting} are not served: "
            f"{_UNSERVED.get(model_type, _BOTH_WAYS)}"
        )
    if model_type not in (*GRIDS, *_POSITIONS):
        raise UnsupportedError(
            f"images are not verified in model type {model_type!r}, only in "
            f"{', '.join(sorted((*GRIDS, *_POSITIONS)))}; give the configuration of the whole "
            "model (model.config), not that of its text part"
        )


def _integers(name: str, grid: Any) -> np.ndarray:
    """Reads integers of any shape as int64."""
    array = to_numpy(grid, name)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers, got {array.dtype}")
    return array.astype(np.int64)


def _pixels(name: str, pixels: Any) -> torch.Tensor:
    check_unmasked(name, pixels)
    try:
        return torch.as_tensor(pixels)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise ValueError(f"{name} must be a tensor or an array of numbers: {problem}") from None


def _parts(
    pixels: Any, patches: list[int], pixel_name: str, grid_name: str, modality: str
) -> list[torch.Tensor]:
    """Cuts the patches of each image, [P, D]."""
    if isinstance(pixels, (list, tuple)):
        if len(pixels) != len(patches):
            raise ValueError(
                f"{pixel_name} has {len(pixels)} {modality}s, {grid_name} {len(patches)}"
            )
        parts = [_pixels(f"{pixel_name}[{i}]", part) for i, part in enumerate(pixels)]
        # as_tensor gives an array a new tensor every time; equal objects stay equal objects
        same: dict[int, torch.Tensor] = {}
        parts = [same.setdefault(id(p), part) for p, part in zip(pixels, parts, strict=True)]
        for i, (part, count) in enumerate(zip(parts, patches, strict=True)):
            if part.ndim != 2 or len(part) != count:
                raise ValueError(
                    f"{pixel_name}[{i}] has shape {list(part.shape)}; {grid_name}[{i}] asks for "
                    f"[{count}, values]: the image is missing in part, or of another size than "
                    "its grid"
                )
        return parts
    joined = _pixels(pixel_name, pixels)
    if joined.ndim != 2 or len(joined) != sum(patches):
        raise ValueError(
            f"{pixel_name} has shape {list(joined.shape)}; {grid_name} asks for "
            f"[{sum(patches)}, values], those of {len(patches)} {modality}s: one is missing, or of "
            "another size than its grid"
        )
    return list(joined.split(patches))
