"""`whole_copy`: a model that FSDP2 shards, whole on every rank while it is sampled from."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from prefixtree.errors import UnsupportedError
from prefixtree.models.checks import foreign_module, transformer_of
from prefixtree.models.compiled import compile_alike
from prefixtree.recompute.choose import available_bytes

# attributes that are not copied: forwards and compiled code of an instance are bound to a module,
# and hooks gather parameters
_BOUND = "forward", "_compiled_call_impl"
_SHARDING = "hook", "fsdp", "composable_api"
# packages whose forward of an instance gives, for logits, what that of its class gives
_AROUND = "torch", "transformers", "accelerate", "trl", "functools"


@contextmanager
def whole_copy(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[Any]:
    """Copies a model with its current parameters whole, while open; all ranks enter together.

    No rank waits for another within. A sampler's step reads every weight, and ranks take different
    numbers of steps: to gather layers in each would take longer, and rows that end would have to go
    on.

    Modules are copied with their attributes, adapters among them, so that the copy computes as the
    model does, in evaluation mode and without gradients. Hooks are not copied. Layers that
    `compile_layers` compiled are compiled. The configuration is the model's own.

    `dtype` is that of sharded parameters in the copy: the dtype that training computes in, the
    `param_dtype` of its mixed precision. Default: their own. If a rank has no room, all raise a
    MemoryError.
    """
    modules = list(model.modules())
    for module in modules:
        if isinstance(module, FSDPModule):
            # an evaluation leaves some modules whole
            module.reshard()
    # tied parameters are listed once
    sources = list(model.parameters())
    _check_plain(model, sources)
    targets = [_empty(p, dtype) for p in sources]
    _check_room(targets, sources[0].device)
    memo: dict[int, Any] = {id(p): new for p, new in zip(sources, targets, strict=True)}
    memo |= {id(b): b.detach().clone() for b in model.buffers()}
    memo |= {id(m): _unsharded(m) for m in modules}
    for module in modules:
        config = vars(module).get("config")
        memo[id(config)] = config
    for module in modules:
        _copy_attributes(module, memo)
    copied = memo[id(model)].eval()
    try:
        with torch.no_grad():
            for source, target in zip(sources, targets, strict=True):
                target.untyped_storage().resize_(target.nbytes)
                # rounded before it moves, as FSDP does
                part = source.detach().to(target.dtype)
                target.copy_(part.full_tensor() if isinstance(part, DTensor) else part)
        compile_alike(model, copied)
        yield copied
    finally:
        for target in targets:
            target.untyped_storage().resize_(0)


def _empty(p: nn.Parameter, dtype: torch.dtype | None) -> nn.Parameter:
    """Makes a parameter of this shape without memory."""
    dtype = dtype if isinstance(p, DTensor) and p.is_floating_point() else None
    out = torch.empty(p.shape, dtype=dtype or p.dtype, device=p.device)
    out.untyped_storage().resize_(0)
    return nn.Parameter(out, requires_grad=False)


def _check_plain(model: nn.Module, sources: list[nn.Parameter]) -> None:
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in sources]
    kinds = {type(part) for part in parts if type(part) not in (torch.Tensor, nn.Parameter)}
    are_floats = all(part.is_floating_point() for part in parts)
    config = transformer_of(model).config
    if kinds or not are_floats or getattr(config, "quantization_config", None) is not None:
        raise UnsupportedError(
            "whole copies of quantised weights are not verified: leave rollout_func out"
        )


def _check_room(targets: list[nn.Parameter], device: torch.device) -> None:
    needed = sum(p.nbytes for p in targets)
    free = torch.tensor(available_bytes(device), device=device)
    if dist.is_initialized():
        # a rank that went on alone would wait for the others
        dist.all_reduce(free, dist.ReduceOp.MIN)
    if needed > free:
        raise MemoryError(
            f"a whole copy of the model to sample from takes {needed:,} bytes on every rank, and "
            f"one has {int(free):,} free: shard over more GPUs, or sample with vLLM (TRL: "
            "use_vllm=True) or with the trainer's generation (leave rollout_func out)"
        )


def _unsharded(module: nn.Module) -> Any:
    """Makes a module of this one's class without attributes, or of FSDP's original class."""
    kind: Any = type(module)
    if isinstance(module, FSDPModule):
        kind = kind.__bases__[1]
    return kind.__new__(kind)


def _copy_attributes(module: nn.Module, memo: dict[int, Any]) -> None:
    attributes = {
        name: value
        for name, value in vars(module).items()
        if name not in _BOUND and not any(part in name for part in _SHARDING)
    }
    replaced = vars(module).get("forward")
    if replaced is not None and foreign_module(replaced, _AROUND) is not None:
        raise UnsupportedError(
            f"{type(module).__name__} has a forward of its own ({replaced!r}), which no copy has: "
            "undo the patch"
        )
    # modules, parameters and buffers are known: methods and lists of them become the copy's
    known = copy.deepcopy(attributes, memo)
    vars(memo[id(module)]).update({**vars(nn.Module()), **known})
