"""Head shapes by the names of models that have them, for the table of backends by head shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from prefixtree import PrefixForest, TileShape


@dataclass(frozen=True)
class Shape:
    """The heads of the attention that is measured on a workload.

    Attributes:
        heads, kv_heads: query heads and kv heads.
        head_dim: of q and k.
        v_head_dim: of v; None where it is the same.
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int | None = None

    def __str__(self) -> str:
        both = "" if self.v_head_dim is None else f"/{self.v_head_dim}"
        return f"{self.heads}/{self.kv_heads} D{self.head_dim}{both}"

    @property
    def dim_of_v(self) -> int:
        return self.head_dim if self.v_head_dim is None else self.v_head_dim


# Every grouping and head dim that the flash backend serves, at 1 to 16 query heads per kv head. The
# shapes without a model's name are here for that.
SHAPES = {
    "qwen3-8b": Shape(32, 8, 128),
    "qwen3-30b-a3b": Shape(32, 4, 128),
    "qwen3-235b-a22b": Shape(64, 4, 128),
    "qwen3-32b": Shape(64, 8, 128),
    "qwen2.5-7b": Shape(28, 4, 128),
    "qwen3-14b": Shape(40, 8, 128),
    "llama-3.2-3b": Shape(24, 8, 128),
    "qwen2.5-1.5b": Shape(12, 2, 128),
    "qwen3-1.7b": Shape(16, 8, 128),
    "santacoder": Shape(16, 1, 128),
    "llama-2-7b": Shape(32, 32, 128),
    "qwen2.5-0.5b": Shape(14, 2, 64),
    "gpt-oss-20b": Shape(64, 8, 64),
    "llama-3.2-1b": Shape(32, 8, 64),
    "smollm2-135m": Shape(9, 3, 64),
    "qwen1.5-0.5b": Shape(16, 16, 64),
    "phi-3-mini": Shape(32, 32, 96),
    "32-8-96": Shape(32, 8, 96),
    "16-8-192": Shape(16, 8, 192),
    "16-16-192": Shape(16, 16, 192),
    "deepseek-v2-lite": Shape(16, 16, 192, 128),
    "qwen3.5-27b": Shape(24, 4, 256),
    "qwen3-next-80b-a3b": Shape(16, 2, 256),
    "qwen3.5-9b": Shape(16, 4, 256),
    "gemma-2-9b": Shape(16, 8, 256),
    "gemma-7b": Shape(16, 16, 256),
    # a rank's heads under tensor parallelism
    "qwen3-8b-1of4": Shape(8, 2, 128),
    "qwen3-8b-1of8": Shape(4, 1, 128),
    "qwen3.5-27b-1of2": Shape(12, 2, 256),
    "qwen3.5-27b-1of4": Shape(6, 1, 256),
}


# tiles of the host's benchmarks, by name
TILES = {
    "grid 128x128": TileShape(128, 128),
    "cut 128x128": TileShape(128, 128, cut=True),
    "grid 16x64": TileShape(16, 64),
    "cut 16x64": TileShape(16, 64, cut=True),
}


def draw(
    forest: PrefixForest, shape: Shape, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """q, k, v and dout, of the same numbers in every run on one kind of device."""
    generator = torch.Generator(device).manual_seed(0)
    h, hk, d, d_v = shape.heads, shape.kv_heads, shape.head_dim, shape.dim_of_v
    return [
        torch.randn(forest.num_tokens, *size, generator=generator, device=device, dtype=dtype)
        for size in ((h, d), (hk, d), (hk, d_v), (h, d_v))
    ]
