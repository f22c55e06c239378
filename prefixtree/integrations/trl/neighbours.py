"""Micro-batches of neighbouring rows, for trainers of TRL that generate.

TRL shuffles the rows of a generation batch, which scatters those that begin alike. Here whole
micro-batches are shuffled.
"""

from __future__ import annotations

from typing import Any

import torch
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from prefixtree.errors import UnsupportedError
from prefixtree.integrations.trl.images import PER_ROW

# the entry of a generation batch that numbers its rows; taken out before a loss is computed
_ROW = "prefixtree_row"


class KeepsNeighbours:
    """A trainer of TRL that generates, whose micro-batches hold neighbouring rows of a generation.
    Stands before TRL's class."""

    model: Any
    # TRL's: the micro-batches of the last generation, None before the first
    _buffered_inputs: list[dict[str, Any]] | None
    # of each block of micro-batches in their order, its number in the generation
    _blocks: list[int]

    def _micro_batches_together(self) -> int:
        """So many micro-batches of neighbouring rows are shuffled as one."""
        return 1

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        if self.model.training:
            batch[_ROW] = torch.arange(len(batch["completion_ids"]))
        return batch

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        before = self._buffered_inputs
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)  # type: ignore[misc]
        shuffled = self._buffered_inputs
        if shuffled is None or shuffled is before:
            return inputs  # of an evaluation, or of a generation that is in order already
        (at,) = (i for i, batch in enumerate(shuffled) if batch is inputs)
        together = self._micro_batches_together()
        self._buffered_inputs, self._blocks = reunite(shuffled, together)
        return self._buffered_inputs[at]


def reunite(
    batches: list[dict[str, Any]], together: int = 1
) -> tuple[list[dict[str, Any]], list[int]]:
    """Turns micro-batches of shuffled rows into micro-batches of neighbouring rows.

    A block of micro-batches takes the place of the first of its rows in the shuffle, so its place
    is random without another draw. Its rows keep the order in which they were generated.

    Args:
        batches: micro-batches of equal size; every entry a tensor [B, ...], or a tensor without
            dimensions or None for the whole micro-batch. But for images: they are those of all
            rows, one after another, and num_images, B numbers, says how many each has.
        together: micro-batches of a block, a divisor of their number. Default: 1.

    Returns:
        As many micro-batches, without the entry that numbers the rows; and of each block its number
        in the order in which rows were generated.

    Raises:
        UnsupportedError: an entry of another kind or size.
    """
    size = len(batches[0][_ROW])
    # [blocks, rows]: where the rows of every run of neighbours stand
    places = torch.cat([batch[_ROW] for batch in batches]).argsort().view(-1, size * together)
    blocks = places.amin(1).argsort()
    order = places[blocks].flatten()
    reunited: list[dict[str, Any]] = [{} for _ in batches]
    # images: a list of tensors, one per row
    batches = [split_pixel_values_by_grid(batch) for batch in batches]
    for key in batches[0].keys() - {_ROW}:
        parts = [batch[key] for batch in batches]
        if all(isinstance(part, torch.Tensor) and part.ndim > 0 for part in parts):
            if any(len(part) != size for part in parts):
                raise UnsupportedError(
                    f"batch entry {key!r} must have one row per completion ({size}), got "
                    f"{[len(part) for part in parts]} rows in the micro-batches; install the TRL "
                    "version the adapter is tested with"
                )
            parts = list(torch.cat(parts)[order].split(size))
        elif key in PER_ROW and all(isinstance(part, list) for part in parts):
            rows = [row for part in parts for row in part]
            moved = [rows[i] for i in order.tolist()]
            parts = [moved[at : at + size] for at in range(0, len(moved), size)]
        elif not all(part is None or isinstance(part, torch.Tensor) for part in parts):
            raise UnsupportedError(
                f"batch entry {key!r} is a {type(parts[0]).__name__}: only tensors are known"
            )
        for batch, part in zip(reunited, parts, strict=True):
            batch[key] = part
    return [unsplit_pixel_values_by_grid(batch) for batch in reunited], blocks.tolist()
