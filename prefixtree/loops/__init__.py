"""The compiled loops (numba) of the forest, packing, planning and near misses; their only door.

    from prefixtree import loops

    predictor, position, bad = loops.block_tables.walk(subtree_end)

A module of loops is imported at its first use, because importing numba takes longer than importing
the rest of the package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefixtree.loops import (
        block_tables,
        parts,
        planning,
        realign,
        segments,
        sequence_copies,
        tile_costs,
        trie,
    )

__all__ = [
    "block_tables",
    "parts",
    "planning",
    "realign",
    "segments",
    "sequence_copies",
    "tile_costs",
    "trie",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        # the import makes the module an attribute, so this runs once per module
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
