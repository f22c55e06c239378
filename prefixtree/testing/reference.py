"""The reference of a comparison: eager attention in little memory, and sums that do not drift.

Nothing here is prefixtree's attention: the family's eager function is called on a few query rows at
a time.

Legend: B batch, n tokens, H query heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from prefixtree.models.plain_batches import family_eager, of_chosen

EAGER_BY_ROWS = "eager_by_rows"
# attention scores held at once, beside some six copies. On a CPU 64 MiB of float32: glibc takes
# what exceeds 32 MiB from the kernel and gives it back. Smaller blocks lie in its heap, where the
# results that are kept between them leave holes: measured seven times the memory at 4,000 tokens
_CPU_SCORES, _GPU_SCORES = 2**24, 2**28


def eager_by_rows(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function "eager_by_rows": eager's results without its H x n x n.

    A query row's attention depends on no other row's. So blocks of rows go through the family's
    eager function one after the other, and again in the backward.

    Args:
        module: the attention layer.
        query, key, value [B, H, n, D], [B, Hk, n, D] and [B, Hk, n, Dv].
        attention_mask: bool [B, 1, n, n], true where a query sees a key; None in a vision tower
            without padding, where every query sees every key.
        indices: int [B, n, k], the keys that an indexer chose. Default: all.
        kwargs: of the family's eager function.

    Returns:
        [B, n, H, Dv], and no attention weights.
    """
    if kwargs.get("block_indices") is not None:
        raise ValueError('blocks of keys are chosen by attn_implementation="eager" alone')
    eager = family_eager(module)
    if indices is not None:
        attention_mask = of_chosen(attention_mask, indices)
    if attention_mask is None:
        return eager(module, query, key, value, None, **kwargs)[0], None

    def block(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        bias = torch.zeros_like(visible, dtype=q.dtype)
        bias.masked_fill_(~visible, torch.finfo(q.dtype).min)
        return eager(module, q, k, v, bias, **kwargs)[0]

    scores = _CPU_SCORES if query.device.type == "cpu" else _GPU_SCORES
    rows = max(1, scores // (query.shape[0] * query.shape[1] * key.shape[2]))
    if rows >= query.shape[2]:
        return block(query, key, value, attention_mask), None
    parts = zip(query.split(rows, 2), attention_mask.split(rows, 2), strict=True)
    outs = [
        checkpoint(block, q, key, value, visible, use_reentrant=False, preserve_rng_state=False)
        for q, visible in parts
    ]
    return torch.cat(outs, 1), None


def _by_rows_mask(*args: Any, **kwargs: Any) -> torch.Tensor:
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})


AttentionInterface.register(EAGER_BY_ROWS, eager_by_rows)
AttentionMaskInterface.register(EAGER_BY_ROWS, _by_rows_mask)


class FaithfulSums(TorchFunctionMode):
    """Inside, embeddings and layer norms on a CPU sum their weights' gradients in float32.

    torch sums these in the dtype of the weights there: over some 10,000 tokens in bfloat16 the
    gradient of an embedding is off by a tenth, that of a layer norm's bias by most of itself. The
    error grows with the tokens of one call, so a packed batch, one call, gets more of it than the
    same sequences one at a time. Everything else that sums over tokens does so in float32, as do
    GPUs. Forward results stay the same but for the last bit of a layer norm.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (F.embedding, F.layer_norm):
            return func(*args, **kwargs)
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        dtypes = {x.dtype for x in tensors if x.is_floating_point()}
        if len(dtypes) != 1 or not all(x.device.type == "cpu" for x in tensors):
            return func(*args, **kwargs)
        args = tuple(_in_float32(x) for x in args)
        return func(*args, **{k: _in_float32(x) for k, x in kwargs.items()}).to(dtypes.pop())


@contextmanager
def float32_convolutions() -> Iterator[None]:
    """Inside, cuDNN computes float32 convolutions in float32, not in TF32 as torch lets it.

    A vision tower of transformers embeds patches by a convolution, which moves log-probabilities by
    more than a float32 run may be off. Packed forests embed them by a product.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32
    try:
        cudnn.allow_tf32 = False
        yield
    finally:
        cudnn.allow_tf32 = before


def _in_float32(x: Any) -> Any:
    is_half = isinstance(x, torch.Tensor) and x.dtype in (torch.bfloat16, torch.float16)
    return x.float() if is_half else x
