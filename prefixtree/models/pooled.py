"""A sequence classifier that is called over a packed forest by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from prefixtree.errors import UnsupportedError


def refuse_pooled(classifier: nn.Module) -> None:
    """From now on the classifier refuses to give one row for a forest of several paths."""
    hooks = classifier._forward_hooks.values()
    if isinstance(getattr(classifier, "score", None), nn.Module) and _check_rows not in hooks:
        classifier.register_forward_hook(_check_rows, with_kwargs=True)


def _check_rows(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """A hook that copies and pickles of the model have too."""
    mask = kwargs.get("tree_mask")
    logits = getattr(output, "logits", None)
    if mask is None or not isinstance(logits, torch.Tensor) or logits.ndim != 2:
        return
    # of a single path its last token is meant
    if (mask.host.subtree_end == mask.host.num_tokens).all():
        return
    raise UnsupportedError(
        f"{type(module).__name__} reads its values at the last token of a row, and a packed forest "
        f"is one row: it gave {list(logits.shape)} for all sequences. Call "
        "prefixtree.sequence_values(model, packed), whose last row [-1] is a sequence's value"
    )
