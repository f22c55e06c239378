"""Routers with losses and counts: a forest against all sequences in one row under a block-diagonal
mask, which is what a router sees of a THD micro-batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

from prefixtree.integrations.megatron import checks, routers
from tests.integrations.megatron import runs
from tests.integrations.megatron.runs import Case, Result, Weights, moe
from tests.support.hooks import inner, place
from tests.support.megatron_cpu import DEVICE, in_float64

BIAS = {
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.01,
    "moe_router_score_function": "sigmoid",
}
Z = {"moe_z_loss_coeff": 0.02}


def losses(*kinds: str, **changes: Any) -> dict[str, Any]:
    """Settings of experts with one or several losses."""
    several = len(kinds) > 1
    return moe(
        moe_router_load_balancing_type=list(kinds) if several else (*kinds, "none")[0],
        moe_aux_loss_coeff=[0.5 + 0.25 * i for i in range(len(kinds))] if several else 0.5,
        **changes,
    )


def make_sequences(seed: int = 1) -> list[list[int]]:
    """An even number of tokens, which two ranks can cut."""
    sequences = runs.make_sequences(seed)
    if sum(map(len, sequences)) % 2:
        sequences[-1] = [*sequences[-1], 3]
    return sequences


@contextlib.contextmanager
def restarting(positions: torch.Tensor) -> Iterator[None]:
    """Rotary tables with a row per token of a row of sequences. Tables are float32, so shifted
    positions would not do."""

    def rows(self: Any, length: int, *_: Any, **__: Any) -> torch.Tensor:
        return self.get_emb(length)[positions]

    with patch.object(RotaryEmbedding, "forward", rows):
        yield


def one_row(model: Any, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """The model's output for all sequences in one row, by Megatron's own attention. Call it and
    its backward under `restarting(positions_of(sequences))`."""
    flat = torch.tensor([[t for s in sequences for t in s]], device=DEVICE)
    owner = torch.cat([torch.full((len(s),), i) for i, s in enumerate(sequences)])
    blocked = (owner[:, None] != owner[None]) | torch.ones(len(owner), len(owner)).triu(1).bool()
    places = torch.arange(len(owner), device=DEVICE)[None]
    return model(flat, places, blocked[None, None].to(DEVICE))


def positions_of(sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.cat([torch.arange(len(s)) for s in sequences])


def scored(output: torch.Tensor, sequences: Sequence[Sequence[int]]) -> tuple[Any, Any]:
    """Log-probabilities and entropies of the sequences of a row [1, tokens, vocabulary]."""
    rows = output[0].split([len(s) for s in sequences])
    both = [runs.columns(x, s) for x, s in zip(rows, sequences, strict=True)]
    return [b[0] for b in both], [b[1] for b in both]


def run_one_row(model: Any, sequences: list[list[int]], weights: Weights) -> Result:
    ddp = runs.wrapped(model)
    # while it recomputes, too
    with restarting(positions_of(sequences)):
        logprobs, entropy = scored(one_row(ddp, sequences), sequences)
        weights.loss(logprobs, entropy).backward()
    return Result(
        [x.detach() for x in logprobs], [x.detach() for x in entropy], runs.gradients(ddp)
    )


def _buffers(model: Any, *kinds: str) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{kind}": getattr(router, kind).double().clone()
        for name, router in routers.routers_of(model).items()
        for kind in kinds
        if getattr(router, kind) is not None
    }


def router_counts(model: Any) -> dict[str, torch.Tensor]:
    """Of experts, before Megatron's reductions, which set them to zero; those of all ranks, since
    two ways of running cut the tokens otherwise."""
    found = _buffers(model, "local_tokens_per_expert", "global_tokens_per_expert")
    for name, counts in found.items():
        if "local" in name:
            group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
            dist.all_reduce(counts, group=group)
    return found


def router_results(model: Any) -> dict[str, torch.Tensor]:
    """Updated biases and logged losses after a step."""
    found = _buffers(model, "expert_bias")
    tracker = get_moe_metrics_tracker()
    for name, metric in tracker.metrics.items():
        found[name] = metric.values.double().clone()
        if dist.get_world_size() > 1:
            dist.all_reduce(found[name])
    tracker.metrics.clear()
    return found


def compared(case: Case) -> dict[str, Any]:
    """Errors of a forest, and of what its routers know after it, relative to their largest."""
    counts: list[dict[str, torch.Tensor]] = []
    gradients = runs.gradients

    def counted(ddp: Any) -> dict[str, torch.Tensor]:
        counts.append(router_counts(ddp.module))
        return gradients(ddp)

    with in_float64(), patch.object(runs, "gradients", counted):
        sequences = make_sequences()
        weights = Weights.of(sequences, seed=5 + parallel_state.get_data_parallel_rank())
        get_moe_metrics_tracker().metrics.clear()
        plain = runs.build(case, lambda spec: spec)
        expected = run_one_row(plain, sequences, weights)
        wanted = router_results(plain) | counts.pop()
        assert wanted and all(x.any() for x in (*wanted.values(), *expected.gradients.values()))
        model = runs.build(case)
        found = runs.errors(runs.run_forest(model, case, sequences, weights), expected)
        got = router_results(model) | counts.pop()
    assert got.keys() == wanted.keys()
    off = {
        k: float((got[k] - v).abs().max() / v.abs().max().clamp(min=1e-12))
        for k, v in wanted.items()
    }
    return {
        "scores": max(found.logprobs, found.entropy),
        "gradients": found.gradients,
        "routers": max(off.values()),
        "at": (found.at, max(off, key=lambda name: off[name])),
    }


def every_token_once() -> Any:
    """Shared tokens count as one."""
    made = checks.RoutedTokens
    return patch.object(checks, "RoutedTokens", lambda copies, **_: made(copies.clamp(max=1)))


def losses_without_gradient() -> Any:
    weighed = inner("scores of a router")

    def cut(self: Any, scores: torch.Tensor, routes: Any, kwargs: Any) -> Any:
        return weighed(self, scores.detach(), routes, kwargs)

    return patch.object(*place("scores of a router"), cut)


#: A mistake -> a case that shows it, and the smallest error of the gradients.
MISTAKES: dict[str, tuple[Case, Callable[[], Any], float]] = {
    "every token once": (Case(losses("seq_aux_loss", **BIAS, **Z)), every_token_once, 1e-2),
    "losses without gradient": (Case(losses("aux_loss")), losses_without_gradient, 5e-2),
}
