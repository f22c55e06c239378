"""Tree attention on any torch device: the queries of one path at a time over the keys above them.

No object is T x T. A block of queries (`HostMask.paths`) sees a few whole runs of keys, then itself
causally. On the CPU each run is one call of torch's flash kernel. The forward merges runs by their
lse. The backward runs with the merged lse, which makes each run's share of the gradient exact
(FlashAttention-2, arXiv 2307.08691, section 3.1). That kernel serves no other device, window,
softcap, chosen keys, gradient of lse, or Dv != D. Then the same blocks go through matrix products
in chunks of bounded size. Half precision is computed in float32. Sums have a fixed order.

Legend: T packed tokens, Tq query rows, H query heads, Hk kv heads, G = H / Hk, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

from prefixtree.kernels.attention.protocol import AttentionCall, gradient_dtype
from prefixtree.kernels.chosen import from_bits

# scores held at once by the chunked products
_CHUNK = 1 << 24


def refusal(call: AttentionCall) -> None:
    """Returns None: this backend serves every call."""
    return None


def forward(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes out [Tq, H, Dv] in q's dtype and lse [H, Tq] over the keys (float32, or float64)."""
    out, lse = _wide_forward(_widened(call))
    return out.to(call.q.dtype), lse


def _widen(x: torch.Tensor) -> torch.Tensor:
    """Makes x float32 (or float64) with last stride 1, which the flash kernel does not check."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x if x.stride(-1) == 1 else x.contiguous()


def _widened(call: AttentionCall) -> AttentionCall:
    return call._replace(q=_widen(call.q), k=_widen(call.k), v=_widen(call.v))


def _wide_forward(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `forward` of a widened call."""
    queries, keys, values, sinks = call.q, call.k, call.v, call.sinks
    heads = queries.shape[1]
    out = queries.new_empty(queries.shape[0], heads, values.shape[2])
    lse = queries.new_empty(heads, queries.shape[0])
    if _flash_serves(call):
        for row, length, runs in call.mask.blocks():
            rows = slice(row, row + length)
            out[rows], lse[:, rows] = _flash_forward(queries[rows], keys, values, runs, call.scale)
    else:
        for chunk in _chunks(call):
            rows = chunk.rows
            scores, _ = chunk.scores(call)
            lse[:, rows] = torch.logsumexp(scores, -1)
            # not exp(scores - lse): that would carry the rounding of lse into every probability
            out[rows] = chunk.values_product(scores.softmax(-1), values)
    if sinks is not None:
        # the sink's share leaves the softmax: exp(lse) / (exp(lse) + exp(sink))
        out *= torch.sigmoid(lse - sinks.to(lse.dtype)[:, None]).t()[..., None]
    return out, lse


def backward(
    call: AttentionCall,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Computes dq, dk, dv as `Kernels` says, and dsinks; it computes probabilities anew."""
    original, call, dout = call, _widened(call), _widen(dout)
    queries, keys, values, sinks = call.q, call.k, call.v, call.sinks
    flash = dlse is None and _flash_serves(call)
    if out.dtype != dout.dtype:
        # delta = dout out^T cancels against dout v^T if a softmax is nearly one-hot: the rounding
        # of a half-precision out would be most of the difference
        out, _ = _wide_forward(call)
    total = lse if sinks is None else torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    # contiguous whatever the inputs' strides, as compiled code was told
    dq, dk, dv = (x.new_zeros(x.shape) for x in (queries, keys, values))
    if flash:
        for row, length, runs in call.mask.blocks():
            rows = slice(row, row + length)
            for start, end, causal in runs:
                run_dq, run_dk, run_dv = _flash_backward(
                    dout[rows],
                    queries[rows],
                    keys[start:end],
                    values[start:end],
                    out[rows],
                    total[:, rows],
                    causal,
                    call.scale,
                )
                dq[rows] += run_dq
                dk[start:end] += run_dk
                dv[start:end] += run_dv
    else:
        for chunk in _chunks(call):
            rows = chunk.rows
            scores, dcap = chunk.scores(call)
            softmax = scores.softmax(-1)
            p = softmax * torch.exp(lse - total)[:, rows, None]  # with the sink's share taken
            dp = chunk.values_grad(dout, values)
            ds = p * (dp - (p * dp).sum(-1, keepdim=True))
            if dlse is not None:
                ds += softmax * dlse[:, rows, None]
            if dcap is not None:
                ds *= dcap
            chunk.add_grads(p, ds * call.scale, dout, queries, keys, dq, dk, dv)
    dsinks = None
    if sinks is not None:
        delta = torch.einsum("qhd,qhd->hq", dout, out)
        dsinks = -(torch.exp(sinks.to(lse.dtype)[:, None] - total) * delta).sum(1).to(sinks.dtype)
    dtype = gradient_dtype(original)
    return dq.to(original.q.dtype), dk.to(dtype), dv.to(dtype), dsinks


# ---- torch's flash kernel for the CPU ------------------------------------------------------------


def _flash_serves(call: AttentionCall) -> bool:
    # it scales masked scores too: -inf times 0 or less
    plain = call.window == 0 and call.softcap == 0.0 and call.scale > 0 and call.chosen is None
    same_dim = call.q.shape[2] == call.v.shape[2]
    return plain and same_dim and call.q.device.type == "cpu" and _flash_works()


@cache
def _flash_works() -> bool:
    """Whether this torch has the kernel, with grouped heads, and it is right on a small case."""
    # it is no public function, so its presence alone proves nothing
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(5, h, 8, generator=generator) for h in (4, 2, 2, 4))
    try:
        out, lse = _flash_forward(q, k, v, [(0, 5, True)], 0.5)
        computed = (out, lse, *_flash_backward(dout, q, k, v, out, lse, True, 0.5))
    except (AttributeError, RuntimeError, TypeError):
        return False
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * 0.5
    scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
    p, value = scores.softmax(-1), v.repeat_interleave(2, 1)
    ds = p * torch.einsum("qhd,khd->hqk", dout, value)
    ds = 0.5 * (ds - p * ds.sum(-1, keepdim=True))
    expected = (
        torch.einsum("hqk,khd->qhd", p, value),
        scores.logsumexp(-1),
        torch.einsum("hqk,khd->qhd", ds, k.repeat_interleave(2, 1)),
        torch.einsum("hqk,qhd->khd", ds, q).view(5, 2, 2, 8).sum(2),
        torch.einsum("hqk,qhd->khd", p, dout).view(5, 2, 2, 8).sum(2),
    )
    return all(
        a.shape == b.shape and torch.allclose(a, b, atol=1e-5)
        for a, b in zip(computed, expected, strict=True)
    )


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1)[None]


def _flash_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    runs: list[tuple[int, int, bool]],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes one block over its runs of keys, merged: out [L, H, D], lse [H, L]."""
    parts = [
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _heads_first(q),
            _heads_first(k[start:end]),
            _heads_first(v[start:end]),
            0.0,
            causal,
            scale=scale,
        )
        for start, end, causal in runs
    ]
    if len(parts) == 1:
        return parts[0][0][0].transpose(0, 1), parts[0][1][0]
    lse = torch.logsumexp(torch.stack([part[1][0] for part in parts]), 0)
    out = torch.zeros_like(q)
    for part, part_lse in parts:
        out += part[0].transpose(0, 1) * torch.exp(part_lse[0] - lse).t()[..., None]
    return out, lse


def _flash_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> list[torch.Tensor]:
    """Computes one run's share of dq [L, H, D], and its dk, dv; out and lse are of all runs."""
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _heads_first(dout),
        _heads_first(q),
        _heads_first(k),
        _heads_first(v),
        _heads_first(out),
        # the kernel reads lse with the strides it gives it in the forward
        lse.t().contiguous().t()[None],
        0.0,
        causal,
        scale=scale,
    )
    return [grad[0].transpose(0, 1) for grad in grads]


# ---- matrix products in chunks -------------------------------------------------------------------


@dataclass(frozen=True)
class _Chunk:
    """A few query rows of one path over the keys in their reach."""

    # rows of q, and the position of the first; the others follow one by one
    rows: slice
    first_position: int
    # packed (start, end) of the keys, whose positions ascend without a gap from that of the first
    runs: list[tuple[int, int]]
    key_position: int

    def keys(self, k: torch.Tensor) -> torch.Tensor:
        """Takes the keys in reach, [K, Hk, D]."""
        parts = [k[start:end] for start, end in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _grouped(self, x: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """Brings rows [L, H, D] to [Hk, G L, D]."""
        rows = x[self.rows]
        length, heads, dim = rows.shape
        rows = rows.view(length, kv_heads, heads // kv_heads, dim)
        return rows.permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)

    def _ungrouped(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """Brings [Hk, G L, D] back to [L, H, D]."""
        return x.view(heads, -1, x.shape[-1]).transpose(0, 1)

    def scores(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes masked scores [H, L, K], and the softcap's derivative if there is one."""
        q, k = call.q, call.k
        length = self.rows.stop - self.rows.start
        key = self.keys(k).permute(1, 2, 0)
        logits = torch.bmm(self._grouped(q, k.shape[1]), key).view(q.shape[1], length, -1)
        logits *= call.scale
        dcap = None
        if call.softcap:
            capped = torch.tanh(logits / call.softcap)
            logits, dcap = call.softcap * capped, 1 - capped * capped
        row = torch.arange(self.first_position, self.first_position + length, device=q.device)[
            :, None
        ]
        column = torch.arange(
            self.key_position, self.key_position + logits.shape[2], device=q.device
        )
        hidden = column > row
        if call.window:
            hidden |= row - column >= call.window
        if call.chosen is not None:
            last = self.key_position + logits.shape[2]
            hidden |= ~from_bits(call.chosen[self.rows], self.key_position, last)
        return logits.masked_fill(hidden, -torch.inf), dcap

    def values_product(self, p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Computes p v, [L, H, Dv]."""
        value = self.keys(v).transpose(0, 1)  # [Hk, K, Dv]
        p = p.view(v.shape[1], -1, p.shape[-1])
        return self._ungrouped(torch.bmm(p, value), p.shape[0] * p.shape[1] // self._length)

    def values_grad(self, dout: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Computes dout v^T, [H, L, K]."""
        value = self.keys(v).permute(1, 2, 0)
        return torch.bmm(self._grouped(dout, v.shape[1]), value).view(
            dout.shape[1], self._length, -1
        )

    def add_grads(
        self,
        p: torch.Tensor,
        ds: torch.Tensor,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
    ) -> None:
        """Adds dq of the rows and dk, dv of the keys; the heads of a group sum in the product."""
        kv_heads = k.shape[1]
        p, ds = (x.view(kv_heads, -1, x.shape[-1]) for x in (p, ds))
        dq[self.rows] = self._ungrouped(torch.bmm(ds, self.keys(k).transpose(0, 1)), q.shape[1])
        key_grad = torch.bmm(ds.transpose(1, 2), self._grouped(q, kv_heads)).transpose(0, 1)
        value_grad = torch.bmm(p.transpose(1, 2), self._grouped(dout, kv_heads)).transpose(0, 1)
        at = 0
        for start, end in self.runs:
            dk[start:end] += key_grad[at : at + end - start]
            dv[start:end] += value_grad[at : at + end - start]
            at += end - start

    @property
    def _length(self) -> int:
        return self.rows.stop - self.rows.start


def _chunks(call: AttentionCall) -> Iterator[_Chunk]:
    """Cuts blocks into pieces of at most `_CHUNK` scores, without keys out of the window."""
    heads = call.q.shape[1]
    for row, length, with_own in call.mask.blocks():
        path = [(start, end) for start, end, _ in with_own]
        position = sum(end - start for start, end in path[:-1])
        cut_rows = 0
        while cut_rows < length:
            reach = position + length
            if call.window:
                reach = min(reach, call.window + length)
            rows = max(1, min(length - cut_rows, _CHUNK // (heads * reach)))
            if call.window:
                # longer chunks than the window would mostly compute what is masked
                rows = min(rows, max(64, call.window))
            first = position + cut_rows
            low = max(0, first - call.window + 1) if call.window else 0
            runs = _clip(path, low, first + rows)
            yield _Chunk(slice(row + cut_rows, row + cut_rows + rows), first, runs, low)
            cut_rows += rows


def _clip(path: list[tuple[int, int]], low: int, high: int) -> list[tuple[int, int]]:
    """Cuts a path's packed runs to those between two positions."""
    runs, position = [], 0
    for start, end in path:
        first = max(start, start + low - position)
        last = min(end, start + high - position)
        if first < last:
            runs.append((first, last))
        position += end - start
    return runs
