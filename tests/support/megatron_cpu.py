"""Stand-ins for CUDA and TransformerEngine, with which Megatron runs on a CPU; for tests alone.

Megatron names CUDA in code that has nothing to do with a device; each stand-in says where.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import logging
import os
import sys
import typing
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock, patch

import torch

_CPU = torch.device("cpu")
#: Where the tests' models are; a GPU for `on_gpus` alone.
DEVICE = _CPU
if torch.cuda.is_available():
    DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


class _Stream:
    """Work on a CPU is done when a call returns, so there is nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, *_: Any) -> _Stream:
        return self

    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...


def on_cpu(make: Any) -> Any:
    """Wraps what makes tensors on a device, so that they are not on "cuda"."""

    def made(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        return make(*args, device=_CPU if str(device).startswith("cuda") else device, **kwargs)

    return made


def stand_in() -> None:
    """For the rest of the process; the package calls it before Megatron's models are imported."""
    # the wheel's compiled helpers and Megatron-Bridge are of Python 3.12
    if not hasattr(typing, "override"):
        from typing_extensions import override

        typing.override = override
    # Megatron compiles small functions as it is imported, and a compiler takes 20 s
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if DEVICE.type == "cpu":
        _stand_in_for_cuda()

    from megatron.core.tensor_parallel import random

    # Megatron's own tracker for inference, whose fork does nothing
    random.initialize_rng_tracker(inference_rng_tracker=True)
    _norms()
    _sizes_of_latent_attention()


def _stand_in_for_cuda() -> None:
    # rotary tables, the mappings of tensor parallelism, and sinks ask where they are
    torch.cuda.current_device = lambda: _CPU
    # a tied weight is reduced over stages on a GPU
    torch.Tensor.cuda = lambda self, *_, **__: self
    # the pipeline's schedules, experts and DDP wait for streams
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.Stream = torch.cuda.current_stream = _Stream
    torch.cuda.stream = lambda *_: contextlib.nullcontext()
    # the schedules count tokens, and sliding windows are masked, on "cuda"
    torch.zeros, torch.ones = on_cpu(torch.zeros), on_cpu(torch.ones)

    from megatron.core.tensor_parallel import random

    # recomputation saves the states of CUDA's generators; nothing here draws numbers
    random._get_cuda_rng_state = lambda *_, **__: None
    random._set_cuda_rng_state = lambda *_, **__: None


def _sizes_of_latent_attention() -> None:
    """Megatron's local core attention refuses the two sizes that latent attention names, and serves
    them: its last reshape takes kv_channels for the size of values."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    made = DotProductAttention.__init__

    @functools.wraps(made)
    def make(
        self: Any, *args: Any, k_channels: Any = None, v_channels: Any = None, **kw: Any
    ) -> Any:
        made(self, *args, **kw)

    DotProductAttention.__init__ = make


def _norms() -> None:
    """RMSNorm where Megatron has TransformerEngine's only: its own local norm refuses sequence
    parallelism, and the last norm of a stack has no place in a spec."""
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.transformer import transformer_block

    transformer_block.LayerNormImpl = Norm
    hybrid_block.TENorm = Norm


class Norm(torch.nn.RMSNorm):
    """torch's norm, whose weight says whether ranks see a part of the tokens each."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


def with_norms(
    spec: Any, names: tuple[str, ...] = ("q_layernorm", "k_layernorm"), kind: type = Norm
) -> Any:
    """A local layer spec with `Norm` in the place of every norm of its layers, and `kind` in the
    places `names` of its attention."""
    attention = spec.submodules.self_attention
    normed = replace(attention.submodules, **dict.fromkeys(names, kind))
    return replace(
        spec,
        submodules=replace(
            spec.submodules,
            input_layernorm=Norm,
            pre_mlp_layernorm=Norm,
            self_attention=replace(attention, submodules=normed),
        ),
    )


class _Double:
    """torch, whose float32 is float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """While open, Megatron's routers and layers with a state, which round to float32 wherever they
    are, keep float64: softmax, counts, biases and decays, and with the default the sums that are
    logged."""
    from megatron.core.ssm import gated_delta_net
    from megatron.core.transformer.moe import moe_utils, router

    # before 0.19 a module of its own
    delta = getattr(gated_delta_net, "common", gated_delta_net)
    double, default = _Double(), torch.get_default_dtype()
    with (
        patch.object(moe_utils, "torch", double),
        patch.object(router, "torch", double),
        patch.object(delta, "torch", double),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


#: Settings of Megatron-Bridge's providers that need a GPU or one of its packages.
ON_CPU = {
    "use_cpu_initialization": True,
    "bf16": False,
    "fp16": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "attention_softmax_in_fp32": True,
    "cross_entropy_loss_fusion": False,
}


def stub_transformer_engine() -> None:
    """For Megatron-Bridge, which imports a module that names TransformerEngine. After Megatron's
    modules were imported, so that these see none."""
    import megatron.core.extensions.transformer_engine
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401

    for name in ("transformer_engine", "transformer_engine.pytorch"):
        stub = MagicMock(name=name)
        stub.__path__, stub.__version__ = [], "0.0"
        stub.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = stub
