"""Calls of `sequence_logprobs(group=)` that every rank of a group of two refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from prefixtree import PrefixForest, pack
from prefixtree.planning import division
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.support import image_cases
from tests.support.hooks import place
from tests.support.models import build, pack_sequences, ragged_sequences
from tests.support.replay import drawn_routes


def scored(rank: int, group: Any, family: str = "llama", **changes: Any) -> Any:
    """Scores the same forest on every rank, but for the changes."""
    model = changes.pop("model", None) or build(family)
    sequences = changes.pop("sequences", ragged_sequences())
    packed = changes.pop("packed", None) or pack_sequences(sequences)
    return sequence_logprobs(model, packed, group=group, **changes)


def _other_order(rank: int, group: Any) -> Any:
    sequences = ragged_sequences()
    return scored(rank, group, sequences=sequences[::-1] if rank else sequences)


def _other_tokens(rank: int, group: Any) -> Any:
    return scored(rank, group, sequences=ragged_sequences(rank))


def _other_mask(rank: int, group: Any) -> Any:
    masks = [np.ones(len(s)) for s in ragged_sequences()]
    masks[10][3:] = 1 - rank  # nobody shares these tokens
    return scored(rank, group, loss_mask=masks)


def _other_temperature(rank: int, group: Any) -> Any:
    return scored(rank, group, temperature=1.0 + rank)


def _other_mode(rank: int, group: Any) -> Any:
    return scored(rank, group, recompute=("all", "nothing")[rank])


def _other_gradient_mode(rank: int, group: Any) -> Any:
    with torch.set_grad_enabled(rank == 0):
        return scored(rank, group)


def _other_group_mode(rank: int, group: Any) -> Any:
    return scored(rank, group, group_mode=("parts", "ulysses")[rank])


def _unknown_group_mode(rank: int, group: Any) -> Any:
    return scored(rank, group, group_mode="ring")


def _unknown_statistics(rank: int, group: Any) -> Any:
    return scored(rank, group, return_statistics=("mode",) if rank else ())


def _odd_heads(rank: int, group: Any) -> Any:
    model = build("qwen3", num_attention_heads=3, num_key_value_heads=3)
    return scored(rank, group, model=model, group_mode="ulysses")


def _other_trained(rank: int, group: Any) -> Any:
    model = build("llama")
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(rank == 0)
    return scored(rank, group, model=model)


def _other_checkpointing(rank: int, group: Any) -> Any:
    model = build("llama")
    if rank:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return scored(rank, group, model=model)


def _other_dtype(rank: int, group: Any) -> Any:
    model = build("llama")
    return scored(rank, group, model=model.bfloat16() if rank else model)


def _other_heads(rank: int, group: Any) -> Any:
    return scored(rank, group, model=build("llama", num_key_value_heads=2 - rank))


def _averaged_over_others(rank: int, group: Any) -> Any:
    alone = [dist.new_group([r]) for r in range(2)][rank]
    model = nn.parallel.DistributedDataParallel(build("llama"), process_group=alone)
    with torch.no_grad():
        assert torch.cat(scored(rank, group, model=model).logprobs).isfinite().all()
    return scored(rank, group, model=model)


def _sharded_over_others(rank: int, group: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("cp", "dp"))
    return scored(rank, group, model=fully_shard(build("llama"), mesh=mesh["dp"]))


def _one_raises(rank: int, group: Any) -> Any:
    return scored(rank, group, temperature=-1.0 if rank else 1.0)


def _odd_heads_of_states(rank: int, group: Any) -> Any:
    model = build("qwen3_5", linear_num_key_heads=3, linear_num_value_heads=3)
    with patch.object(division, "MOST_ABOVE", 0.0):
        return scored(rank, group, model=model)


def _router_loss(rank: int, group: Any) -> Any:
    return scored(rank, group, "qwen3_moe", output_router_logits=rank == 1)


def _routes(rank: int, group: Any) -> Any:
    sequences = ragged_sequences()
    # another numbering of the experts: the same tree
    routes = [(route + rank) % 4 for route in drawn_routes(sequences)]
    forest = PrefixForest.from_sequences(sequences, routes=routes)
    return scored(rank, group, "qwen3_moe", packed=pack(forest))


def _with_images(rank: int, group: Any, cut: bool = False, seen: bool = True, add: int = 0) -> Any:
    model, made = image_cases.build("qwen3_vl"), image_cases.batch("qwen3_vl")
    made = image_cases.clone(made, pixel_values=made.arguments["pixel_values"] + add)
    images = image_cases.images_of(model, made)
    packed = pack_sequences([s[:9] for s in images.sequences] if cut else images.sequences)
    return scored(rank, group, model=model, packed=packed, images=images if seen else None)


def _other_pixels(rank: int, group: Any) -> Any:
    return _with_images(rank, group, add=rank)


def _images_of_one_rank(rank: int, group: Any) -> Any:
    return _with_images(rank, group, seen=rank == 0)


def _cut_image(rank: int, group: Any) -> Any:
    return _with_images(rank, group, cut=rank == 0)


def _auto(rank: int, group: Any) -> Any:
    """One rank has no memory left."""
    left = -1 if rank else 1 << 40
    with patch.object(*place("bytes left for activations"), lambda *_: left):
        return scored(rank, group, recompute="auto")


def _flash(rank: int, group: Any) -> Any:
    model = build("qwen3", num_attention_heads=4, num_key_value_heads=4)
    packed = pack_sequences(ragged_sequences()).with_options(backend="flash")
    return scored(rank, group, model=model, packed=packed)


def _torchs_tensor_parallel(rank: int, group: Any) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    plan = {"model.layers.0.mlp.up_proj": ColwiseParallel()}
    model = parallelize_module(build("llama"), init_device_mesh("cpu", (2,)), plan)
    return scored(rank, group, model=model)


def _deepspeed(rank: int, group: Any) -> Any:
    engine = type("DeepSpeedEngine", (nn.Sequential,), {"__module__": "deepspeed.runtime.engine"})
    return scored(rank, group, model=engine(build("llama")))


def _zero3(rank: int, group: Any) -> Any:
    model = build("llama")
    model.lm_head.weight.ds_id = 0
    return scored(rank, group, model=model)


def _hooked(rank: int, group: Any) -> Any:
    model = build("llama")
    # as transformers marks the modules of its plans
    model.model.layers[0].mlp.up_proj._is_hooked = True
    return scored(rank, group, model=model)


def _mesh(rank: int, group: Any) -> Any:
    return scored(rank, init_device_mesh("cpu", (2,)))


def _not_a_member(rank: int, group: Any) -> Any:
    return scored(rank, dist.new_group([0]))


def _long_longrope(rank: int, group: Any) -> Any:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    model = build("qwen3", rope_parameters={**rope, "original_max_position_embeddings": 4})
    return scored(rank, group, model=model)


def _other_sets(rank: int, group: Any) -> Any:
    packed = pack_sequences([[3, 4, 5]])
    return scored(rank, group, packed=packed, sampling_masks=[[[], [4], [5, 6 + rank]]])


BAD: dict[str, Callable[[int, Any], Any]] = {
    "other order": _other_order,
    "other tokens": _other_tokens,
    "other mask": _other_mask,
    "other temperature": _other_temperature,
    "other sampling masks": _other_sets,
    "other recompute": _other_mode,
    "other gradient mode": _other_gradient_mode,
    "other group_mode": _other_group_mode,
    "unknown group_mode": _unknown_group_mode,
    "unknown statistics": _unknown_statistics,
    "odd heads": _odd_heads,
    "other trained": _other_trained,
    "other checkpointing": _other_checkpointing,
    "other dtype": _other_dtype,
    "other heads": _other_heads,
    "averaged over others": _averaged_over_others,
    "sharded over others": _sharded_over_others,
    "one raises": _one_raises,
    "odd heads of states": _odd_heads_of_states,
    "router loss": _router_loss,
    "routes": _routes,
    "other pixels": _other_pixels,
    "images of one rank": _images_of_one_rank,
    "a cut image": _cut_image,
    "auto": _auto,
    "flash": _flash,
    "DeepSpeed": _deepspeed,
    "ZeRO-3": _zero3,
    "DTensor": _torchs_tensor_parallel,
    "plan": _hooked,
    "mesh": _mesh,
    "long longrope": _long_longrope,
    "not a member": _not_a_member,
}


def message_of(call: Callable[..., Any], *arguments: Any) -> str:
    try:
        call(*arguments)
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return "computed"
