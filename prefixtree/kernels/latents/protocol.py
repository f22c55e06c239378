"""`Chunk`: some queries of a call. `Kernels`: the functions that compute it.

Legend: T packed tokens, n queries of a chunk, H heads, R and P columns of a latent and of its key
with positions, k keys a query may choose.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from prefixtree.packing.host_mask import HostMask


class Chunk(NamedTuple):
    """Some queries, and the keys that each chose.

    Attributes:
        absorbed: [H, n, R].
        rope: [n, H, P], any strides but the last.
        latents: [T, R + P].
        lists: int32 [n, k], packed tokens of the chosen keys in front, anything behind.
        lengths: int32 [n], how many a query chose; more than k are an error, which gives NaN.
        scale: factor on scores.
    """

    absorbed: torch.Tensor
    rope: torch.Tensor
    latents: torch.Tensor
    lists: torch.Tensor
    lengths: torch.Tensor
    scale: float


class Kernels(Protocol):
    """The functions of an implementation: `definition`, or Triton's in `launch`."""

    def serves(self, q: torch.Tensor, rank: int, rope: int) -> bool:
        """Whether they run in the dtype of q, for so many columns R and P."""
        ...

    def indices(
        self, chosen: torch.Tensor, mask: HostMask, rows: slice, most: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """lists and lengths of `Chunk`, from bits int32 [T, W]."""
        ...

    def forward(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        """out [H, n, R] in the inputs' dtype, lse float32 (float64) [n, H], natural log."""
        ...

    def backward(
        self,
        chunk: Chunk,
        dout: torch.Tensor,
        lse: torch.Tensor,
        delta: torch.Tensor,
        drope: torch.Tensor,
        dlatents: torch.Tensor,
    ) -> torch.Tensor:
        """The gradient of `absorbed`; writes that of `rope`, and adds to that of `latents`.

        dout [H, n, R]; delta [n, H], the sums of out x dout; drope as rope; dlatents as latents, in
        float32 (float64)."""
        ...


def sums_of(x: torch.Tensor) -> torch.dtype:
    """The dtype of sums."""
    return torch.promote_types(x.dtype, torch.float32)
