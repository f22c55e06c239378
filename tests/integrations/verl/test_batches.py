"""Splitting, packing and verl's jagged layout, without a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

import prefixtree as pt
from prefixtree.integrations.verl.balance import leaf_order
from prefixtree.integrations.verl.batches import (
    MicroRows,
    at_least,
    micro_rows,
    rows_of,
    scores_in_layout,
    split,
    values_in_layout,
)
from prefixtree.planning.micro_batch import MicroBatch, micro_batch_of
from prefixtree.scoring.edges import SequenceScores
from tests.integrations.verl.runs import batch_of, jagged, rollouts


def cut(data: Any, *args: Any, **options: Any) -> Any:
    return split(data, rows_of(data), None, *args, **options)


def in_layout(values: list[torch.Tensor], data: Any) -> torch.Tensor:
    """As log-probabilities come back, values of tokens 1 .. n - 1."""
    return scores_in_layout(SequenceScores(values, None), MicroRows(data, rows_of(data)))[
        "log_probs"
    ]


def members(batch: MicroBatch) -> list[int]:
    return batch.sequence_indices.tolist()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("budget", [40, 100, 400])
def test_micro_batches_hold_every_sequence_once_within_the_budget(seed: int, budget: int) -> None:
    data = batch_of(rollouts(seed, groups=6, size=5), max_token_len_per_gpu=budget)
    batches = cut(data)
    assert sorted(i for b in batches for i in members(b)) == list(range(30))
    for batch in batches:
        distinct = micro_rows(data, rows_of(data), batch).rows.forest.num_tokens
        assert distinct == batch.num_tokens == batch.forest.num_tokens <= budget


def test_what_is_shared_meets_and_takes_fewer_bins_than_tokens_would() -> None:
    rows = rollouts(1, groups=4, size=8)
    # as verl deals samples out: no two of a group side by side
    mixed = {k: [v[i] for j in range(8) for i in range(j, 32, 8)] for k, v in rows.items()}
    sequences = rows_of(batch_of(mixed)).tokens
    of_group = [
        [s for s, u in zip(sequences, mixed["uid"], strict=True) if u == g]
        for g in set(mixed["uid"])
    ]
    budget = max(pt.PrefixForest.from_sequences(group).num_tokens for group in of_group)
    batches = cut(batch_of(mixed, max_token_len_per_gpu=budget))
    assert len(batches) <= 4
    assert sum(b.num_tokens for b in batches) < sum(map(len, sequences)) / 2


def test_the_fullest_are_halved() -> None:
    # leaves in the order of the sequences
    forest = pt.PrefixForest.from_sequences([[1, 1], [1, 2], [1, 3], [1, 4], [2]])

    def parts(held: list[list[int]], count: int) -> list[list[int]]:
        batches = [micro_batch_of(forest, sequences) for sequences in held]
        return [members(b) for b in at_least(batches, count, forest)]

    assert parts([[0, 1, 2, 3], [4]], 2) == [[0, 1, 2, 3], [4]]
    assert parts([[0, 1, 2, 3], [4]], 3) == [[0, 1], [2, 3], [4]]
    assert parts([[0, 1, 2], [4]], 4) == [[0], [1], [2], [4]]


def test_halves_keep_neighbours() -> None:
    rows = rollouts(2, groups=2, size=4)
    forest = pt.PrefixForest.from_sequences(rows_of(batch_of(rows)).tokens)
    halves = at_least([micro_batch_of(forest, range(8))], 2, forest)
    assert [{rows["uid"][i] for i in members(half)} for half in halves] in (
        [{"2-0"}, {"2-1"}],
        [{"2-1"}, {"2-0"}],
    )


def test_leaves_stand_beside_those_that_share_most() -> None:
    sequences = [[1, 2, 3], [7, 8], [1, 2, 4], [7, 9], [1, 2]]
    order = leaf_order(pt.PrefixForest.from_sequences(sequences))
    assert order in ([4, 0, 2, 1, 3], [1, 3, 4, 0, 2])


def test_a_fixed_size_brings_groups_together() -> None:
    rows = rollouts(3, groups=4, size=4)
    mixed = {k: [v[i] for j in range(4) for i in range(j, 16, 4)] for k, v in rows.items()}
    data = batch_of(mixed, use_dynamic_bsz=False, micro_batch_size_per_gpu=4)
    parts = cut(data)
    assert [len(members(part)) for part in parts] == [4] * 4
    assert all(len({mixed["uid"][i] for i in members(part)}) == 1 for part in parts)


@pytest.mark.parametrize("multiple", [1, 2, 3, 5])
def test_virtual_stages_get_a_multiple_of_micro_batches(multiple: int) -> None:
    options = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 60}
    data = batch_of(rollouts(3, groups=4, size=4), **options)
    fewest = len(cut(data))
    parts = cut(data, multiple=multiple)
    assert len(parts) % multiple == 0 and len(parts) - fewest < multiple
    assert sorted(i for part in parts for i in members(part)) == list(range(16))


def test_virtual_stages_that_get_no_multiple() -> None:
    rows = rollouts(3, groups=4, size=4)
    fixed = batch_of(rows, use_dynamic_bsz=False, micro_batch_size_per_gpu=4)
    assert len(cut(fixed, multiple=2)) == 4
    with pytest.raises(ValueError, match=r"make 4 micro-batches .* need a multiple of 3"):
        cut(fixed, multiple=3)
    dynamic = batch_of(rows, use_dynamic_bsz=True, max_token_len_per_gpu=60)
    with pytest.raises(ValueError, match="needs 17 micro-batches, another has only 16"):
        cut(dynamic, multiple=17)


# ---- layout --------------------------------------------------------------------------------------


def test_the_layout_is_what_verl_reads_responses_from() -> None:
    rows = rollouts(4, groups=2, size=3)
    data = batch_of(rows)
    sequences = rows_of(data).tokens
    # the value of every token but the first of a sequence: which it is
    values = [torch.arange(1, len(s)) + 100.0 * i for i, s in enumerate(sequences)]
    out = no_padding_2_padding(in_layout(values, data), data)
    for i, (prompt, response) in enumerate(zip(rows["prompts"], rows["responses"], strict=True)):
        places = torch.arange(len(prompt), len(prompt) + len(response)) + 100.0 * i
        assert torch.equal(out[i, : len(response)], places)
    jagged_values = in_layout(values, data)
    assert torch.equal(jagged_values.offsets(), data["input_ids"].offsets())
    assert all(row[-1] == 0 for row in jagged_values.unbind())


def test_gradients_go_back_to_the_tokens_they_came_from() -> None:
    like = jagged([torch.arange(4), torch.arange(1), torch.arange(3)])
    values = [torch.randn(n, requires_grad=True) for n in (3, 0, 2)]
    weights = torch.arange(1.0, 9.0)
    data = tu.get_tensordict({"input_ids": like}, {})
    (in_layout(values, data).values() * weights).sum().backward()
    grads = [v.grad for v in values]
    assert grads[0] is not None and grads[2] is not None
    assert grads[0].tolist() == [1, 2, 3]
    assert grads[2].tolist() == [6, 7]
    rows = [torch.arange(4.0)[:, None], torch.ones(1, 1), torch.arange(3.0)[:, None]]
    found = values_in_layout(rows, MicroRows(data, rows_of(data)))["values"]
    assert [r.tolist() for r in found.unbind()] == [[0, 1, 2, 3], [1], [0, 1, 2]]


def test_the_response_is_scored_where_the_batch_says_what_it_is() -> None:
    rows = rollouts(5, groups=1, size=2)
    data = batch_of(rows)
    masks = rows_of(data).masks
    assert masks is not None
    for mask, prompt, response in zip(masks, rows["prompts"], rows["responses"], strict=True):
        assert mask.tolist() == [False] * len(prompt) + [True] * len(response)


def everything(data: Any) -> None:
    assert rows_of(data).masks is None


def test_everything_is_scored_otherwise() -> None:
    rows = rollouts(5, groups=1, size=2)
    everything(batch_of(rows, return_model_output=True))
    everything(batch_of(rows).exclude("prompts"))
    everything(batch_of(rows).exclude("responses"))
    padded = batch_of(rows)
    padded["prompts"] = padded["prompts"].to_padded_tensor(0)
    everything(padded)
    # prompts and responses that are not what input_ids holds
    other = batch_of(rows)
    other["responses"] = jagged([r[:-1] for r in rows["responses"]])
    everything(other)
    tu.assign_non_tensor(other, return_model_output=False)
    everything(other)


def test_ranks_that_compute_a_forest_together_share_a_budget() -> None:
    rows = rollouts(10, groups=4, size=4)
    data = batch_of(rows, max_token_len_per_gpu=30)
    together = cut(batch_of(rows, max_token_len_per_gpu=60))
    assert list(map(members, cut(data, 2))) == list(map(members, together))
    short = batch_of(rows, max_token_len_per_gpu=8)
    with pytest.raises(ValueError, match="more than max_token_len_per_gpu=8 x 2 ranks; raise"):
        cut(short, 2)
