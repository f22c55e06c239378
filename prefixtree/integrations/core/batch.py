"""A trainer's batch, read once: its tokens and masks on the host, by one copy from the device, and
the copy of scores back into the trainer's layout.

Legend: B rows, L columns, n tokens of a row, R tokens of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from prefixtree.errors import ForestError
from prefixtree.forest import PrefixForest
from prefixtree.images.images import Images
from prefixtree.packing.batch_layout import BatchLayout
from prefixtree.packing.layout import PackedForest, pack
from prefixtree.scoring.edges import SequenceScores
from prefixtree.scoring.logprobs import sequence_logprobs

#: pixel_values and image_grid_thw of a batch's rows.
Pixels = tuple[torch.Tensor | None, torch.Tensor | None]


def on_host(tensors: Iterable[torch.Tensor]) -> list[np.ndarray]:
    """Copies integer tensors from their device at once; int64."""
    given = [x.detach().long() for x in tensors]
    whole = torch.cat([x.reshape(-1) for x in given]).cpu().numpy()
    parts = np.split(whole, np.cumsum([x.numel() for x in given])[:-1])
    return [part.reshape(x.shape) for part, x in zip(parts, given, strict=True)]


@dataclass(eq=False)
class Batch:
    """Rows of tokens, and the places of their scores in a trainer's layout.

    Attributes:
        layout: the entry of the trainer's layout for the score of each token, row by row.
        tokens: int64 [n] per row.
        masks: bool [n] per row, the scored tokens. None: all.
        pixels: those of the images of the rows.
        config: that of a model whose rows may have images; None for text alone.
        routes: those of each row, as `PrefixForest.from_sequences` takes them.
        sampling_masks: those of each row, as `sequence_logprobs` takes them.
    """

    layout: BatchLayout
    tokens: list[np.ndarray]
    masks: list[np.ndarray] | None
    device: torch.device
    pixels: Pixels = (None, None)
    config: Any = field(default=None, repr=False)
    routes: Sequence[np.ndarray] | None = None
    sampling_masks: Sequence[Any] | None = None

    @classmethod
    def of(
        cls,
        layout: BatchLayout,
        ids: np.ndarray,
        scored: np.ndarray,
        device: torch.device,
        **more: Any,
    ) -> Batch:
        """Makes a batch of ids [B, L] in a layout; scores stand at their own tokens."""
        tokens, masks = layout.sequences("input_ids", ids), layout.sequences("loss_mask", scored)
        return cls(layout, tokens, masks, device, **more)

    @classmethod
    def padded(
        cls,
        ids: np.ndarray,
        mask: np.ndarray,
        scored: np.ndarray,
        device: torch.device,
        **more: Any,
    ) -> Batch:
        """Makes a batch of rows [B, L], padded on either side, as `of` does.

        Raises:
            ForestError: a row without tokens, or with a hole.
        """
        layout = BatchLayout.of(ids.shape, mask)
        for bad in np.flatnonzero(~mask.any(1))[:1]:
            raise ForestError(f"row {bad} of attention_mask has no token; drop the row")
        return cls.of(layout, ids, scored, device, **more)

    @classmethod
    def jagged(
        cls,
        tokens: list[np.ndarray],
        masks: list[np.ndarray] | None,
        device: torch.device,
    ) -> Batch:
        """Makes a batch of rows one after another; scores stand at the token before their own."""
        lengths = np.array([len(row) for row in tokens])
        size = int(lengths.sum())
        layout = BatchLayout((1, size), np.arange(size) - 1, lengths)
        return cls(layout, tokens, masks, device)

    def take(self, rows: Sequence[int]) -> Batch:
        """Joins some rows of a jagged batch of text to a batch."""
        jagged = Batch.jagged([self.tokens[i] for i in rows], None, self.device)
        return replace(jagged, **self._of_rows(rows))

    def _of_rows(self, rows: Sequence[int]) -> dict[str, Any]:
        """Takes some rows of what is given per row besides tokens."""
        names = "masks", "routes", "sampling_masks"
        given = {name: getattr(self, name) for name in names}
        return {n: None if x is None else [x[i] for i in rows] for n, x in given.items()}

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, start: int, end: int, pixels: Pixels = (None, None)) -> Batch:
        """Takes rows start to end - 1 of a padded batch, with their images."""
        columns, first = self.layout.shape[1], np.append(self.layout.first, len(self.layout.place))
        tokens = self.tokens[start:end]
        place = self.layout.place[first[start] : first[start + len(tokens)]] - start * columns
        lengths = self.layout.lengths[start:end]
        layout = BatchLayout((len(tokens), columns), place, lengths)
        given = self._of_rows(range(start, start + len(tokens)))
        return replace(self, layout=layout, tokens=tokens, pixels=pixels, **given)

    def equals(self, other: Batch) -> bool:
        """Whether tokens, their places and images are the same."""
        return (
            np.array_equal(self.layout.place, other.layout.place)
            and np.array_equal(self.layout.lengths, other.layout.lengths)
            and all(map(np.array_equal, self.tokens, other.tokens))
            and all(
                a is b or (a is not None and b is not None and torch.equal(a, b))
                for a, b in zip(self.pixels, other.pixels, strict=True)
            )
        )

    @cached_property
    def images(self) -> Images | None:
        """The images of the rows; None for text alone."""
        if self.config is None:
            return None
        return Images.from_batch(self.tokens, *self.pixels, self.config)

    @cached_property
    def forest(self) -> PrefixForest:
        """The forest of the rows."""
        tokens = self.tokens if self.images is None else self.images.sequences
        masks = None if self.routes is None else self.masks
        return PrefixForest.from_sequences(tokens, routes=self.routes, loss_mask=masks)

    @cached_property
    def packed(self) -> PackedForest:
        """The packed forest, on the device."""
        return pack(self.forest).to(self.device)

    def score(self, model: nn.Module, **options: Any) -> SequenceScores:
        """Runs `sequence_logprobs` on the rows."""
        options |= {"loss_mask": self.masks, "images": self.images}
        return sequence_logprobs(model, self.packed, **options)

    def spread(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Puts values [n - 1, ...] of each row's tokens but the first into the layout; else 0."""
        return self.layout.spread(values)
