"""log p and entropy of a chunk of logits, and their gradient, in one launch each.

torch's operations (`lm_head.eager`) make a dozen passes over float32 copies. Here the logits
stay in the lm_head's dtype and are read two or three times, mostly from the cache; what is made of
them is float32, in registers.

Legend: R rows, V vocabulary, C columns of the result: log p, or log p and the entropy.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from prefixtree.kernels import device_info
from prefixtree.kernels.lm_head.eager import LogitRule
from prefixtree.kernels.triton_primitives import squash

# columns per step: 16 per thread
BLOCK, WARPS = 4096, 8
# slices of arrays, that begin anywhere: another chunk must not compile anything
_OF_ROWS = ("TARGET", "TEMPERATURE", "OUT", "GRAD")


@triton.jit
def load_scaled(X, column, vocabulary, scale):
    """-> (scale x, -inf beyond the vocabulary; alive) of columns of a row."""
    alive = column < vocabulary
    x = tl.load(X + column, mask=alive, other=0.0).to(tl.float32)
    return tl.where(alive, scale * x, float("-inf")), alive


@triton.jit
def logits_of(y, alive, temperature, softcap, SOFTCAP: tl.constexpr):
    """-> (logits / temperature of y = scale x, -inf where dead; tanh(y / softcap), or y).

    Both increase in y.
    """
    z = y
    squashed = y
    if SOFTCAP:
        squashed = squash(y, 1.0 / softcap, SOFTCAP)
        z = tl.where(alive, softcap * squashed, float("-inf"))
    if temperature != 1.0:
        # rounded as torch does: where a logit is far above the rest, log p is a difference of two
        z = tl.div_rn(z, tl.zeros_like(z) + temperature)
    return z, squashed


@triton.jit
def largest(X, vocabulary, temperature, scale, softcap, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit of a row."""
    lane = tl.arange(0, BLOCK)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    for at in range(0, vocabulary, BLOCK):
        y, _ = load_scaled(X, at + lane, vocabulary, scale)
        most = tl.maximum(most, y)
    z, _ = logits_of(most, lane < vocabulary, temperature, softcap, SOFTCAP)
    return tl.max(z, 0)


@triton.jit(do_not_specialize=_OF_ROWS)
def score_kernel(
    X,
    TARGET,
    TEMPERATURE,
    OUT,
    vocabulary,
    scale,
    softcap,
    SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """OUT [R, C] of X [R, V]; NaN where a target is no token of the vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    X += row * vocabulary
    temperature = tl.load(TEMPERATURE + row)
    target = tl.load(TARGET + row)
    top = largest(X, vocabulary, temperature, scale, softcap, SOFTCAP, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    chosen = tl.zeros([BLOCK], tl.float32)
    for at in range(0, vocabulary, BLOCK):
        column = at + tl.arange(0, BLOCK)
        y, alive = load_scaled(X, column, vocabulary, scale)
        z, _ = logits_of(y, alive, temperature, softcap, SOFTCAP)
        below = z - top
        p = tl.exp(below)
        total += p
        chosen += tl.where(column == target, below, 0.0)
        if ENTROPY:
            # a logit of -inf has no part, and not NaN
            weighted += tl.where(p == 0.0, 0.0, p * below)
    sums = tl.sum(total, 0)
    log_sum = tl.log(sums)
    # not z - (top + log_sum): between large logits that cancels
    logp = tl.sum(chosen, 0) - log_sum
    is_token = (target >= 0) & (target < vocabulary)
    columns = 2 if ENTROPY else 1
    tl.store(OUT + row * columns, tl.where(is_token, logp, float("nan")))
    if ENTROPY:
        tl.store(OUT + row * columns + 1, log_sum - tl.sum(weighted, 0) / sums)


@triton.jit(do_not_specialize=_OF_ROWS)
def gradient_kernel(
    X,
    TARGET,
    TEMPERATURE,
    OUT,
    GRAD,
    INTO,
    vocabulary,
    scale,
    softcap,
    SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """INTO [R, V], which may be X: its gradient, GRAD [R, C] being that of OUT.

    d logp / dz = onehot - p; d entropy / dz = -p (log p + entropy).
    """
    row = tl.program_id(0).to(tl.int64)
    X += row * vocabulary
    INTO += row * vocabulary
    temperature = tl.load(TEMPERATURE + row)
    target = tl.load(TARGET + row)
    columns = 2 if ENTROPY else 1
    grad = tl.load(GRAD + row * columns)
    top = largest(X, vocabulary, temperature, scale, softcap, SOFTCAP, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for at in range(0, vocabulary, BLOCK):
        column = at + tl.arange(0, BLOCK)
        y, alive = load_scaled(X, column, vocabulary, scale)
        z, _ = logits_of(y, alive, temperature, softcap, SOFTCAP)
        total += tl.exp(z - top)
    log_sum = tl.log(tl.sum(total, 0))
    for at in range(0, vocabulary, BLOCK):
        column = at + tl.arange(0, BLOCK)
        y, alive = load_scaled(X, column, vocabulary, scale)
        z, squashed = logits_of(y, alive, temperature, softcap, SOFTCAP)
        logp = (z - top) - log_sum
        p = tl.exp(logp)
        dz = tl.where(column == target, grad, 0.0) - p * grad
        if ENTROPY:
            spread = tl.where(p == 0.0, 0.0, p * (logp + tl.load(OUT + row * columns + 1)))
            dz -= spread * tl.load(GRAD + row * columns + 1)
        if SOFTCAP:
            dz *= 1.0 - squashed * squashed
        dx = (dz * (scale / temperature)).to(INTO.dtype.element_ty)
        tl.store(INTO + column, dx, mask=alive)


def score(
    logits: torch.Tensor,
    target: torch.Tensor,
    temperature: torch.Tensor,
    rule: LogitRule,
    out: torch.Tensor,
) -> None:
    """As `kernels.lm_head.eager.score`; all contiguous."""
    _launch(score_kernel, rule, logits, target, temperature, out)


def gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    temperature: torch.Tensor,
    rule: LogitRule,
    out: torch.Tensor,
    grad: torch.Tensor,
    into: torch.Tensor,
) -> None:
    """As `kernels.lm_head.eager.gradient`; all contiguous."""
    _launch(gradient_kernel, rule, logits, target, temperature, out, grad, into)


def _launch(kernel: Any, rule: LogitRule, *arrays: torch.Tensor) -> None:
    """One program per row; the kernels begin with the same four arrays."""
    logits, _, _, out, *_ = arrays
    rows, vocabulary = logits.shape
    with device_info.current(logits.device):
        kernel[(rows,)](
            *arrays,
            vocabulary,
            rule.scale,
            rule.softcap,
            SOFTCAP=rule.softcap > 0,
            ENTROPY=out.shape[1] == 2,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
