"""Megatron's layers of multi-token prediction along a forest (`prefixtree.scoring.ahead`).

Megatron's block, layers and detaching stay. For one forward its shift to the next token becomes the
gather of the row before each token, each layer gets a mask, and the hidden states of all layers
reach the output layer, as Megatron's loss does not take them.

Legend: T packed tokens, d hidden size, n layers, U scored edges, W vocabulary entries of this rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionLayer,
)

from prefixtree.errors import UnsupportedError, refuse
from prefixtree.integrations.megatron.context_parallel import ForestParams, LocalForest
from prefixtree.integrations.megatron.refusals import MTP
from prefixtree.integrations.megatron.states import has_state
from prefixtree.kernels.lm_head.logprobs import ScoreOptions
from prefixtree.kernels.operators import counted_calls
from prefixtree.models.along_tree import with_globals
from prefixtree.models.changes import changing
from prefixtree.packing.copies import gather
from prefixtree.packing.layout import PackedForest
from prefixtree.scoring.ahead import before_each, edges_ahead, mask_ahead
from prefixtree.scoring.edges import ScoredEdges, scores_of


class AskedLayers(NamedTuple):
    """A model of `tree_logprobs(mtp=True)`, and what the rows `MTP` want to know of it."""

    config: Any
    has_block: bool
    is_megatrons: bool
    has_state: bool
    has_routes: bool


def check_ahead(language_model: Any, packed: PackedForest) -> None:
    """Refuses layers of multi-token prediction that would not run as Megatron runs them."""
    block = getattr(language_model, "mtp", None)
    layers = [] if block is None else list(block.layers)
    codes = [
        (language_model, GPTModel, "_postprocess"),
        *((layer, MultiTokenPredictionLayer, "forward") for layer in layers),
        *((layer, MultiTokenPredictionLayer, "_get_embeddings") for layer in layers),
    ]
    if block is not None:
        codes.append((block, MultiTokenPredictionBlock, "forward"))
    asked = AskedLayers(
        config=language_model.config,
        has_block=block is not None,
        is_megatrons=all(_is_code(*code) for code in codes),
        has_state=any(has_state(module) for layer in layers for module in layer.modules()),
        has_routes=packed.forest.routes is not None,
    )
    refuse(MTP, asked, training=language_model.training)


def _is_code(module: Any, kind: type, name: str) -> bool:
    """Whether a module's method is the one that Megatron's class `kind` has in its file."""
    code = getattr(type(module), name, None)
    own = code is getattr(kind, name) and name not in vars(module)
    return own and code.__module__ == kind.__module__


class Ahead:
    """The layers of multi-token prediction in one forward, and what they predict.

    Attributes:
        logprobs: per layer, one tensor per sequence, as `SequenceScores.mtp`.
    """

    def __init__(
        self, language_model: Any, local: LocalForest, found: ScoredEdges, options: ScoreOptions
    ) -> None:
        self._model, self._local, self._found, self._options = language_model, local, found, options
        self._before, self._run = before_each(local.packed), 0
        self.logprobs: list[list[torch.Tensor]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which the layers follow the forest."""
        model, place = self._model, MultiTokenPredictionLayer
        embeddings = with_globals(place._get_embeddings, {"roll_tensor": lambda _: _in_place})
        whole = {"process_mtp_loss": lambda _: _all_layers}
        with changing(model) as changes:
            changes.set(
                model, _postprocess=partial(with_globals(GPTModel._postprocess, whole), model)
            )
            for layer in model.mtp.layers:
                changes.set(layer, forward=partial(self._forward, layer))
                changes.set(layer, _get_embeddings=partial(embeddings, layer))
            yield

    def _forward(
        self, layer: Any, *, hidden_states: torch.Tensor, packed_seq_params: Any, **given: Any
    ) -> Any:
        """Runs the next layer over hidden_states [T, 1, d] of the one before it."""
        local = copy.copy(self._local)
        local.mask = mask_ahead(local.packed, self._run)
        # a token stands where Megatron has what the layer reads of the tokens before it
        local.position_ids = (local.position_ids - self._run - 1).clamp(min=0)
        with counted_calls(local.mask.host) as calls:
            output = MultiTokenPredictionLayer.forward(
                layer,
                hidden_states=gather(hidden_states, self._before),
                packed_seq_params=ForestParams.of(local),
                **given,
            )
            count, _ = calls()
        if count != 1:
            raise UnsupportedError(
                f"{count} attention calls followed the forest in layer {self._run} of mtp, "
                "expected one (a patched forward, or a replaced layer)"
            )
        self._run += 1
        return output

    def score(
        self, hidden: torch.Tensor, weight: torch.Tensor, head: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """Scores what the layers predict.

        Args:
            hidden: [(1 + n) T, 1, d], of the model and then of each layer.
            weight: [W, d], of the output layer.
            head: scores edges, [U, 1], from hidden states [T, 1, d], a weight and these edges.

        Returns:
            The model's hidden states [T, 1, d].
        """
        config, packed, found = self._model.config, self._local.packed, self._found
        count, layers = packed.num_tokens, config.mtp_num_layers
        if len(hidden) != (1 + layers) * count or self._run != layers:
            raise UnsupportedError(
                f"the output layer got {len(hidden)} rows after {self._run} layers of mtp, "
                f"expected {count} of the model and of each of {layers} layers"
            )
        if getattr(config, "mtp_detach_heads", False):
            weight = weight.detach()
        of_model, *of_layers = hidden.split(count)
        for number, of_layer in enumerate(of_layers):
            edges, to_sequences = edges_ahead(packed, found, number)
            log_p = head(of_layer, weight, edges, self._options)
            of_sequences = scores_of(log_p, to_sequences, found.lengths, self._options)
            self.logprobs.append(of_sequences.logprobs)
        return of_model


def _in_place(tensor: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
    """Stands in for Megatron's roll_tensor: a token stays where it is."""
    return tensor, None


def _all_layers(hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    """Stands in for Megatron's process_mtp_loss: all hidden states go to the output layer."""
    return hidden_states
