"""Refuses what does not go with a way of running a forest: groups of ranks, steps, kept trunks,
values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from prefixtree.errors import Refusal, UnsupportedError
from prefixtree.models.checks import runs_deepspeed
from prefixtree.models.family_table import INDEXED_BLOCKS, layer_types_of
from prefixtree.packing.layout import PackedForest
from prefixtree.parallel.heads import heads_problem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: What the ranks of a group exchange: keys and values that a rank's part of the tokens borrows, or
#: tokens for heads.
GroupMode = Literal["parts", "heads"]


_STEPS = "score in micro-batches that fit (plan_micro_batches without reuse=True)"
_KEPT = "leave kept trunks out and score each micro-batch by itself"


def _divided(model: nn.Module) -> Any:
    """The first module that transformers made tensor or expert parallel."""
    # getattr of what most modules do not have would take most of the time
    hooked = (m for m in model.modules() if vars(m).get("_is_hooked"))
    return next(({"kind": type(module).__name__} for module in hooked), None)


def _placed(model: nn.Module) -> Any:
    """The first parameter that is spread by more than one dimension of FSDP2's."""
    is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    for name, parameter in model.named_parameters():
        placements: Any = getattr(parameter, "placements", ())
        if sum(not p.is_replicate() for p in placements) > is_sharded:
            return {"parameter": name, "placements": placements}
    return None


def _is_static(model: nn.Module) -> bool:
    return any(isinstance(m, DistributedDataParallel) and m.static_graph for m in model.modules())


#: Of a model, wrapped or not, with `group`.
GROUPS = (
    Refusal(
        "DeepSpeed",
        runs_deepspeed,
        "DeepSpeed is not verified with group; use DistributedDataParallel or FSDP",
    ),
    Refusal(
        "tensor or expert parallel",
        _divided,
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
#: Of a model with `max_tokens`, however large the forest is.
STEPS = (
    Refusal(
        # its ranks cannot agree on a number of steps
        "DeepSpeed",
        runs_deepspeed,
        "DeepSpeed counts one backward per micro-batch, and steps have several: use FSDP2, or "
        f"{_STEPS}",
    ),
)
#: The same where the forest is larger than max_tokens.
SEVERAL_STEPS = (
    Refusal(
        "static_graph",
        _is_static,
        "DistributedDataParallel with static_graph=True expects one backward per update, and steps "
        f"have several: leave static_graph at False, or {_STEPS}",
    ),
)
#: Of the keywords of a call with `max_tokens` and `group`.
STEPS_IN_GROUPS = (
    Refusal(
        "pictures",
        lambda keywords: keywords["pictures"] is not None,
        "pictures are not verified with max_tokens and group together; leave one of the two out",
    ),
    Refusal(
        "auto",
        lambda keywords: keywords["recompute"] == "auto",
        "recompute='auto' is not planned for steps that ranks of a group divide; give "
        "recompute='all', 'all_but_attention' or 'nothing', or leave group or max_tokens out",
    ),
)
#: Of a model with kept trunks.
KEPT_TRUNKS = (
    Refusal(
        "DeepSpeed",
        runs_deepspeed,
        "DeepSpeed counts one backward per micro-batch, and kept trunks add their own: use FSDP2, "
        f"or {_KEPT}",
    ),
    Refusal(
        "static_graph",
        _is_static,
        "DistributedDataParallel with static_graph=True expects one backward per update, and kept "
        f"trunks have several: leave static_graph at False, or {_KEPT}",
    ),
    Refusal(
        "FSDP1",
        lambda model: any(isinstance(m, FullyShardedDataParallel) for m in model.modules()),
        "FSDP1 is not verified with kept trunks, whose forwards do not each meet their backward at "
        f"once; use FSDP2 (fully_shard), or {_KEPT}",
    ),
    Refusal(
        "tensor or expert parallel",
        _divided,
        f"{{kind}} is tensor or expert parallel, which is not verified with kept trunks; {_KEPT}",
    ),
)
#: Of a forest whose values are asked for.
VALUES = (
    Refusal(
        "routes",
        lambda forest: getattr(forest, "routes", None) is not None,
        "routes of experts are not verified for values; make the forest without routes",
    ),
)


def check_group_mode(mode: Any) -> None:
    """Raises a ValueError for anything but a GroupMode."""
    if mode not in get_args(GroupMode):
        raise ValueError(
            f"group_mode must be one of {', '.join(map(repr, get_args(GroupMode)))}, got {mode!r}"
        )


def check_mode(mode: GroupMode, config: Any, packed: PackedForest, ranks: int) -> None:
    """Refuses what cannot be divided among ranks in this way."""
    for heads, kv_heads in heads_of(config):
        if mode == "parts":
            check_backend_of_parts(packed, heads, kv_heads)
            continue
        # groups of heads that choose keys apart are divided one by one
        groups = kv_heads if INDEXED_BLOCKS in layer_types_of(config) else 1
        if problem := heads_problem(heads // groups, kv_heads // groups, ranks):
            each = "" if groups == 1 else f"of each of {groups} groups of heads that choose keys, "
            raise ValueError(each + problem)


def heads_of(config: Any) -> set[tuple[int, int]]:
    """The query heads and kv heads of a model's layers; none where they have no attention."""
    layers = getattr(config, "per_layer_config", None)
    each = [config] if layers is None else [layers[i] for i in range(config.num_hidden_layers)]
    heads = ((c, getattr(c, "num_attention_heads", None)) for c in each)
    return {(n, getattr(c, "num_key_value_heads", None) or n) for c, n in heads if n}


def check_backend_of_parts(packed: PackedForest, heads: int, kv_heads: int) -> None:
    """Refuses a backend that would refuse some parts alone, while other ranks wait."""
    if packed.mask.backend == "flash" and heads == kv_heads:
        raise UnsupportedError(
            "backend 'flash' does not serve ranks of a group that borrow or lend keys of every "
            "query head: use 'auto', which takes triton there"
        )


def check_averages(model: nn.Module, group: ProcessGroup) -> None:
    """Refuses wrappers that average gradients over some ranks of the group alone."""
    import torch.distributed as dist

    if not torch.is_grad_enabled():
        return
    averaged: set[int] = set()
    for module in model.modules():
        if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)):
            averaged.update(dist.get_process_group_ranks(module.process_group))
            # of FSDP1's hybrid sharding
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
