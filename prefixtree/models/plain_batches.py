"""Ordinary batches on a model with attn_implementation="prefixtree": what `generate` runs.

A call without a tree mask must never train on a causal mask by accident, so it always raises with
gradients. Without them, a batch is ordinary only if its positions grow by one along every row:
those of a forest of several sequences do not. It gets the masks and the attention of "sdpa".
Nothing else tells the two apart in every family: some do not show attention whether a cache is
used, and `generate` drops masks without padding.

Legend: B rows, n queries, m keys (cached ones included).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from prefixtree.errors import UnsupportedError
from prefixtree.models.families import check_config, family_of
from prefixtree.models.family_table import ATTENDING_TYPES, COMPRESSED_TYPES, layer_types_of
from prefixtree.wings import load

# the keyword of positions in models whose layers hand on all keywords but position_ids
SHOWN_POSITIONS = "shown_position_ids"
_FIX = (
    "call the model with **packed.model_inputs(), or pass tree_mask=packed.mask; ordinary batches "
    'run within torch.no_grad(), and with gradients after model.set_attn_implementation("sdpa")'
)
_LOST_CACHE = (
    "a key-value cache was taken away. Gradient checkpointing does that in training mode: call "
    "model.eval() to generate"
)


def plain_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    chosen: dict[str, torch.Tensor] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention as "sdpa" does.

    query [B, H, n, D], key [B, Hk, m, D], value [B, Hk, m, Dv] -> ([B, n, H, Dv], None).

    Args:
        attention_mask: [B, 1, n, m], true (or 0) where a query sees a key; None for a causal one.
        chosen: what a layer with an indexer chose, by keyword (`CHOICES`). Default: nothing.

    Raises:
        ValueError: a call that may be a packed forest without its mask.
    """
    if torch.is_grad_enabled():
        raise ValueError(f'attn_implementation="prefixtree" needs the forest\'s mask: {_FIX}')
    config: Any = module.config
    check_config(config, training=False)
    if not COMPRESSED_TYPES.isdisjoint(layer_types_of(config)):
        raise UnsupportedError(
            f"ordinary batches of {config.model_type}, whose keys are compressed, are not verified "
            'under "prefixtree": use model.set_attn_implementation("eager") for them'
        )
    length, keys = query.shape[2], key.shape[2]
    if attention_mask is not None and attention_mask.shape[-1] != keys:
        raise ValueError(
            f"the attention mask has {attention_mask.shape[-1]} keys, the layer {keys}: "
            f"{_LOST_CACHE}"
        )
    if attention_mask is None and length == keys == 1 and _may_have_lost_its_cache(module):
        raise ValueError(
            f"a compiled layer cannot tell a prompt of one token from this: {_LOST_CACHE}"
        )
    # one token with cached keys is no forest; reading its position would wait for the GPU
    if shows_positions(module) and (length > 1 or (attention_mask is None and keys == 1)):
        positions = shown_positions(kwargs)
        if positions is None and family_of(config).hides_positions:
            raise UnsupportedError(
                f"{config.model_type} does not pass position_ids to its attention, which "
                "tell ordinary batches from packed ones, until the model is prepared: call "
                "prefixtree.prepare(model) once before it generates"
            )
        _check_positions_do_not_jump(positions, attention_mask, length)
    if chosen:
        # positions were checked without it: it may hide the token before a jump
        of_wing = load("sparse").plain_mask
        attention_mask = of_wing(module, attention_mask, chosen, key, shown_positions(kwargs))
    slides = sliding_window is not None and keys > sliding_window
    if attention_mask is None and (slides or (length != keys and _drops_rows(config))):
        attention_mask = sdpa_mask(
            batch_size=1,
            q_length=length,
            kv_length=keys,
            q_offset=keys - length,
            mask_function=sliding_window_causal_mask_function(sliding_window)
            if slides
            else causal_mask_function,
            allow_is_causal_skip=False,
            device=query.device,
        )
    if softcap is None and sinks is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    # sdpa has neither softcap nor sinks; the family's eager attention adds the mask to the scores
    if attention_mask is None:
        # keys after the queries are places of a static cache that nothing was written to
        seen = query.new_ones(1, 1, length, keys, dtype=torch.bool)
        attention_mask = seen if length == 1 else seen.tril()
    if attention_mask.dtype == torch.bool:
        bias = torch.zeros_like(attention_mask, dtype=query.dtype)
        attention_mask = bias.masked_fill(~attention_mask, torch.finfo(query.dtype).min)
    out, _ = family_eager(module)(
        module, query, key, value, attention_mask, scaling=scaling, softcap=softcap, **kwargs
    )
    return out, None


def shows_positions(module: nn.Module) -> bool:
    """Whether this layer checks the positions: the first layer that attends does, once per forward.

    No layer does in compiled code: values cannot be read there, and reading a layer's number would
    give one graph per layer.
    """
    if torch.compiler.is_compiling():
        return False
    index: Any = getattr(module, "layer_idx", None)
    if index is None or index <= 0:
        # one that several layers share has no number of its own
        return index is not None
    kinds = layer_types_of(module.config)
    # the first layers of hybrids may carry a state and see no positions
    return len(kinds) > index and not any(k in ATTENDING_TYPES for k in kinds[:index])


def shown_positions(kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The position_ids among the keywords of an attention function; None where it gets none."""
    found = kwargs.get("position_ids")
    return kwargs.get(SHOWN_POSITIONS) if found is None else found


def plain_mask(attention_mask: torch.Tensor | None, **kwargs: Any) -> torch.Tensor | None:
    """Makes the mask [B, 1, n, m] of a batch with padding or cached keys; refuses gradients.

    It gives None where "sdpa" gets None, as its fast kernels and those for grouped heads take no
    mask.
    """
    if torch.is_grad_enabled():
        given = "attention_mask" if attention_mask is not None else "key-value cache"
        raise ValueError(
            'with gradients, attn_implementation="prefixtree" runs packed forests alone, and these '
            f"take no {given}. A padded batch is prefixtree.batch_logprobs(model, input_ids, "
            "attention_mask); a packed forest is model(**packed.model_inputs()), whose tree_mask "
            "says what sees what; other batches run under torch.no_grad(), or with "
            'model.set_attn_implementation("sdpa")'
        )
    if _drops_rows(kwargs.get("config")):
        kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(**{**kwargs, "attention_mask": attention_mask})


def _drops_rows(config: Any) -> bool:
    """Whether layers that share keys may get only the last queries."""
    return bool(getattr(config, "num_kv_shared_layers", None))


def _may_have_lost_its_cache(module: nn.Module) -> bool:
    """Whether checkpointing may have dropped the cache, in compiled code, which reads no values."""
    return module.training and torch.compiler.is_compiling()


def _check_positions_do_not_jump(
    position_ids: torch.Tensor | None, attention_mask: torch.Tensor | None, length: int
) -> None:
    """Refuses positions that jump elsewhere than at padding: those of a forest do at branches."""
    if position_ids is None:
        raise UnsupportedError(
            "this model does not pass position_ids to its attention, which tell ordinary batches "
            'from packed ones: use model.set_attn_implementation("sdpa") to generate'
        )
    if attention_mask is None and bool((position_ids[..., 0] != 0).any()):
        raise ValueError(
            f"position_ids start above 0, but earlier tokens are not in the batch: {_LOST_CACHE}"
        )
    jumps = position_ids.reshape(-1, *position_ids.shape[-2:]).diff() != 1  # [.., B or 1, n - 1]
    if attention_mask is not None and attention_mask.shape[2:] == (length, length):
        sees = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        jumps = jumps & sees[:, 0].diagonal(-1, 1, 2)
    elif attention_mask is not None:
        return  # cached keys: not a packed forest
    if bool(jumps.any()):
        raise ValueError(
            "position_ids jump, as those of a packed forest or of packed documents do, but there "
            f"is no tree_mask: {_FIX}"
        )


def family_eager(module: nn.Module) -> Any:
    """The eager attention function that an attention layer's family defines next to its class."""
    for cls in type(module).__mro__:
        eager = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if eager is not None:
            return eager
    raise UnsupportedError(
        f"{type(module).__name__} has no eager attention for a batch without a tree: use "
        'model.set_attn_implementation("eager") to generate'
    )
