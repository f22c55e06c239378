"""Routers of a mixture of experts: replay of recorded experts, and the load-balancing loss as the
replicated batch has it.

**Router replay.** A forest with routes hands them to the model as the keyword `tree_routes`, which
travels with `tree_mask` to every attention (or recurrence), in a recomputation too. A hook before
the attention keeps the layer's routes, and a hook after the router puts them in the place of its
choice. (Hooks of the layer itself are outside of its checkpoint.) The weights of the experts come
from the router's logits, so its gradient is kept.

**The loss.** Both of its means, each expert's share of tokens and mean probability, are over the
tokens that attention_mask counts. A replicated batch has a shared token once per sequence. So
transformers' own function gets `packed.multiplicity` where it expects the attention_mask.

Legend: T packed tokens, L layers of experts, k experts per token, E experts.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NamedTuple

import torch
import transformers
from packaging import version
from torch import nn

from prefixtree._forest_inputs import OTHER_LAYERS, check_counts
from prefixtree.errors import UnsupportedError
from prefixtree.models.checks import attention_modules
from prefixtree.models.families import (
    REPLAYS,
    ROUTES,
    checkpoint_wrappers,
    checkpoints_reentrantly,
)
from prefixtree.models.layers import layers_of
from prefixtree.packing.layout import PackedForest

# ---- router replay -------------------------------------------------------------------------------

# in older versions, routers of Qwen3-MoE return probabilities in the place of logits
_OLDEST = "5.17"
_TRANSFORMERS = metadata.version("transformers")


def _softmax_of_all(router: Any, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    weights = logits.softmax(-1, torch.float).gather(-1, experts)
    # routers without the setting always normalise
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights


def _softmax_of_chosen(router: Any, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return logits.gather(-1, experts).softmax(-1, logits.dtype)


#: model type -> the class of its routers, and the weights [T, k] of experts [T, k] by the router's
#: logits [T, E].
REPLAYED_ROUTERS: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
    "flex_olmo": ("FlexOlmoTopKRouter", _softmax_of_all),
    "gpt_oss": ("GptOssTopKRouter", _softmax_of_chosen),
    "mellum": ("MellumTopKRouter", _softmax_of_all),
    "mixtral": ("MixtralTopKRouter", _softmax_of_all),
    "olmoe": ("OlmoeTopKRouter", _softmax_of_all),
    "qwen2_moe": ("Qwen2MoeTopKRouter", _softmax_of_all),
    "qwen3_5_moe_text": ("Qwen3_5MoeTopKRouter", _softmax_of_all),
    "qwen3_moe": ("Qwen3MoeTopKRouter", _softmax_of_all),
    "qwen3_next": ("Qwen3NextTopKRouter", _softmax_of_all),
}


class _Replay(threading.local):
    """The experts [T, k] that the running layer of this thread must choose, and their uses."""

    routes: torch.Tensor | None = None
    used: int = 0


_replay = _Replay()


class _Keep:
    """A hook before the attention of the `layer`-th of `count` with a router: keeps its routes."""

    def __init__(self, layer: int, count: int) -> None:
        self.layer, self.count = layer, count

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        routes = kwargs.get(ROUTES)
        if routes is not None and routes.shape[1] != self.count:
            raise ValueError(OTHER_LAYERS.format(routes.shape[1], self.count))
        _replay.routes = None if routes is None else routes[:, self.layer]


class _Choose:
    """A hook after a router: returns the kept choice, with the weights of these experts."""

    def __init__(self, weights: Callable[..., torch.Tensor]) -> None:
        self.weights = weights

    def __call__(self, router: nn.Module, args: Any, output: Any) -> Any:
        if _replay.routes is None:
            return None
        _replay.used += 1
        logits, scores, chosen = output
        experts = _replay.routes.to(chosen.dtype)
        if experts.shape != chosen.shape:
            raise ValueError(
                f"routes are {list(experts.shape)} per layer, and the router chose "
                f"{list(chosen.shape)} [tokens, experts per token]"
            )
        return logits, self.weights(router, logits, experts).to(scores.dtype), experts


class _Routers(NamedTuple):
    """The layers that have a router, with the attention and the router of each."""

    layers: list[nn.Module]
    attentions: list[nn.Module]
    routers: list[nn.Module]


def check_routes(model: nn.Module, causal_lm: Any, packed: PackedForest) -> None:
    """Refuses routes that do not fit the model, or that it is not verified to replay."""
    routes = packed.forest.routes
    if routes is None:
        return
    routed = _routers_of(causal_lm)
    for layer, router_of_layer in zip(routed.layers, routed.routers, strict=True):
        _check_runs_plainly(layer, router_of_layer)
    if any(vars(m).get("_compiled_call_impl") or hasattr(m, "_orig_mod") for m in model.modules()):
        raise UnsupportedError(
            "recorded routes are not verified in compiled models: leave torch.compile and "
            "compile_layers out"
        )
    router: Any = routed.routers[0]
    check_counts(
        routes, len(routed.routers), router.top_k, router.num_experts, "num_experts_per_tok"
    )


@contextmanager
def replaying(causal_lm: Any, packed: PackedForest) -> Iterator[None]:
    """Has every router of a forward, while open, take the recorded routes, once each."""
    if packed.forest.routes is None:
        yield
        return
    routers = _prepare(causal_lm)
    _replay.used = 0
    try:
        yield
    finally:
        _replay.routes = None
    if _replay.used != routers:
        raise UnsupportedError(
            f"{_replay.used} routers took the recorded routes in a forward of "
            f"{type(causal_lm).__name__}, which has {routers}: a replaced layer or a patched "
            "forward chose by itself"
        )


def _prepare(causal_lm: Any) -> int:
    """Gives the model the hooks, once, and counts its routers."""
    _, attentions, routers = _routers_of(causal_lm)
    _, weights = REPLAYED_ROUTERS[causal_lm.config.get_text_config().model_type]
    for number, (attention, router) in enumerate(zip(attentions, routers, strict=True)):
        # each is checked, as an interrupt may have come between the two
        if not any(isinstance(hook, _Keep) for hook in attention._forward_pre_hooks.values()):
            attention.register_forward_pre_hook(_Keep(number, len(routers)), with_kwargs=True)
        if not any(isinstance(hook, _Choose) for hook in router._forward_hooks.values()):
            router.register_forward_hook(_Choose(weights))
    for _, module in attention_modules(causal_lm):
        setattr(module, REPLAYS, True)
    return len(routers)


def _routers_of(causal_lm: Any) -> _Routers:
    model_type = causal_lm.config.get_text_config().model_type
    if model_type not in REPLAYED_ROUTERS:
        raise UnsupportedError(
            f"recorded routes are not replayed in model type {model_type!r}, only in "
            f"{', '.join(sorted(REPLAYED_ROUTERS))}: leave routes= out, and the model chooses"
        )
    if version.parse(_TRANSFORMERS) < version.parse(_OLDEST):
        raise UnsupportedError(
            f"recorded routes are replayed with transformers {_OLDEST} or later, {_TRANSFORMERS} "
            f'is installed: pip install "transformers>={_OLDEST}"'
        )
    kind, _ = REPLAYED_ROUTERS[model_type]
    routed = _Routers([], [], [])
    for layer in layers_of(causal_lm):
        # a sharding wrapper replaces the class by a subclass
        routers = [m for m in layer.modules() if kind in (c.__name__ for c in type(m).__mro__)]
        if not routers:
            continue
        attentions = [m for m in layer.children() if _takes_keywords(m)]
        if len(routers) != 1 or len(attentions) != 1:
            raise UnsupportedError(
                f"a layer ({type(layer).__name__}) has {len(routers)} routers and "
                f"{len(attentions)} attentions, expected one of each: recorded routes are not "
                "verified with layers that were replaced or wrapped in part"
            )
        for modules, module in zip(routed, (layer, attentions[0], routers[0]), strict=True):
            modules.append(module)
    return routed


def routed_layers(causal_lm: Any) -> list[bool]:
    """Whether each decoder layer has a router; refuses models whose routes are not replayed."""
    with_router = _routers_of(causal_lm).layers
    return [any(layer is each for each in with_router) for layer in layers_of(causal_lm)]


def _takes_keywords(module: nn.Module) -> bool:
    """Whether a module hands on the tree mask: attentions and recurrences do, norms do not."""
    parameters = inspect.signature(inspect.unwrap(type(module).forward)).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _check_runs_plainly(layer: nn.Module, router: nn.Module) -> None:
    # transformers' tensor and expert parallelism mark and patch the modules that they spread
    if any(getattr(module, "_is_hooked", False) for module in layer.modules()):
        raise UnsupportedError(
            "recorded routes are not verified under tensor or expert parallelism, where routers "
            "return a rank's part of the experts: load the model without tp_plan and ep_size"
        )
    origin = type(router).forward.__globals__.get("__name__", "")
    if "forward" in vars(router) or not str(origin).startswith("transformers."):
        raise UnsupportedError(
            f"the router {type(router).__name__} has another forward than transformers' "
            f"({vars(router).get('forward') or origin}): undo the patch, or leave routes= out"
        )


# ---- the load-balancing loss ---------------------------------------------------------------------

_FUNCTION = "load_balancing_loss_func"


@dataclass(frozen=True)
class RouterLoss:
    """The replicated batch's loss by transformers' function, from packed router logits."""

    causal_lm: Any
    function: Callable[..., Any]

    def held_bytes(self, tokens: int) -> int:
        """Bytes of logits and probabilities of all layers, held until the loss's backward."""
        config = self.causal_lm.config.get_text_config()
        experts = getattr(self.causal_lm, "num_experts", None) or config.num_experts
        router_logits = tokens * experts * config.num_hidden_layers
        return 2 * router_logits * next(self.causal_lm.parameters()).element_size()

    def check(self) -> None:
        """Refuses reentrant checkpointing, under which router logits have no gradient."""
        wrappers = checkpoint_wrappers(self.causal_lm)
        wrapped = any(wrapper.checkpoint_impl.name == "REENTRANT" for wrapper in wrappers)
        if torch.is_grad_enabled() and (wrapped or checkpoints_reentrantly(self.causal_lm)):
            raise UnsupportedError(
                "the load-balancing loss has no gradient under reentrant checkpointing, where "
                "router logits are recorded without a graph (in transformers' own batches too): "
                'enable checkpointing with {"use_reentrant": False}, or pass recompute="all"'
            )

    def logits_of(self, output: Any, expected: int) -> tuple[torch.Tensor, ...]:
        """Finds the router logits in a model's output, one [expected, E] per layer of experts."""
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

    def of(self, packed: PackedForest, logits: Sequence[torch.Tensor]) -> torch.Tensor:
        """The loss, a scalar, from the router logits of all packed tokens, one [T, E] per layer."""
        if packed.forest.is_dummy:
            # transformers would divide by their number. Other ranks wait for the graph's backward
            return sum((layer[:0].float().sum() for layer in logits), torch.zeros(()))
        # the model's number is read, as ERNIE's configuration had another name for it
        config = self.causal_lm.config.get_text_config()
        chosen = getattr(self.causal_lm, "num_experts_per_tok", None) or config.num_experts_per_tok
        experts = logits[0].shape[-1]
        counts = packed.multiplicity.to(logits[0].device)
        loss: torch.Tensor = self.function(tuple(logits), experts, chosen, counts[None])
        return loss


def router_loss(causal_lm: Any, asked: bool | None) -> RouterLoss | None:
    """Makes the loss of a packed forward, or None.

    `asked`: by the caller; then a family without such a loss is refused. None: as
    `config.output_router_logits`.
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
    return RouterLoss(causal_lm, function)


def loss_function(causal_lm: Any) -> Callable[..., Any] | None:
    """Finds transformers' function of a model's load-balancing loss; None if it computes none."""
    forward = inspect.unwrap(type(causal_lm).forward)
    code = getattr(forward, "__code__", None)
    if code is None or _FUNCTION not in code.co_names:
        return None
    function: Callable[..., Any] | None = forward.__globals__.get(_FUNCTION)
    return function
