"""The backends as objects. Each imports the code it stands for when it is first asked."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

from prefixtree.kernels.protocol import AttentionCall, Backend

_Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


class Flash:
    """flash-attn-4 on Hopper, float16 and bfloat16."""

    name = "flash"

    def refuses(self, call: AttentionCall) -> str | None:
        from prefixtree.kernels.flash import launch

        return launch.refusal(call)

    def forward(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        from prefixtree.kernels.flash import launch

        return launch.forward(call)

    def backward(
        self,
        call: AttentionCall,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> _Gradients:
        from prefixtree.kernels.flash import launch

        return launch.backward(call, dout, dlse, out, lse)


class Triton:
    """Our kernels in Triton, for GPUs, float16 and bfloat16."""

    name = "triton"

    def refuses(self, call: AttentionCall) -> str | None:
        if not installed("triton"):
            return "it needs the package triton"
        from prefixtree.kernels.triton import launch

        return launch.refusal(call)

    def forward(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        from prefixtree.kernels.triton import launch

        return launch.forward(call)

    def backward(
        self,
        call: AttentionCall,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> _Gradients:
        from prefixtree.kernels.triton import launch

        return launch.backward(call, dout, dlse, out, lse)


class Sdpa:
    """torch's operations on any device and in any dtype."""

    name = "sdpa"

    def refuses(self, call: AttentionCall) -> str | None:
        return None

    def forward(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        from prefixtree.kernels import sdpa

        return sdpa.forward(call)

    def backward(
        self,
        call: AttentionCall,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> _Gradients:
        from prefixtree.kernels import sdpa

        return sdpa.backward(call, dout, dlse, out, lse)


class Reference:
    """Dense, T x T memory, on any device and in any dtype: the oracle."""

    name = "reference"

    def refuses(self, call: AttentionCall) -> str | None:
        return None

    def forward(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        from prefixtree.kernels import reference

        return reference.forward(call)

    def backward(
        self,
        call: AttentionCall,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> _Gradients:
        from prefixtree.kernels import reference

        return reference.backward(call, dout, dlse)


@cache
def installed(package: str) -> bool:
    """Whether a package can be found; looking is slow beside a launch."""
    return find_spec(package) is not None


FLASH, TRITON, SDPA, REFERENCE = Flash(), Triton(), Sdpa(), Reference()
# "auto" prefers the earlier ones, if they serve and were measured to be faster
BACKENDS: tuple[Backend, ...] = (FLASH, TRITON, SDPA, REFERENCE)
