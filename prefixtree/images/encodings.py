"""Calls of a model's vision encoder: the images of one modality, their pixels and grids, and the
places of their features.

Legend: K placements, N distinct images, F features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from prefixtree.errors import UnsupportedError
from prefixtree.images.encoder import EncoderShape, features_in
from prefixtree.images.exchange import FeatureExchange, holders_of
from prefixtree.images.images import Images
from prefixtree.images.inputs import Image, Modality
from prefixtree.images.placements import Placements
from prefixtree.packing.copies import GatherIndex, gather, move, move_joined
from prefixtree.planning.parts import Parts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: model types whose vision encoder has another name: the vision encoder's attribute in the model
#: without its lm_head, and its keyword of grids
ENCODERS = {"gemma4": ("vision_tower", "pixel_position_ids")}
MODALITIES: tuple[Modality, ...] = ("image", "video")
UNEXPECTED = (
    "images are verified with transformers' models, which call their vision encoder once for the "
    "images and once for the videos of a forward; this one called it"
)


def pixels_of(
    modality: Modality, model_type: str, shown: list[Image], device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Collects pixels of some images of one modality as a keyword of the model."""
    is_padded = model_type in ENCODERS
    name, _ = _NAMES[is_padded, modality]
    each = [image.pixels[None] if is_padded else image.pixels for image in shown]
    return {name: move_joined(each, device)}


def grids_of(modality: Modality, model_type: str, shown: list[Image]) -> dict[str, Any]:
    """Collects grids of some images of one modality, with seconds of videos, as keywords."""
    _, name = _NAMES[model_type in ENCODERS, modality]
    inputs: dict[str, Any] = {name: torch.stack([image.grid for image in shown])}
    if shown[0].seconds is not None:
        inputs["second_per_grid_ts"] = [image.seconds for image in shown]
    return inputs


_NONE = np.empty(0, np.int32)
_NAMES = {
    (False, "image"): ("pixel_values", "image_grid_thw"),
    (False, "video"): ("pixel_values_videos", "video_grid_thw"),
    (True, "image"): ("pixel_values", "image_position_ids"),
}


@dataclass(frozen=True)
class Encoding:
    """One call of the vision encoder: the distinct images of one modality.

    Attributes:
        tensors: keywords of the model's forward, pixels and grids of the N distinct images.
        placed: grids of the K placements, which replace those in `tensors`.
        rows: maps features [F, H] of the distinct images to those of the placements.
        exchange: brings the features that `rows` reads to this rank. Default: it has them.
    """

    tensors: dict[str, torch.Tensor]
    grid_name: str
    placed: torch.Tensor
    rows: GatherIndex
    shape: EncoderShape
    exchange: FeatureExchange | None = None

    @property
    def grids(self) -> torch.Tensor:
        """Grids of the distinct images."""
        return self.tensors[self.grid_name]

    @property
    def shown(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Pixels and grids of the distinct images."""
        pixels, grids = self.tensors.values()
        return pixels, grids

    def inputs(self) -> dict[str, Any]:
        """Keywords of the model's forward."""
        return self.tensors | {self.grid_name: self.placed}

    def repeat(self, output: Any) -> None:
        """Repeats the features in the vision encoder's output per placement, in packed order."""
        by_name = features_in(output)
        if not by_name:
            raise UnsupportedError(f"{UNEXPECTED} and got {type(output).__name__}")
        is_list = {name: isinstance(values, (list, tuple)) for name, values in by_name.items()}
        outputs = [x for n, values in by_name.items() for x in (values if is_list[n] else [values])]
        for features in outputs:
            if len(features) != self.shape.features:
                raise UnsupportedError(
                    f"the vision encoder gave {len(features)} features for images of "
                    f"{self.shape.features} placeholders: it is not the one that the images were "
                    "made for"
                )
        if self.exchange is not None:
            outputs = self.exchange.fetch(outputs)
        repeated = iter([self._repeated(features) for features in outputs])
        for name, values in by_name.items():
            placed = [next(repeated) for _ in values] if is_list[name] else next(repeated)
            setattr(output, name, placed)

    def _repeated(self, features: torch.Tensor) -> torch.Tensor:
        return gather(features, self.rows)


@dataclass(frozen=True)
class EncoderCalls:
    """The calls of the vision encoder that a packed forest's images need."""

    config: Any
    images: Images
    placements: Placements
    device: torch.device

    def of(self, modality: Modality, is_own: np.ndarray) -> Encoding | None:
        """The call for images of one modality that own tokens (bool [T]) show, or None."""
        placed = self._placed(modality, is_own)
        if not placed:
            return None
        distinct = sorted({n for n, _ in placed})
        shown = [self.images.distinct[n] for n in distinct]
        rows = np.concatenate(_features(placed, distinct, self.images)).astype(np.int32)
        tensors, shape = _call(modality, self.images.model_type, shown, self.device)
        return _made(tensors, self._grids(placed, shown), rows, shape, self.device)

    def of_rank(
        self, modality: Modality, parts: Parts, index: int, group: ProcessGroup
    ) -> Encoding | None:
        """Makes the call for a rank's share of images, maybe a blank one; None without images."""
        images = self.images
        placed = [self._placed(modality, parts.owner == rank) for rank in range(len(parts))]
        distinct = sorted({n for of_rank in placed for n, _ in of_rank})
        if not distinct:
            return None
        all_shown = [images.distinct[n] for n in distinct]
        holder = holders_of([len(p.pixels) for p in all_shown], len(parts))
        features = [np.concatenate([_NONE, *_features(p, distinct, images)]) for p in placed]
        of_features = np.repeat(holder, [p.runs * p.run_tokens for p in all_shown])
        exchange = FeatureExchange(of_features, features, index, group, self.device)
        arrived = np.empty(len(of_features), np.int32)
        arrived[exchange.fetched] = np.arange(len(exchange.fetched))
        rows = GatherIndex(arrived[features[index]], len(exchange.fetched), self.device)
        encoding = empty = blank(self.config, self.device, modality)
        shown = [p for p, rank in zip(all_shown, holder, strict=True) if rank == index]
        if shown:
            tensors, shape = _call(modality, images.model_type, shown, self.device)
            encoding = _made(tensors, empty.placed, _NONE, shape, self.device)
        grids = empty.placed
        if placed[index]:
            grids = move(self._grids(placed[index], all_shown), self.device)
        return replace(encoding, placed=grids, rows=rows, exchange=exchange)

    def _placed(self, modality: Modality, is_own: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """The runs of own placeholders of one modality in packed order: (image, its features)."""
        placements = self.placements
        placed: list[tuple[int, np.ndarray]] = []
        for start, n, frame in zip(
            placements.start, placements.number, placements.frame, strict=True
        ):
            image = self.images.distinct[n]
            features = np.flatnonzero(is_own[start : start + image.run_tokens])
            if image.modality == modality and len(features):
                placed.append((int(n), frame * image.run_tokens + features))
        return placed

    def _grids(self, placed: list[tuple[int, np.ndarray]], shown: list[Image]) -> torch.Tensor:
        counts = [len(rows) for _, rows in placed]
        return _grids_of(counts, self.config, len(shown[0].pixels))


def _features(
    placed: list[tuple[int, np.ndarray]], distinct: list[int], images: Images
) -> list[np.ndarray]:
    """The features of each run among those of some distinct images, one after another."""
    sizes = [images.distinct[n].runs * images.distinct[n].run_tokens for n in distinct]
    first = dict(zip(distinct, np.cumsum([0, *sizes]).tolist(), strict=False))
    return [first[n] + rows for n, rows in placed]


def _call(
    modality: Modality, model_type: str, shown: list[Image], device: torch.device
) -> tuple[dict[str, Any], EncoderShape]:
    """Collects pixels and grids of one call of the vision encoder, and its sizes."""
    tensors = pixels_of(modality, model_type, shown, device)
    tensors |= grids_of(modality, model_type, shown)
    # only positions would need them, and these are given
    tensors.pop("second_per_grid_ts", None)
    features = sum(p.runs * p.run_tokens for p in shown)
    return tensors, EncoderShape([len(p.pixels) for p in shown], features)


def _grids_of(counts: list[int], config: Any, patches: int) -> torch.Tensor:
    """Makes grids of as many placeholders; `patches`: of Gemma 4, to which images are padded."""
    vision = config.vision_config
    if config.model_type not in ENCODERS:
        merge = vision.spatial_merge_size
        return torch.tensor([[1, merge, merge * count] for count in counts])
    positions = torch.full((len(counts), patches, 2), -1)
    for of_run, count in zip(positions, counts, strict=True):
        of_run[: count * vision.pooling_kernel_size**2] = 0
    return positions


def blank(config: Any, device: torch.device, modality: Modality = "image") -> Encoding:
    """Makes an image of one placeholder, placed nowhere: the encoder's gradients are zeros."""
    pixels, grid = blank_image(config)
    values, grids = _NAMES[config.model_type in ENCODERS, modality]
    placed = torch.full_like(grid, -1) if config.model_type in ENCODERS else torch.zeros_like(grid)
    shape = EncoderShape([pixels[..., 0].numel()], 1)
    return _made({values: pixels, grids: grid}, placed, _NONE, shape, device)


def blank_image(config: Any, side: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes an image without content, of `side` placeholders in height and in width.

    Returns its pixels [P, D] and grid [1, 3], for Gemma 4 [1, P, D] and [1, P, 2].
    """
    vision = config.vision_config
    if config.model_type in ENCODERS:
        places = torch.arange(side * vision.pooling_kernel_size)
        steps = torch.cartesian_prod(places, places)[None]
        return torch.zeros(1, len(places) ** 2, 3 * vision.patch_size**2), steps
    side *= vision.spatial_merge_size
    channels = getattr(vision, "in_channels", None) or vision.in_chans
    values = channels * vision.temporal_patch_size * vision.patch_size**2
    return torch.zeros(side**2, values), torch.tensor([[1, side, side]])


def _made(
    tensors: dict[str, Any],
    placed: torch.Tensor,
    rows: np.ndarray,
    shape: EncoderShape,
    device: torch.device,
) -> Encoding:
    moved = {name: move(tensor, device) for name, tensor in tensors.items()}
    _, grid_name = moved
    index = GatherIndex(rows, shape.features, device)
    return Encoding(moved, grid_name, move(placed, device), index, shape)
