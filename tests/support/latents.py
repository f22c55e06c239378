"""Inputs of attention to latents, and what expanded keys give for them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from prefixtree import TreeMask, tree_attention
from prefixtree.kernels.latents.gathered import gathered_attention


@dataclass
class LatentCase:
    """As `gathered_attention` takes them; dout [T, H, Dv]."""

    q: torch.Tensor
    latents: torch.Tensor
    w: torch.Tensor
    dout: torch.Tensor

    @classmethod
    def random(
        cls,
        tokens: int,
        heads: int = 3,
        dims: tuple[int, int, int] = (12, 8, 10),
        rank: int = 20,
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
    ) -> LatentCase:
        """dims: N, P and Dv."""
        generator = torch.Generator().manual_seed(tokens)
        nope, rope, dv = dims
        shapes = (
            (tokens, heads, nope + rope),
            (tokens, rank + rope),
            (rank, heads, nope + dv),
            (tokens, heads, dv),
        )
        q, latents, w, dout = (torch.randn(s, generator=generator) for s in shapes)
        return cls(*(x.to(device, dtype) for x in (q, latents, w / rank**0.5, dout)))

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    def to(self, dtype: torch.dtype) -> LatentCase:
        return LatentCase(*(getattr(self, x.name).to(dtype) for x in fields(self)))

    def expanded(self, mask: TreeMask, bits: torch.Tensor, **options: Any) -> dict[str, Any]:
        """out and gradients by `tree_attention` to keys of each head."""

        def attend(q: torch.Tensor, latents: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            rank, heads = w.shape[:2]
            nope = q.shape[2] - (latents.shape[1] - rank)
            made = torch.einsum("tr,rhd->thd", latents[:, :rank], w)
            rope = latents[:, None, rank:].expand(-1, heads, -1)
            k = torch.cat([made[..., :nope], rope], -1)
            v = made[..., nope:]
            return tree_attention(q, k, v, mask, scale=self.scale, chosen=bits, **options)

        return self._results(attend)

    def gathered(
        self, mask: TreeMask, bits: torch.Tensor, most: int, kernels: Any
    ) -> dict[str, Any]:
        """out and gradients by `gathered_attention`."""
        return self._results(
            lambda q, latents, w: gathered_attention(
                q, latents, w, mask.host, bits, most, self.scale, kernels
            )
        )

    def _results(self, attend: Any) -> dict[str, Any]:
        inputs = [x.detach().requires_grad_() for x in (self.q, self.latents, self.w)]
        out = attend(*inputs)
        grads = torch.autograd.grad(out, inputs, self.dout)
        names = ("out", "dq", "dlatents", "dw")
        return dict(zip(names, (out.detach(), *grads), strict=True))
