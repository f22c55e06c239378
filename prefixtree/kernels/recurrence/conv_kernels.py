"""Triton kernels of the causal convolution along paths, for at most four taps.

Packed tokens come in runs, in which each token's predecessor is the token before it. A program
walks a run with the last three rows in registers. So a forward reads x once and writes once, and a
backward reads x and dout once and writes dx once. Only a run's first token looks up its ancestors.
At a branch, a token's gradient also sums over the first tokens of the segments below, which `Taps`
lists. Those tokens have a kernel of their own, because a thousand children are a thousand terms.
Every sum has a fixed order.

Legend: T packed tokens, D channels, W taps, M entries of `Taps`.
"""

import triton
import triton.language as tl


@triton.jit
def _total(x, weight, bias, ancestors, token, live, T, D, channel, in_d, W: tl.constexpr):
    """Sums the taps of the live tokens before the activation, fp32 [rows, channels]."""
    total = tl.zeros([token.shape[0], channel.shape[0]], dtype=tl.float32)
    for j in tl.static_range(W):
        source = tl.load(ancestors + j * T + token, mask=live, other=-1)
        row = x + source.to(tl.int64)[:, None] * D + channel[None, :]
        tap = tl.load(weight + channel * W + (W - 1 - j), mask=in_d, other=0.0).to(tl.float32)
        b_x = tl.load(row, mask=(source >= 0)[:, None] & in_d[None, :], other=0.0)
        total += b_x.to(tl.float32) * tap[None, :]
    if bias is not None:
        total += tl.load(bias + channel, mask=in_d, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def _dtotal(
    x,
    weight,
    bias,
    ancestors,
    dout,
    token,
    live,
    T,
    D,
    channel,
    in_d,
    W: tl.constexpr,
    SILU: tl.constexpr,
):
    """Computes the gradient of `_total` at these tokens; 0 where they are not live."""
    at = dout + token.to(tl.int64)[:, None] * D + channel[None, :]
    grad = tl.load(at, mask=live[:, None] & in_d[None, :], other=0.0).to(tl.float32)
    if SILU:
        total = _total(x, weight, bias, ancestors, token, live, T, D, channel, in_d, W)
        sigmoid = tl.sigmoid(total)
        grad = grad * sigmoid * (1 + total * (1 - sigmoid))
    return grad


@triton.jit
def _tap(weight, channel, in_d, j: tl.constexpr, W: tl.constexpr):
    """Loads the fp32 weight of the ancestor j tokens back; 0 beyond the last tap."""
    return tl.load(weight + channel * W + (W - 1 - j), mask=in_d & (j < W), other=0.0).to(
        tl.float32
    )


@triton.jit
def _ancestor(x, ancestors, token, T, D, channel, in_d, j: tl.constexpr, W: tl.constexpr):
    """Loads the fp32 row of x of the ancestor j tokens back; 0 if there is none."""
    row = tl.load(ancestors + j * T + token, mask=j < W, other=-1)
    values = tl.load(x + row.to(tl.int64) * D + channel, mask=in_d & (row >= 0), other=0.0)
    return values.to(tl.float32)


@triton.jit
def _four(x, row, D, in_d, token, end):
    """Loads the rows of four tokens from `token` on, 0 from `end` on."""
    x0 = tl.load(x + row, mask=in_d & (token < end), other=0.0)
    x1 = tl.load(x + row + D, mask=in_d & (token + 1 < end), other=0.0)
    x2 = tl.load(x + row + 2 * D, mask=in_d & (token + 2 < end), other=0.0)
    x3 = tl.load(x + row + 3 * D, mask=in_d & (token + 3 < end), other=0.0)
    return x0, x1, x2, x3


@triton.jit
def conv_forward(
    x,
    weight,
    bias,
    out,
    ancestors,
    run_start,
    T,
    D,
    num_runs,
    runs_per_program,
    W: tl.constexpr,
    SILU: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Writes out [T, D] in x's dtype; walks runs of tokens, the last three rows in registers."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_d = channel < D
    w0 = _tap(weight, channel, in_d, 0, W)
    w1 = _tap(weight, channel, in_d, 1, W)
    w2 = _tap(weight, channel, in_d, 2, W)
    w3 = _tap(weight, channel, in_d, 3, W)
    shift = tl.zeros([COLUMNS], dtype=tl.float32)
    if bias is not None:
        shift = tl.load(bias + channel, mask=in_d, other=0.0).to(tl.float32)
    first = tl.program_id(1) * runs_per_program
    for run in range(first, tl.minimum(first + runs_per_program, num_runs)):
        start, end = tl.load(run_start + run), tl.load(run_start + run + 1)
        x1 = _ancestor(x, ancestors, start, T, D, channel, in_d, 1, W)
        x2 = _ancestor(x, ancestors, start, T, D, channel, in_d, 2, W)
        x3 = _ancestor(x, ancestors, start, T, D, channel, in_d, 3, W)
        row = start.to(tl.int64) * D + channel
        n0, n1, n2, n3 = _four(x, row, D, in_d, start, end)
        for token in range(start, end, 4):
            # the next four rows are on their way while these are summed
            c0, c1, c2, c3 = n0, n1, n2, n3
            n0, n1, n2, n3 = _four(x, row + 4 * D, D, in_d, token + 4, end)
            for i in tl.static_range(4):
                x0 = (c0 if i == 0 else c1 if i == 1 else c2 if i == 2 else c3).to(tl.float32)
                total = shift + x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3
                if SILU:
                    total = total * tl.sigmoid(total)
                total = total.to(out.dtype.element_ty)
                tl.store(out + row + i * D, total, mask=in_d & (token + i < end))
                x3 = x2
                x2 = x1
                x1 = x0
            row += 4 * D


@triton.jit
def conv_backward(
    x,
    weight,
    bias,
    dout,
    dx,
    dweight,
    dbias,
    ancestors,
    run_start,
    T,
    D,
    num_runs,
    runs_per_program,
    W: tl.constexpr,
    SILU: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Writes dx of all tokens without entries in `Taps`, and parts of sums over tokens.

    The parts are dweight fp32 [programs, W, D] and dbias fp32 [programs, D].
    """
    # dx of a token is complete three tokens later, so a program runs on into the next run's first
    # three tokens, as far as they follow on the same path
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_d = channel < D
    w0 = _tap(weight, channel, in_d, 0, W)
    w1 = _tap(weight, channel, in_d, 1, W)
    w2 = _tap(weight, channel, in_d, 2, W)
    w3 = _tap(weight, channel, in_d, 3, W)
    shift = tl.zeros([COLUMNS], dtype=tl.float32)
    if bias is not None:
        shift = tl.load(bias + channel, mask=in_d, other=0.0).to(tl.float32)
    dw0 = tl.zeros([COLUMNS], dtype=tl.float32)
    dw1 = tl.zeros([COLUMNS], dtype=tl.float32)
    dw2 = tl.zeros([COLUMNS], dtype=tl.float32)
    dw3 = tl.zeros([COLUMNS], dtype=tl.float32)
    db = tl.zeros([COLUMNS], dtype=tl.float32)
    first = tl.program_id(1) * runs_per_program
    for run in range(first, tl.minimum(first + runs_per_program, num_runs)):
        start, end = tl.load(run_start + run), tl.load(run_start + run + 1)
        x1 = _ancestor(x, ancestors, start, T, D, channel, in_d, 1, W)
        x2 = _ancestor(x, ancestors, start, T, D, channel, in_d, 2, W)
        x3 = _ancestor(x, ancestors, start, T, D, channel, in_d, 3, W)
        # dx of the last three tokens so far
        g1 = tl.zeros([COLUMNS], dtype=tl.float32)
        g2 = tl.zeros([COLUMNS], dtype=tl.float32)
        g3 = tl.zeros([COLUMNS], dtype=tl.float32)
        # the last token that follows on this path
        stop = end
        for ahead in tl.static_range(3):
            before = tl.load(
                ancestors + T + end + ahead, mask=(end + ahead < T) & (W > 1), other=-2
            )
            stop = tl.where((stop == end + ahead) & (before == end + ahead - 1), stop + 1, stop)
        row = start.to(tl.int64) * D + channel
        n0, n1, n2, n3 = _four(x, row, D, in_d, start, stop)
        m0, m1, m2, m3 = _four(dout, row, D, in_d, start, stop)
        for token in range(start, end + 3, 4):
            c0, c1, c2, c3 = n0, n1, n2, n3
            d0, d1, d2, d3 = m0, m1, m2, m3
            n0, n1, n2, n3 = _four(x, row + 4 * D, D, in_d, token + 4, stop)
            m0, m1, m2, m3 = _four(dout, row + 4 * D, D, in_d, token + 4, stop)
            for i in tl.static_range(4):
                x0 = (c0 if i == 0 else c1 if i == 1 else c2 if i == 2 else c3).to(tl.float32)
                grad = (d0 if i == 0 else d1 if i == 1 else d2 if i == 2 else d3).to(tl.float32)
                if SILU:
                    total = shift + x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3
                    sigmoid = tl.sigmoid(total)
                    grad = grad * sigmoid * (1 + total * (1 - sigmoid))
                done = (g3 + grad * w3).to(dx.dtype.element_ty)
                written = in_d & (token + i >= start + 3) & (token + i < end + 3)
                tl.store(dx + row + (i - 3) * D, done, mask=written)
                g3 = g2 + grad * w2
                g2 = g1 + grad * w1
                g1 = grad * w0
                # the next run sums its tokens itself
                grad = tl.where(token + i < end, grad, 0.0)
                dw0 += grad * x0
                dw1 += grad * x1
                dw2 += grad * x2
                dw3 += grad * x3
                db += grad
                x3 = x2
                x2 = x1
                x1 = x0
            row += 4 * D
    at = dweight + tl.program_id(1).to(tl.int64) * W * D + channel
    tl.store(at + (W - 1) * D, dw0, mask=in_d)
    if W > 1:
        tl.store(at + (W - 2) * D, dw1, mask=in_d)
    if W > 2:
        tl.store(at + (W - 3) * D, dw2, mask=in_d)
    if W > 3:
        tl.store(at + (W - 4) * D, dw3, mask=in_d)
    if dbias is not None:
        tl.store(dbias + tl.program_id(1).to(tl.int64) * D + channel, db, mask=in_d)


@triton.jit
def conv_backward_branches(
    x,
    weight,
    bias,
    dout,
    dx,
    ancestors,
    branch_tokens,
    entry_start,
    entry_token,
    entry_tap,
    T,
    D,
    W: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Writes dx of the tokens that segments below read, over that of `conv_backward`."""
    branch = tl.load(branch_tokens + tl.program_id(0))
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_d = channel < D
    row = tl.arange(0, ROWS)

    # the tokens right after it, as far as they read it
    reader = branch + row
    reads = (row < W) & (reader < T)
    reads &= tl.load(ancestors + row * T + reader, mask=reads, other=-1) == branch
    dtotal = _dtotal(x, weight, bias, ancestors, dout, reader, reads, T, D, channel, in_d, W, SILU)
    at = weight + channel[None, :] * W + (W - 1 - row)[:, None]
    tap = tl.load(at, mask=reads[:, None] & in_d[None, :], other=0.0)
    grad = tl.sum(dtotal * tap.to(tl.float32), 0)

    end = tl.load(entry_start + branch + 1)
    for first in range(tl.load(entry_start + branch), end, ROWS):
        listed = first + row < end
        reader = tl.load(entry_token + first + row, mask=listed, other=0)
        j = tl.load(entry_tap + first + row, mask=listed, other=0)
        dtotal = _dtotal(
            x, weight, bias, ancestors, dout, reader, listed, T, D, channel, in_d, W, SILU
        )
        at = weight + channel[None, :] * W + (W - 1 - j)[:, None]
        tap = tl.load(at, mask=listed[:, None] & in_d[None, :], other=0.0)
        grad += tl.sum(dtotal * tap.to(tl.float32), 0)
    tl.store(dx + branch.to(tl.int64) * D + channel, grad.to(dx.dtype.element_ty), mask=in_d)
