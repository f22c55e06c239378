"""The load-balancing loss of a mixture of experts, as the replicated batch has it.

transformers computes this loss in the model's forward, from the router logits of all layers: for
each expert the share of tokens that choose it, times its mean probability, summed over the experts.
Both are means over the tokens that attention_mask counts. A packed forest has a shared token once,
and the replicated batch has it once per sequence. So transformers' own function gets
`packed.multiplicity` where it expects the attention_mask.

Legend: T packed tokens, E experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from prefixtree.errors import UnsupportedError
from prefixtree.models.families import (
    COUNTS_COPIES,
    checkpoint_wrappers,
    checkpoints_reentrantly,
)
from prefixtree.packing.layout import PackedForest

_FUNCTION = "load_balancing_loss_func"


@dataclass(frozen=True)
class RouterLoss:
    """The replicated batch's loss, of the router logits of packed forwards.

    Attributes:
        causal_lm: the transformers model.
        function: transformers' function of the loss.
        multiplicity: int32 [T], how many sequences hold each packed token.
        is_dummy: whether it is 0 of all tokens, so that the loss is 0.
    """

    causal_lm: Any
    function: Callable[..., Any]
    multiplicity: torch.Tensor
    is_dummy: bool

    def held_bytes(self) -> int:
        """Bytes that the loss holds until its backward: logits and probabilities of all layers."""
        config = self.causal_lm.config.get_text_config()
        experts = getattr(self.causal_lm, "num_experts", None) or config.num_experts
        router_logits = len(self.multiplicity) * experts * config.num_hidden_layers
        return 2 * router_logits * next(self.causal_lm.parameters()).element_size()

    def check(self) -> None:
        """Refuses checkpointing under which router logits have no gradient.

        Raises:
            UnsupportedError: reentrant checkpointing, of transformers or of torch's wrapper.
        """
        wrappers = checkpoint_wrappers(self.causal_lm)
        wrapped = any(wrapper.checkpoint_impl.name == "REENTRANT" for wrapper in wrappers)
        if torch.is_grad_enabled() and (wrapped or checkpoints_reentrantly(self.causal_lm)):
            raise UnsupportedError(
                "the load-balancing loss has no gradient under reentrant checkpointing, where "
                "router logits are recorded without a graph (in transformers' own batches too): "
                'enable checkpointing with {"use_reentrant": False}, or pass recompute="all"'
            )

    def logits_of(self, output: Any, expected: int) -> tuple[torch.Tensor, ...]:
        """The router logits in a model's output, one [expected, E] per layer of experts.

        Raises:
            UnsupportedError: there are none, or of another number of tokens.
        """
        logits: tuple[torch.Tensor, ...] = getattr(output, "router_logits", None) or ()
        name = type(self.causal_lm).__name__
        if not logits:
            raise UnsupportedError(
                f"{name} recorded no router logits, so transformers {transformers.__version__} has "
                "no load-balancing loss for it in any batch: pip install --upgrade transformers "
                "(Granite's and Qwen3-VL's need 5.23), or pass output_router_logits=False"
            )
        if any(len(layer) != expected for layer in logits):
            raise UnsupportedError(
                f"{name} recorded router logits of shapes {[list(x.shape) for x in logits]}, "
                f"expected [{expected}, experts] per layer of experts: routers were replaced"
            )
        return logits

    def of(self, logits: Sequence[torch.Tensor]) -> torch.Tensor:
        """The loss, a scalar, of the router logits of all packed tokens, one [T, E] per layer."""
        if self.is_dummy:
            # transformers would divide by their number. Other ranks wait for the graph's backward
            return sum((layer[:0].float().sum() for layer in logits), torch.zeros(()))
        # the model's number: ERNIE's configuration had another name for it
        config = self.causal_lm.config.get_text_config()
        chosen = getattr(self.causal_lm, "num_experts_per_tok", None) or config.num_experts_per_tok
        experts = logits[0].shape[-1]
        loss: torch.Tensor = self.function(tuple(logits), experts, chosen, self.multiplicity[None])
        return loss


def router_loss(causal_lm: Any, packed: PackedForest, asked: bool | None) -> RouterLoss | None:
    """The loss that a forward over a packed forest is to compute, None for none.

    Args:
        causal_lm: the transformers model.
        packed: the packed forest.
        asked: by the caller. None: what `config.output_router_logits` says, which says nothing in
            families without such a loss.

    Raises:
        UnsupportedError: the caller asked, and the family has no such loss.
    """
    function = loss_function(causal_lm)
    if asked and function is None:
        raise UnsupportedError(
            f"output_router_logits=True: {type(causal_lm).__name__} of transformers computes no "
            "load-balancing loss; leave output_router_logits out"
        )
    config = causal_lm.config.get_text_config()
    configured = getattr(config, "output_router_logits", False)
    if function is None or not (configured if asked is None else asked):
        return None
    return RouterLoss(causal_lm, function, packed.multiplicity, packed.forest.is_dummy)


def loss_function(causal_lm: Any) -> Callable[..., Any] | None:
    """transformers' function of a model's load-balancing loss; None where it computes none."""
    forward = inspect.unwrap(type(causal_lm).forward)
    code = getattr(forward, "__code__", None)
    if code is None or _FUNCTION not in code.co_names:
        return None
    found: Callable[..., Any] | None = forward.__globals__.get(_FUNCTION)
    return found


def router_keywords(config: Any, loss: RouterLoss | None) -> dict[str, Any]:
    """The keywords of a forward that computes the loss; for None, of one that does not whatever the
    configuration says. Families without experts get none."""
    if not hasattr(config.get_text_config(), "output_router_logits"):
        return {}
    return {"output_router_logits": loss is not None, COUNTS_COPIES: True}
