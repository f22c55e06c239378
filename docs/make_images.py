"""Draws the pictures of docs/how-it-works.md and docs/images.md into docs/images: `make images`.

With a file of rollouts (`make images ROLLOUTS=airline_rollouts.jsonl.gz`) also those of the airline
rollouts, which are not part of this repository.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from prefixtree import PrefixForest, TileShape, pack
from prefixtree.demo.browser import write_rollouts
from prefixtree.plotting import plot_forest, plot_mask
from prefixtree.rollouts import ChatTokenizer, Rollouts, expand_turns, read_rollouts
from prefixtree.rollouts.image_messages import FIRST_IMAGE

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


def draw_browser(file: Path) -> None:
    """The forest of one task in the fake browser, and its screenshots."""
    with tempfile.TemporaryDirectory() as nowhere:
        place = Path(nowhere)
        tokenizer = ChatTokenizer(write_rollouts(place).parent / "model")
        rollouts = read_rollouts(place / "rollouts.jsonl", tokenizer=tokenizer).first_groups(1)
        forest = PrefixForest.from_sequences(rollouts.sequences)
        figure = plot_forest(forest)
        # the labels of nodes would lie over the pictures
        for label in figure.axes[0].texts[1:]:
            label.remove()
        held = np.unique(forest.tokens[forest.tokens >= FIRST_IMAGE]) - FIRST_IMAGE
        names = dict(zip(held.tolist(), "ABCDEFGHIJKLMNOPQRSTUVWXYZ", strict=False))
        colours = dict(zip(held.tolist(), matplotlib.colormaps["Set3"].colors, strict=False))
        _mark_images(figure, forest, names, colours)
        _show_screens(figure, place, rollouts, names, colours)
    # few colours: a palette takes a third of the bytes
    figure.savefig(file)
    Image.open(file).convert("RGB").quantize(128).save(file, optimize=True)


def _mark_images(
    figure: Figure, forest: PrefixForest, names: dict[int, str], colours: dict[int, tuple]
) -> None:
    """A band over each image's tokens, as wide as its node."""
    ax = figure.axes[0]
    for node in range(forest.num_nodes):
        start, length = forest.node_start[node], forest.node_length[node]
        left, right = int(start), int(forest.node_subtree_end[node])
        tokens, top = forest.tokens[start : start + length], int(forest.node_position[node])
        for token, run in itertools.groupby(tokens.tolist()):
            size = len(list(run))
            if token >= FIRST_IMAGE:
                number = token - FIRST_IMAGE
                box = (left, top), right - left, size
                ax.add_patch(Rectangle(*box, facecolor=colours[number], edgecolor="white", lw=0.6))
                ax.text(
                    (left + right) / 2,
                    top + size / 2,
                    names[number],
                    ha="center",
                    va="center",
                    fontsize=7,
                    weight="bold",
                )
            top += size


def _show_screens(
    figure: Figure,
    folder: Path,
    rollouts: Rollouts,
    names: dict[int, str],
    colours: dict[int, tuple],
) -> None:
    """The screenshots in a strip above the forest."""
    columns = 5
    rows = -(-len(names) // columns)
    height = figure.get_figheight()
    figure.set_layout_engine("none")
    room = 1.3 * rows
    figure.set_figheight(height + room)
    for ax in figure.axes:
        box = ax.get_position()
        scale = height / (height + room)
        ax.set_position([box.x0, box.y0 * scale, box.width, box.height * scale])
    for at, (number, name) in enumerate(names.items()):
        row, column = divmod(at, columns)
        ax = figure.add_axes(
            [
                (column + 0.06) / columns,
                1 - 1.3 * (row + 0.98) / (height + room),
                0.88 / columns,
                1.06 / (height + room),
            ]
        )
        ax.imshow(Image.open(folder / rollouts.images[number].name), aspect="auto")
        ax.set(xticks=[], yticks=[])
        ax.set_title(name, fontsize=7, weight="bold", pad=1)
        for spine in ax.spines.values():
            spine.set(color=colours[number], linewidth=2.5)


if __name__ == "__main__":
    draw(IMAGES, *sys.argv[1:])
    draw_browser(IMAGES / "browser-forest.png")
