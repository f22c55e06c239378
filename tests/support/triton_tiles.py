"""Small tiles for the Triton kernels, so that small forests have many of every kind."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from prefixtree.kernels.attention.triton import configs
from prefixtree.kernels.attention.triton.configs import Config, KernelConfigs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the interpreter multiplies bf16 bits as if they were fp16
DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16, torch.float32]
# numpy warns of dead lanes in the interpreter; what is stored is checked
DEAD_LANES = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning"
)


@dataclass(frozen=True)
class Tiles:
    """The answer that `configs.choose` shall give; heads None: that of the table."""

    tma: bool
    forward: Config
    keys: Config
    queries: Config
    heads: int | None = None
    pieces: int = 2
    piece: int = 0


def tile(rows: int, keys: int, cut: bool = True) -> Config:
    return Config(rows, keys, 4, 2, cut=cut)


SMALL = tile(16, 16)
TILES = {
    "pointers": Tiles(False, SMALL, SMALL, SMALL),
    "descriptors": Tiles(True, SMALL, SMALL, SMALL),
    "one head a tile": Tiles(True, SMALL, SMALL, SMALL, heads=1),
    "key tiles on the grid": Tiles(False, *[tile(16, 16, cut=False)] * 3),
    "tiles of their own": Tiles(True, tile(32, 16), tile(16, 32), tile(32, 32), pieces=1),
    "nothing is cut": Tiles(False, SMALL, SMALL, SMALL, pieces=0),
    "dK and dV apart": Tiles(True, SMALL, replace(SMALL, apart=True), SMALL),
    "queries in shared memory": Tiles(
        True, replace(SMALL, shared=1), SMALL, replace(SMALL, shared=2)
    ),
    "q and k in pieces": Tiles(True, SMALL, SMALL, SMALL, piece=16),
    "q and k in pieces by pointers": Tiles(False, SMALL, SMALL, SMALL, piece=16),
}


def use(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Lets the launches use these tiles from here on."""
    tiles = TILES[name]

    def choose(
        capability: tuple[int, int],
        d: int,
        dv: int,
        group: int,
        tma: bool,
        cuda: bool = True,
    ) -> KernelConfigs:
        tma = tma and tiles.tma
        heads = tiles.heads or configs.heads_of_tile(group, tma)
        pairs = [(c, c) for c in (tiles.forward, tiles.keys, tiles.queries)]
        return KernelConfigs(tma, heads, *pairs, piece=tiles.piece)

    monkeypatch.setattr(configs, "choose", choose)
    monkeypatch.setattr(configs, "piece_tiles", lambda *arguments: tiles.pieces)
