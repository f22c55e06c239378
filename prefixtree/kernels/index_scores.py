"""An indexer's scores of the keys on each query's path, in Triton; imported where triton is.

    score(query, key) = sum over heads of weight x relu(scale x q . k)

A program has a few neighbouring queries with all their heads, and streams the keys of their paths.
What is as large as heads x keys stays in its registers.

Legend: T packed tokens, n queries, H index heads, D head dim, K positions.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import torch
import triton
import triton.language as tl

from prefixtree.kernels import device_info
from prefixtree.kernels.triton_primitives import (
    key_lanes,
    load_rows,
    product,
    rows_of_tile,
    visible,
)
from prefixtree.packing.block_tables import TileShape
from prefixtree.packing.host_mask import HostMask

# keys, and (query, head) pairs, of a program's product
KEYS, COLUMNS, WARPS = 128, 128, 8


@triton.jit(do_not_specialize=("first", "first_tile", "width"))
def scores_kernel(
    Q,
    K,
    WEIGHTS,
    SCORES,
    K_SPANS,
    POSITION,
    Q_TILES,
    Q_PTR,
    Q_RUNS,
    first,
    first_tile,
    width,
    scale,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """SCORES [n, width] float32 of the queries from `first` on, the column of a key being its
    position. What stands behind a query's own position is not written."""
    tile = first_tile + tl.program_id(0)
    start = tl.load(Q_TILES + 3 * tile)
    query = tl.load(Q_TILES + 3 * tile + 1) - first
    length = tl.load(Q_TILES + 3 * tile + 2)
    token, head, alive = rows_of_tile(TOKENS * HEADS_PADDED, HEADS_PADDED, length)
    alive = alive & (head < HEADS)
    row = (query + token) * HEADS + head
    q = load_rows(Q, row * D, alive, D, D_PADDED)
    weight = tl.load(WEIGHTS + row, mask=alive, other=0.0)
    mine = tl.arange(0, TOKENS)
    into = SCORES + (query + mine)[None, :] * width
    for run in range(tl.load(Q_PTR + tile), tl.load(Q_PTR + tile + 1)):
        for k_tile in range(tl.load(Q_RUNS + 3 * run), tl.load(Q_RUNS + 3 * run + 1)):
            begin = k_tile * KEYS
            key, live, span, _ = key_lanes(K_SPANS, POSITION, k_tile, begin, KEYS, False, False)
            k = load_rows(K, key.to(tl.int64) * D, live, D, D_PADDED)
            # heads run along the columns, so that a thread holds many of them
            scores = tl.maximum(product(k, tl.trans(q)) * scale, 0.0) * weight[None, :]
            total = tl.sum(tl.reshape(scores, [KEYS, TOKENS, HEADS_PADDED]), 2)
            place = tl.load(POSITION + key, mask=live, other=0)
            seen = (
                visible((start + mine)[None, :], key[:, None], span[:, None], 0, 0, 0, False)
                & (mine < length)[None, :]
            )
            tl.store(into + place[:, None], total, mask=seen)


INTERPRETED = not isinstance(scores_kernel, triton.JITFunction)


def serves(x: torch.Tensor, head_dim: int) -> bool:
    """Whether the kernel runs where x is, in its dtype, with heads of so many dims."""
    if head_dim > 128:
        return False
    if not x.is_cuda:
        return INTERPRETED and x.dtype in (torch.float16, torch.float32)
    is_known = torch.version.hip is None and device_info.capability(x.device) >= (8, 0)
    return is_known and x.dtype in (torch.float16, torch.bfloat16)


def stages(capability: tuple[int, int]) -> int:
    """Depth of the pipeline over keys: what shared memory holds beside q, in half precision."""
    return 3 if capability in ((8, 0), (9, 0), (10, 0), (10, 3)) else 2


def tile_tokens(heads: int) -> int:
    """Queries of a program, a power of two."""
    return max(1, COLUMNS // triton.next_power_of_2(heads))


def tile_borders(mask: HostMask, heads: int) -> np.ndarray:
    """The queries at which the tiles of programs begin, then their number, ascending."""
    tables = mask.tables(TileShape(tile_tokens(heads), KEYS), 0, torch.device("cpu"))
    return np.append(tables.q_tiles[:, 1].numpy(), mask.num_queries)


def index_scores(
    q: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    mask: HostMask,
    first: int,
    scale: float,
) -> torch.Tensor:
    """The scores of the keys on the paths of neighbouring queries.

    Args:
        q: [n, H, D], those of the mask's queries from `first` on, up to a border of `tile_borders`.
        keys: [T, D] in q's dtype; those behind the queries are not looked at.
        weights: float32 [n, H].
        mask: of the forest.
        first: row of the first query, one of `tile_borders`.
        scale: the factor on q . k.

    Returns:
        float32 [n, K], K one more than the greatest position of a query: column d is of the key at
        position d of its query's path. What stands behind a query's own position is no number.
    """
    n, heads, d = q.shape
    tokens = tile_tokens(heads)
    tables = mask.tables(TileShape(tokens, KEYS), 0, torch.device("cpu"))
    rows = tables.q_tiles[:, 1].numpy()
    # a view that numpy would copy to search
    tile, end = (
        bisect_left(range(len(rows)), row, key=rows.__getitem__) for row in (first, first + n)
    )
    assert first == rows[tile]
    width = int(mask.position[mask.query_tokens[first : first + n]].max()) + 1
    scores = q.new_empty(n, width, dtype=torch.float32)
    tables = mask.tables(TileShape(tokens, KEYS), 0, q.device)
    with device_info.current(q.device):
        scores_kernel[(end - tile,)](
            q.contiguous(),
            keys.contiguous(),
            weights.contiguous(),
            scores,
            tables.k_spans,
            mask.on(q.device)["position_ids"],
            tables.q_tiles,
            tables.q_ptr,
            tables.q_runs,
            first,
            tile,
            width,
            scale,
            HEADS=heads,
            HEADS_PADDED=triton.next_power_of_2(heads),
            D=d,
            D_PADDED=max(16, triton.next_power_of_2(d)),
            TOKENS=tokens,
            KEYS=KEYS,
            num_warps=WARPS,
            num_stages=stages(device_info.capability(q.device)),
        )
    return scores
