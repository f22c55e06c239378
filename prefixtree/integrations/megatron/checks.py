"""Checks whether all of a Megatron model runs along a forest.

A layer that does not know forests would read one as a single causal sequence, in packed order,
without an error. So every public function checks the model here before it runs, and counts the
calls of tree attention while it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_layer import TransformerLayer

from prefixtree.errors import UnsupportedError
from prefixtree.integrations.megatron.context_parallel import LocalForest, check_group
from prefixtree.integrations.megatron.layers import (
    ForestCoreAttention,
    ForestLatentAttention,
    ForestSelfAttention,
)
from prefixtree.integrations.megatron.refusals import check_config, counts_tokens
from prefixtree.integrations.megatron.routers import (
    ForestRouter,
    RoutedTokens,
    ordinals_of,
    routers_of,
)
from prefixtree.integrations.megatron.states import check_state, has_state, state_of
from prefixtree.kernels.operators import counted_calls

_WRAPPERS = (DistributedDataParallel, Float16Module)
_MODELS = (GPTModel, HybridModel)
_FIX = "build the model from tree_spec(its layer spec)"
_DELTA = "a layer of the gated delta rule, whose state runs through the tokens in packed order"

#: Classes whose layers have no tree attention -> what they are.
_OTHER_LAYERS = {
    "MambaMixer": "a Mamba mixer, whose state runs through the tokens in packed order",
    # the first module holds the layers of newer versions
    "_GDNBase": _DELTA,
    "GatedDeltaNet": _DELTA,
    "CrossAttention": "cross attention",
}


def find_model(model: Any) -> Any:
    """Finds the GPTModel or HybridModel inside Megatron's wrappers."""
    inner = model
    while isinstance(inner, _WRAPPERS):
        inner = inner.module
    if isinstance(inner, _MODELS):
        return inner
    raise UnsupportedError(
        f"expected Megatron's GPTModel or HybridModel, in DistributedDataParallel or Float16Module "
        f"or bare, got a {type(inner).__name__}"
    )


def check_model(model: Any) -> None:
    """Refuses a model that would read a forest as something else.

    `tree_logprobs` and `pack_batches` call it before they run a model. Call it where you build a
    model, to know at once.

    Args:
        model: Megatron's GPTModel or HybridModel, wrapped or not: that of one pipeline stage, or of
            one virtual stage.

    Raises:
        UnsupportedError: a layer or a setting with which forests are not exact, by name, with the
            reason and the way to mend it.
    """
    language_model = find_model(model)
    check_config(language_model.config, language_model.training)
    check_group(language_model)
    kind = getattr(language_model, "position_embedding_type", "none")
    if kind == "mrope":
        raise UnsupportedError(
            "packed forests are not served with position_embedding_type='mrope': positions of "
            "images are not depths; use a text model"
        )
    if getattr(language_model, "mtp_process", False):
        raise UnsupportedError(
            "packed forests are not served with multi-token prediction (the model has an mtp "
            "block), which shifts tokens in packed order; build the model without mtp_block_spec"
        )
    for part in ("embedding", "decoder"):
        _check_origin(part, getattr(language_model, part, None))
    for name, layer in language_model.decoder.layers.named_children():
        _check_layer(f"decoder.layers.{name}", layer)
    for name, module in language_model.named_modules():
        if isinstance(module, Attention):
            _check_attention(name, module)
    if _counts(language_model):
        for name, router in routers_of(language_model).items():
            _check_router(name, router)


def _counts(language_model: Any) -> bool:
    return language_model.training and counts_tokens(language_model.config)


def _check_router(name: str, router: Any) -> None:
    if not isinstance(router, ForestRouter):
        raise UnsupportedError(
            f"{name}.router is a {type(router).__name__}, which counts each shared token once: "
            f"{_FIX} (it serves TopKRouter), or switch the router's losses and the update of its "
            "bias off"
        )


def routed_tokens(language_model: Any, local: LocalForest) -> RoutedTokens | None:
    """The tokens of this rank for a model's routers; None if they need nothing."""
    if not routers_of(language_model):
        return None
    copies, is_dummy = local.copies.long(), local.packed.forest.is_dummy
    if local.routes is not None:
        if _counts(language_model):
            raise UnsupportedError(
                "recorded routes are not served with router losses or bias updates, which count "
                "last tokens, whose experts nobody recorded; switch them off"
            )
        ordinals, _ = ordinals_of(language_model)
        return RoutedTokens(copies, local.routes, ordinals)
    return RoutedTokens(copies, is_dummy=is_dummy) if _counts(language_model) else None


def _check_layer(name: str, layer: Any) -> None:
    state = state_of(layer)
    if state is not None:
        check_state(name, state)
    if isinstance(layer, MambaLayer) and _is_megatrons(layer):
        if state is None:
            mixer = getattr(layer, "mixer", None)
            _refuse_others(f"{name}.mixer", mixer)
            raise UnsupportedError(
                f"{name}.mixer is a {type(mixer).__name__}, expected MambaMixer from "
                f"tree_spec: it would read a forest as one sequence; {_FIX}"
            )
        return
    if not isinstance(layer, TransformerLayer) or not _is_megatrons(layer):
        raise UnsupportedError(
            f"{name} is a {type(layer).__module__}.{type(layer).__name__}, expected Megatron's "
            "TransformerLayer: whether this one mixes tokens along the forest is not known"
        )
    for part in ("self_attention", "cross_attention"):
        module = getattr(layer, part, None)
        if module is None or module is state or isinstance(module, IdentityOp):
            continue
        _refuse_others(f"{name}.{part}", module)
        if part == "cross_attention" or not isinstance(module, Attention):
            raise UnsupportedError(
                f"{name}.{part} is a {type(module).__name__}, expected self-attention from "
                f"tree_spec: it would read a forest as one sequence; {_FIX}"
            )
    _check_origin(f"{name}.mlp", getattr(layer, "mlp", None))


def _check_origin(name: str, module: Any) -> None:
    if module is not None and not _is_megatrons(module):
        raise UnsupportedError(
            f"{name} is a {type(module).__module__}.{type(module).__name__}, expected one of "
            "Megatron's: whether this one mixes tokens along the forest is not known"
        )


def _is_megatrons(module: Any) -> bool:
    """Whether the code of a layer is Megatron's, Megatron-Bridge's or TransformerEngine's."""
    return type(module).__module__.split(".")[0] in ("megatron", "transformer_engine")


def _check_attention(name: str, attention: Any) -> None:
    _refuse_others(name, attention)
    core = attention.core_attention
    for place, module, expected in (
        (name, attention, (ForestSelfAttention, ForestLatentAttention)),
        (f"{name}.core_attention", core, (ForestCoreAttention,)),
    ):
        if not isinstance(module, expected):
            raise UnsupportedError(
                f"{place} is a {type(module).__name__}, which reads a forest as one sequence: "
                f"{_FIX} (it serves SelfAttention, MLASelfAttention, DotProductAttention and "
                "TEDotProductAttention)"
            )


def _refuse_others(name: str, module: Any) -> None:
    kinds = {c.__name__ for c in type(module).__mro__}
    text_of_kind = next((text for kind, text in _OTHER_LAYERS.items() if kind in kinds), None)
    if text_of_kind is not None:
        raise UnsupportedError(
            f"{name} is {text_of_kind} ({type(module).__name__}): {_FIX} (it serves "
            "SelfAttention, MLASelfAttention, GatedDeltaNet and MambaMixer)"
        )


@contextmanager
def every_layer_attends(
    language_model: Any, local: LocalForest, tokens: RoutedTokens | None
) -> Iterator[None]:
    """A context for one forward over a forest, read once by every self-attention and router."""
    with counted_calls(local.mask.host) as calls:
        yield
        check_calls(language_model, calls(), tokens)


def check_calls(language_model: Any, calls: tuple[int, int], tokens: RoutedTokens | None) -> None:
    """Refuses the results of a forward in which a layer did not see the forest."""
    count, operators = calls
    # a convolution and a recurrence each
    states = 2 * sum(has_state(m) for m in language_model.modules())
    if operators != states:
        raise UnsupportedError(
            f"{operators} convolutions and recurrences followed the forest in a forward of "
            f"{type(language_model).__name__}, which has {states}: the others read the packed "
            "order (a patched forward, or a replaced layer)"
        )
    expected = sum(isinstance(m, Attention) for m in language_model.modules())
    if count != expected:
        raise UnsupportedError(
            f"{count} attention calls followed the forest in a forward of "
            f"{type(language_model).__name__}, which has {expected} attention layers: the "
            "others ran another attention (a patched forward, or a replaced layer)"
        )
    routers = len(routers_of(language_model))
    if tokens is not None and tokens.calls != routers:
        raise UnsupportedError(
            f"{tokens.calls} routers read their tokens in a forward of "
            f"{type(language_model).__name__}, which has {routers} routers: a layer does not hand "
            "on padding_mask"
        )
