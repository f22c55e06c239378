"""The images of a micro-batch, and which activations a vision encoder may keep.

A vision encoder that keeps the activations of its last images has their backward first, as layers
do. It computes the others again, some at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from prefixtree.images.encoder import RUN, EncoderShape

if TYPE_CHECKING:
    from prefixtree.images.encodings import Encoding
    from prefixtree.images.images import Images
    from prefixtree.images.placements import Placements
    from prefixtree.recompute.memory import EncoderMemory

# patches for which memory is left for runs, where a vision encoder keeps anything
_LEAST_RUN = 1 << 12


class EncoderChoice(NamedTuple):
    """One choice of the images whose activations a vision encoder keeps."""

    # the first kept image; all later ones are kept too
    first: int
    # patches of the kept images
    kept: int
    # bytes from its forward to its backward, without features and pixels
    held: float
    # the most bytes at once, without features and pixels but with `held`; of images that are
    # computed again, at least one at a time
    needs: float
    # multiply-adds of the images that are computed again
    again: float


@dataclass(frozen=True)
class ImageWork:
    """The images of a micro-batch, as the memory model sees them."""

    # patches of each distinct image, by its number, in the order of the vision encoder
    patches: dict[int, int]
    # features of distinct images, and those in the place of placeholders
    features: int
    # bytes that are not there yet: pixels on their way, and in the vision encoder's dtype
    pixel_bytes: int
    # frames of each video by its number; empty for images alone
    frames: dict[int, int] = field(default_factory=dict)

    def held(self, encoder: EncoderMemory) -> int:
        """Bytes of features and pixels from the vision encoder's forward to its backward."""
        return self.features * encoder.feature + self.pixel_bytes

    def choices(self, encoder: EncoderMemory, most: int) -> list[EncoderChoice]:
        """Lists choices of a vision encoder: to keep nothing, then more and more last images."""
        # at most `most` after the first, and none if the vision encoder may not keep anything
        sizes = list(self.patches.values())
        step = -(-len(sizes) // most)
        counts = [*range(0, len(sizes), step), len(sizes)] if encoder.may_keep else [0]
        return [self._keeping(encoder, sizes, len(sizes) - count) for count in counts]

    def _keeping(self, encoder: EncoderMemory, sizes: list[int], first: int) -> EncoderChoice:
        again_sizes, kept_sizes = sizes[:first], sizes[first:]
        held, needs = 0.0, 0.0
        runs, _ = EncoderShape(kept_sizes, 0).runs(RUN)
        # kept runs have their backward first; gradients of weights wait for those of other runs
        waiting = encoder.gradients if len(runs) > 1 or (runs and again_sizes) else 0
        for span in runs:
            patches = sum(kept_sizes[slice(*span)])
            needs = max(needs, held + encoder.run(patches) + waiting)
            held += encoder.kept(patches)
        if again_sizes:
            # the room of a few images is no room for many: a GPU wants runs that keep it busy
            run = max(max(again_sizes), min(_LEAST_RUN, sum(again_sizes)) if kept_sizes else 0)
            one_by_one = encoder.run(run) + (encoder.gradients if len(sizes) > 1 else 0)
            at_once = encoder.run(sum(again_sizes)) + waiting
            if sum(again_sizes) <= RUN or len(again_sizes) == 1:
                one_by_one = min(one_by_one, at_once)
            needs = max(needs, one_by_one)
        numbers = list(self.patches)[:first]
        costs = (encoder.again(self.patches[n], self.frames.get(n, 1)) for n in numbers)
        return EncoderChoice(first, sum(kept_sizes), held, needs, sum(costs))

    def runs(
        self, encoder: EncoderMemory, available: float, choice: EncoderChoice
    ) -> tuple[int, float]:
        """The patches that the vision encoder takes at once, as many as fit, and their bytes."""
        sizes = list(self.patches.values())
        again = sizes[: choice.first]
        if not again:
            return RUN, choice.needs
        total = sum(again)
        waiting = encoder.gradients if choice.kept else 0
        patches = encoder.patches_that_fit(available - waiting)
        if total > min(RUN, patches) and len(sizes) > 1:
            # several runs: gradients of weights wait
            waiting = encoder.gradients
            patches = encoder.patches_that_fit(available - waiting)
        run = max(max(again), min(RUN, patches, total))
        return min(RUN, patches), max(choice.needs, encoder.run(run) + waiting)

    @classmethod
    def of(
        cls, placements: Placements, images: Images, dtype: torch.dtype, moved: bool
    ) -> ImageWork | None:
        """The images of a forest, or None; `moved`: pixels are on the device already."""
        # images go before videos
        numbers = sorted(
            set(placements.number.tolist()), key=lambda n: (images.distinct[n].modality, n)
        )
        shown = {n: images.distinct[n] for n in numbers}
        if not shown:
            return None
        taken = sum(
            (0 if moved else p.pixels.nbytes)
            + (0 if p.pixels.dtype == dtype else p.pixels.numel() * dtype.itemsize)
            for p in shown.values()
        )
        features = sum(p.runs * p.run_tokens for p in shown.values())
        features += sum(shown[n].run_tokens for n in placements.number.tolist())
        patches = {n: len(p.pixels) for n, p in shown.items()}
        # a video's grid is (frames, height, width)
        frames = {
            n: int(p.grid[0])
            for n, p in shown.items()
            if p.modality == "video" and p.grid.shape == (3,)
        }
        return cls(patches, features, taken, frames)

    @classmethod
    def of_rank(cls, encodings: Sequence[Encoding], dtype: torch.dtype) -> ImageWork:
        """The images that a rank of a group encodes, pixels on the device, and others' features."""
        patches = [n for encoding in encodings for n in encoding.shape.patches]
        features = taken = 0
        for encoding in encodings:
            pixels, _ = encoding.shown
            taken += 0 if pixels.dtype == dtype else pixels.numel() * dtype.itemsize
            # features of the vision encoder, of other ranks, and in the place of placeholders
            features += encoding.shape.features + encoding.rows.num_rows + len(encoding.rows.rows)
        return cls(dict(enumerate(patches)), features, taken)
