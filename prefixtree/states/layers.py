"""Models whose layers carry a state (convolutions, linear recurrences) on packed forests.

A recurrent layer of transformers calls functions of its module and hands them its keywords, the
tree mask among them. `prepare` gives the layers of a model the same forward, with these functions
replaced by those along the tree. So the family's own code runs, and no class or module of
transformers is touched. In a sampler (`forest_cache`), the functions also keep states, and go on
from rows' states. Without either, the family's own functions are called.

Legend: T packed tokens, D channels of a convolution, W taps, H heads (Hk of keys), K and V sizes of
a key and a value, G groups, N size of a state, P size of a head.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Protocol

import torch
from torch import nn

from prefixtree.errors import UnsupportedError
from prefixtree.models.along_tree import (
    AlongTree,
    along_tree,
    check_own_code,
    with_globals,
)
from prefixtree.models.families import PACKING_KEYWORDS, family_of
from prefixtree.models.family_table import FUSED, Family, functions_of, layer_types_of
from prefixtree.models.plain_batches import SHOWN_POSITIONS
from prefixtree.packing.mask import TreeMask, check_mask
from prefixtree.states.protocol import KeepsStates, WholeForest
from prefixtree.wings import DividedMask, DividedStates


def prepare_layers(transformer: Any, config: Any) -> None:
    """Gives recurrent layers their forward along the tree; refuses those without a proof."""
    family = family_of(config)
    mixers = [(n, m) for n, m in transformer.named_modules() if functions_of(_kind(m))]
    for name, mixer in mixers:
        _check_mixer(name, mixer, config, family)
    _check_none_is_missing(len(mixers), config, family)
    for _, mixer in mixers:
        if not isinstance(mixer, AlongTree):
            mixer.__class__ = along_tree(_kind(mixer), _members)
    if family.hides_positions:
        _show_positions(transformer.get_decoder())


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
    tree_mask: TreeMask | DividedStates | None = None,
    forest_cache: KeepsForest | None = None,
    **kwargs: Any,
) -> Any:
    """Runs causal_conv1d_fn along the tree: x [1, D, T], weight [D, W] -> [1, D, T]."""
    if tree_mask is None and forest_cache is None:
        return original(x, weight, bias, activation=activation, **kwargs)
    _check_call(tree_mask, x.transpose(1, 2), kwargs)
    # not x[0]: its gradient is laid out channel by channel, which no product takes at full speed
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
    tree_mask: TreeMask | DividedStates | None = None,
    forest_cache: KeepsForest | None = None,
    key_copies: int = 1,
    **kwargs: Any,
) -> Any:
    """Runs the gated delta rule, its decay g per head [1, T, H] or per channel [1, T, H, K]."""
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
    tree_mask: TreeMask | DividedStates | None = None,
    forest_cache: KeepsForest | None = None,
    **kwargs: Any,
) -> Any:
    """Runs mamba2_chunk_scan: x [1, T, H, P], dt [1, T, H], A [H], B and C [1, T, G, N]."""
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
    """Returns None for the fused kernel, which knows no tree, so that the layer goes on."""
    return original(*args, **kwargs) if tree_mask is None and forest_cache is None else None


def _states_of(
    tree_mask: TreeMask | DividedStates | None, forest_cache: KeepsForest | None
) -> KeepsStates:
    """The keeper of states: this call, other steps or ranks, or a growing forest."""
    if forest_cache is not None:
        return forest_cache.states
    assert tree_mask is not None
    if isinstance(tree_mask, TreeMask):
        return WholeForest(tree_mask)
    of_part: Any = tree_mask
    keeper: KeepsStates = of_part
    return keeper


def _check_call(
    tree_mask: TreeMask | DividedStates | None, x: torch.Tensor, kwargs: dict[str, Any]
) -> None:
    """Refuses x [B, n, ..] that attention layers refuse, before a state mixes its rows."""
    if x.shape[0] != 1:
        raise ValueError(f"a packed forest is one row: expected batch size 1, got {x.shape[0]}")
    if tree_mask is None:
        return
    if not isinstance(tree_mask, DividedStates):
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


# keywords by which a layer asks for the state to put it into a cache
_STATES_OUT = ("output_final_state", "return_final_states")
# names that recurrent layers of transformers call -> functions along the tree
_TREE_RULES: dict[str, Any] = {
    "causal_conv1d_fn": _conv,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _ssd,
    FUSED: _not_fused,
}


# ---- layers --------------------------------------------------------------------------------------


def _members(original: Any) -> dict[str, Any]:
    """Makes the forward of a layer along the tree."""
    rules = {
        name: functools.partial(functools.partial, _TREE_RULES[name])
        for name in functions_of(original)
    }
    return {"forward": _of_layer(with_globals(original.forward, rules))}


def _of_layer(forward: Any) -> Any:
    """Makes a forward that gets a part's stand-in for this layer, and its number of key copies."""

    @functools.wraps(forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("tree_mask")
        if isinstance(mask, DividedMask):
            kwargs["tree_mask"] = mask.of_layer(self)
        heads = getattr(self, "num_v_heads", 1), getattr(self, "num_k_heads", 1)
        if heads[0] > heads[1] and ("tree_mask" in kwargs or "forest_cache" in kwargs):
            kwargs["key_copies"] = heads[0] // heads[1]
        return forward(self, *args, **kwargs)

    return run


def _kind(module: nn.Module) -> Any:
    return type(module)


def _show_positions(decoder: nn.Module) -> None:
    """Lets the attention see position_ids among the keywords that the layers hand on."""
    if _with_shown_positions not in decoder._forward_pre_hooks.values():
        decoder.register_forward_pre_hook(_with_shown_positions, with_kwargs=True)


def _with_shown_positions(
    decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs | {SHOWN_POSITIONS: kwargs.get("position_ids")}


# ---- checks --------------------------------------------------------------------------------------


def _check_mixer(name: str, mixer: nn.Module, config: Any, family: Family) -> None:
    kind, functions = type(mixer).__name__, functions_of(_kind(mixer))
    if functions != set(family.functions):
        raise UnsupportedError(
            f"{name} ({kind}) computes {', '.join(sorted(functions))}; verified for "
            f"{config.model_type} is {', '.join(sorted(family.functions)) or 'no recurrent layer'}"
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
