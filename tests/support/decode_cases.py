"""Rows that see runs of a pool of keys, and attention to them by definition, in float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from prefixtree.kernels.decoding.cascade import cascade_attention
from prefixtree.kernels.decoding.work import DecodeWork


@dataclass
class DecodeCase:
    """One call of `cascade_attention`; what no row may read is NaN.

    Attributes:
        runs, tails: as `DecodeWork` takes them.
        live: bool [B].
        q, k, v, key_pool, value_pool: as `cascade_attention` takes them.
        options: scale, window, softcap and sinks.
    """

    runs: np.ndarray
    tails: np.ndarray
    live: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    key_pool: torch.Tensor
    value_pool: torch.Tensor
    options: dict[str, Any]

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    def to(self, device: str) -> DecodeCase:
        names = ("live", "q", "k", "v", "key_pool", "value_pool")
        options = dict(self.options)
        if "sinks" in options:
            options["sinks"] = options["sinks"].to(device)
        moved = {name: getattr(self, name).to(device) for name in names}
        return replace(self, options=options, **moved)

    def work(self, **options: Any) -> DecodeWork:
        given: dict[str, Any] = {"device": self.q.device, "window": self.options.get("window")}
        given |= {"live": self.live, "group": self.group, "kv_heads": self.k.shape[1]}
        return DecodeWork(self.runs, self.tails, **(given | options))

    def attend(self, work: DecodeWork | None = None, **options: Any) -> torch.Tensor:
        """The operator's result; it writes into the pools of the case."""
        tensors = self.q, self.k, self.v, self.key_pool, self.value_pool
        return cascade_attention(*tensors, work or self.work(), **self.options, **options)


def random_shape(
    rng: np.random.Generator, rows: int, most: int, room: int, tokens: int = 1
) -> tuple[np.ndarray, np.ndarray, int]:
    """Runs and tails of a random forest with gaps between its nodes in the pool, and its keys.

    Args:
        rows: leaves.
        most: keys of a run.
        room: of a tail.
        tokens: rows of a leaf: the tokens of an append. Then leaves have 1 to so many.
    """
    width = [int(rng.integers(1, tokens + 1)) for _ in range(rows)]
    start = np.concatenate([[0], np.cumsum(width)])
    runs: list[list[int]] = []
    depth_of = [0] * rows

    def node(first: int, stop: int, depth: int, level: int) -> None:
        length = int(rng.integers(0, most + 1))
        runs.append([0, length, start[first], start[stop], depth])
        depth += length
        if stop - first == 1 or (level > 4 and rng.random() < 0.5):
            depth_of[first:stop] = [depth] * (stop - first)
            return
        # the same rows may see several runs: an earlier reply of the policy, then a tool's
        cuts = [first, *sorted(rng.integers(first, stop + 1, rng.integers(0, 3))), stop]
        for a, b in itertools.pairwise(cuts):
            if b > a:
                node(int(a), int(b), depth, level + 1)

    middle = int(rng.integers(0, rows + 1))
    for a, b in ((0, middle), (middle, rows)):
        if b > a:
            node(a, b, 0, 0)
    # anywhere in the pool, in any order
    lengths = [run[1] for run in runs] + [room] * rows
    begin, at = [0] * len(lengths), int(rng.integers(0, 5))
    for i in rng.permutation(len(lengths)):
        begin[i] = at
        at += lengths[i] + int(rng.integers(0, 4))
    for i, run in enumerate(runs):
        run[:2] = begin[i], begin[i] + run[1]
    tails = []
    for r in range(rows):
        written = int(rng.integers(0, room - width[r] + 1))
        first = begin[len(runs) + r]
        tails += [[first, room, written + j, depth_of[r]] for j in range(width[r])]
    order = rng.permutation(len(runs))
    return np.array(runs, np.int64)[order], np.array(tails, np.int64), at + 3


def random_case(
    seed: int,
    rows: int = 6,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
    *,
    most: int = 40,
    room: int = 30,
    tokens: int = 1,
    stopped: float = 0.0,
    sinks: bool = False,
    **options: Any,
) -> DecodeCase:
    """A random forest in a pool, one new key per row.

    Args:
        most, room, tokens: of `random_shape`.
        stopped: the share of rows that are not live.
        options: scale, window and softcap.
    """
    rng = np.random.default_rng(seed)
    runs, tails, num_keys = random_shape(rng, rows, most, room, tokens)
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    count, (h, hk), (d, d_v) = len(tails), heads, dims
    written = torch.zeros(num_keys, dtype=torch.bool)
    for a, b, *_ in runs:
        written[a:b] = True
    # the least of a leaf's rows: its first token's
    for first, _, keys, _ in tails[::-1]:
        written[first : first + 1 + keys] = False
        written[first : first + keys] = True
    pools = [draw(num_keys, hk, x).masked_fill(~written[:, None, None], torch.nan) for x in dims]
    if sinks:
        options["sinks"] = draw(h)
    # the tokens of an append go together
    _, leaf = np.unique(tails[:, 0], return_inverse=True)
    live = torch.as_tensor((rng.random(count) >= stopped)[leaf])
    tensors = draw(count, h, d), draw(count, hk, d), draw(count, hk, d_v)
    return DecodeCase(runs, tails, live, *tensors, *pools, options)


def visible(case: DecodeCase) -> torch.Tensor:
    """bool [B, C], pair by pair: the keys that each row sees after all have been written."""
    window = case.options.get("window") or 1 << 40
    out = torch.zeros(len(case.tails), len(case.key_pool), dtype=torch.bool)
    for r, (first, _, written, depth) in enumerate(case.tails.tolist()):
        if not case.live[r]:
            continue
        position = depth + written
        for a, b, i, j, above in case.runs.tolist():
            if i <= r < j:
                for key in range(a, b):
                    out[r, key] = position - (above + key - a) < window
        for i in range(written + 1):
            out[r, first + i] = written - i < window
    return out


def exact(case: DecodeCase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> out [B, H, Dv] in float64, and the pools as they are to be afterwards."""
    case = case.to("cpu")
    key_pool, value_pool = case.key_pool.clone(), case.value_pool.clone()
    for r, (first, _, written, _) in enumerate(case.tails.tolist()):
        if case.live[r]:
            key_pool[first + written], value_pool[first + written] = case.k[r], case.v[r]
    seen = visible(case)
    read = seen.any(0)[:, None, None]
    k = key_pool.double().masked_fill(~read, 0).repeat_interleave(case.group, 1)
    v = value_pool.double().masked_fill(~read, 0).repeat_interleave(case.group, 1)
    scale = case.options.get("scale") or case.q.shape[2] ** -0.5
    scores = torch.einsum("bhd,chd->bhc", case.q.double(), k) * scale
    if softcap := case.options.get("softcap"):
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.exp() * seen[:, None]
    total = weights.sum(-1, keepdim=True)
    if (sinks := case.options.get("sinks")) is not None:
        total = total + sinks.double().exp()[:, None]
    weights = weights / total.masked_fill(total == 0, 1)
    return torch.einsum("bhc,chd->bhd", weights, v), key_pool, value_pool


def assert_exact(case: DecodeCase, limit: float, work: DecodeWork | None = None, **options: Any):
    """The operator against float64: out within `limit` of the largest value, the pools by bits."""
    want, *pools = exact(case)
    out = case.attend(work, **options)
    assert out.dtype == case.q.dtype and out.shape == want.shape and out.isfinite().all()
    assert not out[~case.live].any()
    error = float((out.cpu().double() - want).abs().max())
    assert error <= limit * max(1.0, float(want.abs().max())), error
    for found, expected in zip((case.key_pool, case.value_pool), pools, strict=True):
        assert torch.equal(found.cpu().nan_to_num(9e4), expected.nan_to_num(9e4))
    return error
