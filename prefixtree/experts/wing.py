"""The face of the wing: experts of layers, and in calls the routes and the loss of routers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from prefixtree.errors import UnsupportedError
from prefixtree.experts.products import prepare_layers
from prefixtree.experts.routers import RouterLoss, check_routes, replaying, router_loss
from prefixtree.models.families import router_keywords
from prefixtree.packing.layout import PackedForest
from prefixtree.wings import CallWing, ForwardWing

if TYPE_CHECKING:
    from prefixtree.scoring.edges import SequenceScores

__all__ = ["Routers", "check_routers", "prepare_layers"]


def check_routers(
    model: nn.Module, causal_lm: Any, packed: PackedForest, asked: bool | None
) -> bool:
    """Refuses routes and losses that the model cannot have; says whether it computes the loss."""
    check_routes(model, causal_lm, packed)
    return router_loss(causal_lm, asked) is not None


class Routers(CallWing):
    """The routers of a model in a call, with the loss or None; `asked` None: as configured."""

    def __init__(self, causal_lm: Any, packed: PackedForest, asked: bool | None) -> None:
        self.loss = router_loss(causal_lm, asked)
        routes = packed.forest.routes
        if self.loss is not None and routes is not None and (routes < 0).any():
            raise UnsupportedError(
                "the load-balancing loss counts every token, and some of this forest have no "
                "recorded experts: leave output_router_logits out, or give all routes"
            )
        self._forward = _Forward(causal_lm, packed, self.loss)
        self.held_bytes = self._forward.held_bytes

    def forward(self, own: np.ndarray | None) -> ForwardWing:
        return self._forward

    def result(
        self, scores: SequenceScores, of_tokens: tuple[torch.Tensor, ...], packed: PackedForest
    ) -> SequenceScores:
        if self.loss is None:
            return scores
        aux_loss = self.loss.of(packed, of_tokens)
        return replace(scores, aux_loss=aux_loss, router_logits=of_tokens)


class _Forward(ForwardWing):
    def __init__(self, causal_lm: Any, packed: PackedForest, loss: RouterLoss | None) -> None:
        self._causal_lm, self._packed, self._loss = causal_lm, packed, loss
        self.inputs = router_keywords(causal_lm.config, loss is not None)
        self.held_bytes = 0 if loss is None else loss.held_bytes(packed.num_tokens)

    @contextmanager
    def around(self, recompute: Any) -> Iterator[None]:
        with replaying(self._causal_lm, self._packed):
            if self._loss is not None:
                self._loss.check()
            yield

    def rows(self, output: Any, tokens: int) -> tuple[torch.Tensor, ...]:
        return () if self._loss is None else self._loss.logits_of(output, tokens)
