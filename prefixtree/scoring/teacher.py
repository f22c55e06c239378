"""Another model's next-token distributions over the same packed forest, for a `measure`.

Legend: E scored edges, P predictors, r edges of a block, d hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from prefixtree.errors import UnsupportedError
from prefixtree.kernels.lm_head.measures import MeasuredEdges
from prefixtree.models.changes import changing
from prefixtree.models.checks import check_model, every_layer_attends, find_causal_lm
from prefixtree.models.families import forward_inputs
from prefixtree.models.hybrids import prepare_states
from prefixtree.packing.arguments import check_packed
from prefixtree.packing.layout import PackedForest
from prefixtree.packing.transfers import move
from prefixtree.scoring.edges import find_edges
from prefixtree.scoring.lm_head import check_rows_alone, logit_rule
from prefixtree.scoring.parallel_lm_head import is_linear


class Teacher:
    """The next-token distributions of another model, for the `measure` of `sequence_logprobs`.

        of_teacher = pt.Teacher(teacher, packed, loss_mask)

        def kl(logits, edges):
            t = of_teacher.log_p(edges)
            return (t.exp() * (t - logits.log_softmax(-1))).sum(-1, keepdim=True)

    The teacher runs once over the forest, without gradients, when it is made. The hidden states of
    the predictors are kept, [P, d]. Its lm_head runs when a measure asks for a block of edges.

    Args:
        model: a causal language model with attn_implementation="prefixtree", wrapped or not, in
            eval mode, with the tokenizer of the model that is scored.
        packed: the packed forest that is scored, on the model's device.
        loss_mask: that of `sequence_logprobs`. Default: every token is scored.

    Raises:
        TypeError: anything but a PackedForest.
        UnsupportedError: a model that does not run exactly on packed forests, or whose lm_head is
            sharded outside its forward.
    """

    def __init__(
        self, model: nn.Module, packed: PackedForest, loss_mask: Sequence[Any] | None = None
    ) -> None:
        check_packed(packed, "Teacher", subset=True)
        causal_lm = find_causal_lm(model)
        # on the host: packed.edges would come back from the device
        predictor = find_edges(packed, 1.0, loss_mask).predictor
        rows, row_of_edge = np.unique(predictor, return_inverse=True)
        with torch.no_grad():
            check_model(model, causal_lm, packed, None)
            prepare_states(causal_lm)
            self._row_of_edge = move(torch.from_numpy(row_of_edge.astype(np.int64)), packed.device)
            inputs = forward_inputs(packed, causal_lm.config)
            predictors = move(torch.from_numpy(rows.astype(np.int64)), packed.device)
            with every_layer_attends(causal_lm, packed.mask), _hidden_states(causal_lm) as kept:
                model(**inputs, logits_to_keep=predictors)
        if len(kept) != 1 or kept[0][0].shape[:2] != (1, len(rows)):
            raise UnsupportedError(
                f"{type(causal_lm).__name__} handed its output embedding "
                f"{[list(x.shape) for x, _ in kept]} where logits_to_keep asked for {len(rows)} "
                "tokens: a teacher's forward must honour logits_to_keep"
            )
        ((hidden, self._autocast),) = kept
        self._hidden = hidden[0]
        self._lm_head = causal_lm.get_output_embeddings()
        self._rule = logit_rule(causal_lm)
        if any(hasattr(p, "placements") for p in self._lm_head.parameters()):
            raise UnsupportedError(
                "the teacher's output embedding is sharded (a DTensor): leave the teacher whole on "
                "every rank"
            )
        if not is_linear(self._lm_head):
            with torch.no_grad(), self._autocast():
                forward = self._lm_head.forward
                check_rows_alone(self._lm_head, forward, self._hidden, "the teacher's lm_head")

    def log_p(self, edges: MeasuredEdges) -> torch.Tensor:
        """The log-probabilities of all tokens, float32 [r, V], of logits divided by the edges'
        temperature; without gradients."""
        with torch.no_grad():
            with self._autocast():
                x = self._lm_head(self._hidden[self._row_of_edge[edges.edge]])
            logits = self._rule.apply(x.float()) / edges.temperature[:, None]
            return logits.log_softmax(-1)


@contextmanager
def _hidden_states(causal_lm: Any) -> Iterator[list[tuple[torch.Tensor, Any]]]:
    """While open, the output embedding computes nothing: what it is given is kept, with the
    autocast it would have run in."""
    kept: list[tuple[torch.Tensor, Any]] = []

    def keep(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        kept.append((hidden.detach(), _autocast_of(hidden.device.type)))
        # the family's forward does to it what it does to logits
        return hidden[..., :1].clone()

    with changing(causal_lm) as changes:
        lm_head = causal_lm.get_output_embeddings()
        changes.set(lm_head, forward=torch.compiler.disable(keep))
        yield kept


def _autocast_of(device_type: str) -> Any:
    """Makes contexts with the autocast of now."""
    if not torch.is_autocast_enabled(device_type):
        return nullcontext
    dtype = torch.get_autocast_dtype(device_type)
    return lambda: torch.autocast(device_type, dtype)
