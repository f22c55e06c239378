"""Gathered latents beside tiles of all keys, on chains: what `sparse --chains` measures.

Both sides attend to the same k keys of each query, chosen at random. The rows of out and dq of some
queries, and the gradients that these alone give to latents and projection, are held against
float64 before anything is timed. TF are of the work a side does: a pair of tiles costs D + Dv
columns and every visible one is computed, a gathered one R + P + R, and only chosen ones are.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.lib.timing import Row, median_ms, peak_bytes, times_of
from prefixtree import PrefixForest, TreeMask, pack, tree_attention
from prefixtree.kernels.best_keys import best_bits
from prefixtree.kernels.chosen import from_bits, words
from prefixtree.kernels.latents import definition, gathered

TILES, GATHERED = "tiles of all keys", "gathered latents"
# heads; N, P, Dv; R
MODELS = {"deepseek-v3.2": (128, (128, 64, 128), 512), "glm-5": (64, (192, 64, 256), 512)}
# queries that are checked; the greatest relative error of a result's norm
PICKED, LIMIT = 12, 0.02


class Chain:
    """One path of so many tokens, and what an attention of latents takes for it."""

    def __init__(self, tokens: int, options: argparse.Namespace) -> None:
        heads, (nope, rope, dv), rank = MODELS[options.model]
        if options.is_tiny:
            heads, nope, rope, dv, rank = 2, 16, 8, 16, 32
        self.options, self.nope, self.rank, self.heads = options, nope, rank, heads
        self.mask: TreeMask = pack(PrefixForest.from_parents([-1], [tokens])).mask
        self.mask = self.mask.to(options.device)
        generator = torch.Generator(self.mask.device).manual_seed(0)
        dtype = getattr(torch, options.dtype)

        def draw(*size: int) -> torch.Tensor:
            kind = {"dtype": dtype, "device": self.mask.device}
            return torch.randn(size, generator=generator, **kind)

        self.q = draw(tokens, heads, nope + rope)
        self.latents = draw(tokens, rank + rope)
        self.w = draw(rank, heads, nope + dv) * rank**-0.5
        self.dout = draw(tokens, heads, dv)
        self.scale = (nope + rope) ** -0.5
        parts = []
        for position in self.mask.position_ids.split(1024):
            scores = torch.rand(len(position), tokens, generator=generator, device=self.mask.device)
            parts.append(best_bits(scores, options.topk, position, words(tokens)))
        self.bits = torch.cat(parts)
        rng = np.random.default_rng(0)
        count = min(PICKED, tokens)
        self.picked = sorted(rng.choice(tokens, count, replace=False).tolist())
        kernels = gathered.kernels_for(options.backend, self.mask.device)
        self.kernels: Any = definition if kernels is None else kernels

    def gather(self, q: torch.Tensor, latents: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """[T, H, Dv]."""
        most = self.options.topk
        return gathered.gathered_attention(
            q, latents, w, self.mask.host, self.bits, most, self.scale, self.kernels
        )

    def expand(self, q: torch.Tensor, latents: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """[T, H, Dv], of as many heads as q has."""
        out: torch.Tensor = tree_attention(q, *self.keys(latents, w), **self.tile_options)
        return out

    def keys(self, latents: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [T, H, D] and values [T, H, Dv] of the heads of w."""
        made = torch.einsum("tr,rhd->thd", latents[:, : self.rank], w)
        rope = latents[:, None, self.rank :].expand(-1, w.shape[1], -1)
        return torch.cat([made[..., : self.nope], rope], -1), made[..., self.nope :]

    @property
    def tile_options(self) -> dict[str, Any]:
        """Of `tree_attention`."""
        options = {"mask": self.mask, "scale": self.scale, "chosen": self.bits}
        return options | {"backend": self.options.backend}

    def inputs(self, heads: int) -> list[torch.Tensor]:
        """q, latents and w, of the first heads."""
        tensors = self.q[:, :heads], self.latents, self.w[:, :heads]
        return [x.detach().contiguous().requires_grad_() for x in tensors]

    def errors(self, attend: Callable[..., torch.Tensor], heads: int) -> dict[str, float]:
        """Of out, dq, dlatents and dw against float64, where some rows alone have a gradient."""
        inputs, dout = self.inputs(heads), torch.zeros_like(self.dout[:, :heads])
        dout[self.picked] = self.dout[self.picked, :heads]
        out = attend(*inputs)
        dq, *grads = torch.autograd.grad(out, inputs, dout)
        latents, w = (x.detach().double().requires_grad_() for x in inputs[1:])
        wanted = []
        for row in self.picked:
            keys = from_bits(self.bits[row, None], 0, row + 1)[0].nonzero()[:, 0]
            own, rows = self.q[row, :heads].double().requires_grad_(), latents[keys]
            made = torch.einsum("kr,rhd->khd", rows[:, : self.rank], w)
            scores = torch.einsum("hd,khd->hk", own[:, : self.nope], made[..., : self.nope])
            scores = (scores + own[:, self.nope :] @ rows[:, self.rank :].T) * self.scale
            found = torch.einsum("hk,khd->hd", scores.softmax(-1), made[..., self.nope :])
            found.backward(dout[row].double())
            wanted.append((found.detach(), own.grad))
        want_out, want_dq = (torch.stack(x) for x in zip(*wanted, strict=True))
        pairs = {
            "out": (out[self.picked], want_out),
            "dq": (dq[self.picked], want_dq),
            "dlatents": (grads[0], latents.grad),
            "dw": (grads[1], w.grad),
        }
        return {
            n: float((a.detach().double() - b).norm() / b.norm()) for n, (a, b) in pairs.items()
        }

    def run(self, side: str) -> Row:
        """Checks, then times, one side; tiles on some heads, as their time grows with these."""
        heads = min(self.options.heads, self.heads) if side == TILES else self.heads
        attend = self.expand if side == TILES else self.gather
        found = self.errors(attend, heads)
        row: Row = {"heads": self.heads, "measured_heads": heads, "errors": found}
        # no number at all is an error too
        row["red"] = [n for n, x in found.items() if not x < LIMIT]
        row["worst"] = max(found.values()) / LIMIT
        if row["red"]:
            return row
        q, latents, w = self.inputs(heads)
        dout = self.dout[:, :heads].contiguous()
        if side == TILES:
            made = (x.detach().contiguous() for x in self.keys(latents, w))
            given = [q, *(x.requires_grad_() for x in made)]
            pairs = self.mask.host.visible_pairs(0)
            row |= times_of(
                lambda *x: tree_attention(*x, **self.tile_options),
                given,
                dout,
                pairs,
                self.options.repeats,
                1,
            )
            for key in ("forward_ms", "backward_ms"):
                row[key] *= self.heads / heads
            return row
        return row | self._times([q, latents, w], dout)

    def _times(self, inputs: list[torch.Tensor], dout: torch.Tensor) -> Row:
        repeats, device = self.options.repeats, self.mask.device

        def forward() -> torch.Tensor:
            with torch.no_grad():
                return self.gather(*inputs)

        q, latents, w = inputs
        # a projection that is not asked for is computed all the same, unless it is frozen
        outs = {"backward": self.gather(q, latents, w)}
        outs["backward_frozen"] = self.gather(q, latents, w.detach())

        def backward(name: str) -> Any:
            some = inputs if name == "backward" else inputs[:2]
            return torch.autograd.grad(outs[name], some, dout, retain_graph=True)

        row: Row = {}
        row["forward_ms"], row["forward_all_ms"] = median_ms(forward, device, repeats, 1)
        for name in outs:
            timed = median_ms(partial(backward, name), device, repeats, 1)
            row[f"{name}_ms"], row[f"{name}_all_ms"] = timed
        if device.type == "cuda":
            row["peak_bytes"] = peak_bytes(lambda: backward("backward"))
        chosen = self.mask.host.visible_pairs(self.options.topk)
        wide, flops = inputs[1].shape[1], 2.0 * self.heads * chosen
        row["forward_tflops"] = flops * (wide + self.rank) / row["forward_ms"] / 1e9
        # where no projection is trained: its gradient takes the forward's outputs once more
        work = flops * (3 * wide + 2 * self.rank)
        row["backward_tflops"] = work / row["backward_frozen_ms"] / 1e9
        return row
