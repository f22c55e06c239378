"""Attention over a packed forest against the replicated batch, for `prefixtree bench`.

Both sides get the same numbers: q, k and v of the distinct tokens, copied for the replicated side,
and one upstream gradient per token, which the packed side gets times the token's copies. So the
copies' gradients add up to the packed ones, which is checked before anything is timed. The
replicated side is what a trainer runs today: FA2 over variable lengths on a GPU, elsewhere torch's
SDPA, a sequence at a time.

Legend: S sequences, T distinct tokens, R replicated tokens, H query heads, Hk kv heads, D head dim.
"""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from prefixtree.errors import InputError
from prefixtree.forest import PrefixForest
from prefixtree.kernels.attention import tree_attention
from prefixtree.packing.layout import pack
from prefixtree.packing.visible import visible_pairs
from prefixtree.progress import Watch, unwatched
from prefixtree.testing.compare import Meter
from prefixtree.testing.models import choose_device

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
RESULTS = ("out", "dq", "dk", "dv")
# ||packed - replicated|| / ||replicated||; in half precision each side rounds differently
LIMITS = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 2e-2}
# torch's FA2 computes offsets in int32, and faults on batches a few times as large
PIECE = 300_000


@dataclass(frozen=True)
class Setting:
    """The shape of the attention to compare and time.

    Attributes:
        device: a torch device, or "auto": cuda if there is one.
        dtype: one of LIMITS, or "auto": bfloat16, on a CPU float32.
        heads, kv_heads, head_dim: 0 for those of an 8B model (32, 8, 128), on a CPU of a small one
            (8, 2, 64).
        repeats: timed runs, after one that warms up.
    """

    device: str = "auto"
    dtype: str = "auto"
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    backend: str = "auto"
    repeats: int = 3
    seed: int = 0

    def resolved(self) -> Setting:
        """Replaces "auto" and 0 by chosen values."""
        device, dtype = choose_device(self.device), self.dtype
        is_small = device.startswith("cpu")
        if dtype == "auto":
            dtype = "float32" if is_small else "bfloat16"
        heads, kv_heads, head_dim = (8, 2, 64) if is_small else (32, 8, 128)
        return replace(
            self,
            device=device,
            dtype=dtype,
            heads=self.heads or heads,
            kv_heads=self.kv_heads or kv_heads,
            head_dim=self.head_dim or head_dim,
        )


def synthetic(num_levels: int, branching: int, node: int) -> PrefixForest:
    """Makes a full tree: nodes of `node` tokens, `branching` children each, `num_levels` deep."""
    total = sum(branching**level for level in range(num_levels))
    parents = [(i - 1) // branching if i else -1 for i in range(total)]
    return PrefixForest.from_parents(parents, [node] * total)


def replicated_attention(
    lengths: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    key_lengths: Sequence[int] | None = None,
) -> tuple[str, Attention]:
    """Finds the causal attention of S sequences, one after another, that trainers run today.

    `key_lengths`: of their keys, if those begin before the queries do.

    Returns:
        Its name, and the function of q [R, H, D], k and v [R, Hk, D]: flash-attn's FA2 if it is
            installed, torch's FA2 on other GPUs, torch's SDPA a sequence at a time on a CPU and in
            float32.
    """
    keys = lengths if key_lengths is None else key_lengths
    if device.type != "cuda" or dtype == torch.float32:

        def each(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            outs = []
            parts = (q.split(list(lengths)), k.split(list(keys)), v.split(list(keys)))
            for part in zip(*parts, strict=True):
                query, key, value = (x.transpose(0, 1)[None] for x in part)
                n, m = len(part[0]), len(part[1])
                visible = None if n == m else q.new_ones(n, m, dtype=torch.bool).tril(m - n)
                out = F.scaled_dot_product_attention(
                    query, key, value, attn_mask=visible, is_causal=n == m, enable_gqa=True
                )
                outs.append(out[0].transpose(0, 1))
            return torch.cat(outs)

        return "torch SDPA, a sequence at a time", each

    def offsets(counts: Sequence[int]) -> torch.Tensor:
        return torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device=device)

    ends = offsets(lengths)
    layout = (ends, ends if key_lengths is None else offsets(keys), max(lengths), max(keys))
    try:
        # flash-attn-4 brings a package of this name without FA2 in it
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        from torch.nn.attention.varlen import varlen_attn

        # newer versions ask for enable_gqa, older ones do not know it
        known = "enable_gqa" in inspect.signature(varlen_attn).parameters
        more: dict[str, Any] = {"enable_gqa": True} if known else {}
        fa2: Any = varlen_attn
        return "FA2 of torch", lambda q, k, v: fa2(q, k, v, *layout, window_size=(-1, 0), **more)
    return "FA2 of flash-attn", lambda q, k, v: flash_attn_varlen_func(
        q, k, v, *layout, causal=True
    )


def pieces(lengths: Sequence[int], most: int = PIECE) -> list[list[int]]:
    """Cuts sequences into runs of at most `most` tokens (or one sequence), as their indices."""
    out: list[list[int]] = []
    room = 0
    for i, length in enumerate(lengths):
        if not out or length > room:
            out.append([])
            room = most
        out[-1].append(i)
        room -= length
    return out


def differences(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> dict[str, float]:
    """||found - expected|| / ||expected|| of each of RESULTS, in float64 sums."""
    out = {}
    for name, a, b in zip(RESULTS, found, expected, strict=True):
        gap = torch.linalg.vector_norm(a.float() - b.float(), dtype=torch.float64)
        out[name] = float(gap / torch.linalg.vector_norm(b.float(), dtype=torch.float64))
    return out


class Replication:
    """The two sides of one forest: the same numbers, packed and replicated.

    Attributes:
        inputs: q, k and v of the packed tokens.
        upstream: the gradient that reaches each copy of a token's out.
        dout: the packed token's gradient: that times its copies.
        pieces: of the replicated batch: the packed token of each row, then the name and function.
    """

    def __init__(self, forest: PrefixForest, setting: Setting) -> None:
        self.setting = setting
        self.device = torch.device(setting.device)
        packed = pack(forest)
        self.packed = packed.to(self.device)
        generator = torch.Generator(self.device).manual_seed(setting.seed)
        dtype = getattr(torch, setting.dtype)
        sizes = (setting.heads, setting.kv_heads, setting.kv_heads, setting.heads)
        drawn = [
            torch.randn(
                (forest.num_tokens, heads, setting.head_dim),
                generator=generator,
                device=self.device,
                dtype=dtype,
            )
            for heads in sizes
        ]
        self.inputs, self.upstream = drawn[:3], drawn[3]
        self.dout = self.upstream * self.packed.multiplicity[:, None, None].to(dtype)
        lengths = forest.sequence_lengths.tolist()
        rows = packed.unpack(torch.arange(forest.num_tokens))
        self.pieces = [
            (
                torch.cat([rows[i] for i in piece]).to(self.device),
                replicated_attention([lengths[i] for i in piece], self.device, dtype),
            )
            for piece in pieces(lengths)
        ]
        self.name = self.pieces[0][1][0]

    def attend_packed(self, attend: Attention | None = None) -> list[torch.Tensor]:
        """Computes out, dq, dk and dv of the packed tokens, by `tree_attention` or by `attend`."""
        q, k, v = inputs = [x.detach().requires_grad_() for x in self.inputs]
        if attend is None:
            out = tree_attention(q, k, v, self.packed.mask, backend=self.setting.backend)
        else:
            out = attend(q, k, v)
        return [out.detach(), *torch.autograd.grad(out, inputs, self.dout)]

    def run_packed(self) -> tuple[list[torch.Tensor], Meter]:
        """Computes the same by `tree_attention`, with its cost."""
        with Meter(self.device) as meter:
            found = self.attend_packed()
            self._wait()
        return found, meter

    def run_replicated(self) -> Iterator[tuple[torch.Tensor, list[torch.Tensor], Meter]]:
        """Runs each piece: the packed token of each row, its out and gradients, and their cost."""
        for rows, (_, attend) in self.pieces:
            q, k, v = inputs = [x[rows].requires_grad_() for x in self.inputs]
            dout = self.upstream[rows]
            with Meter(self.device) as meter:
                out = attend(q, k, v)
                gradients = torch.autograd.grad(out, inputs, dout)
                self._wait()
            yield rows, [out.detach(), *gradients], meter

    def check(self) -> dict[str, float]:
        """Measures how far the packed results are from the replicated ones; warms both sides up."""
        packed, _ = self.run_packed()
        expected = [torch.zeros_like(x, dtype=torch.float32) for x in packed]
        for rows, (out, *gradients), _ in self.run_replicated():
            expected[0][rows] = out.float()
            for total, gradient in zip(expected[1:], gradients, strict=True):
                total.index_add_(0, rows, gradient.float())
        return differences(packed, expected)

    def times(self, watch: Watch = unwatched) -> tuple[dict[str, Any], dict[str, Any]]:
        """Measures seconds and peak memory of the packed and of the replicated side, in turn."""
        sides: tuple[list[list[Meter]], list[list[Meter]]] = ([], [])
        for _ in watch(range(self.setting.repeats), "timing", self.setting.repeats):
            sides[0].append([self.run_packed()[1]])
            sides[1].append([meter for _, _, meter in self.run_replicated()])
        packed, replicated = (self._cost(runs) for runs in sides)
        return packed, replicated

    @staticmethod
    def _cost(runs: list[list[Meter]]) -> dict[str, Any]:
        seconds = [sum(meter.seconds for meter in run) for run in runs]
        peaks = [meter.peak_bytes for run in runs for meter in run if meter.peak_bytes is not None]
        return {
            "seconds": statistics.median(seconds),
            "all_seconds": seconds,
            "peak_bytes": max(peaks, default=None),
        }

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def bench(forest: PrefixForest, setting: Setting, *, watch: Watch = unwatched) -> dict[str, Any]:
    """Checks both sides against each other and, if they agree, times them; ready for JSON."""
    setting = setting.resolved()
    limit = LIMITS[setting.dtype]
    lengths = forest.sequence_lengths
    position, length = forest.node_position.astype(np.int64), forest.node_length.astype(np.int64)
    try:
        sides = Replication(forest, setting)
        distances = sides.check()
        # NaN fails the check
        passed = all(difference <= limit for difference in distances.values())
        packed, replicated = sides.times(watch) if passed else (None, None)
    except torch.OutOfMemoryError as problem:
        raise InputError(
            f"out of memory on {setting.device}; try a smaller --limit or --node "
            f"({str(problem).splitlines()[0]})"
        ) from None
    bound = visible_pairs(np.zeros_like(lengths), lengths, None) / visible_pairs(
        position, length, None
    )
    speedup = replicated["seconds"] / packed["seconds"] if packed and replicated else None
    return {
        "passed": passed,
        **asdict(setting),
        "replicated_by": sides.name,
        "sequences": forest.num_sequences,
        "tokens": {
            "replicated": forest.num_replicated_tokens,
            "distinct": forest.num_tokens,
            "ratio": forest.replication_ratio,
        },
        "checks": {
            name: {
                "difference": value if np.isfinite(value) else None,
                "limit": limit,
                "passed": value <= limit,
            }
            for name, value in distances.items()
        },
        "packed": packed,
        "replicated": replicated,
        "attention_flop_ratio": bound,
        "speedup": speedup,
        "efficiency": None if speedup is None else speedup / bound,
    }
