"""Another model's next-token distributions over the same packed forest, for a `measure`.

Legend: E scored edges, P predictors, r edges of a block, d hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from prefixtree._numbers import integer, number
from prefixtree.errors import UnsupportedError
from prefixtree.forest import PrefixForest
from prefixtree.kernels.lm_head.measures import Divergence, Measure, MeasuredEdges, source_of
from prefixtree.models.changes import changing
from prefixtree.models.checks import (
    check_model,
    every_layer_attends,
    find_causal_lm,
)
from prefixtree.models.families import forward_inputs
from prefixtree.models.layers import device_of
from prefixtree.models.prepared import prepare_layers
from prefixtree.models.rows_alone import check_layers
from prefixtree.packing.copies import move
from prefixtree.packing.layout import PackedForest
from prefixtree.packing.same_paths import find_paths
from prefixtree.planning.micro_batch import MicroBatch, own_of, packed_of
from prefixtree.scoring.edges import find_edges
from prefixtree.scoring.forest_edges import MEND, ForestEdges, make_handle, rows_in
from prefixtree.scoring.lm_head import check_rows_alone, is_linear, logit_rule

_LINEAR = nn.Linear.forward


class Teacher:
    """The next-token distributions of another model, for the `measure` of `sequence_logprobs`.

        of_teacher = pt.Teacher(teacher, packed, loss_mask)

        forward_kl = of_teacher.divergence()

        def kl_by_hand(logits, edges):
            t = of_teacher.log_p(edges)
            return (t.exp() * (t - logits.log_softmax(-1))).sum(-1, keepdim=True)

    The teacher runs once over the forest, without gradients, when it is made. It keeps the hidden
    states of the predictors, [P, d]. Its lm_head runs later, when a measure asks for a block of
    edges or `divergence` for a chunk. If FSDP2 or DeepSpeed shards the teacher, every rank keeps
    the whole lm_head.

    A scored edge finds its row by the tokens up to its predictor. So a teacher made without a loss
    mask serves any mask, and one of `pack(plan.forest)` serves every micro-batch and `kept_trunks`.
    An edge without a row is refused.

    Args:
        model: a causal language model with attn_implementation="prefixtree", wrapped or not, in
            eval mode, with the tokenizer of the model that is scored. It may be that model, as
            with `disable_adapter()`, if its lm_head is linear.
        packed: the packed forest that is scored, on the model's device, or one that holds all its
            sequences; or a MicroBatch, as in `sequence_logprobs`.
        loss_mask: that of `sequence_logprobs`, or one that scores more. Default: every token is
            scored.

    Raises:
        TypeError: anything but a PackedForest or a MicroBatch.
        UnsupportedError: a model that does not run exactly on packed forests; tensor parallelism; a
            sharded lm_head that is not linear.
    """

    def __init__(
        self,
        model: nn.Module,
        packed: PackedForest | MicroBatch,
        loss_mask: Sequence[Any] | None = None,
    ) -> None:
        loss_mask = own_of(packed, 1.0, loss_mask)[1]
        packed = packed_of(packed, "Teacher", lambda: device_of(find_causal_lm(model)))
        causal_lm = find_causal_lm(model)
        if packed.forest.routes is not None:
            raise UnsupportedError(
                "a Teacher replays no recorded routes: give it the packed forest of the same "
                "sequences without routes="
            )
        # found on the host: packed.edges would have to come back from the device
        rows = np.unique(find_edges(packed, 1.0, loss_mask).predictor)
        row = np.full(packed.num_tokens, -1)
        row[rows] = np.arange(len(rows))
        self._rows = _Rows(packed.forest, row)
        lm_head = causal_lm.get_output_embeddings()
        is_sharded = _is_sharded(model, lm_head)
        with torch.no_grad():
            check_model(model, causal_lm, packed)
            prepare_layers(causal_lm)
            check_layers(model, causal_lm, packed.device)
            inputs = forward_inputs(packed, causal_lm)
            predictors = move(torch.from_numpy(rows.astype(np.int64)), packed.device)
            with (
                every_layer_attends(causal_lm, packed.mask),
                _hidden_states(causal_lm, is_sharded) as kept,
            ):
                model(**inputs, logits_to_keep=predictors)
        if len(kept) != 1 or kept[0].hidden.shape[:2] != (1, len(rows)):
            raise UnsupportedError(
                f"{type(causal_lm).__name__} handed its output embedding "
                f"{[list(x.hidden.shape) for x in kept]} where logits_to_keep asked for "
                f"{len(rows)} tokens: a teacher's forward must honour logits_to_keep"
            )
        self._of_forward = kept[0]
        self._hidden = kept[0].hidden[0]
        self._rule = logit_rule(causal_lm)
        if not is_linear(lm_head):
            with torch.no_grad(), kept[0].autocast():
                check_rows_alone(lm_head, lm_head.forward, self._hidden, "the teacher's lm_head")

    def divergence(self, beta: float = 0.0, vocabulary: int | None = None) -> Measure:
        """Makes a measure [r, 1] of the divergence between the model and this teacher, in nats.

        The Triton kernels of the lm_head compute the divergence and its gradient together with log
        p, from the teacher's logits of the whole chunk (`chunk_size`). Elsewhere, and where the
        scored model's lm_head is not linear, it is computed as any measure.

        Args:
            beta: 0 for KL(teacher || model), 1 for KL(model || teacher), between them TRL's
                generalised Jensen-Shannon divergence: beta KL(teacher || m) + (1 - beta) KL(model
                || m), where m is beta teacher + (1 - beta) model. Default: 0.
            vocabulary: the size of the common part, where the two lm_heads are padded otherwise
                (Qwen2.5: 151,936 and 152,064): both distributions are those of the first so many
                tokens. The kernels serve that of the scored model's whole lm_head. Default: both
                are whole, and of one size.

        Raises:
            ValueError: a beta that is no number from 0 to 1, or nearer to either than 1e-6, where
                float32 has no mixture; a vocabulary below 1. The call raises it for one that is
                larger than either lm_head's.
        """
        if vocabulary is not None:
            vocabulary = integer("vocabulary", vocabulary, 1)
        beta = number("beta", beta, 0, most=1)
        if beta not in (0, 1) and not 1e-6 <= beta <= 1 - 1e-6:
            raise ValueError(f"beta must be 0, 1 or at least 1e-6 from both, got {beta}")
        return Divergence(beta, self._output, self._rule, vocabulary)

    def log_p(self, edges: MeasuredEdges) -> torch.Tensor:
        """Computes the teacher's log-probabilities of all tokens at edges, without gradients.

        Args:
            edges: the edges that a measure gets, r of them.

        Returns:
            [r, V], float32 (float64 of a teacher in float64), of logits divided by the edges'
            temperature.

        Raises:
            ForestError: edges for which the teacher has no row.
            ValueError: edges that were made by hand.
        """
        return Divergence(0.0, self._output, self._rule).log_p(edges)

    @torch.no_grad()
    def _output(self, edges: MeasuredEdges) -> torch.Tensor:
        """Computes the lm_head's output for edges, [r, V]."""
        rows = self._rows.of(edges)
        with self._of_forward.autocast():
            return self._of_forward.head(self._hidden[rows])


class _Rows:
    """Finds the row of a teacher's hidden states that an edge reads.

    Args:
        row: int64 [T], the row of each packed token as a predictor; -1 where none was kept.

    Attributes:
        handle: int64 [], the number of this object in the operator `rows_in`.
    """

    def __init__(self, forest: PrefixForest, row: np.ndarray) -> None:
        self._forest, self._row = forest, row
        self.handle = make_handle(self)

    def of(self, edges: MeasuredEdges) -> torch.Tensor:
        """Rows of the edges that a measure gets, int64 [r]."""
        source, which = source_of(edges), edges.scored_edge
        if torch.compiler.is_compiling():
            return rows_in(source.handle, self.handle, which)
        return self.rows_of(source, which.device)[which]

    def rows_of(self, source: ForestEdges, device: torch.device) -> torch.Tensor:
        """Rows of all edges of a call, int64 [U] on a device; refuses edges without one."""
        return source.kept(self, device, lambda: self._find(source))

    def _find(self, source: ForestEdges) -> np.ndarray:
        at = find_paths(source.forest, self._forest).at[source.predictor]
        source.refuse(
            at < 0, f"have no row in the Teacher, which is of another packed forest: {MEND}"
        )
        rows: np.ndarray = self._row[at]
        source.refuse(
            rows < 0,
            "have no row in the Teacher, whose loss_mask leaves them out: give it the loss_mask of "
            "the call, or none",
        )
        return rows


class _Kept(NamedTuple):
    """The output embedding of a forward, for later.

    Attributes:
        hidden: [1, P, d], its input.
        head: computes its output for rows [r, d], later and on this rank alone.
        autocast: makes contexts with the autocast that it ran in.
    """

    hidden: torch.Tensor
    head: Callable[[torch.Tensor], torch.Tensor]
    autocast: Any


@contextmanager
def _hidden_states(causal_lm: Any, is_sharded: bool) -> Iterator[list[_Kept]]:
    """A context in which the output embedding computes nothing, and its input is kept.

    Args:
        is_sharded: whether its weights are whole only within a forward, and must be copied.
    """
    kept: list[_Kept] = []
    lm_head = causal_lm.get_output_embeddings()

    def keep(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if any(hasattr(p, "placements") for p in lm_head.parameters()):
            raise UnsupportedError(
                "the teacher's output embedding is divided (a DTensor) in its forward: leave the "
                "teacher whole on every rank, or shard it by FSDP2 or DeepSpeed"
            )
        head: Callable[..., torch.Tensor] = lm_head
        if is_sharded:
            weight = lm_head.weight.clone()
            bias = None if lm_head.bias is None else lm_head.bias.clone()
            head = partial(nn.functional.linear, weight=weight, bias=bias)
        kept.append(_Kept(hidden.detach(), head, _autocast_of(hidden.device.type)))
        # the family's forward treats it as logits
        return hidden[..., :1].clone()

    with changing(causal_lm) as changes:
        changes.set(lm_head, forward=torch.compiler.disable(keep))
        yield kept


def _is_sharded(model: nn.Module, lm_head: nn.Module) -> bool:
    """Whether a wrapper shards the weights of a teacher's lm_head again after a forward."""
    kinds = FSDPModule, FullyShardedDataParallel
    if not any(isinstance(m, kinds) for m in model.modules()) and not any(
        hasattr(p, "ds_id") for p in lm_head.parameters()
    ):
        return False
    if not is_linear(lm_head) or getattr(lm_head.forward, "__func__", None) is not _LINEAR:
        raise UnsupportedError(
            f"the teacher is sharded, and its lm_head ({type(lm_head).__name__}) is not linear, or "
            "quantised: "
            "leave the teacher whole on every rank"
        )
    return True


def _autocast_of(device_type: str) -> Any:
    """Gives a function that makes contexts with the autocast of now."""
    if not torch.is_autocast_enabled(device_type):
        return nullcontext
    dtype = torch.get_autocast_dtype(device_type)
    return lambda: torch.autocast(device_type, dtype)
