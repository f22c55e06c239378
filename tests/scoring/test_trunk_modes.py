"""`kept_trunks(recompute="auto")`: within the memory there is, the peak as predicted, exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from prefixtree import (
    PrefixForest,
    UnsupportedError,
    import_cost,
    kept_trunks,
    sequence_logprobs,
)
from prefixtree.kernels.lm_head.measures import measure_bytes
from prefixtree.planning.micro_batches import batches_with_trunks
from prefixtree.planning.trunks import plan_trunks
from prefixtree.recompute import trunk_modes
from prefixtree.recompute.counted import LiveBytes
from prefixtree.recompute.layers import MODES
from prefixtree.recompute.trunk_modes import KeptPlan
from tests.scoring.kept_cases import compare, plan_of, run
from tests.scoring.steps_cases import run as in_steps
from tests.support.full import mostly
from tests.support.hooks import limit
from tests.support.models import (
    adapted,
    build,
    logprob_and_entropy,
    pack_sequences,
    ragged_objective,
    same_bits,
)
from tests.support.step_ranks import LIGHT


class Memory:
    """Stands in for the memory of a device.

    Attributes:
        left: bytes for activations.
        plans: what was planned, call after call.
        works: the parts that were planned last.
    """

    works: Any

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 1 << 60
        self.plans: list[KeptPlan] = []
        self._real, self._plan = trunk_modes.plan_kept, lambda available: self.plans[-1]
        real = trunk_modes.left_for_activations

        def left_for_activations(*model: Any) -> tuple[Any, int]:
            return real(*model)[0], self.left

        def planned(*given: Any, **options: Any) -> KeptPlan:
            self.works = given[1]
            self._plan = lambda available: self._real(*given[:-1], available, **options)
            self.plans.append(self._real(*given, **options))
            return self.plans[-1]

        monkeypatch.setattr(trunk_modes, "left_for_activations", left_for_activations)
        monkeypatch.setattr(trunk_modes, "plan_kept", planned)
        # chunks of logits are as small as the models
        limit(monkeypatch, "logits of plans", 1 << 16)

    def assert_predicted(
        self, counted: Callable[[], int], share: float, above: float = 0.07
    ) -> None:
        """What a call counts in a share of the memory is what was planned for it.

        Args:
            above: by how much of itself a plan may be above what was counted.
        """
        # layers are measured, and tables of the forest are made once
        counted()
        counted()
        # a plan for less memory may want modes that were not measured
        for _ in MODES:
            self.left = self.share(share)
            counted()
        self.left = self.share(share)
        measured, plan = counted(), self.plans[-1]
        print(f"again: {plan.runs_again}, predicted / counted: {plan.peak_bytes / measured:.3f}")
        assert 1 - above <= measured / plan.peak_bytes < 1.02
        assert plan.peak_bytes <= self.left

    def share(self, share: float) -> int:
        """Bytes on the way from the least that the last call could run in (0) to those in which it
        recomputes nothing (1)."""
        low, most = 0, self._plan(1 << 60).peak_bytes + 1
        high = most
        while high - low > most // 500:
            middle = (low + high) // 2
            try:
                self._plan(middle)
                high = middle
            except torch.OutOfMemoryError:
                low = middle
        return round(high + share * (most - high))


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    return Memory(monkeypatch)


def test_the_same_bits_whatever_the_memory(memory: Memory) -> None:
    model = build("qwen3")
    expected = compare(model, recompute="auto")
    assert same_bits(run(model, recompute="nothing"), expected)
    seen = {str(memory.plans[-1])}
    for share in (0, 0.1, 0.2, 0.4, 0.7):
        memory.left = memory.share(share)
        assert same_bits(run(model, recompute="auto"), expected)
        assert memory.plans[-1].peak_bytes <= memory.left
        seen.add(str(memory.plans[-1]))
    assert len(seen) == 6
    assert {plan.runs_again for plan in memory.plans} == {False, True}


# PEFT asks transformers under the old name of the property
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("model_type", mostly(["qwen3_5", "adapters"], ["adapters"]))
def test_recurrent_layers_and_adapters(memory: Memory, model_type: str) -> None:
    model = build("qwen3" if model_type == "adapters" else model_type)
    if model_type == "adapters":
        model = adapted(model, "q_proj", "down_proj")
    compare(model, recompute="auto")
    memory.left = memory.share(0.3)
    compare(model, recompute="auto")
    first, second = memory.plans
    assert str(first) != str(second) and second.peak_bytes <= memory.left


def test_again_and_without_gradients(memory: Memory) -> None:
    model = build("qwen3")
    compare(model, recompute="auto", recompute_trunks="again")
    (plan,) = memory.plans
    assert plan.runs_again
    with torch.no_grad(), kept_trunks(model, plan_of(ragged_objective())[0], recompute="auto") as s:
        for _ in s:
            pass
    assert memory.plans == [plan]


def test_what_a_measure_takes_is_left_free(memory: Memory) -> None:
    model = build("qwen3")
    run(model, recompute="auto")
    less = memory.share(0.5)
    memory.left = less
    run(model, recompute="auto")
    most = max(work.scored for work in memory.works)
    memory.left = less + measure_bytes(most, model.config.vocab_size)
    run(model, recompute="auto", measure=logprob_and_entropy)
    _, without, beside = memory.plans
    assert beside == without


@pytest.mark.full
@pytest.mark.parametrize(("model_type", "share"), [("qwen3", 0), ("gemma2", 0.4), ("qwen3", 1)])
def test_peaks_are_those_that_were_predicted(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, model_type: str, share: float
) -> None:
    """Counted on real runs of a trunk of 600 tokens, two below it, and six micro-batches."""
    limit(monkeypatch, "tokens of a small trunk", 20)
    model = build(model_type, num_hidden_layers=6)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    rng = np.random.default_rng(0)
    trunk, below = rng.integers(3, 90, 600), [rng.integers(3, 90, n) for n in (200, 150)]
    sequences = [
        np.concatenate([trunk, x, rng.integers(3, 90, 80)]) for x in below for _ in "123456"
    ]
    masks = [np.arange(len(each)) >= 600 for each in sequences]
    members = [np.arange(at, at + 2) for at in range(0, 12, 2)]
    forest = PrefixForest.from_sequences(sequences)
    trunks = plan_trunks(forest, 10**6, import_cost(model, "auto"), members)
    assert trunks.stats.trunks == 3

    def counted() -> int:
        live = LiveBytes(x for p in model.parameters() for x in (p, p.grad))
        most, options = 0, {"recompute": "auto", "loss_mask": masks, "chunk_size": 64}
        with live, kept_trunks(model, batches_with_trunks(trunks), **options) as scored:
            for _, scores in scored:
                torch.cat(scores.logprobs).sum().backward()
                most = max(most, live.most)
                del scores
        return max(most, live.most)

    memory.assert_predicted(counted, share)


@pytest.mark.parametrize("share", mostly([0, 0.4, 1], [0.4]))
def test_peaks_of_steps(memory: Memory, share: float) -> None:
    """Each step recomputes what does not fit beside what steps export."""
    model = build("qwen3")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    rng = np.random.default_rng(0)
    chain = rng.integers(3, 90, 900)
    packed = pack_sequences([chain[:500], chain, np.append(chain[:700], rng.integers(3, 90, 100))])

    def counted() -> int:
        live = LiveBytes(x for p in model.parameters() for x in (p, p.grad))
        with live:
            scores = sequence_logprobs(
                model,
                packed,
                recompute="auto",
                chunk_size=64,
                max_step_tokens=300,
                import_cost=LIGHT,
            )
            torch.cat(scores.logprobs).sum().backward()
            del scores
            return live.most

    memory.assert_predicted(counted, share)
    assert len(memory.plans[-1].of_part) > 3


def test_steps_give_the_same_bits_whatever_the_memory(memory: Memory) -> None:
    model = build("qwen3_5")
    expected = in_steps(model, recompute="nothing")
    assert same_bits(in_steps(model, recompute="auto"), expected)
    memory.left = memory.share(0.2)
    assert same_bits(in_steps(model, recompute="auto"), expected)
    first, second = memory.plans
    assert str(first) != str(second) and second.peak_bytes <= memory.left
    memory.left = memory.share(0) // 2
    with pytest.raises(torch.OutOfMemoryError):
        in_steps(model, recompute="auto")


# ---- what is refused -----------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_before_it_runs(memory: Memory) -> None:
    model = build("qwen3")
    run(model, recompute="auto")
    memory.left = memory.share(0) // 2
    with pytest.raises(torch.OutOfMemoryError, match="beside what trunks export"):
        run(model, recompute="auto")


def test_arguments_that_do_not_fit() -> None:
    model = build("qwen3")
    for own, of_trunks in (("auto", "all"), ("all", "auto"), ("auto", "auto")):
        with pytest.raises(ValueError, match="'auto' plans trunks and micro-batches together"):
            run(model, recompute=own, recompute_trunks=of_trunks)
    with pytest.raises(UnsupportedError, match="in training mode alone"):
        run(build("qwen3").eval(), recompute="auto")
