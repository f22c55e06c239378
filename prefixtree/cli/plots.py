"""The pictures that `report --plot` and `demo --pictures` write: the forest and its block mask."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from prefixtree.errors import InputError
from prefixtree.forest import PrefixForest
from prefixtree.packing.block_tables import TileShape
from prefixtree.packing.layout import PackedForest
from prefixtree.packing.mask import TreeMask
from prefixtree.plotting import plot_forest, plot_mask, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ENDINGS = (".png", ".pdf", ".svg")
_TILE = 128


def check_picture_path(path: Path) -> None:
    """Refuses a file name that is no picture's; call it before the work of a command."""
    if path.suffix.lower() not in _ENDINGS:
        raise InputError(f"--plot {path}: expected a name that ends in {', '.join(_ENDINGS)}")


def check_picture_folder(folder: Path) -> None:
    """Makes the folder, and refuses one that pictures cannot be written to."""
    require_matplotlib()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as problem:
        raise InputError(f"{folder}: cannot be written: {problem.strerror}") from None


def write_pictures(path: Path, forest: PrefixForest) -> list[Path]:
    """Writes the forest to `path` and its block mask next to it: forest.png and forest-mask.png.

    The mask's tiles are 128 x 128, or smaller for a forest that would be a few of them.
    """
    mask = TreeMask(np.repeat(forest.node_subtree_end, forest.node_length))
    tile = _TILE
    while tile > 2 and forest.num_tokens < 8 * tile:
        tile //= 2
    figures = {
        path: plot_forest(forest),
        path.with_stem(f"{path.stem}-mask"): plot_mask(mask, TileShape(tile, tile)),
    }
    return save(figures)


def write_demo_pictures(folder: Path, packed: PackedForest) -> list[Path]:
    """Writes forest.png and mask.png, with tiles of 64 x 64, into the folder; both files."""
    return save(
        {
            folder / "forest.png": plot_forest(packed.forest),
            folder / "mask.png": plot_mask(packed.mask, TileShape(64, 64)),
        }
    )


def save(figures: dict[Path, Figure]) -> list[Path]:
    """Writes each figure to its file; `InputError` where one cannot be written."""
    for file, figure in figures.items():
        # a half-written file would be left to matplotlib, which fails again as it closes it
        picture = io.BytesIO()
        figure.savefig(picture, format=file.suffix.lower().removeprefix("."))
        try:
            file.write_bytes(picture.getvalue())
        except OSError as problem:
            raise InputError(f"{file}: cannot be written: {problem.strerror or problem}") from None
    return list(figures)
