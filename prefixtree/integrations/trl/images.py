"""Images in TRL's batches: those of some rows."""

from __future__ import annotations

from typing import Any

import torch
from trl.trainer.utils import split_pixel_values_by_grid

from prefixtree.errors import UnsupportedError
from prefixtree.integrations.core.batch import Pixels

#: TRL's arguments for images that are taken: those of processors that give grids.
_TAKEN = ("pixel_values", "image_grid_thw", "num_images", "mm_token_type_ids")
#: Entries of batches that TRL's `split_pixel_values_by_grid` makes lists, one item per row.
PER_ROW = ("pixel_values", "image_grid_thw", "num_images")


class RowImages:
    """The images of a batch's rows."""

    def __init__(self, images: dict[str, Any], is_vlm: bool) -> None:
        entries = {name: value for name, value in images.items() if value is not None}
        if unknown := sorted(entries.keys() - (_TAKEN if is_vlm else ())):
            why = (
                "only images with a grid (image_grid_thw, of Qwen's processors) are verified"
                if is_vlm
                else "the trainer has no processor of images: train on text alone, or give it one"
            )
            raise UnsupportedError(f"the batch has {', '.join(unknown)}: {why}")
        self._rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        if "pixel_values" in entries:
            self._all = entries["pixel_values"], entries["image_grid_thw"]
            split: Any = split_pixel_values_by_grid(entries)
            self._rows = list(zip(split["pixel_values"], split["image_grid_thw"], strict=True))

    def of(self, start: int, end: int) -> Pixels:
        """The images of rows start to end - 1; None where no row has any."""
        rows = self._rows[start:end]
        if not rows:
            return None, None
        pixels, grids = self._all
        if len(rows) < len(self._rows):
            # images of all rows are not copied
            pixels, grids = (torch.cat(parts) for parts in zip(*rows, strict=True))
        return (pixels, grids) if len(grids) else (None, None)
