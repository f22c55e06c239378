"""One rank of the runs of tests/scoring/test_kept_trunks_on_ranks.py.

Runs every case, one after the other; gives what it found or the traceback per case. The reference
of a case is every micro-batch of each rank in a forward of its own, of a model without a wrapper.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from prefixtree import (
    kept_trunks,
    kept_values,
    plan_micro_batches,
    sequence_logprobs,
    sequence_values,
)
from prefixtree.planning.costs import ImportCost
from prefixtree.recompute import trunk_modes
from prefixtree.recompute.trunk_modes import plan_kept
from tests.support.full import asked_for
from tests.support.models import (
    build,
    counted,
    enable_checkpointing,
    logprob_and_entropy,
    make_objective,
    ragged_sequences,
    reward_model,
    with_measured,
)
from tests.support.spawn import results_of
from tests.support.step_ranks import LIGHT, Case, _wrap, distance, gradients_of, loss_of

MAX_TOKENS = 24
# of each rank: trunks and micro-batches in other numbers
OBJECTIVES = (make_objective(ragged_sequences(0), 0), make_objective(ragged_sequences(3)[:6], 1))
CASES = {
    "ddp": Case("ddp"),
    "ddp, checkpointing, again": Case("ddp", "gemma2", checkpointing=True),
    "ddp, accumulation": Case("ddp", micro_batches=2),
    "fsdp2": Case("fsdp2"),
    "fsdp2, lora, again": Case("fsdp2", lora=True),
    "fsdp2, accumulation": Case("fsdp2", micro_batches=2),
    "fsdp2, measured, auto": Case("fsdp2", measured=True),
    "fsdp2, bfloat16": Case("fsdp2", half=True),
    "fsdp2, recurrent": Case("fsdp2", "nemotron_h", checkpointing=True),
}
QUICK = (
    *("ddp, checkpointing, again", "fsdp2, lora, again", "fsdp2, accumulation"),
    *("fsdp2, measured, auto", "fsdp2, recurrent"),
)
VALUES = ("ddp", "fsdp2")


def _plan(rank: int) -> Any:
    sequences = OBJECTIVES[rank].sequences
    return plan_micro_batches(sequences, MAX_TOKENS, trunks=True, import_cost=LIGHT)


def _taken(rank: int, batch: Any) -> Any:
    its = OBJECTIVES[rank]
    assert its.loss_masks is not None
    return replace(
        its,
        sequences=batch.take(its.sequences),
        weights=batch.take(its.weights),
        loss_masks=batch.take(its.loss_masks),
        temperatures=batch.take(its.temperatures),
    )


def _alone(model: nn.Module, rank: int) -> torch.Tensor:
    """Every micro-batch in a forward of its own; the log-probabilities of all."""
    found = []
    for batch in _plan(rank)[0]:
        its = _taken(rank, batch)
        given = its.temperatures, its.loss_masks
        scores = sequence_logprobs(model, batch.packed, *given, return_entropy=True)
        loss_of(its, scores).backward()
        found += [x.detach() for x in scores.logprobs]
    return torch.cat(found)


def _kept(model: nn.Module, rank: int, **options: Any) -> torch.Tensor:
    """The same with kept trunks."""
    found, its = [], OBJECTIVES[rank]
    given = its.temperatures, its.loss_masks
    with kept_trunks(model, _plan(rank)[0], *given, return_entropy=True, **options) as scored:
        for batch, scores in scored:
            scores = with_measured(scores)
            if torch.is_grad_enabled():
                loss_of(_taken(rank, batch), scores).backward()
            found += [x.detach() for x in scores.logprobs]
    return torch.cat(found)


def _run(name: str, rank: int, folder: Path) -> dict[str, Any]:
    case = CASES[name]
    alone = case.model()
    of_ranks = [_alone(alone, each) for each in range(2)]
    expected = {n: case.micro_batches * g.float() / 2 for n, g in gradients_of(alone).items()}
    model, reduced = _wrap(case, folder)
    found: dict[str, Any] = {"forwards": []}
    if case.half:
        # how far forwards of their own are from float32; both ranks run as many of these
        for batch in range(2):
            _alone(model, batch)
        found["in one forward"] = distance(gradients_of(model), expected)
    options: dict[str, Any] = {"recompute_trunks": "again"} if name.endswith("again") else {}
    planning: Any = nullcontext()
    if name.endswith("auto"):
        # the trunks of one rank run forward again
        def planned(*given: Any, **keywords: Any) -> Any:
            return plan_kept(*given, **{**keywords, "runs_again": rank == 0})

        planning = patch.object(trunk_modes, "plan_kept", planned)
        options = {"recompute": "auto", "measure": logprob_and_entropy}
    with planning:
        for _ in range(case.updates):
            model.zero_grad(set_to_none=True)
            for number in range(case.micro_batches):
                with reduced(number == case.micro_batches - 1), counted([model]) as forwards:
                    logprobs = _kept(model, rank, **options)
                    found["forwards"].append(forwards())
                found["logprobs"] = float((logprobs - of_ranks[rank]).abs().max())
    got = gradients_of(model)
    found["gradients"] = distance(got, expected)
    found["sum"] = sum(float(g.double().sum()) for g in got.values())
    return found


def _one_rank_cannot(rank: int, folder: Path) -> str:
    """The error of each rank of FSDP2 where rank 0 has a plan without trunks."""
    model, _ = _wrap(CASES["fsdp2"], folder)
    plan = _plan(rank)
    if rank == 0:
        plan = plan_micro_batches(OBJECTIVES[rank].sequences, 200)
    try:
        with kept_trunks(model, plan[0]):
            pass
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return "scores"


def _fsdp1(rank: int, folder: Path) -> str:
    model, _ = _wrap(Case("fsdp1"), folder)
    try:
        with kept_trunks(model, _plan(rank)[0]):
            pass
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return "scores"


def _static_graph(rank: int) -> str:
    model = nn.parallel.DistributedDataParallel(build("qwen3"), static_graph=True)
    try:
        with kept_trunks(model, _plan(rank)[0]):
            pass
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return "scores"


def _no_sync(rank: int, folder: Path) -> float:
    """Within no_sync of DDP no gradient crosses ranks: they are those of this rank alone."""
    alone = CASES["ddp"].model()
    _alone(alone, rank)
    model, reduced = _wrap(CASES["ddp"], folder)
    with reduced(False):
        _kept(model, rank)
    return distance(gradients_of(model), {n: g.float() for n, g in gradients_of(alone).items()})


def _without_gradients(rank: int, folder: Path) -> float:
    model, _ = _wrap(CASES["fsdp2"], folder)
    expected = _alone(CASES["fsdp2"].model(), rank)
    with torch.no_grad():
        got = _kept(model, rank)
    return float((got - expected).abs().max())


def _many_kept(rank: int, folder: Path) -> dict[str, Any]:
    """Ranks where one has a dozen trunks and the other has nothing but empty micro-batches."""
    sequences = [*OBJECTIVES[0].sequences, [1, 2, 3]]
    heavy = ImportCost(token_bytes=20 * 36 * 8 * 256 * 6, graph_bytes=0)
    groups = [0] * len(sequences)
    plan = plan_micro_batches(
        sequences, 17, 2, groups, min_micro_batches=9, trunks=True, import_cost=heavy
    )
    alone = CASES["fsdp2"].model()
    for each in range(2):
        for batch in plan[each]:
            torch.cat(sequence_logprobs(alone, batch.packed).logprobs).sum().backward()
    expected = {n: g.float() / 2 for n, g in gradients_of(alone).items()}
    model, _ = _wrap(CASES["fsdp2"], folder)
    with counted([model]) as forwards, kept_trunks(model, plan[rank]) as scored:
        for _, scores in scored:
            torch.cat(scores.logprobs).sum().backward()
    empty = all(batch.is_empty for batch in plan[rank])
    off = distance(gradients_of(model), expected)
    return {"empty": empty, "forwards": forwards(), "gradients": off}


def _values(wrapper: str, rank: int, folder: Path) -> dict[str, float]:
    """A critic's, beside those of every micro-batch in a forward of its own."""
    alone = _critic()
    of_ranks = [
        [_of_values(batch, sequence_values(alone, batch.packed)) for batch in _plan(each)[0]]
        for each in range(2)
    ]
    expected = {n: g / 2 for n, g in gradients_of(alone).items()}
    with patch.object(Case, "model", lambda _: _critic()):
        model, _ = _wrap(Case(wrapper), folder)
    with kept_values(model, _plan(rank)[0]) as scored:
        found = [_of_values(batch, values) for batch, values in scored]
    gap = (torch.cat(found) - torch.cat(of_ranks[rank])).abs().max()
    return {"values": float(gap), "gradients": distance(gradients_of(model), expected)}


def _critic() -> nn.Module:
    model = reward_model("qwen3")
    enable_checkpointing(model, use_reentrant=False)
    return model


def _of_values(batch: Any, values: list[torch.Tensor]) -> torch.Tensor:
    """All values of a micro-batch, whose loss ran backward."""
    pairs = zip(batch.sequence_indices.tolist(), values, strict=True)
    loss: Any = sum(((v - 0.3 * i) ** 2).sum() for i, v in pairs)
    loss.backward()
    return torch.cat(values).detach()


def on_rank(rank: int, folder: Path) -> dict[str, Any]:
    """Runs all cases on this rank."""
    warnings.simplefilter("ignore", FutureWarning)
    runs: dict[str, Callable[[], Any]] = {
        name: lambda name=name: _run(name, rank, folder) for name in asked_for(CASES, QUICK)
    }
    runs["one rank cannot"] = lambda: _one_rank_cannot(rank, folder)
    for wrapper in asked_for(VALUES, ["fsdp2"]):
        runs[f"values, {wrapper}"] = lambda wrapper=wrapper: _values(wrapper, rank, folder)
    runs["fsdp1"] = lambda: _fsdp1(rank, folder)
    runs["static graph"] = lambda: _static_graph(rank)
    runs["no_sync"] = lambda: _no_sync(rank, folder)
    runs["without gradients"] = lambda: _without_gradients(rank, folder)
    runs["one rank is empty"] = lambda: _many_kept(rank, folder)
    return results_of(runs)
