"""Attention of a vision tower: a call per size of picture, in the place of one per picture.

transformers calls flash kernels once per block, with the borders of pictures (of windows, in
Qwen2.5-VL). Other attention it calls once per picture or window. Under "prefixtree" and "sdpa" a
block's attention takes the first way, and pictures of one size are a batch of torch's attention.

Legend: P patches of all pictures, N of them of one size, L patches of each, H heads, D head dim.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from prefixtree.kernels.operators import uncompiled
from prefixtree.models.copied_forwards import with_globals

# what a forward asks before it hands borders on, and what it then hands them on as
_ASKED, _BORDERS = "is_flash_attention_requested", "cu_seq_lens_q"
_MEANINGS: dict[str, Callable[[Any], Any]] = {
    _ASKED: lambda _: lambda *_, **__: True,
    # which would wait for the GPU
    "get_max_seqlen": lambda _: lambda *_, **__: None,
    # a graph ends at this function, and not inside of what looks it up
    "ALL_ATTENTION_FUNCTIONS": lambda _: SimpleNamespace(get_interface=lambda *_: _attend),
}


@functools.cache
def with_borders(kind: Any) -> Any | None:
    """The forward of a class of attention that hands on the borders of pictures.

    Args:
        kind: the class of a tower's attention.

    Returns:
        A function as `kind.forward`; None where it hands on none.
    """
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    if code is None or _ASKED not in code.co_names:
        return None
    if not any(isinstance(names, tuple) and _BORDERS in names for names in code.co_consts):
        return None
    return with_globals(kind.forward, {n: m for n, m in _MEANINGS.items() if n in code.co_names})


@uncompiled
def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """`picture_attention` as a forward calls it, outside of graphs: it looks at borders."""
    return picture_attention(
        module, query, key, value, attention_mask, dropout, scaling, cu_seq_lens_q
    )


def picture_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    borders: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """Attention within each picture, as torch's.

    Args:
        module: the attention of a tower's block.
        query, key, value: [1, H, P, D] each.
        attention_mask, dropout, scaling: as transformers' function for "sdpa" takes them.
        borders: int [pictures + 1], where pictures begin and end. None: all patches are one
            picture, or as the mask says.

    Returns:
        [1, P, H, D], and no attention weights.
    """
    attend = functools.partial(
        sdpa_attention_forward,
        module,
        attention_mask=attention_mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=False,
    )
    if borders is None:
        return attend(query, key, value)[0], None
    sizes = borders.diff().tolist()
    if len(set(sizes)) == 1:
        # values are a part of what their projection gives, which would be kept whole
        rows = (x.squeeze(0).transpose(0, 1).contiguous() for x in (query, key, value))
        batch = (x.unflatten(0, (-1, sizes[0])).transpose(1, 2) for x in rows)
        return attend(*batch)[0].flatten(0, 1).unsqueeze(0), None
    of_size: dict[int, list[int]] = {}
    for number, size in enumerate(sizes):
        of_size.setdefault(size, []).append(number)
    each = [x.split(sizes, 2) for x in (query, key, value)]
    found: dict[int, torch.Tensor] = {}
    for numbers in of_size.values():
        batch = (torch.cat([x[n] for n in numbers]) for x in each)
        found |= zip(numbers, attend(*batch)[0].split(1), strict=True)
    return torch.cat([found[n] for n in range(len(sizes))], 1), None
