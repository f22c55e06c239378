"""Common parts of adapters: errors for a trainer that is missing or a transformers of another
version, and the line that trainers log when they start.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
import torch

from prefixtree.errors import UnsupportedError, missing
from prefixtree.forest import PrefixForest
from prefixtree.kernels.attention.api import explain
from prefixtree.kernels.runtime import installed
from prefixtree.packing.mask import TreeMask

# ---- packages that are missing, or of another version --------------------------------------------

#: the transformers that models run on, as pyproject.toml has them: from the first, below the second
TRANSFORMERS = "5.5", "6"


def check_transformers(version: str) -> None:
    """Raises an UnsupportedError for a version of transformers that is not served."""
    first, end = map(_release, TRANSFORMERS)
    if not first <= _release(version) < end:
        raise UnsupportedError(
            f"transformers {version} is not served: prefixtree needs transformers >= "
            f"{TRANSFORMERS[0]}, < {TRANSFORMERS[1]} (pip install "
            f"'transformers>={TRANSFORMERS[0]},<{TRANSFORMERS[1]}')"
        )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def require(adapter: str, package: str, install: str) -> None:
    """Raises a `ModuleNotFoundError` that says what to install, where a package is missing."""
    if not installed(package):
        raise missing(adapter, package, install)


# ---- the line that trainers log once -------------------------------------------------------------

_log = logging.getLogger("prefixtree")
# a prompt and four answers, as parents and lengths
_FOREST = (-1, 0, 0, 0, 0), (2048, 512, 512, 512, 512)


def announce(config: Any, device: torch.device, dtype: torch.dtype, **settings: Any) -> None:
    """Logs that packing is on, as a warning of the logger "prefixtree", which users see."""
    words = ", ".join(f"{k}={v!r}" for k, v in settings.items() if v is not None)
    _log.warning(
        "packing is on: each distinct token of a micro-batch is computed once%s. Of a prompt with "
        "four answers %s",
        f" ({words})" if words else "",
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
