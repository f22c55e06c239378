"""The best keys of `kernels.chosen` in Triton; imported where triton is.

A program has a query. It finds the score of the last key that is chosen by bisection: how many
scores reach a number says whether that score does. Then it writes the query's words. The scores of
a path that the largest of SIZES holds are read once, and counted in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from prefixtree.kernels import device_info

# scores of a program, and its warps: 32 a thread, which leave room for 16 warps side by side
SIZES = {2048: 2, 4096: 4, 8192: 8, 16384: 16}
REGISTERS = 128
# places of -inf and inf among the float32, see `_at`
_LOWEST, _HIGHEST = tl.constexpr(-0x7F800001), tl.constexpr(0x7F800000)


@triton.jit
def _scores(ROW, start, length, SIZE: tl.constexpr):
    """Scores from column `start` on; behind the query nan, which reaches no number."""
    column = start + tl.arange(0, SIZE)
    return tl.load(ROW + column, mask=column < length, other=float("nan"))


@triton.jit
def _at(place):
    """The float32 at a place in their order, -0.0 at -1 and 0.0 at 0; above that of inf, nan."""
    place = place.to(tl.int32)
    return (place ^ ((place >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _count(ROW, scores, length, number, SIZE: tl.constexpr, IS_WHOLE: tl.constexpr):
    """How many scores reach a number: of those in registers, where these are all."""
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
    """BITS [n, num_words], which were 0, of queries that see more than `shortest` columns and,
    where IS_WHOLE, at most SIZE."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(POSITION + row) + 1, width).to(tl.int32)
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
        # between the two lie scores that are equal, or no more than are left
        left = most - reach_high
        BITS += row * num_words
        lane = tl.arange(0, 32)[None, :]
        word = tl.arange(0, SIZE // 32)
        for start in range(0, length, SIZE):
            by_word = tl.reshape(_scores(SCORES, start, length, SIZE), [SIZE // 32, 32])
            above = (by_word >= _at(high)).to(tl.int32)
            tied = (by_word >= _at(low)).to(tl.int32) - above
            count = tl.sum(tied, 1)
            ties = tl.sum(tied << lane, 1)
            here = left - tl.cumsum(count, 0) + count
            # of one word some ties are left, its lowest bits
            is_cut = (here > 0) & (here < count)
            cut = tl.sum(tl.where(is_cut, ties, 0), 0)
            others = cut
            for _ in range(tl.sum(tl.where(is_cut, here, 0), 0)):
                others &= others - 1
            ties = tl.where(is_cut, cut ^ others, tl.where(here > 0, ties, 0))
            bits = tl.sum(above << lane, 1) | ties
            at = start // 32 + word
            tl.store(BITS + at, tl.where(is_number, bits, 0), mask=at < num_words)
            left -= tl.sum(count, 0)


def serves(scores: torch.Tensor) -> bool:
    """Whether the kernel runs where these are, in their dtype."""
    is_known = torch.version.hip is None and scores.is_cuda
    return is_known and scores.dtype == torch.float32


def best_bits(
    scores: torch.Tensor, count: int, position: torch.Tensor, num_words: int
) -> torch.Tensor:
    """As `kernels.chosen.best_bits`, of float32 scores."""
    n, width = scores.shape
    bits = torch.zeros(n, num_words, dtype=torch.int32, device=scores.device)
    given = scores.contiguous(), position.contiguous(), bits, width, num_words, count
    longest = max(SIZES)
    shortest = 0
    for size, is_whole in (*dict.fromkeys(SIZES, True).items(), (longest, False)):
        if n and width > shortest:
            with device_info.current(scores.device):
                best_keys_kernel[(n,)](
                    *given,
                    shortest,
                    SIZE=size,
                    IS_WHOLE=is_whole,
                    num_warps=SIZES[size],
                    maxnreg=REGISTERS,
                )
        shortest = size
    return bits
