"""Checkpoints with a vision tower: the updates of verl's own engine, or of each sequence alone
where verl's fails; text alone and pictures, one rank and two; and red where a picture, its place
or its gradient is another's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from prefixtree.integrations.verl import pictures as room
from prefixtree.models import vision
from prefixtree.packing.placements import Placements
from tests.integrations.verl.compare import check_same, difference
from tests.integrations.verl.runs import VISION_CASES, run, run_ranks
from tests.support.full import asked_for, mostly

# every time
ONE = (
    "qwen2_5_vl, text",
    "qwen3_vl, text, decay",
    "qwen2_5_vl, pictures",
    "qwen3_vl_moe, pictures",
)
TWO = ("qwen3_vl, one rank sees", "qwen3_vl, lora")
RED = "qwen3_vl, pictures"


@pytest.fixture(scope="module")
def two_ranks(sees: Path) -> list[dict[Any, Any]]:
    return run_ranks(sees, asked_for(VISION_CASES, TWO))


@pytest.mark.parametrize("name", mostly(VISION_CASES, ONE))
def test_one_rank(name: str, sees: Path, record_property: Callable[..., None]) -> None:
    settings = VISION_CASES[name]
    packed = run("prefixtree", sees, settings)
    differences = check_same(run(settings.beside, sees, settings), packed, settings)
    print("DIFF", name, {k: f"{v:.1e}" for k, v in differences.items()})
    record_property("differences", differences)


@pytest.mark.parametrize("name", mostly(VISION_CASES, TWO))
def test_two_ranks(
    name: str, two_ranks: list[dict[Any, Any]], record_property: Callable[..., None]
) -> None:
    settings = VISION_CASES[name]
    for rank, results in enumerate(two_ranks):
        differences = check_same(
            results[name, settings.beside], results[name, "prefixtree"], settings
        )
        record_property(f"differences of rank {rank}", differences)
        print("DIFF", name, rank, {k: f"{v:.1e}" for k, v in differences.items()})


# ---- red -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stock(sees: Path) -> Any:
    return run("stock", sees, VISION_CASES[RED])


def gaps(stock: Any, packed: Any) -> tuple[float, float, float]:
    """Of the first log-probabilities, and of the text's and the tower's parameters at the end."""
    ends = stock["parameters"]["actor"], packed["parameters"]["actor"]
    found = {name: difference([p], [ends[1][name]]) for name, p in ends[0].items()}
    return (
        difference(stock["infer"]["old_log_probs"], packed["infer"]["old_log_probs"]),
        max(gap for name, gap in found.items() if "visual." not in name),
        max(gap for name, gap in found.items() if "visual." in name),
    )


def test_a_gradient_left_out_is_seen(
    stock: Any, sees: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first picture of each forward, 8 features."""
    repeated = vision._Encoding._repeated

    def without(self: Any, features: torch.Tensor) -> torch.Tensor:
        return repeated(self, torch.cat([features[:8].detach(), features[8:]]))

    right = gaps(stock, run("prefixtree", sees, VISION_CASES[RED]))
    assert max(right) < 1e-5, right
    monkeypatch.setattr(vision._Encoding, "_repeated", without)
    scores, _, tower = gaps(stock, run("prefixtree", sees, VISION_CASES[RED]))
    assert scores == right[0]
    assert tower > 1e-3


def test_placements_in_another_order_are_seen(
    stock: Any, sees: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = vision.place

    def turned(*args: Any) -> Any:
        placements, paths = place(*args)
        return Placements(placements.start, placements.number[::-1], placements.frame), paths

    monkeypatch.setattr(vision, "place", turned)
    scores, text, tower = gaps(stock, run("prefixtree", sees, VISION_CASES[RED]))
    assert min(scores, text, tower) > 1e-3


def test_a_picture_of_another_sequence_is_seen(
    stock: Any, sees: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the third group, alike but for pixels, get their neighbours'."""
    shown_of = room.shown_of

    def turned(data: Any) -> Any:
        rows = shown_of(data)
        one_picture = [i for i, row in enumerate(rows) if len(row.get("image_grid_thw", [])) == 1]
        turned = {i: rows[j] for i, j in zip(one_picture, one_picture[::-1], strict=True)}
        return [turned.get(i, row) for i, row in enumerate(rows)]

    monkeypatch.setattr(room, "shown_of", turned)
    scores, text, tower = gaps(stock, run("prefixtree", sees, VISION_CASES[RED]))
    assert min(scores, text, tower) > 1e-3
