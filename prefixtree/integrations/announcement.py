"""The line that trainers log once when they start: that packing is on, by which kernel, and how."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from prefixtree.forest import PrefixForest
from prefixtree.kernels.attention.api import explain
from prefixtree.packing.mask import TreeMask

_log = logging.getLogger("prefixtree")
# a prompt and four answers, as parents and lengths
_FOREST = (-1, 0, 0, 0, 0), (2048, 512, 512, 512, 512)


def announce(config: Any, device: torch.device, dtype: torch.dtype, **settings: Any) -> None:
    """Logs that packing is on, as a warning of the logger "prefixtree", which users see.

    Args:
        config: of the model.
        device: where it runs. dtype: of its attention.
        settings: of the plan, by name; those that are None are left out.
    """
    given = ", ".join(f"{k}={v!r}" for k, v in settings.items() if v is not None)
    _log.warning(
        "packing is on: each distinct token of a micro-batch is computed once%s. Of a prompt with "
        "four answers %s",
        f" ({given})" if given else "",
        _kernel(config.get_text_config(), device, dtype),
    )


def _kernel(config: Any, device: torch.device, dtype: torch.dtype) -> str:
    """The answer of `explain` for a small tree and the heads of a model."""
    heads: int = config.num_attention_heads
    shared = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    of_value = getattr(config, "v_head_dim", None) or dim
    if nope := getattr(config, "qk_nope_head_dim", None):
        # latents are expanded
        dim, shared = nope + config.qk_rope_head_dim, heads
    forest = PrefixForest.from_parents(*_FOREST)
    mask = TreeMask(np.repeat(forest.node_subtree_end, forest.node_length)).to(device)
    row = torch.empty(1, 1, 1, dtype=dtype, device=device)
    q = row.expand(mask.num_tokens, heads, dim)
    k, v = (row.expand(mask.num_tokens, shared, d) for d in (dim, of_value))
    return explain(mask, q, k, v)
