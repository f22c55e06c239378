"""The kernels of log p, entropy and the divergence to a teacher: one launch each way per chunk.

torch's operations (`lm_head.eager`) make a dozen passes over float32 copies. Here the logits, a
teacher's too, stay in the lm_head's dtype and are read one to three times, mostly from the cache.
Everything computed of them is float32, in registers.

Legend: R rows, V vocabulary, C columns of the result: log p, or log p and the entropy.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from prefixtree.kernels import runtime
from prefixtree.kernels.lm_head.eager import LogitRule
from prefixtree.kernels.lm_head.measures import NUM_KEPT, TeacherRows
from prefixtree.kernels.triton_primitives import squash

# columns per step: 16 per thread
BLOCK, WARPS = 4096, 8
_KEPT = tl.constexpr(NUM_KEPT)
# slices of arrays, which begin anywhere: another chunk must not compile anything
_OF_ROWS = ("TARGET", "TEMPERATURE", "OUT", "GRAD", "VALUE", "VALUE_GRAD")


@triton.jit
def load_scaled(X, column, vocabulary, scale):
    """Loads columns of a row: scale x, -inf beyond the vocabulary, and whether they are alive."""
    alive = column < vocabulary
    x = tl.load(X + column, mask=alive, other=0.0).to(tl.float32)
    return tl.where(alive, scale * x, float("-inf")), alive


@triton.jit
def logits_of(y, alive, temperature, softcap, SOFTCAP: tl.constexpr):
    """Computes logits / temperature of y = scale x, -inf if dead, and tanh(y / softcap), or y."""
    # both increase in y
    z = y
    squashed = y
    if SOFTCAP:
        squashed = squash(y, 1.0 / softcap, SOFTCAP)
        z = tl.where(alive, softcap * squashed, float("-inf"))
    if temperature != 1.0:
        # rounded as torch does: if a logit is far above the rest, log p is a difference of two
        z = tl.div_rn(z, tl.zeros_like(z) + temperature)
    return z, squashed


@triton.jit
def largest(X, vocabulary, temperature, scale, softcap, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):
    """Finds the largest logit of a row."""
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    for at in range(0, vocabulary, BLOCK):
        y, _ = load_scaled(X, at + lane, vocabulary, scale)
        top = tl.maximum(top, y)
    z, _ = logits_of(top, lane < vocabulary, temperature, softcap, SOFTCAP)
    return tl.max(z, 0)


@triton.jit
def normaliser(
    X, vocabulary, temperature, scale, softcap, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr
):
    """Finds a row's largest logit, and log of the sum of exponentials of logits less it."""
    top = largest(X, vocabulary, temperature, scale, softcap, SOFTCAP, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for at in range(0, vocabulary, BLOCK):
        y, alive = load_scaled(X, at + tl.arange(0, BLOCK), vocabulary, scale)
        z, _ = logits_of(y, alive, temperature, softcap, SOFTCAP)
        total += tl.exp(z - top)
    return top, tl.log(tl.sum(total, 0))


@triton.jit
def diverging(log_p, log_q, beta, DIVERGENCE: tl.constexpr):
    """Computes the columns' shares of the divergence, and raw gradients, from log p and log q."""
    # p is the model's, q the teacher's; the gradient of p's logits is raw - p sum(raw), and a
    # probability of 0 adds nothing
    p = tl.exp(log_p)
    q = tl.exp(log_q)
    apart = log_q - log_p
    if DIVERGENCE == "forward":
        raw = -q
        added = tl.where(q == 0.0, 0.0, q * apart)
    elif DIVERGENCE == "reverse":
        raw = tl.where(p == 0.0, 0.0, -p * apart)
        added = raw
    else:
        # log of the mixture over the larger of both: nothing cancels if they are near each other
        is_q = apart > 0.0
        nearer = tl.exp(-tl.abs(apart))
        mixture = tl.log(tl.where(is_q, beta + (1.0 - beta) * nearer, 1.0 - beta + beta * nearer))
        raw = (1.0 - beta) * tl.where(p == 0.0, 0.0, p * (tl.where(is_q, -apart, 0.0) - mixture))
        added = raw + beta * tl.where(q == 0.0, 0.0, q * (tl.where(is_q, 0.0, apart) - mixture))
    return added, raw


@triton.jit(do_not_specialize=_OF_ROWS)
def score_kernel(
    X,
    TARGET,
    TEMPERATURE,
    OUT,
    Y,
    KEPT,
    VALUE,
    vocabulary,
    scale,
    softcap,
    teacher_scale,
    teacher_softcap,
    beta,
    SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes OUT [R, C] of X [R, V], and with DIVERGENCE of Y [R, V] VALUE [R] and KEPT [R, 5]."""
    # OUT is NaN if a target is no token of the vocabulary; Y is the teacher's output and VALUE the
    # divergence to it
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
            # a logit of -inf adds 0, and not NaN
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
    if DIVERGENCE != "":
        Y += row * vocabulary
        KEPT += row * _KEPT
        top_q, log_sum_q = normaliser(
            Y, vocabulary, temperature, teacher_scale, teacher_softcap, TEACHER_SOFTCAP, BLOCK
        )
        value = tl.zeros([BLOCK], tl.float32)
        raw_sum = tl.zeros([BLOCK], tl.float32)
        for at in range(0, vocabulary, BLOCK):
            column = at + tl.arange(0, BLOCK)
            y, alive = load_scaled(X, column, vocabulary, scale)
            z, _ = logits_of(y, alive, temperature, softcap, SOFTCAP)
            y, _ = load_scaled(Y, column, vocabulary, teacher_scale)
            z_q, _ = logits_of(y, alive, temperature, teacher_softcap, TEACHER_SOFTCAP)
            log_q = (z_q - top_q) - log_sum_q
            added, raw = diverging((z - top) - log_sum, log_q, beta, DIVERGENCE)
            value += added
            raw_sum += raw
        tl.store(VALUE + row, tl.sum(value, 0))
        # exact for probabilities, so that equal distributions have no gradient
        tl.store(KEPT, -1.0 if DIVERGENCE == "forward" else tl.sum(raw_sum, 0))
        tl.store(KEPT + 1, top)
        tl.store(KEPT + 2, log_sum)
        tl.store(KEPT + 3, top_q)
        tl.store(KEPT + 4, log_sum_q)


@triton.jit(do_not_specialize=_OF_ROWS)
def gradient_kernel(
    X,
    TARGET,
    TEMPERATURE,
    OUT,
    Y,
    KEPT,
    VALUE,
    GRAD,
    INTO,
    VALUE_GRAD,
    vocabulary,
    scale,
    softcap,
    teacher_scale,
    teacher_softcap,
    beta,
    SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the gradient of X into INTO [R, V], which may be X; GRAD [R, C] is that of OUT."""
    # d logp / dz = onehot - p; d entropy / dz = -p (log p + entropy)
    # with DIVERGENCE, VALUE_GRAD [R] is the gradient of the divergences, which VALUE gets again;
    # their gradient is p - q if beta is 0 and p (log p - log q - KL(p || q)) if it is 1; between
    # them, with the mixture m, it is (1 - beta) p (log p - log m - KL(p || m))
    row = tl.program_id(0).to(tl.int64)
    X += row * vocabulary
    INTO += row * vocabulary
    temperature = tl.load(TEMPERATURE + row)
    target = tl.load(TARGET + row)
    columns = 2 if ENTROPY else 1
    grad = tl.load(GRAD + row * columns)
    if DIVERGENCE != "":
        Y += row * vocabulary
        KEPT += row * _KEPT
        raw_sum = tl.load(KEPT)
        top = tl.load(KEPT + 1)
        log_sum = tl.load(KEPT + 2)
        top_q = tl.load(KEPT + 3)
        log_sum_q = tl.load(KEPT + 4)
        value_grad = tl.load(VALUE_GRAD + row)
        value = tl.zeros([BLOCK], tl.float32)
    else:
        top, log_sum = normaliser(X, vocabulary, temperature, scale, softcap, SOFTCAP, BLOCK)
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
        if DIVERGENCE != "":
            y, _ = load_scaled(Y, column, vocabulary, teacher_scale)
            z_q, _ = logits_of(y, alive, temperature, teacher_softcap, TEACHER_SOFTCAP)
            added, raw = diverging(logp, (z_q - top_q) - log_sum_q, beta, DIVERGENCE)
            value += added
            dz += value_grad * (raw - p * raw_sum)
        if SOFTCAP:
            dz *= 1.0 - squashed * squashed
        dx = (dz * (scale / temperature)).to(INTO.dtype.element_ty)
        tl.store(INTO + column, dx, mask=alive)
    if DIVERGENCE != "":
        tl.store(VALUE + row, tl.sum(value, 0))


def score(
    logits: torch.Tensor,
    target: torch.Tensor,
    temperature: torch.Tensor,
    rule: LogitRule,
    out: torch.Tensor,
    teacher: TeacherRows | None = None,
) -> None:
    """Computes `eager.score` and the divergence to a teacher; all contiguous."""
    _launch(score_kernel, rule, (logits, target, temperature, out), teacher)


def gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    temperature: torch.Tensor,
    rule: LogitRule,
    out: torch.Tensor,
    grad: torch.Tensor,
    into: torch.Tensor,
    teacher: TeacherRows | None = None,
) -> None:
    """Computes `eager.gradient` with that of the divergence; all contiguous."""
    arrays = logits, target, temperature, out
    _launch(
        gradient_kernel,
        rule,
        arrays,
        teacher,
        grad,
        into,
        None if teacher is None else teacher.grad,
    )


def _launch(
    kernel: Any,
    rule: LogitRule,
    arrays: tuple[torch.Tensor, ...],
    teacher: TeacherRows | None,
    *of_gradients: torch.Tensor | None,
) -> None:
    """Launches one program per row."""
    logits, *_, out = arrays
    rows, vocabulary = logits.shape
    of_teacher: tuple[Any, ...] = (None,) * 3
    beta, teacher_rule, divergence = 0.0, LogitRule(), ""
    if teacher is not None:
        assert teacher.output.shape == logits.shape and teacher.kept.shape == (rows, NUM_KEPT)
        of_teacher = teacher.output, teacher.kept, teacher.value
        beta, teacher_rule = float(teacher.beta), teacher.rule
        divergence = {0.0: "forward", 1.0: "reverse"}.get(beta, "between")
    with runtime.current(logits.device):
        kernel[(rows,)](
            *arrays,
            *of_teacher,
            *of_gradients,
            vocabulary,
            rule.scale,
            rule.softcap,
            teacher_rule.scale,
            teacher_rule.softcap,
            beta,
            SOFTCAP=rule.softcap > 0,
            ENTROPY=out.shape[1] == 2,
            DIVERGENCE=divergence,
            TEACHER_SOFTCAP=teacher_rule.softcap > 0,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
