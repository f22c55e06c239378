"""An indexer in Triton: scores of the keys on each query's path, and the best of them.

    score(query, key) = sum over heads of weight x relu(scale x q . k)

A program has a few neighbouring queries with all their heads, and streams the keys of their paths.
Objects as large as heads x keys stay in its registers.

For the best keys (`kernels.best_keys`) a program has one query. It finds the score of the last
chosen key by bisection: the count of scores that reach a number tells on which side that score is.
Then it writes the query's words. If the largest of SIZES holds a path's scores, they are read once,
and counted in registers.

Legend: T packed tokens, n queries, H index heads, D head dim, K positions.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import torch
import triton
import triton.language as tl

from prefixtree.kernels import runtime
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
    """Writes SCORES [n, width] float32 of queries from `first` on, by position, up to their own."""
    tile = first_tile + tl.program_id(0)
    start = tl.load(Q_TILES + 3 * tile)
    query = tl.load(Q_TILES + 3 * tile + 1) - first
    length = tl.load(Q_TILES + 3 * tile + 2)
    token, head, alive = rows_of_tile(TOKENS * HEADS_PADDED, HEADS_PADDED, length)
    alive = alive & (head < HEADS)
    row = (query + token) * HEADS + head
    q = load_rows(Q, row * D, alive, D, D_PADDED)
    weight = tl.load(WEIGHTS + row, mask=alive, other=0.0)
    query_lane = tl.arange(0, TOKENS)
    into = SCORES + (query + query_lane)[None, :] * width
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
                visible((start + query_lane)[None, :], key[:, None], span[:, None], 0, 0, 0, False)
                & (query_lane < length)[None, :]
            )
            tl.store(into + place[:, None], total, mask=seen)


INTERPRETED = not isinstance(scores_kernel, triton.JITFunction)


def serves_scores(x: torch.Tensor, head_dim: int) -> bool:
    """Whether the kernel runs on x's device, in its dtype, with heads of so many dims."""
    if head_dim > 128:
        return False
    if not x.is_cuda:
        return INTERPRETED and x.dtype in (torch.float16, torch.float32)
    is_known = torch.version.hip is None and runtime.capability(x.device) >= (8, 0)
    return is_known and x.dtype in (torch.float16, torch.bfloat16)


def stages(capability: tuple[int, int]) -> int:
    """Depth of the pipeline over keys that shared memory holds with q, in half precision."""
    return 3 if capability in ((8, 0), (9, 0), (10, 0), (10, 3)) else 2


def tile_tokens(heads: int) -> int:
    """The number of queries of a program, a power of two."""
    return max(1, COLUMNS // triton.next_power_of_2(heads))


def tile_borders(mask: HostMask, heads: int) -> np.ndarray:
    """Lists the queries at which the tiles of programs begin, then their number, ascending."""
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
    """Scores the keys on the paths of neighbouring queries, float32 [n, K].

    q [n, H, D] are the mask's queries from `first`, one of `tile_borders`, up to another; keys
    [T, D] in its dtype; weights float32 [n, H]. Column d is of the key at position d of a query's
    path. Columns after the query's own position hold anything.
    """
    n, heads, d = q.shape
    tokens = tile_tokens(heads)
    tables = mask.tables(TileShape(tokens, KEYS), 0, torch.device("cpu"))
    rows = tables.q_tiles[:, 1].numpy()
    # searched without numpy, which would copy this view
    tile, end = (
        bisect_left(range(len(rows)), row, key=rows.__getitem__) for row in (first, first + n)
    )
    assert first == rows[tile]
    width = int(mask.position[mask.query_tokens[first : first + n]].max()) + 1
    scores = q.new_empty(n, width, dtype=torch.float32)
    tables = mask.tables(TileShape(tokens, KEYS), 0, q.device)
    with runtime.current(q.device):
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
            num_stages=stages(runtime.capability(q.device)),
        )
    return scores


# scores of a program, and its warps: 32 scores per thread, which leave room for 16 warps at once
SIZES = {2048: 2, 4096: 4, 8192: 8, 16384: 16}
REGISTERS = 128
# places of -inf and inf among the float32, see `_at`
_LOWEST, _HIGHEST = tl.constexpr(-0x7F800001), tl.constexpr(0x7F800000)


@triton.jit
def _scores(ROW, start, length, SIZE: tl.constexpr):
    """Loads the scores from column `start` on; after the query nan, which reaches no number."""
    column = start + tl.arange(0, SIZE)
    return tl.load(ROW + column, mask=column < length, other=float("nan"))


@triton.jit
def _at(place):
    """Gives the float32 at a place in their order, -0.0 at -1, 0.0 at 0, and nan above inf."""
    place = place.to(tl.int32)
    return (place ^ ((place >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _count(ROW, scores, length, number, SIZE: tl.constexpr, IS_WHOLE: tl.constexpr):
    """Counts the scores that reach a number, in registers if these are all."""
    if IS_WHOLE:
        count = tl.sum((scores >= number).to(tl.int32), 0)
    else:
        count = 0
        for start in range(0, length, SIZE):
            these = _scores(ROW, start, length, SIZE)
            count += tl.sum((these >= number).to(tl.int32), 0)
    return count


@triton.jit(do_not_specialize=("POSITION", "width", "num_words", "most", "shortest"))
def best_keys_kernel(
    SCORES,
    POSITION,
    BITS,
    width,
    num_words,
    most,
    shortest,
    SIZE: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """Writes BITS [n, num_words], 0 before, of queries with more columns than `shortest`."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(POSITION + row) + 1, width).to(tl.int32)
    # longer paths are left to another launch if IS_WHOLE
    if (length > shortest) & (length <= SIZE if IS_WHOLE else True):
        SCORES += row * width
        scores = _scores(SCORES, 0, length, SIZE)
        # `low` is reached by at least `most` scores, if so many are there, `high` by fewer
        low = tl.full([], _LOWEST, tl.int64)
        high = tl.full([], _HIGHEST + 1, tl.int64)
        reach_low = _count(SCORES, scores, length, _at(low), SIZE, IS_WHOLE)
        reach_high = 0
        is_number = reach_low == length
        while (reach_low > most) & (high - low > 1):
            middle = (low + high) >> 1
            reach = _count(SCORES, scores, length, _at(middle), SIZE, IS_WHOLE)
            if reach >= most:
                low = middle
                reach_low = reach
            else:
                high = middle
                reach_high = reach
        # scores between the two are equal, or no more than are left
        places_left = most - reach_high
        BITS += row * num_words
        lane = tl.arange(0, 32)[None, :]
        word = tl.arange(0, SIZE // 32)
        for start in range(0, length, SIZE):
            by_word = tl.reshape(_scores(SCORES, start, length, SIZE), [SIZE // 32, 32])
            above = (by_word >= _at(high)).to(tl.int32)
            tied = (by_word >= _at(low)).to(tl.int32) - above
            count = tl.sum(tied, 1)
            ties = tl.sum(tied << lane, 1)
            ties_left = places_left - tl.cumsum(count, 0) + count
            # one word keeps some of its ties, the lowest bits
            is_cut = (ties_left > 0) & (ties_left < count)
            cut = tl.sum(tl.where(is_cut, ties, 0), 0)
            dropped = cut
            for _ in range(tl.sum(tl.where(is_cut, ties_left, 0), 0)):
                dropped &= dropped - 1
            ties = tl.where(is_cut, cut ^ dropped, tl.where(ties_left > 0, ties, 0))
            bits = tl.sum(above << lane, 1) | ties
            at = start // 32 + word
            tl.store(BITS + at, tl.where(is_number, bits, 0), mask=at < num_words)
            places_left -= tl.sum(count, 0)


def serves_choice(scores: torch.Tensor) -> bool:
    """Whether the kernel runs on the scores' device, in their dtype."""
    is_known = torch.version.hip is None and scores.is_cuda
    return is_known and scores.dtype == torch.float32


def best_bits(
    scores: torch.Tensor, count: int, position: torch.Tensor, num_words: int
) -> torch.Tensor:
    """Computes `kernels.best_keys.best_bits` for float32 scores."""
    num_queries, width = scores.shape
    bits = torch.zeros(num_queries, num_words, dtype=torch.int32, device=scores.device)
    arguments = scores.contiguous(), position.contiguous(), bits, width, num_words, count
    longest = max(SIZES)
    shortest = 0
    for size, is_whole in (*dict.fromkeys(SIZES, True).items(), (longest, False)):
        if num_queries and width > shortest:
            with runtime.current(scores.device):
                best_keys_kernel[(num_queries,)](
                    *arguments,
                    shortest,
                    SIZE=size,
                    IS_WHOLE=is_whole,
                    num_warps=SIZES[size],
                    maxnreg=REGISTERS,
                )
        shortest = size
    return bits
