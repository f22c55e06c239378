"""`kept_values`: critics and reward models whose micro-batches compute their trunks once, against
each sequence alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

import prefixtree as pt
from prefixtree.planning.micro_batches import batches_with_trunks
from prefixtree.planning.trunks import plan_trunks
from prefixtree.recompute.counted import LiveBytes
from tests.scoring.kept_cases import plan_of
from tests.scoring.test_trunk_modes import Memory
from tests.scoring.test_values import classifier
from tests.support.float64 import Float64
from tests.support.full import mostly
from tests.support.models import (
    adapted,
    build,
    gradients,
    ragged_objective,
    ragged_sequences,
)

TOKEN, SEQUENCE = AutoModelForTokenClassification, AutoModelForSequenceClassification
Loss = Callable[[Any, list[torch.Tensor]], torch.Tensor]


def squares(batch: Any, values: list[torch.Tensor]) -> torch.Tensor:
    """Another loss for each sequence: returns differ where tokens are shared."""
    pairs = zip(batch.sequence_indices.tolist(), values, strict=True)
    total: Any = sum(((v - 0.3 * i) ** 2).sum() for i, v in pairs)
    return total


def rewards(batch: Any, values: list[torch.Tensor]) -> torch.Tensor:
    """A pairwise loss of the last tokens in a micro-batch."""
    last = torch.stack([v[-1, 0] for v in values])
    return -nn.functional.logsigmoid(last[:, None] - last).sum()


def kept(model: nn.Module, loss: Loss = squares, **options: Any) -> dict[int, torch.Tensor]:
    """The values of each sequence, once all backwards ran."""
    plan = plan_of(ragged_objective())
    assert plan.stats.trunks.trunks > 0 and plan.stats.packed_tokens == plan.forest.num_tokens
    model.zero_grad(set_to_none=True)
    found = {}
    with pt.kept_values(model, plan[0], **options) as scored:
        for batch, values in scored:
            found |= dict(zip(batch.sequence_indices.tolist(), values, strict=True))
            if torch.is_grad_enabled():
                loss(batch, values).backward()
    return {i: found[i].detach() for i in sorted(found)}


def alone(model: nn.Module, loss: Loss = squares) -> dict[int, torch.Tensor]:
    """The same of each sequence alone, and the sum of the micro-batches' losses."""
    model.zero_grad(set_to_none=True)
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    found = []
    for tokens in ragged_sequences():
        hidden = inner.base_model(torch.from_numpy(tokens)[None], use_cache=False)
        found.append(inner.score(hidden.last_hidden_state)[0])
    batches = [b for b in plan_of(ragged_objective())[0] if not b.is_empty]
    total: Any = sum(loss(b, b.take(found)) for b in batches)
    total.backward()
    return {i: v.detach() for i, v in enumerate(found)}


def distance(found: dict[Any, torch.Tensor], expected: dict[Any, torch.Tensor]) -> float:
    """The largest difference over the norm of what is expected; of all where one is small."""
    assert found.keys() == expected.keys()
    floor = 1e-3 * sum(float(e.norm()) ** 2 for e in expected.values()) ** 0.5
    gaps = ((found[i] - e).norm() / max(float(e.norm()), floor) for i, e in expected.items())
    return max(map(float, gaps))


def compare(model: nn.Module, reference: nn.Module, loss: Loss = squares, **options: Any) -> float:
    expected, wanted = alone(reference, loss), gradients(reference)
    return max(distance(kept(model, loss, **options), expected), distance(gradients(model), wanted))


@pytest.mark.parametrize(
    ("auto", "model_type", "again", "loss"),
    [
        (TOKEN, "qwen3", False, squares),
        (SEQUENCE, "gemma2", True, squares),
        (SEQUENCE, "qwen3", False, rewards),
    ],
)
def test_float64_is_exact(auto: Any, model_type: str, again: bool, loss: Loss) -> None:
    model, reference = (
        classifier(auto, model_type, name).double() for name in ("prefixtree", "eager")
    )
    with Float64():
        error = compare(model, reference, loss, recompute_trunks="again" if again else None)
    print(f"{model_type}: {error:.1e}")
    assert error < 1e-12


@pytest.mark.usefixtures("unprobed")
def test_every_token_is_computed_once() -> None:
    model, tokens = classifier(TOKEN, "qwen3"), list[int]()
    model.model.layers[0].mlp.register_forward_pre_hook(
        lambda _, args: tokens.append(len(args[0][0]))
    )
    kept(model)
    assert sum(tokens) == plan_of(ragged_objective()).forest.num_tokens


def test_an_empty_micro_batch_has_one_token() -> None:
    """As `take` has it and `sequence_values`: a loop needs no special case."""
    model = classifier(SEQUENCE, "qwen3")
    plan = plan_of(ragged_objective(), min_micro_batches=40)
    empty = 0
    with pt.kept_values(model, plan[0]) as scored:
        for batch, values in scored:
            if batch.is_empty:
                (taken,) = batch.take([torch.ones(len(s)) for s in ragged_sequences()])
                (direct,) = pt.sequence_values(model, batch.packed)
                assert len(values) == 1 and values[0].shape == direct.shape == (len(taken), 2)
                assert not values[0].any()
                empty += 1
            rewards(batch, values).backward()
    assert empty


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("how", mostly(["recurrent", "lora"], ["lora"]))
def test_auto_is_exact(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In much memory, and in as little as there may be."""
    auto = SEQUENCE if how == "lora" else TOKEN
    model_type = "qwen3_next" if how == "recurrent" else "qwen3"
    model, reference = (classifier(auto, model_type, name) for name in ("prefixtree", "eager"))
    if how == "lora":
        model, reference = (adapted(m, "q_proj", "down_proj") for m in (model, reference))
    memory = Memory(monkeypatch)
    kept(model, recompute="auto")
    for share in (1, 0.3, 0):
        memory.left = memory.share(share)
        error = compare(model, reference, recompute="auto")
        assert error < (5e-5 if how == "recurrent" else 1e-5)
        assert memory.plans[-1].peak_bytes <= memory.left
    assert len({str(plan) for plan in memory.plans}) > 2
    with torch.no_grad():
        kept(model, recompute="auto")


@pytest.mark.parametrize(("auto", "share"), mostly([(TOKEN, 0.4), (SEQUENCE, 0)], [(SEQUENCE, 0)]))
def test_peaks_are_those_that_were_predicted(
    auto: Any, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted on real runs of a trunk of 600 tokens and two micro-batches."""
    model, memory = classifier(auto, "qwen3"), Memory(monkeypatch)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    rng = np.random.default_rng(0)
    trunk = rng.integers(3, 90, 600)
    sequences = [np.concatenate([trunk, rng.integers(3, 90, 150)]) for _ in range(4)]
    forest = pt.PrefixForest.from_sequences(sequences)
    members = [np.arange(at, at + 2) for at in (0, 2)]
    trunks = plan_trunks(forest, 10**6, pt.import_cost(model, "auto"), members)
    assert trunks.stats.trunks == 1

    def counted() -> int:
        live = LiveBytes(x for p in model.parameters() for x in (p, p.grad))
        most, batches = 0, batches_with_trunks(trunks)
        with live, pt.kept_values(model, batches, recompute="auto") as scored:
            for batch, values in scored:
                squares(batch, values).backward()
                most = max(most, live.most)
                del values
        return max(most, live.most)

    # a line through few and many tokens that would begin below 0 begins at 0, as steep as before
    # (`recompute.measured`): the few tokens of these micro-batches count as more
    memory.assert_predicted(counted, share, above=0.12 if share else 0.07)


def test_the_cost_of_a_classifier() -> None:
    critic, model = classifier(TOKEN, "qwen3"), build("qwen3")
    assert pt.import_cost(critic, "all") == pt.import_cost(model, "all")


def test_what_is_refused() -> None:
    plan, model = plan_of(ragged_objective()), classifier(TOKEN, "qwen3")

    def refused(error: type[Exception], words: str, *given: Any, **options: Any) -> None:
        with pytest.raises(error, match=words), pt.kept_values(*given, **options):
            pass

    refused(
        ValueError, "plans trunks and", model, plan[0], recompute="auto", recompute_trunks="all"
    )
    refused(pt.UnsupportedError, "values need a token or sequence", build("qwen3"), plan[0])
    refused(TypeError, "must be a torch module, got str", "qwen3", plan[0])
    cut = pt.plan_micro_batches(ragged_sequences(), 60)
    refused(ValueError, r"be plan\[rank\] of a plan that keeps trunks", model, cut[0])
