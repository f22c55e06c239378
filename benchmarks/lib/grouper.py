"""Prefix Grouper, by its package: attention of the prompt, then of every response over a
copy of the prompt's keys and values (arXiv 2506.05433).

The package lays q, k and v out and puts the results back; what it calls for attention is FA2 over
variable lengths, with the padding taken out and put back, as its documentation does with
transformers' flash attention.

Legend: P prompt tokens, N responses, L the longest one, H query heads, Hk kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from prefixtree.testing.attention import Attention, replicated_attention


def grouped_attention(
    prompt: int, responses: Sequence[int], device: torch.device, dtype: torch.dtype
) -> Attention:
    """Attention of q [P + sum of responses, H, D], k and v [..., Hk, D]: prompt, then responses."""
    from prefix_grouper import PrefixGrouper

    grouper = PrefixGrouper([[prompt, *responses]], device=device)
    calls = [
        _padded([prompt], [prompt], device, dtype),
        _padded(list(responses), [prompt + n for n in responses], device, dtype),
    ]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        pending = iter(calls)

        def attend(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
            return next(pending)(q, k, v)

        batched = (x.transpose(0, 1)[None] for x in (q, k, v))
        return grouper.forward(attend, *batched)[0]

    return run


def _padded(
    lengths: list[int], key_lengths: list[int], device: torch.device, dtype: torch.dtype
) -> Attention:
    """Of q [N, H, L, D] padded on the right -> [N, L, H, D]; its rows are found once."""
    _, attend = replicated_attention(lengths, device, dtype, key_lengths)
    rows, key_rows = _rows(lengths, device), _rows(key_lengths, device)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        flat_q, flat_k, flat_v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        out = attend(flat_q[rows], flat_k[key_rows], flat_v[key_rows])
        padded = out.new_zeros(q.shape[0] * q.shape[2], *out.shape[1:])
        return padded.index_copy(0, rows, out).view(q.shape[0], q.shape[2], *out.shape[1:])

    return run


def _rows(lengths: list[int], device: torch.device) -> torch.Tensor:
    """Where the tokens are in [N, L] flattened."""
    column = torch.arange(max(lengths))
    return (column < torch.tensor(lengths)[:, None]).flatten().nonzero()[:, 0].to(device)
