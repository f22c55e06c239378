"""Models whose layers carry a state (convolutions, linear recurrences) on packed forests.

A recurrent layer of transformers calls functions of its module and hands them its keywords, the
tree mask among them. `prepare` gives the layers of a model the same forward, with these functions
replaced by those along the tree: the family's own code runs, and no class or module of transformers
is touched. In a sampler (`forest_cache`), they also keep states, and go on from those that rows
have. Without either, the family's own functions are called.

Legend: T packed tokens, D channels of a convolution, W taps, H heads (Hk of keys), K and V sizes of
a key and a value, G groups, N size of a state, P size of a head.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from prefixtree.errors import UnsupportedError
from prefixtree.models.along_tree import (
    AlongTree,
    KeepsStates,
    WholeForest,
    along_tree,
    check_own_code,
    with_globals,
)
from prefixtree.models.checks import attention_modules, refuse_pooled, set_attention, transformer_of
from prefixtree.models.experts import prepare_experts
from prefixtree.models.families import (
    PACKING_KEYWORDS,
    check_config,
    check_modules,
    family_of,
)
from prefixtree.models.family_table import FUSED, Family, layer_types_of
from prefixtree.models.indexers import prepare_indexers
from prefixtree.models.paths import unprepared
from prefixtree.models.plain_batches import SHOWN_POSITIONS
from prefixtree.packing.mask import TreeMask, check_mask
from prefixtree.parallel.attention import PartMask
from prefixtree.parallel.states import LayerStates

_MARK = "_prefixtree_prepared"
_HELD = "_prefixtree_registers"
_Model = TypeVar("_Model", bound=nn.Module)


def prepare(model: _Model) -> _Model:
    """Makes a model of transformers ready for forwards over packed forests, however it was loaded.

    It sets attn_implementation="prefixtree" where the model has another attention; a vision tower
    keeps its own. Where layers carry a state (Qwen3.5, Nemotron-H, Kimi Linear, LFM2 and others),
    recurrent layers get a class of their own, which runs the family's forward along the tree.
    Indexers, which choose the keys of a query (DeepSeek V3.2, GLM-5), get one likewise;
    `sequence_logprobs` does that by itself. A sequence classifier refuses to give one row for a
    forest of several. It checks what no single layer sees: that the type is
    verified, that every layer runs this attention, and that no dropout is active.

    The model still generates, and runs ordinary batches without gradients: as under "sdpa".

    A second call changes nothing. Copies and pickles of a prepared model are prepared;
    `from_pretrained` gives a model that is not.

    Args:
        model: a model of transformers, wrapped (PEFT, DDP, FSDP2) or not.

    Returns:
        The same model.

    Raises:
        TypeError: not a module.
        UnsupportedError: a model that does not run exactly on packed forests, with the reason.
    """
    transformer = transformer_of(model)
    config = transformer.config
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        check_config(part, transformer.training)
    # the model may be called by itself from now on, whatever trains then
    check_modules(model, may_change=True)
    set_attention(transformer)
    setattr(transformer, _HELD, _Registers())
    attention_modules(transformer)
    prepare_states(transformer)
    refuse_pooled(transformer)
    return model


class _Registers:
    """Held by prepared models: unpickling it imports prefixtree, which registers that."""


def prepare_states(transformer: Any) -> None:
    """Gives recurrent layers and indexers their forward along the tree, and experts theirs.

    Raises:
        UnsupportedError: a recurrent layer or an indexer that is not as the family's proof had it.
    """
    prepare_experts(transformer)
    config = transformer.config.get_text_config()
    family = family_of(config)
    mixers = [(n, m) for n, m in transformer.named_modules() if rules_of(_kind(m))]
    if family.has_indexers:
        prepare_indexers(transformer, config)
    elif not mixers and not family.rules:
        return
    if mixers or family.rules:
        for name, mixer in mixers:
            _check_mixer(name, mixer, config, family)
        _check_none_is_missing(len(mixers), config, family)
    for _, mixer in mixers:
        if not isinstance(mixer, AlongTree):
            mixer.__class__ = along_tree(_kind(mixer), _members)
    if family.hides_positions and not family.has_indexers:
        _show_positions(transformer.get_decoder())
    for _, module in attention_modules(transformer):
        setattr(module, _MARK, True)


def check_prepared(module: nn.Module) -> None:
    """Refuses an attention layer of a model whose recurrent layers or indexers do not know the
    tree yet.

    They would drop the mask without an error, and mix tokens or choose keys by packed order.
    """
    config: Any = module.config
    family = family_of(config)
    if getattr(module, _MARK, False):
        return
    if family.has_indexers:
        raise unprepared(config)
    if family.rules:
        raise UnsupportedError(
            f"{config.model_type} has recurrent layers, which mix tokens by packed order until the "
            "model is prepared: call prefixtree.prepare(model) once before model(...), or use "
            "sequence_logprobs, which does it by itself"
        )


# ---- functions along the tree --------------------------------------------------------------------


class KeepsForest(Protocol):
    """A growing forest (`sampling.forest_cache`)."""

    states: KeepsStates


def _conv(
    original: Any,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    tree_mask: TreeMask | LayerStates | None = None,
    forest_cache: KeepsForest | None = None,
    **kwargs: Any,
) -> Any:
    """causal_conv1d_fn: x [1, D, T], weight [D, W] -> [1, D, T]."""
    if tree_mask is None and forest_cache is None:
        return original(x, weight, bias, activation=activation, **kwargs)
    _check_call(tree_mask, x.transpose(1, 2), kwargs)
    # not x[0], whose gradient is laid out channel by channel: no product takes that at full speed
    rows = x.squeeze(0).t().to(weight.dtype)
    out = _states_of(tree_mask, forest_cache).conv(rows, weight, bias, activation)
    return out.to(x.dtype).t()[None]


def _delta_rule(
    original: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    tree_mask: TreeMask | LayerStates | None = None,
    forest_cache: KeepsForest | None = None,
    key_copies: int = 1,
    **kwargs: Any,
) -> Any:
    """Gated delta rule, its decay a number per head (g [1, T, H]) or per channel ([1, T, H, K])."""
    if tree_mask is None and forest_cache is None:
        return original(query, key, value, g=g, beta=beta, **kwargs)
    _check_call(tree_mask, query, kwargs)
    if query.shape[2] == value.shape[2]:
        # until 5.23 transformers repeats key heads before the call: ranks would exchange copies
        query, key = query[:, :, ::key_copies], key[:, :, ::key_copies]
    l2norm = kwargs.get("use_qk_l2norm_in_kernel", False)
    rows = (part.squeeze(0) for part in (query, key, value, g, beta))
    out = _states_of(tree_mask, forest_cache).delta_rule(*rows, qk_l2norm=l2norm)
    return out[None], None


def _ssd(
    original: Any,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    tree_mask: TreeMask | LayerStates | None = None,
    forest_cache: KeepsForest | None = None,
    **kwargs: Any,
) -> Any:
    """mamba2_chunk_scan: x [1, T, H, P], dt [1, T, H], A [H], B and C [1, T, G, N]."""
    if tree_mask is None and forest_cache is None:
        return original(x, dt, A, B, C, **kwargs)
    _check_call(tree_mask, x, kwargs)
    if kwargs.get("z") is not None:
        raise UnsupportedError("a gate inside mamba2_chunk_scan (z) is not verified")
    names = ("D", "dt_bias", "dt_softplus", "dt_limit")
    options = {name: kwargs[name] for name in names if name in kwargs}
    rows = x.squeeze(0), dt.squeeze(0), A, B.squeeze(0), C.squeeze(0)
    return _states_of(tree_mask, forest_cache).ssd(*rows, **options)[None]


def _not_fused(
    original: Any,
    *args: Any,
    tree_mask: TreeMask | None = None,
    forest_cache: KeepsForest | None = None,
    **kwargs: Any,
) -> Any:
    """One kernel for convolution, scan and norm, which knows no tree: None lets the layer go on."""
    return original(*args, **kwargs) if tree_mask is None and forest_cache is None else None


def _states_of(
    tree_mask: TreeMask | LayerStates | None, forest_cache: KeepsForest | None
) -> KeepsStates:
    """Where states come from and go to: this call, other steps or ranks, or a growing forest."""
    if forest_cache is not None:
        return forest_cache.states
    assert tree_mask is not None
    return tree_mask if isinstance(tree_mask, LayerStates) else WholeForest(tree_mask)


def _check_call(
    tree_mask: TreeMask | LayerStates | None, x: torch.Tensor, kwargs: dict[str, Any]
) -> None:
    """x [B, n, ..]; what the attention layers refuse, before a state mixes it. Without a mask:
    tokens of a growing forest's rows."""
    if x.shape[0] != 1:
        raise ValueError(f"a packed forest is one row: expected batch size 1, got {x.shape[0]}")
    if tree_mask is None:
        return
    if not isinstance(tree_mask, LayerStates):
        check_mask(tree_mask, "tree_mask")
    if tree_mask.query_tokens is not None:
        raise UnsupportedError(
            "a mask of some queries (TreeMask.for_queries) says nothing of the states between "
            "them: recurrent layers take the whole forest, packed.mask"
        )
    if any(kwargs.get(name) is not None for name in (*PACKING_KEYWORDS, "seq_idx")):
        raise ValueError(
            f"tree_mask cannot be combined with {', '.join((*PACKING_KEYWORDS, 'seq_idx'))}"
        )
    if any(kwargs.get(name) for name in _STATES_OUT):
        raise ValueError("a packed forest has no key-value cache: pass use_cache=False")
    if x.shape[1] != tree_mask.num_tokens:
        raise ValueError(
            f"a packed forest has no key-value cache: pass use_cache=False ({x.shape[1]} rows, the "
            f"mask has {tree_mask.num_tokens})"
        )


# how a layer asks for the state to put it into a cache
_STATES_OUT = ("output_final_state", "return_final_states")
# by the names that recurrent layers of transformers call
_TREE_RULES: dict[str, Any] = {
    "causal_conv1d_fn": _conv,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _ssd,
    FUSED: _not_fused,
}


# ---- layers --------------------------------------------------------------------------------------


def _members(original: Any) -> dict[str, Any]:
    """The same forward along the tree."""
    rules = {
        name: functools.partial(functools.partial, _TREE_RULES[name]) for name in rules_of(original)
    }
    return {"forward": _of_layer(with_globals(original.forward, rules))}


def _of_layer(forward: Any) -> Any:
    """The same forward, which gets what the mask of a part has for this layer, and how many value
    heads share a key head."""

    @functools.wraps(forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("tree_mask")
        if isinstance(mask, PartMask):
            kwargs["tree_mask"] = mask.of_layer(self)
        heads = getattr(self, "num_v_heads", 1), getattr(self, "num_k_heads", 1)
        if heads[0] > heads[1] and ("tree_mask" in kwargs or "forest_cache" in kwargs):
            kwargs["key_copies"] = heads[0] // heads[1]
        return forward(self, *args, **kwargs)

    return run


@functools.cache
def rules_of(kind: Any) -> frozenset[str]:
    """Which functions along the tree the forward of a class has a place for."""
    forward = inspect.unwrap(kind.forward)
    code = getattr(forward, "__code__", None)
    if code is None:
        return frozenset()
    # co_names has attributes too
    return frozenset(_TREE_RULES.keys() & set(code.co_names) & forward.__globals__.keys())


def _kind(module: nn.Module) -> Any:
    return type(module)


def _show_positions(decoder: nn.Module) -> None:
    """Lets the attention see position_ids beside the keywords that the layers hand on."""
    if _with_shown_positions not in decoder._forward_pre_hooks.values():
        decoder.register_forward_pre_hook(_with_shown_positions, with_kwargs=True)


def _with_shown_positions(
    decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs | {SHOWN_POSITIONS: kwargs.get("position_ids")}


# ---- checks --------------------------------------------------------------------------------------


def _check_mixer(name: str, mixer: nn.Module, config: Any, family: Family) -> None:
    kind = type(mixer).__name__
    if rules_of(_kind(mixer)) != set(family.rules):
        raise UnsupportedError(
            f"{name} ({kind}) computes {', '.join(sorted(rules_of(_kind(mixer))))}; verified for "
            f"{config.model_type} is {', '.join(sorted(family.rules)) or 'no recurrent layer'}"
        )
    check_own_code(name, mixer, "recurrent layers")
    parameters = inspect.signature(inspect.unwrap(type(mixer).forward)).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise UnsupportedError(
            f"{name}: {kind}.forward of this version of transformers takes no further keywords, so "
            "the tree mask does not reach it: pip install --upgrade transformers"
        )


def _check_none_is_missing(found: int, config: Any, family: Family) -> None:
    kinds = layer_types_of(config)
    expected = sum(kind in family.recurrent_types for kind in kinds)
    if found < max(1, expected):
        raise UnsupportedError(
            f"{config.model_type} has {expected} recurrent layers by its layer_types, of which "
            f"{found} have transformers' own code: replaced ones would mix tokens by packed order"
        )
