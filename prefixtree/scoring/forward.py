"""One forward of a model over a packed forest, or over a part of one, with the wings of its call.

Legend: u scored edges, t own tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from prefixtree.kernels.lm_head.logprobs import ScoreOptions
from prefixtree.kernels.lm_head.measures import measure_bytes
from prefixtree.models.checks import check_model, every_layer_attends, warn_past_ddp
from prefixtree.models.prepared import prepare_layers
from prefixtree.models.rows_alone import check_layers
from prefixtree.packing.layout import PackedForest
from prefixtree.packing.mask import TreeMask
from prefixtree.scoring.edges import DeviceEdges, ScoredEdges, edges_on_device
from prefixtree.scoring.lm_head import logit_rule, scoring_lm_head
from prefixtree.scoring.local import PartCall, Rows
from prefixtree.wings import CallWing, ForwardWing, load

if TYPE_CHECKING:
    from prefixtree.images.images import Images
    from prefixtree.recompute.choose import GroupShare, Recompute


class AskedWings(NamedTuple):
    """The keywords of `sequence_logprobs` that ask for wings, and what `mtp` needs to know."""

    images: Images | None = None
    output_router_logits: bool | None = None
    mtp: nn.Module | None = None
    mtp_detach: bool = True
    chunk_size: int | None = None
    recompute: Recompute = None

    def check(
        self, model: nn.Module, causal_lm: Any, packed: PackedForest, divided: str | None
    ) -> None:
        """Refuses what would not give the scores of the replicated batch, as `check_model` does."""
        known = None
        if self.images is not None:
            known = load("images").check_images(model, causal_lm, packed, self.images)
        check_model(model, causal_lm, packed, divided, known)
        with_loss = False
        if self._has_routers(causal_lm, packed):
            asked = self.output_router_logits
            with_loss = load("experts").check_routers(model, causal_lm, packed, asked)
        if self.mtp is not None:
            load("mtp").check_heads(model, causal_lm, packed, self, with_loss)

    def open(
        self,
        model: nn.Module,
        causal_lm: Any,
        packed: PackedForest,
        whole: PackedForest,
        found: ScoredEdges | None = None,
    ) -> tuple[PackedForest, dict[str, CallWing]]:
        """Opens the wings of a call, by name; makes the forest with the token ids the model knows.

        Args:
            whole: `packed`, padded where ranks need it.
            found: what is scored, for `mtp`.
        """
        wings: dict[str, CallWing] = {}
        if self.images is not None:
            placed = load("images").PlacedImages(model, causal_lm, whole, self.images)
            wings["images"], whole = placed, placed.packed
        if self._has_routers(causal_lm, packed):
            asked = self.output_router_logits
            wings["experts"] = load("experts").Routers(causal_lm, packed, asked)
        if self.mtp is not None:
            wings["mtp"] = load("mtp").Heads(causal_lm, self, found)
        return whole, wings

    def _has_routers(self, causal_lm: Any, packed: PackedForest) -> bool:
        """Whether the model has experts, or the call asks for theirs."""
        asked = self.output_router_logits or packed.forest.routes is not None
        return asked or hasattr(causal_lm.config.get_text_config(), "output_router_logits")


class ModelForward:
    """Calls a model over a packed forest, or over a part of one, for the scores of its edges.

    Args:
        options: what is computed of each edge; the rule of the model's family is added.
        share: the part of a rank, as in `LocalTokens`. Default: no ranks divide the forest.
    """

    def __init__(
        self,
        model: nn.Module,
        causal_lm: Any,
        packed: PackedForest,
        options: ScoreOptions,
        wings: Mapping[str, CallWing],
        share: GroupShare | None = None,
    ) -> None:
        prepare_layers(causal_lm)
        warn_past_ddp(model)
        self.packed, self.wings = packed, wings
        self._model, self._causal_lm, self._share = model, causal_lm, share
        self.options = replace(options, rule=logit_rule(causal_lm))

    def __call__(
        self,
        mask: TreeMask,
        inputs: dict[str, Any],
        edges: DeviceEdges,
        recompute: Recompute,
        own: np.ndarray | None = None,
    ) -> Rows:
        """Runs one forward: the scores [u, columns], then [t, ...] per tensor that a wing hands on.

        Args:
            own: int64 [t], the packed tokens that it computes, ascending. Default: all.
        """
        model, causal_lm, count = self._model, self._causal_lm, len(edges.target)
        forwards = {name: wing.forward(own) for name, wing in self.wings.items()}
        # runs a forward of its own, which the other ranks run at the same point
        check_layers(model, causal_lm, self.packed.device)
        held_bytes = sum(wing_forward.held_bytes for wing_forward in forwards.values())
        if self.options.measure is not None:
            held_bytes += measure_bytes(count, causal_lm.config.get_text_config().vocab_size)
        planned = recompute, held_bytes, forwards, self._share
        chosen, recomputing = recomputed(model, causal_lm, self.packed, count, *planned)
        with ExitStack() as around:
            around.enter_context(recomputing)
            for wing_forward in forwards.values():
                around.enter_context(wing_forward.around(chosen))
                inputs = {**inputs, **wing_forward.inputs}
            around.enter_context(every_layer_attends(causal_lm, mask))
            handed = around.enter_context(scoring_lm_head(causal_lm, edges, self.options))
            output = model(**inputs, logits_to_keep=edges.predictors)
        # what a wrapper changed in place is its fault, not the model's
        scores = handed.returned(output)
        handed.check_treatment(causal_lm, self.options.rule)
        tokens = inputs["input_ids"].shape[-1]
        of_tokens = [rows for x in forwards.values() if (rows := x.rows(output, tokens))]
        # without it, `CallWing.result` could not tell whose rows they are
        assert len(of_tokens) < 2
        return scores, *sum(of_tokens, ())


def recomputed(
    model: nn.Module,
    transformer: Any,
    packed: PackedForest,
    scored: int,
    recompute: Recompute,
    held_bytes: int = 0,
    forwards: Mapping[str, ForwardWing] = MappingProxyType({}),
    share: GroupShare | None = None,
) -> tuple[Any, AbstractContextManager[Any]]:
    """Chooses what layers compute again in one forward's backward, and makes the context of it.

    Args:
        scored: the number of edges whose log-probability is computed.
        held_bytes: bytes held until the backward that are not activations of layers.
        share: the part of the forest that a rank of a group computes. Default: all of it.
    """
    if recompute is None or not torch.is_grad_enabled():
        return None, nullcontext()
    more = recompute, held_bytes, forwards, share
    chosen: tuple[Any, AbstractContextManager[Any]] = load("recompute").recomputed_forward(
        model, transformer, packed, scored, *more
    )
    return chosen


class ScoresOfParts:
    """The scores of the edges whose predictors a part owns: a `PartForward`.

    Args:
        inputs: keywords of a forward over the whole forest.
        edges: all that are scored.
    """

    def __init__(self, forward: ModelForward, inputs: dict[str, Any], edges: ScoredEdges) -> None:
        self.packed, self.options, self.wings = forward.packed, forward.options, forward.wings
        self.inputs, self.units = inputs, edges
        self._forward = forward

    def __call__(self, part: PartCall) -> Rows:
        edges = edges_on_device(self.packed, self.units, part.which, part.rows)
        return self._forward(part.mask, part.inputs, edges, part.recompute, part.own)
