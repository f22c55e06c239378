"""An lm_head that transformers' tensor parallelism cut along the vocabulary.

transformers gives such a layer a forward of its own, which multiplies by this rank's slice of the
weight and, as most plans say, gathers the logits. Scores need no gathered logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from prefixtree.kernels.lm_head.eager import VocabularySlice
from prefixtree.models.checks import foreign_module
from prefixtree.models.low_precision import is_plain

# who wrote the forward, and what it wraps: a further wrapper might change logits
_COLWISE_FORWARD = ("transformers.distributed.tensor_parallel", "torch.nn.modules.linear")


@dataclass(frozen=True)
class SlicedHead:
    """This rank's slice of an lm_head.

    Attributes:
        weight: [W, d], with the graph to the parameter.
        bias: [W] or None.
        vocabulary: which rows these are.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    vocabulary: VocabularySlice


def sliced_head(lm_head: nn.Module, forward: Callable[..., Any]) -> SlicedHead | None:
    """This rank's slice; None for every lm_head that is not transformers' own split of a linear
    layer along its rows.

    Called inside the forward, where FSDP2 has put its parameters together and what is left of their
    sharding is tensor parallelism's.

    Args:
        lm_head: the output embedding.
        forward: its forward outside of scoring.
    """
    if not is_linear(lm_head) or foreign_module(forward, _COLWISE_FORWARD) is not None:
        return None
    weight: Any = lm_head.weight
    bias: Any = lm_head.bias
    if not _is_cut_by_rows(weight) or not (bias is None or _is_cut_by_rows(bias)):
        return None
    mesh, size = weight.device_mesh, weight.device_mesh.size()
    # as torch.chunk cuts: the last rank may have fewer rows, or none
    widest = -(-weight.shape[0] // size)
    if (size - 1) * widest >= weight.shape[0]:
        return None
    vocabulary = VocabularySlice(mesh.get_group(), mesh.get_local_rank() * widest, widest)
    return SlicedHead(weight.to_local(), None if bias is None else bias.to_local(), vocabulary)


def is_linear(lm_head: nn.Module) -> bool:
    """Whether its class and weight compute what nn.Linear computes; its own `forward` may do
    something else.

    Sharding wrappers change the class by a subclass of the same forward.
    """
    if not isinstance(lm_head, nn.Linear) or type(lm_head).forward is not nn.Linear.forward:
        return False
    return is_plain(lm_head.weight)


def _is_cut_by_rows(parameter: Any) -> bool:
    if not hasattr(parameter, "placements"):
        return False
    from torch.distributed.tensor import Shard

    return tuple(parameter.placements) == (Shard(0),)
