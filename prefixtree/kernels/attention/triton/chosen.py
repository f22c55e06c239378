"""The bits of chosen keys in the order in which the kernels read them: tile by tile.

A query's words (`kernels.chosen`) follow its path. A kernel needs, for a tile of queries and one of
keys, whether each pair is visible and chosen: a word for 32 keys of each query or, if scores are
held transposed, for 32 queries of each key, side by side. One pass over the visited tiles writes
them, a bit per pair; the kernels then compare nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from prefixtree.kernels.attention.protocol import AttentionCall
from prefixtree.kernels.triton_primitives import key_lanes, visible
from prefixtree.packing.block_tables import BlockTables


@triton.jit
def _pairs(
    CHOSEN,
    K_SPANS,
    K_TILES,
    Q_TILES,
    POSITION,
    q_tile,
    k_tile,
    num_words,
    window,
    HAS_WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Whether each query of a tile sees and chose each key of one, [TOKENS, KEYS]."""
    token = tl.arange(0, TOKENS)
    start = tl.load(Q_TILES + 3 * q_tile)
    alive = token < tl.load(Q_TILES + 3 * q_tile + 2)
    begin = tl.load(K_TILES + 2 * k_tile)
    key, live, span, _ = key_lanes(K_SPANS, POSITION, k_tile, begin, KEYS, False, False)
    place = tl.load(POSITION + key, mask=live, other=0)
    position = tl.load(POSITION + start + token, mask=alive, other=0)
    seen = visible(
        (start + token)[:, None],
        key[None, :],
        span[None, :],
        position[:, None],
        place[None, :],
        window,
        HAS_WINDOW,
    )
    seen = seen & alive[:, None]
    row = (tl.load(Q_TILES + 3 * q_tile + 1) + token).to(tl.int64) * num_words
    word = tl.load(CHOSEN + row[:, None] + (place // 32)[None, :], mask=seen, other=0)
    return ((word >> (place % 32)[None, :]) & 1) != 0


@triton.jit
def _packed(pairs, SIZE: tl.constexpr, LANES: tl.constexpr):
    """Packs bool [SIZE, LANES] into int32 [words, SIZE], a bit per lane."""
    WIDE: tl.constexpr = LANES if LANES < 32 else 32
    bits = pairs.to(tl.int32) << (tl.arange(0, LANES) % 32)[None, :]
    return tl.trans(tl.sum(tl.reshape(bits, [SIZE, LANES // WIDE, WIDE]), 2))


# CHOSEN may be a slice, which starts anywhere
@triton.jit(do_not_specialize=("CHOSEN", "num_words", "window"))
def by_query_kernel(
    CHOSEN,
    BITS,
    TILES,
    K_SPANS,
    K_TILES,
    Q_TILES,
    Q_ORDER,
    Q_PTR,
    Q_SPLIT,
    Q_RUNS,
    PARTIAL_PTR,
    PARTIAL,
    POSITION,
    num_words,
    window,
    HAS_WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Writes BITS [visited pairs of tiles, words, TOKENS], a bit per key, and TILES [pairs]."""
    # TILES gets the packed start of the keys, with its bits flipped if every query sees and chose
    # all of them
    WORDS: tl.constexpr = (KEYS + 31) // 32
    q_tile = tl.load(Q_ORDER + tl.program_id(0))
    first = tl.load(PARTIAL_PTR + q_tile)
    # full tiles, which come first, are of one path: the words of their keys follow one another
    partial = first
    for run in range(tl.load(Q_PTR + q_tile), tl.load(Q_SPLIT + q_tile)):
        partial += tl.load(Q_RUNS + 3 * run + 1) - tl.load(Q_RUNS + 3 * run)
    token = tl.arange(0, TOKENS)[None, :]
    word = tl.arange(0, WORDS)[:, None]
    alive = token < tl.load(Q_TILES + 3 * q_tile + 2)
    row = (tl.load(Q_TILES + 3 * q_tile + 1) + token).to(tl.int64) * num_words
    ALL: tl.constexpr = -1 if KEYS >= 32 else (1 << KEYS) - 1
    for i in range(first, partial):
        begin = tl.load(PARTIAL + 2 * i + 1)
        place = tl.load(POSITION + begin)
        at = place // 32 + word
        low = tl.load(CHOSEN + row + at, mask=alive, other=0).to(tl.uint32, bitcast=True)
        # if no bit of the next word is needed, there may be none
        there = alive & (at + 1 < num_words)
        high = tl.load(CHOSEN + row + at + 1, mask=there, other=0).to(tl.uint32, bitcast=True)
        shift = (place % 32).to(tl.uint32)
        # in two shifts, as one by 32 is undefined
        bits = ((low >> shift) | ((high << 1) << (31 - shift))).to(tl.int32, bitcast=True)
        into = BITS + tl.cast(i, tl.int64) * (WORDS * TOKENS)
        tl.store(into + word * TOKENS + token, bits)
        sparse = tl.sum(tl.sum((alive & ((bits & ALL) != ALL)).to(tl.int32), 1), 0)
        tl.store(TILES + i, tl.where(sparse == 0, -1 - begin, begin))
    for i in range(partial, tl.load(PARTIAL_PTR + q_tile + 1)):
        pairs = _pairs(
            CHOSEN,
            K_SPANS,
            K_TILES,
            Q_TILES,
            POSITION,
            q_tile,
            tl.load(PARTIAL + 2 * i),
            num_words,
            window,
            HAS_WINDOW,
            TOKENS,
            KEYS,
        )
        into = BITS + tl.cast(i, tl.int64) * (WORDS * TOKENS)
        tl.store(into + word * TOKENS + token, _packed(pairs, TOKENS, KEYS))
        tl.store(TILES + i, tl.load(PARTIAL + 2 * i + 1))


# CHOSEN may be a slice, which starts anywhere
@triton.jit(do_not_specialize=("CHOSEN", "num_words", "window"))
def by_key_kernel(
    CHOSEN,
    BITS,
    RUN_PAIRS,
    K_SPANS,
    K_TILES,
    Q_TILES,
    PIECES,
    K_RUNS,
    POSITION,
    num_words,
    window,
    HAS_WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Writes BITS [visited pairs of tiles, words, KEYS], a bit per query token."""
    WORDS: tl.constexpr = (TOKENS + 31) // 32
    PIECES += 5 * tl.program_id(0)
    k_tile = tl.load(PIECES)
    at = tl.arange(0, WORDS)[:, None] * KEYS + tl.arange(0, KEYS)[None, :]
    for run in range(tl.load(PIECES + 1), tl.load(PIECES + 2)):
        first = tl.load(K_RUNS + 4 * run)
        into = BITS + tl.load(RUN_PAIRS + run).to(tl.int64) * (WORDS * KEYS)
        for q_tile in range(first, tl.load(K_RUNS + 4 * run + 3)):
            pairs = _pairs(
                CHOSEN,
                K_SPANS,
                K_TILES,
                Q_TILES,
                POSITION,
                q_tile,
                k_tile,
                num_words,
                window,
                HAS_WINDOW,
                TOKENS,
                KEYS,
            )
            tl.store(into + at, _packed(tl.trans(pairs), KEYS, TOKENS))
            into += WORDS * KEYS


def warps_of(tokens: int, keys: int) -> int:
    """Counts the warps of a program that lays out the bits of such tiles; with fewer it spills."""
    return 8 if tokens * keys > 128 * 64 else 4


def lay_out(
    call: AttentionCall,
    position: torch.Tensor,
    tables: BlockTables,
    size: tuple[int, int],
    by_key: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lays out the bits of a call, for kernels whose program has a tile of queries or keys.

    position is int32 [T], `size` the tokens and keys of a tile, powers of two, and tables are
    `masked`. Returns int32 [pairs of tiles, words, tokens or keys] in a row. By key, where a word
    has a bit per query, also the pair with which each run of `tables.k_runs` begins, int32 [runs];
    by query TILES of `by_query_kernel`.
    """
    tokens, keys = size
    words_per_pair = -(-tokens // 32) * keys if by_key else -(-keys // 32) * tokens
    assert call.chosen is not None
    chosen = call.chosen.contiguous()
    bits = chosen.new_empty(len(tables.partial_tiles) * words_per_pair)
    if by_key:
        tiles = tables.k_runs[:, 3] - tables.k_runs[:, 0]
        begins = tiles.cumsum(0, dtype=torch.int32) - tiles
        order: tuple[torch.Tensor, ...] = tables.pieces, tables.k_runs
    else:
        begins = chosen.new_empty(len(tables.partial_tiles))
        order = (
            tables.q_order,
            tables.q_ptr,
            tables.q_split,
            tables.q_runs,
            tables.partial_ptr,
            tables.partial_tiles,
        )
    kernel = by_key_kernel if by_key else by_query_kernel
    kernel[(len(tables.pieces if by_key else tables.q_tiles),)](
        chosen,
        bits,
        begins,
        tables.k_spans,
        tables.k_tiles,
        tables.q_tiles,
        *order,
        position,
        chosen.shape[1],
        call.window,
        HAS_WINDOW=call.window > 0,
        TOKENS=tokens,
        KEYS=keys,
        num_warps=warps_of(tokens, keys),
    )
    return bits, begins
