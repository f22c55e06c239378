"""GRPO on real weights and text: the updates of prefixtree's engine beside those of verl's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.integrations.verl import runs
from tests.integrations.verl.cases import Settings
from tests.integrations.verl.compare import check_same
from tests.support.real import NEEDED, PROMPT, chats, folder

pytestmark = pytest.mark.skipif(folder() is None, reason=NEEDED)


def recorded(*_: Any, **__: Any) -> dict[str, list[Any]]:
    """The chats, as if they had been sampled; the first once more, as two updates take two each."""
    masks = chats().loss_masks
    assert masks is not None
    order = [0, 1, 2, 0]
    tokens = [torch.from_numpy(chats().sequences[i]) for i in order]
    return {
        "prompts": [t[:PROMPT] for t in tokens],
        "responses": [t[PROMPT:] for t in tokens],
        "response_mask": [torch.from_numpy(masks[i][PROMPT:]).long() for i in order],
        "uid": ["library"] * len(order),
    }


def test_two_updates_are_verls(
    monkeypatch: pytest.MonkeyPatch, record_property: Callable[..., None]
) -> None:
    path = folder()
    assert path is not None
    monkeypatch.setattr(runs, "rollouts", recorded)
    settings = Settings(
        model=path.name,
        tokens=10_000,
        same_steps=True,
        checkpointing=False,
        # verl's entropies, which it takes from logits of up to 68, are 5e-4 from float64; ours 3e-5
        score_tolerance=1e-3,
        tolerance=3e-4,
    )
    stock, packed = (runs.run(vendor, path.parent, settings) for vendor in ("stock", "prefixtree"))
    differences = check_same(stock, packed, settings)
    theirs, ours, start = (
        side["actor"] for side in (stock["parameters"], packed["parameters"], stock["start"])
    )
    apart, moved = (
        sum(float((theirs[n] - of[n]).square().sum()) for n in theirs) ** 0.5
        for of in (ours, start)
    )
    record_property("updates", json.dumps({**differences, "parameters": apart / moved}))
    # most of it is the rounding of weights
    assert moved > 0.01 and apart < 5e-4 * moved
