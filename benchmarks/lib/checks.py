"""Float64 attention over a forest of any size, and the three-way bound of docs/design.md.

The dense computation is written out here from the mask's definition `k <= q < subtree_end[k]`,
query chunk by query chunk, once in float64 and once in the dtype under test ("eager": every tensor
that eager PyTorch would hold in that dtype is rounded to it, sums are float32). One kv head with
its query heads is a few TFLOP, so some heads are taken and every row of them: no gradient of a key
can be had without the softmax of all its queries anyway.

Legend: T tokens, G query heads of one kv head, H query heads, Hk kv heads, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from prefixtree import PrefixForest
from prefixtree.testing.compare import errors, pooled_nodes

NAMES = ("out", "lse", "dq", "dk", "dv")
Results = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Verdict:
    """The errors of one tensor over their limits.

    Attributes:
        name: of the tensor.
        worst: greatest error over its limit, of all (node x head); above 1 is red.
        mean: greatest mean error over its limit, of all heads; above 1 is red.
        error: greatest error over the greatest number of the reference, to be read by people.
    """

    name: str
    worst: float
    mean: float
    error: float

    @property
    def is_red(self) -> bool:
        """NaN is red."""
        return not (self.worst <= 1 and self.mean <= 1)


def dense_group(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    subtree_end: np.ndarray,
    dtype: torch.dtype,
    chunk: int = 1024,
    chosen: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Results:
    """One kv head: out, lse and gradients, rounded where eager in `dtype` rounds.

    Args:
        q: [T, G, D].
        k: [T, D].
        v: [T, Dv].
        dout: [T, G, Dv].
        subtree_end: int [T], on the host.
        dtype: float64 for the reference, that of the inputs for eager.
        chunk: query tokens at a time; a chunk holds a few tensors of G x chunk x visible keys. Sums
            in float32 are better in small chunks: for float32 inputs small chunks are too strict.
        chosen: `chosen` of `tree_attention` and the position of each token, int [T]. Default: all
            keys.

    Returns:
        out [T, G, Dv], lse [T, G], dq [T, G, D], dk [T, 1, D], dv [T, 1, Dv], in float64.
    """
    wide = torch.promote_types(dtype, torch.float32)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).to(wide)

    tokens, group, dim = q.shape
    q, k, v, dout = (rounded(x) for x in (q, k, v, dout))
    out, dq = torch.zeros_like(dout), torch.zeros_like(q)
    lse = q.new_zeros(tokens, group)
    # one per head: eager rounds the gradient of every copy of k and v before it adds them up
    dk, dv = (x.new_zeros(group, *x.shape) for x in (k, v))
    device_end = torch.as_tensor(subtree_end, device=q.device)
    for begin in range(0, tokens, chunk):
        rows = torch.arange(begin, min(begin + chunk, tokens), device=q.device)
        stop = begin + len(rows)
        # keys that no query of the chunk sees are left out; the mask below decides on the others
        near = np.flatnonzero(subtree_end[:stop] > begin)
        keys = torch.as_tensor(near, device=q.device)
        visible = (keys[None] <= rows[:, None]) & (rows[:, None] < device_end[keys][None])
        if chosen is not None:
            bits, position = chosen
            at = position[keys]
            visible &= (bits[rows][:, at // 32] >> (at % 32)) & 1 != 0
        q_rows, k_rows, v_rows, dout_rows = q[rows], k[keys], v[keys], dout[rows]
        scores = rounded(torch.einsum("qgd,kd->gqk", q_rows, k_rows)) * dim**-0.5
        scores.masked_fill_(~visible, -torch.inf)
        lse[rows] = scores.logsumexp(-1).t()
        p = scores.softmax(-1)
        del scores
        dp = rounded(torch.einsum("qgd,kd->gqk", dout_rows, v_rows))
        ds = rounded(p * (dp - (p * dp).sum(-1, keepdim=True)) * dim**-0.5)
        p = rounded(p)
        out[rows] = rounded(torch.einsum("gqk,kd->qgd", p, v_rows))
        dq[rows] = rounded(torch.einsum("gqk,kd->qgd", ds, k_rows))
        dk[:, keys] += torch.einsum("gqk,qgd->gkd", ds, q_rows)
        dv[:, keys] += torch.einsum("gqk,qgd->gkd", p, dout_rows)
    dk, dv = (rounded(rounded(x).sum(0))[:, None] for x in (dk, dv))
    results = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    return {name: x.double() for name, x in results.items()}


def check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    got: Results,
    forest: PrefixForest,
    kv_heads: int = 2,
    chunk: int = 1024,
    chosen: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> list[Verdict]:
    """Holds results against float64: per (node x head) the worst error is at most 2x eager's
    + 2 eps x max|reference|, per head the mean at most 1.2x eager's + eps / 10 x max|reference|.

    Args:
        q, k, v, dout: [T, H, D], [T, Hk, D], [T, Hk, Dv], [T, H, Dv] in the dtype under test.
        got: NAMES, of the shapes above; lse is [H, T].
        forest: whose packed tokens these are.
        kv_heads: how many are judged, the first and the last among them. Of the others only NaN
            and infinity are seen.
        chunk: query tokens at a time.
        chosen: as in `dense_group`.
    """
    group, total = q.shape[1] // k.shape[1], k.shape[1]
    judged = np.unique(np.linspace(0, total - 1, min(kv_heads, total)).round().astype(int))
    subtree_end = np.repeat(forest.node_subtree_end, forest.node_length)
    # a token's subtree is its node's: everything below the node is below each of its tokens
    reference, eager = [], []
    for head in judged:
        mine = slice(head * group, (head + 1) * group)
        inputs = (q[:, mine], k[:, head], v[:, head], dout[:, mine], subtree_end)
        reference.append(dense_group(*inputs, torch.float64, chunk, chosen))
        eager.append(dense_group(*inputs, q.dtype, chunk, chosen))
    node = torch.as_tensor(pooled_nodes(forest), device=q.device)
    query_heads = (judged[:, None] * group + np.arange(group)).ravel()
    verdicts = []
    for name in NAMES:
        x = got[name].t() if name == "lse" else got[name]
        heads = judged if name in ("dk", "dv") else query_heads
        ours = x[:, torch.as_tensor(heads, device=x.device)].double()
        want = torch.cat([r.pop(name) for r in reference], 1)
        base = torch.cat([r.pop(name) for r in eager], 1)
        if ours.shape != want.shape:
            raise ValueError(f"{name} is {list(x.shape)}, expected rows like {list(want.shape)}")
        verdict = _judge(name, ours, base, want, node, torch.finfo(q.dtype).eps)
        if not torch.isfinite(x).all():
            verdict = Verdict(name, float("nan"), float("nan"), float("nan"))
        verdicts.append(verdict)
    return verdicts


def _judge(
    name: str,
    ours: torch.Tensor,
    base: torch.Tensor,
    want: torch.Tensor,
    node: torch.Tensor,
    eps: float,
) -> Verdict:
    """ours, base (eager) and want: [T, heads] or [T, heads, dim]; node: [T]."""
    # a forest of single tokens has gradients of exactly 0
    size = want.abs().max().clamp(min=1e-30)
    found = errors(ours, base, want, node, eps * size)
    return Verdict(
        name,
        float((found.worst / found.worst_limit).max()),
        float((found.mean / found.mean_limit).max()),
        float((ours - want).abs().max() / size),
    )


def results_of(
    attend: Callable[..., Any], inputs: Sequence[torch.Tensor], dout: torch.Tensor
) -> dict[str, torch.Tensor]:
    """out, lse and the gradients, by NAMES."""
    out, lse = attend(*inputs, return_lse=True)
    gradients = torch.autograd.grad(out, inputs, dout)
    return dict(zip(NAMES, (out.detach(), lse.detach(), *gradients), strict=True))
