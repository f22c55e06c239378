"""`batch_logprobs`: a score stands where its token stands, in every layout, against each sequence
alone."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import prefixtree as pt
from prefixtree.packing.batch_layout import BatchLayout
from tests.support.models import (
    Objective,
    Run,
    assert_same,
    build,
    errors,
    gradients,
    ragged_objective,
    run_eager,
)

LAYOUTS = ("right", "left", "both", "positions", "positions of one row", "cu_seqlens")


@cache
def _reference() -> Run:
    return run_eager(build("qwen3"))


def _batch(layout: str, sequences: list[np.ndarray]) -> tuple[dict[str, Any], np.ndarray]:
    """The arguments that say what the tokens are and where, and the place of every token in the
    flattened batch, sequence by sequence."""
    rng = np.random.default_rng(1)
    lengths = [len(s) for s in sequences]
    if layout in ("right", "left", "both"):
        columns = max(lengths) + 3
        # rows without tokens between the others
        mask = np.zeros((len(sequences) + 2, columns), np.int64)
        at = np.delete(np.arange(len(mask)), [0, 4])
        for row, n in zip(at, lengths, strict=True):
            begin = {"right": 0, "left": columns - n, "both": (columns - n) // 2}[layout]
            mask[row, begin : begin + n] = 1
        place = np.flatnonzero(mask)
        given: dict[str, Any] = {"attention_mask": torch.from_numpy(mask)}
        shape = mask.shape
    else:
        shape = (1, sum(lengths))
        if layout == "positions":  # in two rows of one length
            half = len(sequences) // 2 + 1
            rows = [sum(lengths[:half]), sum(lengths[half:])]
            sequences = [*sequences, np.full(abs(rows[0] - rows[1]) or 1, 3)]
            assert rows[0] > rows[1], "the second row gets one more sequence"
            lengths = [len(s) for s in sequences]
            shape = (2, rows[0])
        place = np.arange(shape[0] * shape[1])
        if layout == "cu_seqlens":
            shape = (1, shape[1] + 5)  # padding behind the last border
            given = {"cu_seqlens": torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)}
        else:
            positions = np.concatenate([np.arange(n) for n in lengths])
            given = {"position_ids": torch.from_numpy(positions.reshape(shape))}
    ids = rng.integers(3, 90, shape[0] * shape[1])
    ids[place] = np.concatenate(sequences)
    return {"input_ids": torch.from_numpy(ids.reshape(shape)), **given}, place


def _spread(values: list[Any], place: np.ndarray, shape: Any) -> torch.Tensor:
    """[n] per sequence to [B, L]; what no sequence holds is 0."""
    flat = torch.from_numpy(np.concatenate(values))
    out = flat.new_zeros(int(np.prod(shape)))
    out[torch.from_numpy(place[: len(flat)])] = flat
    return out.view(shape)


def _of_the_taken(logits: torch.Tensor, edges: Any) -> torch.Tensor:
    return logits.log_softmax(-1).gather(1, edges.token[:, None])


def _run(
    layout: str, wanted: Objective, roll: int = 0, roll_temperature: int = 0
) -> tuple[Run, pt.BatchScores]:
    """Through `batch_logprobs`; the loss is computed in the layout of the batch.

    Args:
        roll: columns by which the weights of the loss are shifted.
        roll_temperature: columns by which temperatures per token are.
    """
    model = build("qwen3")
    given, place = _batch(layout, wanted.sequences)
    shape = given["input_ids"].shape
    masks = wanted.loss_masks
    assert masks is not None
    per_row = all(np.ndim(t) == 0 for t in wanted.temperatures)
    if per_row and layout in ("right", "left", "both"):
        temperature = np.ones(shape[0], np.float32)
        temperature[np.delete(np.arange(shape[0]), [0, 4])] = wanted.temperatures
    else:
        temperature = _spread(
            [
                np.broadcast_to(np.float64(t), len(s))
                for s, t in zip(wanted.sequences, wanted.temperatures, strict=True)
            ],
            place,
            shape,
        )
        # a temperature's column is that of its token
        temperature = temperature.roll(roll_temperature, 1).clamp(min=0.5)
    scores = pt.batch_logprobs(
        model,
        **given,
        temperature=torch.as_tensor(temperature),
        loss_mask=_spread(masks, place, shape),
        return_entropy=True,
        return_statistics=["is_top1"],
        measure=_of_the_taken,
    )
    assert scores.measured is not None and scores.measured.shape == (*shape, 1)
    torch.testing.assert_close(scores.measured[..., 0], scores.logprobs)
    assert scores.logprobs.shape == scores.scored.shape == shape
    assert scores.entropy is not None
    weights = [np.concatenate([np.zeros((1, 2)), w.numpy()]) for w in wanted.weights]
    of_logprobs, of_entropy = (
        _spread([w[:, i] for w in weights], place, shape).roll(roll, 1) for i in (0, 1)
    )
    ((scores.logprobs * of_logprobs).sum() + (scores.entropy * of_entropy).sum()).backward()

    def of_sequences(values: torch.Tensor) -> list[torch.Tensor]:
        lengths = [len(s) for s in wanted.sequences]
        flat = values.detach().flatten()[torch.from_numpy(place[: sum(lengths)])]
        return [of[1:] for of in flat.split(lengths)]

    run = Run(of_sequences(scores.logprobs), of_sequences(scores.entropy), gradients(model))
    return run, scores


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout: str) -> None:
    wanted = ragged_objective()
    run, scores = _run(layout, wanted)
    assert_same(run, _reference())
    assert wanted.loss_masks is not None
    assert int(scores.scored.sum()) == sum(int(mask[1:].sum()) for mask in wanted.loss_masks)
    assert not scores.logprobs[~scores.scored].any()
    assert scores.entropy is not None and not scores.entropy[~scores.scored].any()
    assert scores.statistics["is_top1"].shape == scores.logprobs.shape
    assert scores.packed.num_tokens < scores.packed.forest.num_replicated_tokens


def test_a_shift_by_one_column_is_seen() -> None:
    run, _ = _run("right", ragged_objective(), roll=1)
    found = errors(run, _reference())
    assert found.logprob < 1e-5 and found.gradient > 0.3


@pytest.mark.parametrize("layout", ["left", "cu_seqlens"])
def test_a_temperature_per_token(layout: str) -> None:
    """At its token, and seen one column off: at the predictor."""
    wanted = ragged_objective()
    drawn = np.random.default_rng(1)
    lengths = [len(tokens) for tokens in wanted.sequences]
    wanted = replace(wanted, temperatures=[drawn.choice([0.7, 1.0, 1.6], n) for n in lengths])
    reference = run_eager(build("qwen3"), wanted)
    assert_same(_run(layout, wanted)[0], reference)
    found = errors(_run(layout, wanted, roll_temperature=-1)[0], reference)
    assert found.logprob > 0.1 and found.gradient > 0.1


def test_a_batch_of_padding_runs_for_the_other_ranks() -> None:
    model = build("qwen3")
    ids = torch.zeros(2, 3, dtype=torch.long)
    temperature = torch.ones(2, 3)
    scores = pt.batch_logprobs(
        model,
        ids,
        torch.zeros_like(ids),
        temperature=temperature,
        loss_mask=torch.zeros_like(ids),
        return_entropy=True,
    )
    assert not scores.scored.any() and not scores.logprobs.any()
    assert scores.entropy is not None
    (scores.logprobs.sum() + scores.entropy.sum()).backward()
    found = gradients(model)
    assert found.keys() == dict(model.named_parameters()).keys()
    assert not any(gradient.any() for gradient in found.values())


def test_without_a_loss_mask_every_token_but_the_first_is_scored() -> None:
    model = build("qwen3")
    ids = torch.tensor([[5, 6, 7, 0], [5, 6, 8, 9]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    found = pt.batch_logprobs(model, ids, mask)
    assert found.scored.tolist() == [[False, True, True, False], [False, True, True, True]]
    positions = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3]])
    again = pt.batch_logprobs(model, ids, mask, position_ids=positions)
    assert torch.equal(found.logprobs, again.logprobs)
    # padded on the left
    positions[0] = torch.tensor([7, 0, 1, 2])
    left = pt.batch_logprobs(model, ids.roll(1, 1), mask.roll(1, 1), position_ids=positions)
    assert left.scored[0].tolist() == [False, False, True, True]
    # no length: a batch may hold sequences of one token, and no row
    assert pt.batch_logprobs(model, ids[:0], mask[:0]).logprobs.shape == (0, 4)
    ones = pt.batch_logprobs(model, ids, position_ids=torch.zeros(2, 4, dtype=torch.long))
    assert not ones.scored.any()


def test_sequences_of_one_token_stand_between_others() -> None:
    """They have a place and no score, and those after them keep theirs."""
    model = build("qwen3")
    ids, mask = torch.tensor([[5, 0, 0], [6, 7, 8]]), torch.tensor([[1, 0, 0], [1, 1, 1]])
    expected = pt.batch_logprobs(model, ids[1:], mask[1:]).logprobs[0]
    padded = pt.batch_logprobs(model, ids, mask)
    assert padded.scored.tolist() == [[False] * 3, [False, True, True]]
    torch.testing.assert_close(padded.logprobs[1], expected)
    joined = pt.batch_logprobs(model, torch.tensor([[5, 6, 7, 8]]), cu_seqlens=[0, 1, 4])
    assert joined.scored.tolist() == [[False, False, True, True]]
    torch.testing.assert_close(joined.logprobs[0, 1:], expected)


_IDS = torch.tensor([[5, 6, 7, 8], [5, 6, 8, 9]])
_REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("nothing says where sequences stand", {}),
    ("hole between columns 0 and 3", {"attention_mask": [[1, 0, 1, 1], [1, 1, 1, 1]]}),
    (r"attention_mask must be \[B, L\].*\[2, 4\], got \[2, 3\]", {"attention_mask": [[1] * 3] * 2}),
    ("must hold 1 on tokens", {"attention_mask": [[1, 1, 1, 2], [1, 1, 1, 1]]}),
    ("jump to 3 at column 0", {"position_ids": [[0, 1, 2, 3], [3, 4, 5, 6]]}),
    ("several rows of positions", {"position_ids": np.zeros((3, 2, 4), np.int64)}),
    (
        "row 1 do not count from 0 along",
        {"attention_mask": np.ones((2, 4), int), "position_ids": [[0, 1, 2, 3], [0, 1, 0, 1]]},
    ),
    ("ends at 9, beyond the 8 tokens", {"cu_seqlens": [0, 4, 9]}),
    ("integers", {"cu_seqlens": [0.0, 4.0]}),
    ("several rows of positions", {"position_ids": np.zeros((2, 3), np.int64)}),
    ("begin with 0 and not descend", {"cu_seqlens": [0, 4, 2]}),
    ("begin with 0 and not descend", {"cu_seqlens": [1, 4]}),
    ("integers", {"cu_seqlens": [[0, 4]]}),
    ("leave out attention_mask", {"cu_seqlens": [0, 4], "attention_mask": np.ones((2, 4))}),
    ("loss_mask must be", {"cu_seqlens": [0, 4], "loss_mask": [1, 1, 1, 1]}),
    (
        "row 1, column 3, where no sequence",
        {"cu_seqlens": [0, 7], "loss_mask": np.ones((2, 4), int)},
    ),
    ("loss_mask", {"cu_seqlens": [0, 8], "loss_mask": np.full((2, 4), 2)}),
]


@pytest.mark.parametrize(("message", "given"), _REFUSED)
def test_what_is_refused(message: str, given: dict[str, Any]) -> None:
    with pytest.raises(pt.ForestError, match=message):
        pt.batch_logprobs(
            build("qwen3"), _IDS, **{name: torch.as_tensor(of) for name, of in given.items()}
        )


def test_other_bad_input() -> None:
    model, mask = build("qwen3"), torch.ones_like(_IDS)
    with pytest.raises(ValueError, match=r"one per row \[2\] or one per token \[2, 4\], got"):
        pt.batch_logprobs(model, _IDS, mask, temperature=torch.ones(3))
    with pytest.raises(ValueError, match="above 0"):
        pt.batch_logprobs(model, _IDS, mask, temperature=torch.tensor([1.0, 0.0]))
    with pytest.raises(pt.ForestError, match=r"input_ids must be \[B, L\], got shape \[4\]"):
        pt.batch_logprobs(model, _IDS[0], mask[0])
    with pytest.raises(TypeError, match="did you mean attention_mask"):
        pt.batch_logprobs(model, _IDS, attention_masks=mask)
    with pytest.raises(TypeError, match="did you mean return_entropy"):
        pt.batch_logprobs(model, _IDS, mask, return_entropys=True)


def test_places_are_those_of_the_tokens() -> None:
    layout = BatchLayout.of((2, 4), cu_seqlens=[0, 3, 3, 5])
    assert layout.lengths.tolist() == [3, 2]
    assert layout.rows.tolist() == [0, 0]
    out = layout.spread([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    assert out.tolist() == [[0, 1, 2, 0], [3, 0, 0, 0]]
