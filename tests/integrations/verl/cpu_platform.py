"""verl on a CPU: a platform for it, and verl's and prefixtree's engines registered for it.

verl brings platforms for accelerators only. Importing this module (tests do, and Ray's workers
through VERL_USE_EXTERNAL_MODULES) registers one named "cpu", which VERL_PLATFORM=cpu selects.
`register_engines` then makes verl's own FSDP engines available for it under the vendor "stock",
and prefixtree's under "prefixtree"; VERL_ENGINE_VENDOR chooses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _device_module() -> ModuleType:
    """torch.cpu with the functions of torch.cuda that verl calls."""
    module = ModuleType("cpu_device")
    module.__dict__.update(vars(torch.cpu))

    def nothing(*args: Any, **kwargs: Any) -> int:
        return 0

    names = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")
    for name in (*names, "empty_cache", "synchronize", "ipc_collect"):
        setattr(module, name, nothing)
    module.mem_get_info = lambda *args: (0, 0)
    module.is_available = lambda: False
    module.get_device_name = lambda *args: "CPU"
    module.get_rng_state = torch.get_rng_state
    module.set_rng_state = torch.set_rng_state
    return module


_DEVICE = _device_module()


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """The platform that verl asks for, on a machine without an accelerator."""

    device_name = "cpu"
    vendor_name = "stock"
    device_module = _DEVICE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


class CpuFSDP(FullyShardedDataParallel):
    """FSDP1 that does not broadcast the first rank's weights, which it refuses to do on a CPU.

    Only for models that every rank loads (with tied weights verl has no meta tensors)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "sync_module_states": False})


# In the place of flash_attention_2, which no CPU has: transformers' function for it, which verl
# patches to exchange heads among ranks, over a dense kernel.
VARLEN = "varlen_on_cpu"


def _dense_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    query_length: int,
    *,
    position_ids: torch.Tensor,
    softmax_scale: float | None = None,
    **_: Any,
) -> torch.Tensor:
    """Causal attention within the sequences of a row, which begin at position 0; [1, T, H, D]."""
    sequence = (position_ids[0] == 0).cumsum(0)
    mask = (sequence[:, None] == sequence[None]).tril()
    rows = (x.transpose(1, 2) for x in (query, key, value))
    attend = torch.nn.functional.scaled_dot_product_attention
    out = attend(*rows, attn_mask=mask, scale=softmax_scale, enable_gqa=True)
    return out.transpose(1, 2)


def _register_varlen() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations import flash_attention
    from verl.models.transformers import monkey_patch

    AttentionInterface.register(VARLEN, flash_attention.flash_attention_forward)
    AttentionMaskInterface.register(VARLEN, lambda *args, **kwargs: None)
    monkey_patch._flash_attention_forward = _dense_varlen


def _unpinned(policy: Any, pin_memory: bool) -> Any:
    return policy(pin_memory=False)


def register_engines(device: str = "cpu") -> None:
    """verl's own engines for vendors "stock" and "undivided", prefixtree's for "prefixtree", verl's
    without its patches of classes for "alone"; once a process."""
    from functools import partial

    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp import transformer_impl

    from prefixtree.integrations.verl import PackedActorEngine, PackedCriticEngine
    from prefixtree.integrations.verl.images import without_patches
    from tests.integrations.verl.stock_critic import StockCritic

    if (device, "stock") in EngineRegistry._engines["language_model"]["fsdp2"]:
        return
    if device == "cpu":
        _register_varlen()
        # verl pins what a reference offloads; without an accelerator there is nothing to pin for
        transformer_impl.CPUOffloadPolicy = partial(_unpinned, transformer_impl.CPUOffloadPolicy)
        transformer_impl.FSDP = CpuFSDP

    class Alone(transformer_impl.FSDPEngineWithLMHead):  # type: ignore[misc]
        """transformers' models as they are, in verl's engine."""

        def _build_module(self) -> Any:
            with without_patches():
                return super()._build_module()

    for vendor, actor, critic in (
        ("alone", Alone, StockCritic),
        ("stock", transformer_impl.FSDPEngineWithLMHead, StockCritic),
        ("undivided", transformer_impl.FSDPEngineWithLMHead, StockCritic),
        ("prefixtree", PackedActorEngine, PackedCriticEngine),
    ):
        options: dict[str, Any] = {"backend": ["fsdp", "fsdp2"], "device": device, "vendor": vendor}
        EngineRegistry.register(model_type="language_model", **options)(actor)
        EngineRegistry.register(model_type="value_model", **options)(critic)
