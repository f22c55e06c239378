"""The pictures of a forest: how often they stand in the replicated batch, and in the packed one."""

from __future__ import annotations

from typing import Any

import numpy as np

from prefixtree.forest import PrefixForest
from prefixtree.rollouts.picture_messages import FIRST_PICTURE, RolloutPicture
from prefixtree.rollouts.sequences import Rollouts


def measure_pictures(forest: PrefixForest, rollouts: Rollouts) -> dict[str, Any] | None:
    """The figures of the pictures, ready for JSON; None where no sequence has one.

    `replicated` is what every sequence alone has, `packed` what stands in the forest. A picture
    that is in two branches stands there twice. `distinct` counts every picture once: these are
    what the vision encoder has to read.

    Args:
        forest: of `rollouts.sequences`.
        rollouts: as they are read.
    """
    assert forest.tokens is not None
    count = len(rollouts.pictures)
    if count == 0:
        return None
    replicated = sum(
        (_counts(sequence, rollouts.pictures) for sequence in rollouts.sequences),
        np.zeros(count, np.int64),
    )
    if not replicated.any():
        return None
    packed = _counts(forest.tokens, rollouts.pictures)
    sides = {"replicated": replicated, "packed": packed, "distinct": np.minimum(replicated, 1)}
    tokens = np.array([picture.tokens for picture in rollouts.pictures])
    patches = np.array([picture.patches for picture in rollouts.pictures])
    return {
        "pictures": {name: int(times.sum()) for name, times in sides.items()},
        "tokens": {name: int(times @ tokens) for name, times in list(sides.items())[:2]},
        "patches": {name: int(times @ patches) for name, times in sides.items()},
        "ratio": float(replicated @ patches / (sides["distinct"] @ patches)),
    }


def _counts(tokens: np.ndarray, pictures: tuple[RolloutPicture, ...]) -> np.ndarray:
    """How often each picture stands in some tokens: int64 [pictures]."""
    there = tokens[tokens >= FIRST_PICTURE] - FIRST_PICTURE
    # by tokens and not by runs: in packed order two of a kind may lie side by side
    times = np.bincount(there, minlength=len(pictures))
    return times // [picture.tokens for picture in pictures]
