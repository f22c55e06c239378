"""Latents in place of the keys and values that they expand to, where queries choose few keys.

Multi-head latent attention expands one latent row per token to the keys and values of all heads. A
prepared attention holds its latents back in a layer that chooses keys, on paths so long that
gathered keys take less time (`kernels.latents`). The attention function takes them, with the
expanding projection as the module itself computes it. If anything is not verified, it has them
expanded after all, as the family does.

Legend: T packed tokens, H heads, R and P columns of a latent and of its key with positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from prefixtree.kernels.latents.gathered import (
    gathered_attention,
    kernels_for,
    pays,
)
from prefixtree.kernels.operators import note_call
from prefixtree.models.changes import changing
from prefixtree.packing.mask import TreeMask

# attribute with an attention's latents during a forward: an empty list before they are there
_HELD = "_prefixtree_latents"
_TAKES = ["self", "kv_nope", "k_rot"]
_SIZES = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
# modules around the matrices of an adapter
_AROUND = (nn.ModuleDict, nn.ParameterDict, nn.Identity)


class Latents(NamedTuple):
    """kv [1, 1, T, R] and rope [1, 1, T, P], as the family's `expand_kv` takes them."""

    kv: torch.Tensor
    rope: torch.Tensor


def of_expansion(original: Any) -> dict[str, Any]:
    """Makes an `expand_kv` whose latents may be held back; nothing for an unverified attention."""
    expand = getattr(original, "expand_kv", None)
    if expand is None or list(inspect.signature(expand).parameters) != _TAKES:
        return {}
    if not {"kv_b_proj", *_SIZES[1:]} <= set(expand.__code__.co_names):
        return {}

    def expand_kv(self: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> Any:
        held = vars(self).get(_HELD)
        if held is None:
            return expand(self, kv_nope, k_rot)
        held.append(Latents(kv_nope, k_rot))
        # the family hands these on without a look at their numbers
        return kv_nope, kv_nope

    return {"expand_kv": expand_kv}


@contextmanager
def held_back(attention: Any, mask: Any) -> Iterator[None]:
    """Holds an attention's latents back during its forward, if that pays; yields whether."""
    if not _gathers(attention, mask):
        yield
        return
    with changing(attention) as changes:
        changes.set(attention, **{_HELD: []})
        yield


def _gathers(attention: Any, mask: Any) -> bool:
    """Whether gathering is verified for a layer that chooses keys, and pays."""
    if not isinstance(mask, TreeMask) or mask.query_tokens is not None or mask.deterministic:
        return False
    config = attention.config
    if "expand_kv" not in vars(type(attention)) or config._attn_implementation != "prefixtree":
        return False
    # sinks join the softmax, which the kernels do not know
    if hasattr(attention, "sinks") or not all(hasattr(attention, name) for name in _SIZES):
        return False
    if kernels_for(mask.backend, mask.device) is None:
        return False
    rank, rope, nope, dv = (getattr(attention, name) for name in _SIZES)
    # the mask decides first, so that most layers need no look at their modules
    is_worth_it = pays(mask.host, config.index_topk, (nope + rope, dv), (rank, rope))
    return is_worth_it and _is_linear(attention.kv_b_proj)


def _is_linear(projection: nn.Module) -> bool:
    """Whether a projection is its matrix alone: neither quantised, DoRA nor with dropout."""
    for module in projection.modules():
        kind = type(module)
        if kind is nn.Linear or (kind.__name__ == "Linear" and "lora" in kind.__module__):
            weight, bias = module.weight, module.bias
            is_plain = type(weight) is nn.Parameter and weight.is_floating_point() and bias is None
            if not is_plain or getattr(module, "lora_variant", None) or "forward" in vars(module):
                return False
        elif kind is nn.Dropout:
            if module.training and module.p:
                return False
        elif kind not in _AROUND and kind.__name__ != "BufferDict":
            return False
    return True


def held_by(attention: nn.Module) -> Latents | None:
    """The latents that an attention held back in the running forward."""
    held = vars(attention).get(_HELD)
    return held[-1] if held else None


def expanded(attention: Any, latents: Latents) -> tuple[torch.Tensor, torch.Tensor]:
    """Expands latents to key [1, H, T, D] and value [1, H, T, Dv] after all."""
    key, value = type(attention)._original.expand_kv(attention, *latents)
    return key, value


def attend(
    attention: Any,
    q: torch.Tensor,
    latents: Latents,
    mask: TreeMask,
    *,
    chosen: torch.Tensor | None,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor | None:
    """Attends to latents by q [T, H, D], giving [T, H, Dv]; None if keys must be expanded."""
    kernels = kernels_for(mask.backend, q.device)
    rank, rope = latents.kv.shape[-1], latents.rope.shape[-1]
    if chosen is None or scale is None or not (window is softcap is sinks is None):
        return None
    # tensors without numbers, as memory is traced with, know torch's operations alone
    if type(q) is not torch.Tensor or not kernels.serves(q, rank, rope):
        return None
    # through the module, so that adapters and the hooks of sharded weights count
    eye = torch.eye(rank, dtype=latents.kv.dtype, device=q.device)
    w = attention.kv_b_proj(eye).view(rank, q.shape[1], -1)
    rows = torch.cat([latents.kv, latents.rope], -1)[0, 0]
    note_call(mask.host, "attention")
    return gathered_attention(
        q,
        rows.to(q.dtype),
        w.to(q.dtype),
        mask.host,
        chosen,
        attention.config.index_topk,
        scale,
        kernels,
    )
