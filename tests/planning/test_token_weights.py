"""Weights of rollouts that fork: each drawn token once, against every draw by hand."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import prefixtree as pt
from prefixtree.rollouts import expand_turns, read_rollouts
from tests.support.forks import (
    CONSTANT,
    MASKS,
    ROLLOUTS,
    SEQUENCES,
    loss_by_hand,
    loss_of,
    options_of,
)
from tests.support.full import mostly
from tests.support.models import build
from tests.support.recipes import in_float64
from tests.support.spawn import run_ranks
from tests.support.step_ranks import LIGHT

NAMES = ("token-mean", "rollout-mean", "session-mean", "sequence-mean", "constant")
Draw = Callable[[int, int], Hashable]


# ---- by hand -------------------------------------------------------------------------------------


def by_hand(name: str, masks: list[list[int]], rollouts: list[Any], draw: Draw) -> list[Any]:
    """The weights, token by token; `draw` names the draw of token t of sequence i."""
    scored = [[t for t in range(1, len(mask)) if mask[t]] for mask in masks]
    copies = Counter(draw(i, t) for i, row in enumerate(scored) for t in row)
    drawn_by = {draw(i, t): rollouts[i] for i, row in enumerate(scored) for t in row}
    cut_into = Counter(rollouts)
    weights = [np.zeros(len(mask)) for mask in masks]
    for i, row in enumerate(scored):
        length = sum(1 / copies[draw(i, t)] for t in row)
        of_rollout = sum(r == rollouts[i] for r in drawn_by.values())
        divisor = {
            "token-mean": len(copies),
            "rollout-mean": len(cut_into) * of_rollout,
            "session-mean": len(cut_into) * cut_into[rollouts[i]] * length,
            "sequence-mean": len(masks) * length,
            "constant": len(masks) * CONSTANT,
        }[name]
        for t in row:
            weights[i][t] = 1 / copies[draw(i, t)] / divisor
    return weights


@st.composite
def forks(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[list[int]], list[int]]:
    """Rows of two words that sample, hear replies and branch: so that chance draws the same often.

    Tokens, masks, turns and rollouts.
    """
    words = st.lists(st.integers(0, 1), min_size=1, max_size=3)
    rows = [([7], [0], [-1], r) for r in range(draw(st.integers(1, 3)))]
    for turn in range(draw(st.integers(1, 9))):
        at = draw(st.integers(0, len(rows) - 1))
        tokens, masks, turns, rollout = rows[at]
        if draw(st.booleans()):
            rows.append(rows[at])
        said, sampled = draw(words), draw(st.sampled_from([1, 1, 0]))
        number = turn if sampled else -1
        count = len(said)
        rows[at] = tokens + said, masks + [sampled] * count, turns + [number] * count, rollout
    masked = [[m * draw(st.sampled_from([1, 1, 0])) for m in masks] for _, masks, _, _ in rows]
    return [r[0] for r in rows], masked, [r[2] for r in rows], [r[3] for r in rows]


@settings(max_examples=60)
@given(forks(), st.sampled_from(NAMES), st.integers(1, 3))
def test_weights_of_random_forks(rows, name, ranks):
    sequences, masks, turns, rollouts = rows
    plan = pt.plan_micro_batches(sequences, 30, ranks)

    def by_turn(i: int, t: int) -> Hashable:
        return turns[i][t], t

    def by_rollout(i: int, t: int) -> Hashable:
        return rollouts[i], tuple(sequences[i][: t + 1])

    for labels, drawn in (({"turns": turns}, by_turn), ({}, by_rollout)):
        given_labels = {"rollouts": rollouts, **labels}
        if not any(map(any, masks)) and name != "constant":
            with pytest.raises(ValueError, match="no token is scored"):
                plan.token_weights(loss_mask=masks, **options_of(name), **given_labels)
            continue
        found = plan.token_weights(loss_mask=masks, **options_of(name), **given_labels)
        assert all(w.dtype == torch.float64 for w in found)
        # a mean over ranks divides by them
        expected = [ranks * w for w in by_hand(name, masks, rollouts, drawn)]
        np.testing.assert_allclose(torch.cat(found), np.concatenate(expected), rtol=1e-12)
    if any(map(any, masks)) and name in ("token-mean", "rollout-mean"):
        total = sum(float(w.sum()) for w in found)
        live = {r for r, mask in zip(rollouts, masks, strict=True) if any(mask)}
        whole = len(live) / len(set(rollouts)) if name == "rollout-mean" else 1
        assert total == pytest.approx(ranks * whole)


def test_a_rollout_per_sequence_is_what_loss_weights_counts():
    sequences = [[1, 2, 3], [1, 2], [1, 2, 3, 4], [5]]
    masks = [[1, 1, 0], [1, 0], [0, 1, 1, 1], [1]]
    plan = pt.plan_micro_batches(sequences, 4, num_ranks=2)
    for name in NAMES:
        reduced = options_of(name) | {"loss_mask": masks, "rank_reduction": "sum"}
        found = plan.token_weights(**reduced, rollouts=range(4))
        alike = "sequence-mean" if name in ("rollout-mean", "session-mean") else name
        expected = plan.loss_weights(**{**reduced, "normalization": alike})
        for weights, one, mask in zip(found, expected, masks, strict=True):
            assert weights.tolist() == [0, *(one * m for m in mask[1:])]


# ---- gradients -----------------------------------------------------------------------------------

# of each its plan, and options of its calls
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one step": ({"max_tokens": 100}, {}),
    "three micro-batches": ({"max_tokens": 9}, {}),
    "two ranks": ({"max_tokens": 9, "num_ranks": 2}, {}),
    "steps": ({"max_tokens": 100}, {"max_step_tokens": 8, "import_cost": LIGHT}),
}


def packed_backward(model: Any, plan: Any, weights: list[torch.Tensor], **how: Any) -> None:
    """All ranks and steps in turn; reduced by the mean over ranks."""
    for rank in plan:
        for batch in rank:
            (loss_of(model, batch, weights, **how) / len(plan)).backward()


def apart(one: Any, other: Any) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a.grad - b.grad).abs().max() / b.grad.abs().max()) for a, b in pairs)


@pytest.mark.parametrize(
    ("dtype", "name"),
    mostly(
        [(dtype, name) for dtype in (torch.float64, torch.float32) for name in NAMES],
        [(torch.float64, "rollout-mean"), (torch.float32, "session-mean")],
    ),
)
def test_gradients_of_every_drawn_token_by_hand(name, dtype):
    reference, model = build("qwen3", "eager").to(dtype), build("qwen3").to(dtype)
    with in_float64() if dtype == torch.float64 else nullcontext():
        loss_by_hand(reference, name).backward()
        for way, (planned, how) in WAYS.items():
            if how and dtype == torch.float64:
                # steps hand gradients on in float32
                continue
            plan = pt.plan_micro_batches(SEQUENCES, **planned)
            weights = plan.token_weights(loss_mask=MASKS, rollouts=ROLLOUTS, **options_of(name))
            model.zero_grad()
            packed_backward(model, plan, weights, **how)
            found = apart(model, reference)
            print(way, plan, f"{found:.1e}")
            assert found < (1e-12 if dtype == torch.float64 else 5e-6)


@pytest.mark.full
def test_updates_of_two_ranks(tmp_path):
    reference, start = build("qwen3", "eager"), build("qwen3")
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-3)
    for _ in range(2):
        loss_by_hand(reference, "rollout-mean").backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks("tests.support.forks", tmp_path):
        pairs = [(found[name], p.detach()) for name, p in reference.named_parameters()]
        away = max(float((a - b).abs().max()) for a, b in pairs)
        moved = zip(reference.parameters(), start.parameters(), strict=True)
        far = max(float((a - b).detach().abs().max()) for a, b in moved)
        print(f"{away:.1e} of {far:.1e}")
        assert away < 2e-6 and far > 5e-3


def test_multiplicity_alone_would_be_wrong():
    """5 is in three sequences and was drawn twice: 1 / 3 in each makes it one draw."""
    plan = pt.plan_micro_batches(SEQUENCES, 9)
    right = plan.token_weights(loss_mask=MASKS, rollouts=ROLLOUTS)
    # the draws are A's 5 6 20 21 30, B's 5 9, and five of C
    assert [float(w[4] * 12) for w in right[:3]] == pytest.approx([1 / 2, 1 / 2, 1])
    packed = pt.pack(plan.forest)
    counts = packed.unpack(packed.multiplicity)
    plain = [torch.tensor(mask) / count for mask, count in zip(MASKS, counts, strict=True)]
    plain = [w / sum(float(v.sum()) for v in plain) for w in plain]
    reference = build("qwen3", "eager")
    loss_by_hand(reference, "token-mean").backward()
    for weights, least, most in ((right, 0, 5e-6), (plain, 0.02, 1)):
        model = build("qwen3")
        packed_backward(model, plan, weights)
        assert least <= apart(model, reference) < most


# ---- where labels come from ----------------------------------------------------------------------


def test_a_sample_per_turn_is_read_with_its_labels(tmp_path: Path):
    """Each turn's sequence scores all turns before it again."""
    path = tmp_path / "rollouts.jsonl"
    turns = [1, 1, 0, 1]
    rows = [
        {"token_ids": [9, *said], "loss_mask": [0, *turns]} for said in ([5, 6, 1, 7], [5, 8, 1, 7])
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    read = expand_turns(read_rollouts(path))
    assert [len(s) for s in read.sequences] == [3, 5, 3, 5] and read.origins == [0, 0, 1, 1]
    plan = pt.plan_micro_batches(read.sequences, 99)
    weights = plan.token_weights("token-mean", read.loss_masks, rollouts=read.origins)
    drawn: Counter[tuple[int, int]] = Counter()
    for rollout, w in zip(read.origins, weights, strict=True):
        drawn.update({(rollout, t): float(w[t]) for t in range(len(w)) if w[t]})
    # both drew 5 first
    assert drawn == pytest.approx({(r, t): 1 / 6 for r in (0, 1) for t in (1, 2, 4)})


SHARED = [[1, 2, 3], [1, 2, 4]]
ROUTES = [np.array([[[0, 1]]] * 3), np.array([[[0, 1]], [[1, 2]], [[0, 1]]])]


@pytest.mark.parametrize(
    ("forest", "shares"),
    [
        # an engine recorded other routes for the second copy of 2
        (pt.PrefixForest.from_sequences(SHARED, routes=ROUTES), [0, 0.5, 1] * 2),
        (pt.PrefixForest.from_groups([[1]], [[[2, 3], [2, 4]]]), [0, 0.5, 1] * 2),
        (pt.PrefixForest.from_sequences(SHARED, namespaces=["a", "b"]), [0, 1, 1] * 2),
    ],
    ids=["routes", "structure that was given", "namespaces"],
)
def test_what_stands_apart_in_the_forest_may_be_one_draw(forest, shares):
    plan = pt.plan_micro_batches(forest, 9)
    # from a generator, as labels may come
    weights = plan.token_weights(rollouts=(0 for _ in SHARED))
    torch.testing.assert_close(torch.cat(weights) * sum(shares), torch.tensor(shares).double())
    if 0.5 in shares:
        of_turns = plan.token_weights(turns=[[-1, 0, 1], [-1, 0, 2]])
        assert all(map(torch.equal, of_turns, weights))
    with pytest.raises(ValueError, match=r"rollouts\[0\] is -1"):
        plan.token_weights(rollouts=(-1 for _ in SHARED))


# ---- what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs rollouts= or turns=, which tell what was drawn once; loss_weights counts"),
        ({"rollouts": [0]}, "rollouts must name one rollout per sequence: got 1 rollouts for 2"),
        ({"rollouts": [0, -1]}, r"rollouts\[1\] is -1; .* number the rollouts from 0"),
        ({"rollouts": [None, None]}, r"rollouts\[0\] is None; expected an integer >= 0, text or"),
        ({"rollouts": torch.tensor([0.0, 1.0])}, r"rollouts\[0\] is 0\.0; expected an integer"),
        ({"rollouts": [True, False]}, r"rollouts\[0\] is True; expected"),
        ({"rollouts": [[0, 0], [1]]}, "rollouts must be hashable"),
        ({"rollouts": "ab"}, "rollouts must be a list that names one rollout per sequence"),
        ({"turns": [[-1, 0]]}, "turns must hold one entry per sequence: expected 2, got 1"),
        ({"turns": [[-1, 0], [-1]]}, r"turns\[1\] must have the sequence's length 2, got length 1"),
        ({"turns": [0, 1]}, r"turns\[0\] must be 1-D integers, got shape \[\] of int64"),
        ({"turns": [[-1, 0.5], [-1, 1]]}, r"turns\[0\] must be 1-D integers, got .* of float64"),
        ({"turns": [[-1, -1], [-1, 1]]}, r"turns\[0\]\[1\] is -1, no turn, .* or 0 in loss_mask"),
        (
            {"turns": [[-1, 0], [-1, 0]]},
            r"turns\[1\]\[1\] and turns\[0\]\[1\] are both 0, but the sequences differ .* across",
        ),
        ({"turns": [[-1, 0], [-1, 1]], "normalization": "session-mean"}, "give token_weights roll"),
        ({"rollouts": [0, 1], "normalization": "mean"}, "'rollout-mean' or 'session-mean', got"),
        ({"rollouts": [0, 1], "constant": 3}, "constant= goes with normalization='constant'"),
        ({"rollouts": [0, 1], "loss_mask": [[0, 0], [1, 0]]}, "no token is scored"),
        ({"rollouts": [0, 1], "loss_mask": [[0, 1]]}, "loss_mask must hold one entry per sequence"),
        ({"rollouts": [0, 1], "rank_reduction": "max"}, "rank_reduction must be 'mean' or 'sum'"),
    ],
)
def test_labels_that_cannot_be(arguments, message):
    plan = pt.plan_micro_batches([[1, 2], [1, 3]], 10)
    with pytest.raises(ValueError, match=message):
        plan.token_weights(**arguments)


def test_loss_weights_names_the_means_of_rollouts():
    plan = pt.plan_micro_batches([[1, 2]], 10)
    with pytest.raises(ValueError, match=r"got 'rollout-mean'; .* give token_weights rollouts="):
        plan.loss_weights("rollout-mean")
