"""`TreeSampler` interrupted: what was sampled is kept, and no token is wrong."""

from __future__ import annotations

from typing import Any

import pytest

import prefixtree as pt
from prefixtree.sampling import Draws, TreeSampler
from prefixtree.sampling.forest_cache import ForestCache
from prefixtree.sampling.growing_forest import GrowingForest
from tests.sampling.cases import (
    histories,
    models,
    same_samples,
)


@pytest.mark.parametrize("narrow", [False, True])
def test_what_was_sampled_before_an_interruption_is_kept(narrow):
    """And rows go on from there as if nothing had happened."""
    ours, _ = models()
    forest = pt.PrefixForest.from_sequences(histories(5))
    stop = [5, 11, 17, 23, 31, 41, 51] if narrow else []
    sampler = TreeSampler(ours, 3000)

    def started() -> Any:
        rows = sampler.start(forest)
        rows.branch(2)
        return rows

    rows = started()
    rows.generate(12, Draws(seed=2), stop)
    whole = rows.samples()
    rows = started()
    calls: list[None] = []

    def interrupt(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 6:
            raise KeyboardInterrupt

    # in the second layer of the sixth step
    hook = ours.model.layers[1].register_forward_pre_hook(interrupt)
    with hook, pytest.raises(KeyboardInterrupt):
        rows.generate(12, Draws(seed=2), stop)
    samples = rows.samples()
    for part, full, mask in zip(
        samples.sequences, whole.sequences, samples.loss_masks, strict=True
    ):
        assert part.tolist() == full[: len(part)].tolist() and 1 <= mask.sum() <= 6
    assert {int(m.sum()) for m in samples.loss_masks} >= {6}
    rows.generate(6, Draws(seed=2), stop)
    assert same_samples(rows.samples(), whole)


@pytest.mark.parametrize("place", ["before", "behind"])
def test_an_interruption_between_two_rows_gives_no_wrong_token(place, monkeypatch):
    """Tokens are handed out once; keys that are behind their tokens are noticed."""
    ours, _ = models()
    forest = pt.PrefixForest.from_sequences(histories(5))
    sampler, draws = TreeSampler(ours, 3000), Draws(seed=2)
    stop = [5, 11, 17, 23, 31, 41, 51]
    rows = sampler.start(forest)
    rows.generate(12, draws, stop)
    whole = rows.samples()
    rows = sampler.start(forest)
    original, calls = GrowingForest.extend, []

    def interrupted(*args: Any) -> None:
        calls.append(None)
        if place == "behind":
            original(*args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        if place == "before":
            original(*args)

    monkeypatch.setattr(GrowingForest, "extend", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rows.generate(12, draws, stop)
    for part, full in zip(rows.samples().sequences, whole.sequences, strict=True):
        assert part.tolist() == full[: len(part)].tolist()
    if place == "behind":
        with pytest.raises(RuntimeError, match="left the keys of some rows behind their tokens"):
            rows.generate(12, draws, stop)
        return
    rows.generate(12, draws, stop)
    for more, full in zip(rows.samples().sequences, whole.sequences, strict=True):
        assert more[: len(full)].tolist() == full.tolist()


def test_an_interruption_while_keys_move_ends_the_rows(monkeypatch):
    ours, _ = models()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    rows = TreeSampler(ours, 20).start(pt.PrefixForest.from_sequences([[3, 4, 5], [6, 7]]))
    rows.generate(5)
    rows.drop([0])
    monkeypatch.setattr(ForestCache, "move", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rows.generate(10)
    with pytest.raises(RuntimeError, match="interrupted while it moved keys"):
        rows.generate(1)
    assert len(rows.samples().sequences[0]) == 7


def test_an_interruption_while_rows_branch_ends_them(monkeypatch):
    """Rows would have the keys of others."""
    ours, _ = models()
    rows = TreeSampler(ours, 100).start(pt.PrefixForest.from_sequences([[3, 4, 5], [6, 7, 8]]))
    original = GrowingForest.branch

    def interrupted(*args: Any) -> None:
        original(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(GrowingForest, "branch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rows.branch(2)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="interrupted while it moved keys or branched rows"):
        rows.generate(1)
    assert [s.tolist() for s in rows.samples().sequences] == [[3, 4, 5], [6, 7, 8]]
