"""The wing of heads that predict several tokens ahead: multi-token prediction, `mtp=`.

Head k (1, 2, ..) reads, at token j, the embedding of j and what head k - 1 (for k = 1 the model)
made of the token before j, and predicts the token after j. All of this depends on the path of j
alone. So a head runs over the same forest, at the same places: token j takes the row of its
predictor. The first k tokens of a path have nothing to read, and are hidden as keys.

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
from prefixtree.packing.copies import GatherIndex, gather
from prefixtree.packing.layout import PackedForest
from prefixtree.packing.mask import TreeMask
from prefixtree.scoring.edges import ScoredEdges, SequenceScores, edges_on_device, scores_of
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
        heads, host, found, options = self._heads, packed.mask.host, self._found, self._options
        weight, bias = heads.shared_head.weight, heads.shared_head.bias
        if self._detach:
            hidden, weight = hidden.detach(), weight.detach()
            bias = None if bias is None else bias.detach()
        inputs = packed.model_inputs()
        with torch.no_grad() if self._detach else nullcontext():
            embedded = heads.embed_tokens(inputs["input_ids"])
        # roots, which have no token before them, get zeros
        before = GatherIndex(host.predictor, packed.num_tokens, packed.device)
        for number in range(len(heads.layers)):
            mask = _without_first(packed, number + 1).given_with(inputs["position_ids"][0])
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
            # the predictor must have had something to read
            which = np.flatnonzero(host.position[found.predictor] > number)
            edges = edges_on_device(packed, found, which, found.predictor[which])
            rows = gather(hidden.index_select(0, edges.predictors), edges.to_predictors)
            log_p = linear_logprobs(rows, weight, bias, edges.target, edges.temperature, options)
            # one entry more: copies that are not scored have the unit -1, and stay so
            row = np.full(found.count + 1, -1, np.int32)
            row[which] = np.arange(len(which))
            to_sequences = GatherIndex(row[found.of_copies], len(which), packed.device)
            yield scores_of(log_p, to_sequences, found.lengths, options).logprobs


def _without_first(packed: PackedForest, count: int) -> TreeMask:
    """The mask of a forest in which the first `count` tokens of a path are seen by no other."""
    host, tokens = packed.mask.host, np.arange(packed.num_tokens)
    end = np.where(host.position < count, tokens + 1, host.subtree_end)
    mask = TreeMask(end).to(packed.device)
    return mask.with_options(packed.mask.backend, packed.mask.deterministic)


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
