"""The pictures of a micro-batch, and what a vision tower may keep of them.

A tower that keeps the activations of its last pictures has their backward first, as layers do. The
others it computes again, some at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from prefixtree.images.tower import RUN, TowerShape

if TYPE_CHECKING:
    from prefixtree.images.encodings import Encoding
    from prefixtree.images.pictures import Pictures
    from prefixtree.images.placements import Placements
    from prefixtree.recompute.memory import TowerMemory

# what is left for runs where a tower keeps anything
_LEAST_RUN = 1 << 12


class TowerChoice(NamedTuple):
    """One choice of what a vision tower keeps.

    Attributes:
        first: of the pictures that it keeps, which are the last ones.
        kept: their patches.
        held: bytes from its forward to its backward, beside features and pixels.
        needs: the most bytes beside these at once, the held ones among them; of what is computed
            again one picture at a time, if that is less.
        again: multiply-adds of the others, which are computed again.
    """

    first: int
    kept: int
    held: float
    needs: float
    again: float


@dataclass(frozen=True)
class PictureWork:
    """The pictures of a micro-batch, as the memory model sees them.

    Attributes:
        patches: of each distinct picture, by its number, in the order of the tower.
        features: those of distinct pictures, and those in the place of placeholders.
        pixel_bytes: that are not there yet: pixels on their way, and in the tower's dtype.
        frames: of each video by its number. Default: images alone.
    """

    patches: dict[int, int]
    features: int
    pixel_bytes: int
    frames: dict[int, int] = field(default_factory=dict)

    def held(self, tower: TowerMemory) -> int:
        """Bytes of features and pixels from the tower's forward to its backward."""
        return self.features * tower.feature + self.pixel_bytes

    def choices(self, tower: TowerMemory, most: int) -> list[TowerChoice]:
        """The choices of a tower: it keeps nothing, and of the last pictures more and more.

        Args:
            most: choices beside the first. Of a tower that may not keep anything there are none.
        """
        sizes = list(self.patches.values())
        step = -(-len(sizes) // most)
        counts = [*range(0, len(sizes), step), len(sizes)] if tower.may_keep else [0]
        return [self._keeping(tower, sizes, len(sizes) - count) for count in counts]

    def _keeping(self, tower: TowerMemory, sizes: list[int], first: int) -> TowerChoice:
        again, kept = sizes[:first], sizes[first:]
        held, needs = 0.0, 0.0
        runs, _ = TowerShape(kept, 0).runs(RUN)
        # what keeps has its backward first; gradients of weights wait for those of other runs
        waiting = tower.gradients if len(runs) > 1 or (runs and again) else 0
        for at in runs:
            patches = sum(kept[slice(*at)])
            needs = max(needs, held + tower.run(patches) + waiting)
            held += tower.kept(patches)
        if again:
            # the room of a few pictures is no room for many: a GPU wants runs that keep it busy
            run = max(max(again), min(_LEAST_RUN, sum(again)) if kept else 0)
            one_by_one = tower.run(run) + (tower.gradients if len(sizes) > 1 else 0)
            at_once = tower.run(sum(again)) + waiting
            if sum(again) <= RUN or len(again) == 1:
                one_by_one = min(one_by_one, at_once)
            needs = max(needs, one_by_one)
        numbers = list(self.patches)[:first]
        costs = (tower.again(self.patches[n], self.frames.get(n, 1)) for n in numbers)
        return TowerChoice(first, sum(kept), held, needs, sum(costs))

    def runs(self, tower: TowerMemory, available: float, choice: TowerChoice) -> tuple[int, float]:
        """The patches that the tower takes at once, as many as fit, and the bytes that it needs."""
        sizes = list(self.patches.values())
        again = sizes[: choice.first]
        if not again:
            return RUN, choice.needs
        total = sum(again)
        waiting = tower.gradients if choice.kept else 0
        patches = tower.patches_that_fit(available - waiting)
        if total > min(RUN, patches) and len(sizes) > 1:
            # several runs
            waiting = tower.gradients
            patches = tower.patches_that_fit(available - waiting)
        run = max(max(again), min(RUN, patches, total))
        return min(RUN, patches), max(choice.needs, tower.run(run) + waiting)

    @classmethod
    def of(
        cls, placements: Placements, pictures: Pictures, dtype: torch.dtype, moved: bool
    ) -> PictureWork | None:
        """Those of a forest; None where it places none.

        Args:
            placements: of the forest. dtype: in which the tower takes pixels.
            moved: whether their pixels are on the device.
        """
        # images go before videos
        numbers = sorted(
            set(placements.number.tolist()), key=lambda n: (pictures.distinct[n].modality, n)
        )
        shown = {n: pictures.distinct[n] for n in numbers}
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
        # of videos with a grid of frames, height, width
        frames = {
            n: int(p.grid[0])
            for n, p in shown.items()
            if p.modality == "video" and p.grid.shape == (3,)
        }
        return cls(patches, features, taken, frames)

    @classmethod
    def of_rank(cls, encodings: Sequence[Encoding], dtype: torch.dtype) -> PictureWork:
        """Those that a rank of a group encodes, whose pixels are on the device, beside features
        that come from other ranks.

        Args:
            encodings: the calls of the tower. dtype: in which it takes pixels.
        """
        patches = [n for encoding in encodings for n in encoding.shape.patches]
        features = taken = 0
        for encoding in encodings:
            pixels, _ = encoding.shown
            taken += 0 if pixels.dtype == dtype else pixels.numel() * dtype.itemsize
            # what the tower gives, what came, what stands in the place of placeholders
            features += encoding.shape.features + encoding.rows.num_rows + len(encoding.rows.rows)
        return cls(dict(enumerate(patches)), features, taken)
