"""What stands for nothing trains nothing: a dummy changes no gradient by a bit, in every way of
running, in this process and on another rank."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import prefixtree as pt
from tests.support.dummy_ranks import (
    CASES,
    QUICK,
    WAYS,
    differing,
    gradients,
    loss_of,
    plan_of,
)
from tests.support.full import mostly
from tests.support.models import build
from tests.support.spawn import run_ranks


@pytest.mark.parametrize("way", WAYS)
def test_a_dummy_among_micro_batches_changes_no_gradient(way: str) -> None:
    make, run, trunks = WAYS[way]
    real, empty = plan_of(2, trunks)
    model = make()
    run(model, real)
    expected = gradients(model)
    run(model, empty)
    assert not differing(gradients(model), expected)
    model.zero_grad()
    run(model, empty)
    found = gradients(model)
    assert not any(grad.any() for grad in found.values())
    # wrappers wait for all of them
    assert found.keys() == expected.keys()


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Per rank, what differs in each way."""
    return run_ranks("tests.support.dummy_ranks", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", mostly(CASES, QUICK))
def test_a_rank_with_a_dummy_adds_zeros(of_ranks: list[dict[str, Any]], case: str) -> None:
    for rank, found in enumerate(of_ranks):
        assert not found[case], f"rank {rank}: {found[case]}"


def test_what_a_dummy_is() -> None:
    forest = pt.PrefixForest.from_sequences([[9, 5, 7], [9, 5, 8]])
    dummy = forest.dummy()
    assert (dummy.tokens.tolist(), dummy.is_dummy, forest.is_dummy) == ([5], True, False)
    for same in (dummy, pickle.loads(pickle.dumps(dummy))):
        for packed in (
            pt.pack(same),
            pt.pack(same, pad_to_multiple_of=4),
            pickle.loads(pickle.dumps(pt.pack(same))),
        ):
            assert not packed.multiplicity.any() and len(packed.edges().token) == 0
            values = torch.full((packed.num_tokens, 2), float("inf"), requires_grad=True)
            for unpacked in (packed.unpack(values)[0], packed.unpack_padded(values)[0]):
                assert unpacked.tolist() == [[0, 0]]
                (grad,) = torch.autograd.grad(unpacked.sum(), values)
                assert not grad.any()


@pytest.mark.parametrize("sets", [[[], [[6], [7]]], [None, [[6], [7]]]], ids=["no set", "None"])
def test_what_an_empty_step_takes_is_scored(sets: Any) -> None:
    """A temperature of 0, and a rollout of which nothing is scored."""
    plan = pt.plan_micro_batches([[3, 4, 5], [3, 4, 6, 7]], 9, min_micro_batches=3)
    empty = next(batch for batch in plan[0] if batch.is_empty)
    temperatures, masks, own_sets = map(empty.take, ([0.7, 1.0], [[0] * 3, [0, 0, 1, 1]], sets))
    scores = pt.sequence_logprobs(
        build("qwen3"), empty.packed, temperatures, masks, sampling_masks=own_sets
    )
    assert [len(row) for row in scores.logprobs] == [0]


def test_a_token_that_stands_for_something_trains() -> None:
    """These losses see a single token that is no dummy."""
    model = build("qwen3_moe")
    one = pt.pack(pt.PrefixForest.from_sequences([[3]]))
    scores = pt.sequence_logprobs(
        model, one, return_entropy=True, measure=lambda z, _: z[:, :1], output_router_logits=True
    )
    loss_of(scores, one).backward()
    assert max(float(grad.abs().max()) for grad in gradients(model).values()) > 0.1
