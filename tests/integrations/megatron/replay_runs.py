"""Recorded routes, and two ways to follow them: a forest keyed by token and route, and Megatron's
RouterReplay, one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from prefixtree import PrefixForest, pack
from prefixtree.integrations.megatron import routers, tree_logprobs
from tests.integrations.megatron import runs
from tests.integrations.megatron.runs import TEMPERATURE, Case, Result, Weights, make_sequences
from tests.support.megatron_cpu import DEVICE, in_float64

LAYERS, EXPERTS, CHOSEN = 3, 4, 2


def routes_of(sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """By token, place and layer; sequence 4 has others for the tokens that it shares."""
    routes = []
    for number, sequence in enumerate(sequences):
        other = 7 * (number == 4)
        first = [
            [(t * 3 + at + layer * 5 + other) % EXPERTS for layer in range(LAYERS)]
            for at, t in enumerate(sequence)
        ]
        base = np.array(first)
        routes.append(np.stack([base, (base + 1) % EXPERTS], -1))
    return routes


def run_replayed(model: Any, sequences: Any, routes: Any, weights: Weights) -> Result:
    """By Megatron's own attention and replay."""
    ddp, both = runs.wrapped(model), []
    multiple = runs.padded_to() if model.config.sequence_parallel else 1
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    for at, sequence in enumerate(sequences):
        experts = torch.from_numpy(routes[at]).long().to(DEVICE)
        padding = torch.arange(CHOSEN, device=DEVICE).expand(
            -len(sequence) % (multiple or 1), LAYERS, CHOSEN
        )
        experts = torch.cat([experts, padding])
        if model.config.sequence_parallel:
            experts = scatter_to_sequence_parallel_region(experts)
        RouterReplay.set_replay_data(list(experts.unbind(1)))
        logits = runs.alone(ddp, sequence, multiple)[0, : len(sequence)]
        logprobs, entropy = runs.columns(logits, sequence)
        one = Weights([weights.logprobs[at]], [weights.entropy[at]])
        one.loss([logprobs], [entropy]).backward()
        both.append((logprobs.detach(), entropy.detach()))
    return Result([b[0] for b in both], [b[1] for b in both], runs.gradients(ddp))


def run_forest(model: Any, sequences: Any, routes: Any, weights: Weights) -> Result:
    ddp, multiple = runs.wrapped(model), None
    if model.config.sequence_parallel:
        multiple = runs.padded_to()
    # engines record none for a sequence's last token
    forest = PrefixForest.from_sequences(sequences, routes=[r[:-1] for r in routes])
    packed = pack(forest, pad_to_multiple_of=multiple).to(DEVICE)
    scores = tree_logprobs(ddp, packed, TEMPERATURE, return_entropy=True)
    assert not isinstance(scores, torch.Tensor) and scores.entropy is not None
    weights.loss(scores.logprobs, scores.entropy).backward()
    both = (scores.logprobs, scores.entropy)
    return Result(*([x.detach() for x in each] for each in both), runs.gradients(ddp))


def compared(case: Case) -> runs.Errors:
    """The model of a forest has Megatron's replay too, as a trainer makes it, and does not use
    it."""
    sequences = make_sequences()
    routes = routes_of(sequences)
    weights = Weights.of(sequences, seed=5 + parallel_state.get_data_parallel_rank())
    config = case.config or {}
    plain = {k: v for k, v in config.items() if not k.startswith("recompute")}
    replaying = {"moe_enable_routing_replay": True}
    with in_float64():
        RouterReplay.clear_global_router_replay_instances()
        model = runs.build(Case(plain | replaying), lambda spec: spec)
        expected = run_replayed(model, sequences, routes, weights)
        model = runs.build(Case(config | replaying))
        return runs.errors(run_forest(model, sequences, routes, weights), expected)


def recorded(case: Case) -> dict[str, Any]:
    """Experts that a forest's forward records, and those that Megatron records of each sequence
    alone: the rows, and how many differ."""
    config, sequences = case.config or {}, make_sequences()
    with in_float64(), torch.no_grad():
        RouterReplay.clear_global_router_replay_instances()
        plain = runs.build(Case(config | {"moe_enable_routing_replay": True}), lambda spec: spec)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        multiple = runs.padded_to() if plain.config.sequence_parallel else None
        expected = []
        for sequence in sequences:
            runs.alone(plain, sequence, multiple)
            experts = torch.stack(RouterReplay.get_recorded_data(), 1)
            if plain.config.sequence_parallel:
                experts = gather_from_sequence_parallel_region(experts)
            expected.append(experts[: len(sequence)])
        model = runs.build(case)
        packed = runs.packed_of(sequences, multiple)
        with routers.recording(model) as chosen:
            tree_logprobs(model, packed)
        got = packed.unpack(chosen())
    assert all(vars(r)["router_replay"] is None for r in routers.routers_of(model).values())
    off = [
        (a.sort(-1).values != b.sort(-1).values).any((1, 2))
        for a, b in zip(got, expected, strict=True)
    ]
    return {"rows": len(torch.cat(off)), "other": int(torch.cat(off).sum())}


def next_layers_routes() -> Any:
    """Routers read another layer's column."""
    made = routers.RoutedTokens.__init__

    def shifted(self: Any, copies: Any, routes: Any = None, ordinals: Any = None) -> None:
        moved = {k: (at + 1) % LAYERS for k, at in (ordinals or {}).items()}
        made(self, copies, routes, moved)

    return patch.object(routers.RoutedTokens, "__init__", shifted)


def weights_without_gradient() -> Any:
    """The recorded experts' weights are constants."""
    taken = routers.Recorded.get_replay_topk

    def cut(self: Any, scores: torch.Tensor, *given: Any, **more: Any) -> Any:
        return taken(self, scores.detach(), *given, **more)

    return patch.object(routers.Recorded, "get_replay_topk", cut)
