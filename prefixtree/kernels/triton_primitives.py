"""Device functions that the kernels share.

Logits are held in base 2: exp2 is the hardware's exponential, and the scale folds into its input. A
row is a (query token, query head) pair. A tile of rows holds the query heads of one kv head side by
side (GQA), or some of them if the group is larger.
"""

from __future__ import annotations

import triton
import triton.language as tl

# arguments that differ by forest are not specialised on: a new forest must not compile anything.
# Strides and the inputs' addresses are, because they decide whether loads can be 16 bytes wide
FOREST_ARGUMENTS = ("num_queries", "rows_a_block", "tokens_a_block", "window")

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# a masked logit: so low that exp2 of it is 0 next to any real one, and finite, so that a row whose
# first tiles are all masked needs no extra case: its sums there are multiplied by 0 at its first
# visible key, and every query sees itself
MASKED = tl.constexpr(-1.0e30)
# a masked score, not yet multiplied by `outer`: a power of two, so that the product is exact
MASKED_SCORE = tl.constexpr(-(2.0**80))


@triton.jit
def rows_of_tile(ROWS: tl.constexpr, HEADS: tl.constexpr, length):
    """Finds each row's query token in the tile, head in the block, and whether alive. # [ROWS]"""
    row = tl.arange(0, ROWS)
    token = row // HEADS
    return token, row % HEADS, token < length


@triton.jit
def load_rows(base, offsets, alive, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Loads rows of a [*, DIM] matrix whose last stride is 1, zero where dead. # [rows, PADDED]"""
    column = tl.arange(0, PADDED)
    inside = alive[:, None]
    if PADDED != DIM:
        inside = inside & (column < DIM)[None, :]
    return tl.load(base + offsets[:, None] + column[None, :], mask=inside, other=0.0)


@triton.jit
def load_queries(
    X,
    first_row,
    first_head,
    token,
    head,
    alive,
    stride_token,
    stride_head,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TMA: tl.constexpr,
):
    """Loads rows of q or dout [Tq, H, DIM] in pieces of columns: a tuple of # [ROWS, WIDTH]"""
    # X is a pointer or a tensor descriptor; dead rows hold zeros, or through a descriptor whatever
    # is after the tile; through a descriptor pieces come as boxes, which are in registers as a
    # product's first operand; through a pointer as matrices, which are in shared memory
    pieces = ()
    for first in tl.static_range(0, DIM, WIDTH):
        if TMA:
            x = X.load([first_row, first_head, first]).reshape(ROWS, WIDTH)
        else:
            base = X + first_row.to(tl.int64) * stride_token + first_head.to(tl.int64) * stride_head
            at = token * stride_token + head * stride_head
            x = load_rows(base + first, at, alive, DIM - first, WIDTH)
        pieces += (x,)
    return pieces


@triton.jit
def load_keys(
    X,
    begin,
    alive,
    kv_head,
    stride_token,
    stride_head,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TMA: tl.constexpr,
    ALL: tl.constexpr,
):
    """Loads KEYS rows of k or v [T, Hk, DIM] in pieces of columns: a tuple of # [KEYS, WIDTH]"""
    # ALL says that no row is dead; X is a pointer, or a descriptor of the matrix [T, columns] in
    # which the heads are side by side: dead lanes and padding then hold whatever is after the tile;
    # it is a matrix and not a reshaped [T, Hk, DIM] box, because only a tile loaded as a matrix
    # stays in shared memory as the first operand of a product; dK/dV has no registers for it
    pieces = ()
    for first in tl.static_range(0, DIM, WIDTH):
        if TMA:
            x = X.load([begin, kv_head * stride_head + first])
        else:
            base = X + begin.to(tl.int64) * stride_token + kv_head.to(tl.int64) * stride_head
            column = first + tl.arange(0, WIDTH)
            at = base + tl.arange(0, KEYS)[:, None] * stride_token + column[None, :]
            if ALL and first + WIDTH <= DIM:
                x = tl.load(at)
            elif ALL:
                x = tl.load(at, mask=(column < DIM)[None, :], other=0.0)
            else:
                x = tl.load(at, mask=alive[:, None] & (column < DIM)[None, :], other=0.0)
        pieces += (x,)
    return pieces


@triton.jit
def load_vector(X, first, SIZE: tl.constexpr, TMA: tl.constexpr):
    """Loads SIZE neighbours of a vector, from a multiple of 16 bytes on if X is a descriptor."""
    if TMA:
        x = X.load([first])
    else:
        x = tl.load(X + first + tl.arange(0, SIZE))
    return x


@triton.jit
def store_rows(base, offsets, alive, values, DIM: tl.constexpr, PADDED: tl.constexpr):
    column = tl.arange(0, PADDED)
    inside = alive[:, None]
    if PADDED != DIM:
        inside = inside & (column < DIM)[None, :]
    values = values.to(base.dtype.element_ty)
    tl.store(base + offsets[:, None] + column[None, :], values, mask=inside)


@triton.jit
def product(a, b):
    """Multiplies matrices in the inputs' dtype, accumulated in float32."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def scores_of(a, b):
    """Computes a b^T over head dims, of pieces of both, [m, WIDTH] and [n, WIDTH]. # [m, n]"""
    total = product(a[0], tl.trans(b[0]))
    for i in tl.static_range(1, len(a)):
        total = add_product(a[i], tl.trans(b[i]), total)
    return total


@triton.jit
def zeros_of(ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Makes the first sums, in pieces of WIDTH columns: a tuple of # [ROWS, WIDTH] float32"""
    pieces = ()
    for _ in tl.static_range(0, DIM, WIDTH):
        pieces += (tl.zeros([ROWS, WIDTH], tl.float32),)
    return pieces


@triton.jit
def add_products(a, b, totals):
    """Adds a b to its sums, b and these in pieces of columns."""
    pieces = ()
    for i in tl.static_range(len(b)):
        pieces += (add_product(a, b[i], totals[i]),)
    return pieces


@triton.jit
def add_product(a, b, total):
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def absorb(scores, outer, value, top, total, acc):
    """Takes a step of online softmax, logits = scores x outer. # [ROWS, KEYS], [KEYS, DV_PADDED]"""
    # outer >= 0, so the greatest score is the greatest logit; the scaling then fuses with the
    # subtraction
    new_top = tl.maximum(top, tl.max(scores, 1) * outer)
    p = tl.exp2(scores * outer - new_top[:, None])
    decay = tl.exp2(top - new_top)
    total = total * decay + tl.sum(p, 1)
    acc = add_product(p.to(value.dtype), value, acc * decay[:, None])
    return new_top, total, acc


@triton.jit
def squash(scores, inner, SOFTCAP: tl.constexpr):
    """Computes the factor of `outer` in base-2 logits: the scores, or tanh(scores x inner)."""
    # scale x log2(e) is `outer` without a softcap c; with one, inner is scale / c and outer c x
    # log2(e)
    if SOFTCAP:
        # tanh x = 1 - 2 / (exp(2x) + 1): right at both ends, absolute error about 1e-7
        return 1.0 - 2.0 / (tl.exp2(scores * (inner * (2.0 * LOG2E))) + 1.0)
    return scores


@triton.jit
def key_lanes(
    K_SPANS, POSITION, tile, begin, KEYS: tl.constexpr, WINDOW: tl.constexpr, TMA: tl.constexpr
):
    """Finds keys' packed indices, whether alive, spans and positions. # [KEYS]"""
    # the span is subtree_end - index, 0 where dead; the position is read only for a window
    key = begin + tl.arange(0, KEYS)
    span = load_vector(K_SPANS, tile * KEYS, KEYS, TMA)
    alive = span > 0
    position = key
    if WINDOW:
        position = tl.load(POSITION + key, mask=alive, other=0)
    return key, alive, span, position


@triton.jit
def visible(query, key, span, query_position, key_position, window, WINDOW: tl.constexpr):
    """Tests k <= q < subtree_end[k] by one unsigned compare: q - k < span = subtree_end[k] - k."""
    # broadcasts query against key; span is 0 for dead key lanes; with a window also position(q) -
    # position(k) < window
    seen = (query - key).to(tl.uint32, bitcast=True) < span.to(tl.uint32, bitcast=True)
    if WINDOW:
        seen = seen & (query_position - key_position < window)
    return seen


@triton.jit
def chosen_words(BITS, pair, at, lane, SIZE: tl.constexpr, LANES: tl.constexpr):
    """Loads the word with the bit of each of a tile's pairs (at, lane). # [at, lane]"""
    # BITS are laid out by `attention.triton.chosen`: for each 32 of LANES lanes, one word per token
    # of the other side's SIZE
    COUNT: tl.constexpr = (LANES + 31) // 32
    first = BITS + tl.cast(pair, tl.int64) * (COUNT * SIZE) + at
    words = tl.load(first)[:, None]
    for i in tl.static_range(1, COUNT):
        words = tl.where((lane // 32 == i)[None, :], tl.load(first + i * SIZE)[:, None], words)
    return words


@triton.jit
def chosen(words, lane):
    """Whether each pair of `chosen_words` is to be attended to, visible and chosen."""
    # a thread holds two neighbouring lanes of every eight, so that its lanes share bits 1 and 2: it
    # shifts its few words by these, and tests its pairs with constants
    return ((words >> (lane & 6)[None, :]) & (1 << (lane & 25))[None, :]) != 0


@triton.jit
def only_chosen(values, other, words, lane, is_dense, BRANCH: tl.constexpr):
    """Replaces each pair's value by `other` unless it is `chosen`; with is_dense all are."""
    # BRANCH says whether dense tiles skip the compares. It must be off if the products before and
    # after have results of one shape: ptxas (CUDA 12.8) then puts the second's operand into those
    # registers of the first's that later steps read again (`benchmarks.cases.compiled` counts them)
    if BRANCH:
        if not is_dense:
            values = tl.where(chosen(words, lane), values, other)
    else:
        values = tl.where(chosen(words, lane), values, other)
    return values
