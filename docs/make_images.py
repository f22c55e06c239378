"""Draws the pictures of docs/how-it-works.md into docs/images: `make images`.

With a file of rollouts (`make images ROLLOUTS=airline_rollouts.jsonl.gz`) also those of the airline
rollouts, which are not part of this repository.
"""

from __future__ import annotations

import sys
from pathlib import Path

from prefixtree import PrefixForest, TileShape, pack
from prefixtree.plotting import plot_forest, plot_mask
from prefixtree.rollouts import expand_turns, read_rollouts

IMAGES = Path(__file__).parent / "images"
# those of the README
ROLLOUTS = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 9, 9], [1, 2, 3, 7, 8], [1, 2, 3, 4]]


def draw(folder: Path, airline: str | None = None) -> None:
    """Writes the pictures into `folder`."""
    folder.mkdir(exist_ok=True)
    packed = pack(PrefixForest.from_sequences(ROLLOUTS))
    plot_forest(packed.forest).savefig(folder / "forest.png")
    plot_mask(packed.mask, TileShape(2, 2)).savefig(folder / "mask.png")
    plot_mask(packed.mask, TileShape(2, 2, cut=True)).savefig(folder / "mask-cut.png")
    if airline is not None:
        turns = expand_turns(read_rollouts(airline))
        packed = pack(PrefixForest.from_sequences(turns.sequences))
        plot_forest(packed.forest).savefig(folder / "airline-forest.png")
        plot_mask(packed.mask).savefig(folder / "airline-mask.png")


if __name__ == "__main__":
    draw(IMAGES, *sys.argv[1:])
