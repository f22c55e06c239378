"""The draw of a token per row from logits, in one pass: noise, argmax and the log-probability.

Legend: B rows, V vocabulary, S parts of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from prefixtree.kernels import runtime

# logits of a program's step, and programs that fill a GPU
_BLOCK, _PROGRAMS = 1024, 1024


@triton.jit
def _mixed(z, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Computes SplitMix64's output; int64 products wrap around, shifts are logical."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * FIRST
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * SECOND
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


# one compilation for all numbers of rows
@triton.jit(do_not_specialize=["parts"])
def draw_kernel(
    LOGITS, STATE, VALUE, INDEX, CHOSEN, TOP, TOTAL, stride, vocabulary, share, parts, temperature,
    BLOCK: tl.constexpr, HAS_NOISE: tl.constexpr,
    GAMMA: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Finds the largest noisy logit of a row's part, and the part's share of the log-sum-exp."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    state = tl.load(STATE + row)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.full([BLOCK], 0, tl.int32) + part * share + lane
    chosen = tl.full([BLOCK], float("-inf"), tl.float32)
    top = tl.full([], -1e30, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for at in range(part * share, tl.minimum((part + 1) * share, vocabulary), BLOCK):
        token = at + lane
        logit = tl.load(LOGITS + row * stride + token, mask=token < vocabulary, other=float("-inf"))
        logit = logit.to(tl.float32) / temperature
        new_top = tl.maximum(top, tl.max(logit, 0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(logit - new_top), 0)
        top = new_top
        value = logit
        if HAS_NOISE:
            hashed = _mixed(state + (token + 1).to(tl.int64) * GAMMA, FIRST, SECOND)
            # as `gumbel` of sampling.draws, which says why
            count = ((hashed >> 11) & 0x1FFFFFFFFFFFFF) + 1
            uniform = count.to(tl.float32) * 1.1102230246251565e-16
            uniform = tl.minimum(uniform, 0.99999994)
            # log1p(-uniform), exact also if uniform is tiny (Kahan)
            rest = 1.0 - uniform
            is_one = rest == 1.0
            ratio = tl.log(rest) * (-uniform) / tl.where(is_one, 1.0, rest - 1.0)
            value += -tl.log(-tl.where(is_one, -uniform, ratio))
        better = value > best
        best = tl.where(better, value, best)
        where = tl.where(better, token, where)
        chosen = tl.where(better, logit, chosen)
    value = tl.max(best, 0)
    # of equal values the first, as argmax takes it
    index = tl.min(tl.where(best == value, where, 2147483647), 0)
    to = row * parts + part
    tl.store(VALUE + to, value)
    tl.store(INDEX + to, index)
    tl.store(CHOSEN + to, tl.max(tl.where(where == index, chosen, float("-inf")), 0))
    tl.store(TOP + to, top)
    tl.store(TOTAL + to, total)


def draw(
    logits: torch.Tensor, state: torch.Tensor, temperature: float, constants: tuple[int, int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws int64 [B] tokens of logits [B, V], contiguous rows; gives float32 [B] their log p.

    state int64 [B] is a hash of each row's key and position; temperature 0 takes the likeliest
    token, its log-probability at 1; constants are gamma and the two factors of SplitMix64.
    """
    rows, vocabulary = logits.shape
    parts = max(1, min(-(-_PROGRAMS // rows), -(-vocabulary // _BLOCK)))
    share = -(-vocabulary // (parts * _BLOCK)) * _BLOCK
    parts = -(-vocabulary // share)
    value, chosen, top, total = torch.empty(4, rows, parts, device=logits.device)
    index = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    gamma, first, second = constants
    with runtime.current(logits.device):
        draw_kernel[(rows, parts)](
            logits,
            state,
            value,
            index,
            chosen,
            top,
            total,
            logits.stride(0),
            vocabulary,
            share,
            parts,
            temperature or 1.0,
            BLOCK=_BLOCK,
            HAS_NOISE=temperature > 0,
            GAMMA=gamma,
            FIRST=first,
            SECOND=second,
        )
    best_part = value.argmax(1, keepdim=True)
    highest = top.amax(1, keepdim=True)
    lse = highest + (total * (top - highest).exp()).sum(1, keepdim=True).log()
    return index.gather(1, best_part)[:, 0].long(), (chosen.gather(1, best_part) - lse)[:, 0]
