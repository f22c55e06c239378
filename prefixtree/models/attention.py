"""The two functions registered with transformers: attention over a packed forest, and its mask.

The mask travels as the keyword `tree_mask` through `model(...)` to every layer, through gradient
checkpointing and torch.compile. Models that cannot run exactly are refused (`models.families`). A
batch without a tree mask is an ordinary one (`models.plain_batches`).
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from types import NoneType
from typing import Any, Protocol

import torch
from torch import nn
from transformers.masking_utils import sdpa_mask

from prefixtree.errors import UnsupportedError
from prefixtree.kernels.attention import tree_attention
from prefixtree.models.families import (
    CHOICES,
    ENCODERS,
    ENCODES,
    PACKING_KEYWORDS,
    check_config,
    check_replayed,
    check_router_logits,
)
from prefixtree.models.family_table import has_indexers
from prefixtree.models.plain_batches import (
    plain_attention,
    plain_mask,
    shown_positions,
    shows_positions,
)
from prefixtree.models.prepared import check_prepared, unprepared
from prefixtree.models.rope import check_lengths, fixed_lengths
from prefixtree.packing.host_mask import HostMask
from prefixtree.packing.layout import LABELS, NoLabels
from prefixtree.packing.mask import TreeMask, check_mask
from prefixtree.wings import DividedMask, LayerMask, load

# raised for tensors of a trace, which have shapes and no values
_TRACED = ("torch._subclasses.fake_tensor", "torch._subclasses.functional_tensor")


class KeepsKeys(Protocol):
    """The keys and values of a growing forest (`sampling.forest_cache`)."""

    def keep(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> None:
        """Keeps keys and values of a packed forest: q [T, H, D], k [T, Hk, D], v [T, Hk, Dv]."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """Computes attention of new tokens to the keys of their rows: [T, H, Dv]."""
        ...


def prefixtree_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | LayerMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    tree_mask: TreeMask | DividedMask | None = None,
    forest_cache: KeepsKeys | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention over a packed forest: the function registered with transformers.

    Without a tree mask, `models.plain_batches` computes or refuses the call.

    Args:
        query: [1, H, T, D].
        key: [1, Hk, T, D], heads not repeated; [1, Hk, 2 T, D] where compressed keys follow.
        value: [1, Hk, T, Dv], heads not repeated, as many rows as key.
        attention_mask: None with a tree mask; a LayerMask in layers of a wing.
        dropout: 0 with a tree mask.
        scaling: `scale` of `tree_attention`.
        sliding_window: `window` of `tree_attention`.
        s_aux: `sinks` of `tree_attention`.
        tree_mask: the packed forest's mask. A DividedMask where a rank or a step computes a part of
            the forest: T is then the number of own tokens.
        forest_cache: the keys and values of a growing forest (`sampling`). With a tree mask it
            keeps those of this call; without one, the call's tokens attend to what it kept.
        kwargs: the model's other keywords; those that a packed forest cannot serve are refused.

    Returns:
        ([1, T, H, Dv], None).

    Raises:
        TypeError: a tree_mask that is neither a TreeMask nor a DividedMask.
        ValueError: arguments that do not fit a packed forest.
        UnsupportedError: a model or setting that does not run exactly on packed forests.
    """
    if not getattr(module, "is_causal", True):
        encode = kwargs.get(ENCODES)
        if encode is None:
            raise UnsupportedError(
                f"{type(module).__name__} attends both ways, as image encoders do: images of a "
                "forest are scored with sequence_logprobs(model, packed, images=images); for "
                'other calls with images use model.set_attn_implementation({"": "prefixtree", '
                '"text_config": "prefixtree", "vision_config": "sdpa"})'
            )
        # patches of one image see each other and nothing of the tree
        encoded: tuple[torch.Tensor, None] = encode(
            module, query, key, value, attention_mask, dropout, scaling
        )
        return encoded
    given = {name: kwargs.pop(name, None) for name in CHOICES}
    chosen = {name: keys for name, keys in given.items() if keys is not None}
    if attention_mask is None and sliding_window is None and _slides(module):
        raise UnsupportedError(
            f"{type(module).__name__} keeps its sliding window from the attention function: set "
            "layer_types to full_attention, or use_sliding_window to False"
        )
    options: dict[str, Any] = {
        "scale": scaling,
        "window": sliding_window,
        "softcap": softcap,
        "sinks": s_aux,
    }
    if tree_mask is None and forest_cache is not None:
        return forest_cache.attend(*token_rows(query, key, value), **options).unsqueeze(0), None
    layer_mask = None
    if isinstance(attention_mask, LayerMask):
        layer_mask, attention_mask = attention_mask, None
        layer_mask.check(module.config, chosen)
    if tree_mask is None:
        assert layer_mask is None
        kwargs["dropout"] = dropout
        return plain_attention(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling,
            sliding_window,
            softcap,
            s_aux,
            chosen,
            **kwargs,
        )
    mask = tree_mask.mask if isinstance(tree_mask, DividedMask) else tree_mask
    check_mask(mask, "tree_mask")
    if chosen and layer_mask is attention_mask is None:
        # these keywords are a choice of keys that the tree did not make
        raise unprepared(module.config)
    num_keys = query.shape[2] if layer_mask is None else layer_mask.num_keys(query.shape[2])
    if key.shape[2] != num_keys:
        raise ValueError(
            f"a packed forest has no key-value cache: pass use_cache=False ({key.shape[2]} key "
            f"rows, the mask has {mask.num_tokens})"
        )
    if attention_mask is not None:
        raise ValueError(
            "tree_mask already says which tokens see which: do not pass an attention_mask too"
        )
    if query.shape[0] != 1:
        raise ValueError(f"a packed forest is one row: expected batch size 1, got {query.shape[0]}")
    if kwargs.get("use_cache"):
        raise ValueError("a packed forest has no key-value cache: pass use_cache=False")
    if any(kwargs.get(name) is not None for name in PACKING_KEYWORDS):
        raise ValueError(f"tree_mask cannot be combined with {', '.join(PACKING_KEYWORDS)}")
    if dropout > 0:
        raise UnsupportedError(
            f"attention dropout is {dropout}: set config.attention_dropout to 0, or model.eval()"
        )
    check_router_logits(module.config, kwargs)
    check_replayed(module, kwargs)
    if not isinstance(kwargs.get("num_items_in_batch"), (NoLabels, NoneType)):
        raise UnsupportedError(LABELS)
    is_first = shows_positions(module)
    _check_config(module, mask, is_first)
    check_prepared(module)
    if is_first:
        _check_position_ids(shown_positions(kwargs), mask)
    if layer_mask is not None:
        out = layer_mask.attend(module, (query, key, value), tree_mask, chosen, **options)
        return out.unsqueeze(0), None
    q, k, v = token_rows(query, key, value)
    if forest_cache is not None:
        forest_cache.keep(q, k, v, sliding_window)
    return attend_once(module, q, k, v, tree_mask, **options).unsqueeze(0), None


def attend_once(
    layer: Hashable,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: TreeMask | DividedMask,
    **options: Any,
) -> torch.Tensor:
    """Computes attention over a forest, or over a part of one: [t, H, Dv]."""
    if isinstance(mask, DividedMask):
        return mask.attend(layer, q, k, v, **options)
    out: torch.Tensor = tree_attention(q, k, v, mask, **options)
    return out


def token_rows(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views query, key and value of a batch's one row by tokens: [1, H, T, D] -> [T, H, D]."""
    if torch.is_autocast_enabled(tensors[0].device.type):
        # RoPE leaves query and key in float32; eager's matrix products would cast all three
        dtype = torch.get_autocast_dtype(tensors[0].device.type)
        tensors = tuple(x.to(dtype) for x in tensors)
    # `x[0]` would have a gradient that is filled with zeros first, and lies head by head
    return tuple(x.squeeze(0).transpose(0, 1) for x in tensors)


# attributes and values of attention modules that have a sliding window
_SLIDING = {"layer_type": "sliding_attention", "is_sliding": True, "is_local_attention": True}


def _slides(module: nn.Module) -> bool:
    """Whether the configuration gives this layer a sliding window.

    Some models put the window into their mask alone and do not pass it to the attention function.
    """
    layer_types: Any = getattr(module.config, "layer_types", None)
    if not layer_types or "sliding_attention" not in layer_types:
        return False
    # Most modules have one of these attributes. In compiled code, reading layer_idx would give one
    # graph per layer
    for name, sliding in _SLIDING.items():
        if (known := getattr(module, name, None)) is not None:
            return bool(known == sliding)
    index: Any = getattr(module, "layer_idx", None)
    return index is not None and bool(layer_types[index] == "sliding_attention")


# the configuration and mode that the first layer of a forward checked, by mask
_checked: weakref.WeakKeyDictionary[HostMask, tuple[Any, bool]] = weakref.WeakKeyDictionary()


def _check_config(module: nn.Module, mask: TreeMask, is_first: bool) -> None:
    """Runs `check_config` once per forward: it takes as long as the rest of a call."""
    config: Any = module.config
    if torch.compiler.is_compiling():
        check_config(config, module.training)
        if fixed_lengths(config):
            # torch then runs the layer uncompiled, unless it must compile all of it
            raise UnsupportedError(
                "compiled layers cannot see how long sequences are, on which dynamic and longrope "
                "RoPE depend: leave the layers uncompiled"
            )
        return
    checked = None if is_first else _checked.get(mask.host)
    if checked is None or checked[0] is not config or checked[1] != module.training:
        check_config(config, module.training)
        check_lengths(config, mask.host)
        _checked[mask.host] = config, module.training


def _check_position_ids(position_ids: torch.Tensor | None, tree_mask: TreeMask) -> None:
    """Refuses position_ids [1, Tq] other than the tokens' positions in the forest.

    The model's default counts packed tokens, which would make RoPE wrong without an error.
    Positions of `packed.model_inputs()` are known by their memory. Others cost one comparison per
    forward, for which the host waits. It is skipped while a CUDA graph is captured and for tensors
    of a trace, where values cannot be read. None: the model does not pass positions to attention.
    """
    if position_ids is None:
        raise UnsupportedError(
            "this model does not pass position_ids to its attention, so wrong ones would go "
            "unseen; to a model with a multi-dimensional RoPE pass "
            "packed.position_ids.expand(4, 1, -1)"
        )
    if position_ids.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    if type(position_ids).__module__ in _TRACED:
        return
    positions = position_ids[0]
    if tree_mask.is_given(positions):
        return
    depths = tree_mask.position_ids
    if tree_mask.query_tokens is not None:
        depths = depths[tree_mask.query_tokens]
    if not torch.equal(positions.to(depths.dtype), depths):
        raise ValueError(
            "position_ids are not the tokens' positions in the forest: pass "
            "packed.position_ids[None], or call the model with **packed.model_inputs()"
        )


def prefixtree_mask(
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> torch.Tensor | LayerMask | None:
    """Makes the attention mask of a call: the mask function registered with transformers.

    A packed forest needs no T x T mask and gets None (a LayerMask without pairs where layers have
    an indexer). transformers does not pass the tree mask here. A batch with padding or cached keys
    gets an ordinary mask, which the attention function refuses together with a tree mask.
    """
    if getattr(kwargs.get("config"), "model_type", None) in ENCODERS:
        lengths = {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset}
        return sdpa_mask(**lengths, attention_mask=attention_mask, use_vmap=use_vmap, **kwargs)
    if use_vmap:
        raise UnsupportedError(
            "this model adds its own mask function (images or bidirectional parts), which a tree "
            "mask would ignore"
        )
    if attention_mask is None and q_length == kv_length and q_offset == 0:
        config = kwargs.get("config")
        if not has_indexers(config):
            return None
        found: LayerMask = load("sparse").UnpreparedMask(q_length, config, kwargs.get("device"))
        return found
    return plain_mask(
        attention_mask, q_length=q_length, kv_length=kv_length, q_offset=q_offset, **kwargs
    )
