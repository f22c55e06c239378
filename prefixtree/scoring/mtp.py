"""The wing of heads that predict several tokens ahead: multi-token prediction, `mtp=`.

What a head (see `ahead`) makes of a token depends on the token's path alone. So a head runs over
the same forest, at the same places: each token takes the row of its predictor.

Legend: T packed tokens, t own tokens of a part, d hidden size, V vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers import modeling_layers

from prefixtree.errors import UnsupportedError, refuse
from prefixtree.kernels.lm_head.logprobs import ScoreOptions, linear_logprobs
from prefixtree.kernels.operators import counted_calls
from prefixtree.models.changes import changing
from prefixtree.models.checks import attention_modules, check_parts
from prefixtree.models.layers import decoder_of
from prefixtree.models.prepared import prepare_attending
from prefixtree.models.rope import check_rope
from prefixtree.packing.copies import gather
from prefixtree.packing.layout import PackedForest
from prefixtree.scoring.ahead import before_each, edges_ahead, mask_ahead
from prefixtree.scoring.edges import ScoredEdges, SequenceScores, scores_of
from prefixtree.scoring.mtp_refusals import MTP, AskedHeads
from prefixtree.wings import CallWing, ForwardWing

if TYPE_CHECKING:
    from prefixtree.scoring.forward import AskedWings


def check_heads(
    model: nn.Module, causal_lm: Any, packed: PackedForest, asked: AskedWings, with_loss: bool
) -> None:
    """Refuses heads that would not give the scores of the replicated batch.

    Args:
        with_loss: whether the call computes the load-balancing loss.

    Raises:
        TypeError: no MtpModel of transformers in `asked.mtp`.
        UnsupportedError: with the reason.
    """
    mtp: Any = asked.mtp
    heads = _heads_in(mtp)
    refuse(MTP, AskedHeads(model, causal_lm, mtp, heads, packed, asked, with_loss))
    check_parts(heads, heads)
    check_rope(heads, packed.mask.host)
    attention_modules(heads)


def _heads_in(mtp: Any) -> Any:
    """Finds transformers' heads in adapters."""
    # not there before transformers 5.17
    kind: Any = getattr(modeling_layers, "MtpModel", ())
    modules = mtp.modules() if isinstance(mtp, nn.Module) else ()
    heads = next((module for module in modules if isinstance(module, kind)), None)
    if heads is None:
        raise TypeError(
            "mtp must be or hold an MtpModel (transformers.modeling_layers, from 5.23 on), got "
            f"{type(mtp).__name__}; MtpModel.from_pretrained(model) loads that of a checkpoint, "
            "MtpModel(model, 1) makes a new one"
        )
    return heads


class Heads(CallWing):
    """The heads of a call that scores the edges `found`."""

    def __init__(self, causal_lm: Any, asked: AskedWings, found: ScoredEdges) -> None:
        self._heads, self._detach = _heads_in(asked.mtp), asked.mtp_detach
        self._options = ScoreOptions(chunk_size=asked.chunk_size)
        self._decoder, self._found = decoder_of(causal_lm), found
        prepare_attending(self._heads)

    def forward(self, own: np.ndarray | None) -> ForwardWing:
        return _Forward(self._decoder)

    def facts(self) -> dict[str, Any]:
        return {"layers": len(self._heads.layers), "detach": self._detach}

    def result(
        self, scores: SequenceScores, of_tokens: tuple[torch.Tensor, ...], packed: PackedForest
    ) -> SequenceScores:
        (hidden,) = of_tokens
        return replace(scores, mtp=list(self._logprobs(hidden, packed)))

    def _logprobs(self, hidden: torch.Tensor, packed: PackedForest) -> Iterator[list[torch.Tensor]]:
        """Runs head after head; `hidden` is what the model made of all tokens, [T, d]."""
        heads, found, options = self._heads, self._found, self._options
        weight, bias = heads.shared_head.weight, heads.shared_head.bias
        if self._detach:
            hidden, weight = hidden.detach(), weight.detach()
            bias = None if bias is None else bias.detach()
        inputs = packed.model_inputs()
        with torch.no_grad() if self._detach else nullcontext():
            embedded = heads.embed_tokens(inputs["input_ids"])
        before = before_each(packed)
        for number in range(len(heads.layers)):
            mask = mask_ahead(packed, number).given_with(inputs["position_ids"][0])
            given = number, gather(hidden, before)[None], inputs["position_ids"], None
            options_of_layer = {"inputs_embeds": embedded, "tree_mask": mask, "use_cache": False}
            with counted_calls(mask.host) as calls:
                hidden = heads.forward_layer(*given, **options_of_layer).squeeze(0)
                count, _ = calls()
            if count != 1:
                raise UnsupportedError(
                    f"{count} attention calls followed the tree in layer {number} of mtp, "
                    "expected one: another attention (a replaced module or a patched forward) "
                    "gives the results of another batch; use transformers' layers"
                )
            edges, to_sequences = edges_ahead(packed, found, number)
            rows = gather(hidden.index_select(0, edges.predictors), edges.to_predictors)
            log_p = linear_logprobs(rows, weight, bias, edges.target, edges.temperature, options)
            yield scores_of(log_p, to_sequences, found.lengths, options).logprobs


class _Forward(ForwardWing):
    """Keeps what the decoder makes of the own tokens of one forward."""

    def __init__(self, decoder: nn.Module) -> None:
        self._decoder, self._kept = decoder, list[torch.Tensor]()

    @contextmanager
    def around(self, recompute: Any) -> Iterator[None]:
        thread = threading.get_ident()

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if threading.get_ident() == thread:
                self._kept.append(output.last_hidden_state)

        with changing(self._decoder) as changes:
            changes.hook(self._decoder.register_forward_hook, torch.compiler.disable(keep))
            yield

    def rows(self, output: Any, tokens: int) -> tuple[torch.Tensor, ...]:
        (hidden,) = self._kept
        self._kept.clear()
        return (hidden.squeeze(0),)
