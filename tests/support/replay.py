"""Recorded routes for the tiny mixtures of experts, and their replay sequence by sequence.

The replicated side runs the family's own router code in eager, in which `torch.topk` gives the
recorded experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from tests.support.family_configs import VOCABULARY
from tests.support.models import Objective, Run, run_replicated

# of most tiny models
EXPERTS, CHOSEN = 4, 2


def routers_of(model: nn.Module) -> list[Any]:
    """The routers of a model, first to last."""
    return [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]


def drawn_routes(
    sequences: Sequence[np.ndarray], layers: int = 3, experts: int = EXPERTS
) -> list[np.ndarray]:
    """Drawn by token id and layer, so that most shared tokens have the same; other ones at a token
    in the middle of every fourth sequence, so that the tree parts there. [n, layers, k] each."""
    g = torch.Generator().manual_seed(1)
    drawn = [torch.randperm(experts, generator=g)[:CHOSEN] for _ in range(VOCABULARY * layers)]
    by_token = torch.stack(drawn).view(VOCABULARY, layers, CHOSEN).numpy()
    routes = [by_token[sequence].copy() for sequence in sequences]
    for route in routes[::4]:
        route[len(route) // 3] = (route[len(route) // 3] + 1) % experts
    return routes


@contextmanager
def recorded_choice(model: nn.Module, routes: np.ndarray) -> Iterator[None]:
    """The model's routers choose `routes` [n, layers, k]: the top-k in their code gives these."""
    routers = routers_of(model)

    def choosing(experts: torch.Tensor, forward: Any) -> Any:
        def topk(values: torch.Tensor, k: int, dim: int = -1) -> Any:
            assert experts.shape == (len(values), k)
            return values.gather(dim, experts), experts

        def run(hidden: torch.Tensor) -> Any:
            with patch.object(torch, "topk", topk):
                return forward(hidden)

        return run

    for layer, router in enumerate(routers):
        router.forward = choosing(torch.from_numpy(routes[:, layer]).long(), router.forward)
    try:
        yield
    finally:
        for router in routers:
            del router.forward


def run_replayed(model: Any, objective: Objective, routes: Sequence[np.ndarray]) -> Run:
    """Every sequence alone through the eager model with its routes."""
    runs = []
    for i, route in enumerate(routes):
        masks = objective.loss_masks
        alone = replace(
            objective,
            sequences=objective.sequences[i : i + 1],
            temperatures=objective.temperatures[i : i + 1],
            loss_masks=None if masks is None else masks[i : i + 1],
            weights=objective.weights[i : i + 1],
        )
        with recorded_choice(model, route):
            runs.append(run_replicated(model, alone))
    return Run(
        [run.logprobs[0] for run in runs],
        [run.entropy[0] for run in runs],
        {name: sum(run.gradients[name] for run in runs) for name in runs[0].gradients},
    )
