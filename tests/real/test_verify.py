"""`verify` on real weights and real text: right runs are green, the smallest mistakes red."""

from __future__ import annotations

import pytest

from tests.support.mistakes import MISTAKES
from tests.support.real import chats, folder
from tests.support.verdicts import LINES, Judged


@pytest.fixture(scope="module")
def side() -> Judged:
    # half a minute of a core; two of the chats begin with the same 120 tokens, all with 62
    return Judged(str(folder()), [tokens[:120] for tokens in chats().sequences])


def test_real_text_is_green(side: Judged) -> None:
    found = side.judged()
    assert not found["red"], found
    # rounding, not luck: replicated is as far from float64
    assert found["packed"]["whole gradient"] < 2 * found["replicated"]["whole gradient"]


def test_each_mistake_is_red(side: Judged) -> None:
    found = dict(side.mistaken())
    assert found.keys() == MISTAKES.keys()
    # a weight shows in gradients alone, what a token sees first in log p
    assert found.pop("one token's weight left out")["red"] == list(LINES[2:])
    for name, wrong in found.items():
        assert "logprobs" in wrong["red"], (name, wrong)
