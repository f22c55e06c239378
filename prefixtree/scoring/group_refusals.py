"""Refuses what does not go with a group of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from prefixtree.errors import Refusal, UnsupportedError
from prefixtree.models.checks import runs_deepspeed
from prefixtree.models.family_table import INDEXED_BLOCKS, layer_types_of
from prefixtree.packing.layout import PackedForest
from prefixtree.parallel.heads import heads_problem
from prefixtree.scoring.refusals import GroupMode, divided_by_transformers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def _placed(model: nn.Module) -> Any:
    """The first parameter that FSDP2 spreads over more than one dimension of its mesh."""
    is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    for name, parameter in model.named_parameters():
        placements: Any = getattr(parameter, "placements", ())
        if sum(not p.is_replicate() for p in placements) > is_sharded:
            return {"parameter": name, "placements": placements}
    return None


#: Refusals of a model, wrapped or not, with `group`.
GROUPS = (
    Refusal(
        "DeepSpeed",
        runs_deepspeed,
        "DeepSpeed is not verified with group; use DistributedDataParallel or FSDP",
    ),
    Refusal(
        "tensor or expert parallel",
        divided_by_transformers,
        "{kind} is tensor or expert parallel, which is not verified with group; load the model "
        "without tp_plan and DistributedConfig, or leave group out",
    ),
    Refusal(
        "parallelize_module",
        _placed,
        "{parameter} is a DTensor with placements {placements}, as tensor parallelism makes them, "
        "which is not verified with group; leave parallelize_module or group out",
    ),
)


def check_mode(mode: GroupMode, config: Any, packed: PackedForest, ranks: int) -> None:
    """Refuses a forest that this mode cannot divide among the ranks."""
    for heads, kv_heads in heads_of(config):
        if mode == "parts":
            check_backend_of_parts(packed, heads, kv_heads)
            continue
        # each group of heads that chooses its own keys is divided by itself
        groups = kv_heads if INDEXED_BLOCKS in layer_types_of(config) else 1
        if problem := heads_problem(heads // groups, kv_heads // groups, ranks):
            each = "" if groups == 1 else f"of each of {groups} groups of heads that choose keys, "
            raise ValueError(each + problem)


def heads_of(config: Any) -> set[tuple[int, int]]:
    """The (query heads, kv heads) of a model's layers; empty where no layer has attention."""
    layers = getattr(config, "per_layer_config", None)
    each = [config] if layers is None else [layers[i] for i in range(config.num_hidden_layers)]
    heads = ((c, getattr(c, "num_attention_heads", None)) for c in each)
    return {(n, getattr(c, "num_key_value_heads", None) or n) for c, n in heads if n}


def check_backend_of_parts(packed: PackedForest, heads: int, kv_heads: int) -> None:
    """Refuses a backend that would refuse some parts alone, while other ranks wait."""
    if packed.mask.backend == "flash" and heads == kv_heads:
        raise UnsupportedError(
            "backend 'flash' does not serve ranks of a group that import or export keys of every "
            "query head: use 'auto', which takes triton there"
        )


def check_averages(model: nn.Module, group: ProcessGroup) -> None:
    """Refuses wrappers that average gradients over only some ranks of the group."""
    import torch.distributed as dist

    if not torch.is_grad_enabled():
        return
    averaged: set[int] = set()
    for module in model.modules():
        if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)):
            averaged.update(dist.get_process_group_ranks(module.process_group))
            # FSDP1's hybrid sharding has it
            if (others := getattr(module, "_inter_node_pg", None)) is not None:
                averaged.update(dist.get_process_group_ranks(others))
    meshes: Any = {getattr(parameter, "device_mesh", None) for parameter in model.parameters()}
    for mesh in meshes - {None}:
        averaged.update(mesh.mesh.flatten().tolist())
    if averaged and (missing := set(dist.get_process_group_ranks(group)) - averaged):
        raise UnsupportedError(
            f"the model's wrapper averages gradients over ranks {sorted(averaged)}. The group has "
            f"ranks {sorted(missing)} too, whose gradients would be lost. Wrap the model over all "
            "ranks that train it (FSDP2: a mesh of both dimensions, or none)"
        )
