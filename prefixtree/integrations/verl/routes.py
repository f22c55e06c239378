"""verl's router replay on its Megatron engines: recorded experts in and out of a batch.

With router_replay.mode=R3 a batch has the experts that the rollout engine recorded, and both
forwards run them. With R2 the forward of old log-probabilities records its own, and the update runs
these. A forest has the routes as data of its tokens, so prefixes part where they differ; those of
R2 were chosen once per distinct token.

Legend: B sequences, n tokens of one, L layers of experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.megatron.router_replay_utils import (
    is_moe_layer,
    merge_nested_router_maps,
    pp_gather,
)
from verl.utils.seqlen_balancing import restore_dynamic_batch

from prefixtree.errors import UnsupportedError
from prefixtree.planning.micro_batch import MicroBatch


def asks_for_routes(data: TensorDict) -> bool:
    """Whether this forward must replay or record; verl's reference does neither."""
    flag: bool = tu.get_non_tensor_data(data=data, key="enable_routing_replay", default=False)
    return flag


def is_recorded(data: TensorDict, mode: str, forward_only: bool) -> bool:
    """Whether this forward must record the experts of a batch."""
    asked = asks_for_routes(data) and mode == "R2" and forward_only
    return asked and data.get("routed_experts", None) is None


def check_stages(config: Any) -> None:
    """Refuses stages from which a forward cannot record routes."""
    dense = has_experts(config).count(False)
    if config.pipeline_model_parallel_size > 1 and dense:
        raise UnsupportedError(
            f"router_replay.mode=R2 with pipeline_model_parallel_size="
            f"{config.pipeline_model_parallel_size} and {dense} layers without experts: a "
            "stage may have nothing to record, which was not compared; set router_replay.mode to R3"
        )


def has_experts(config: Any) -> list[bool]:
    """Whether each layer of Megatron's configuration has experts."""
    return [bool(is_moe_layer(config, at)) for at in range(config.num_layers)]


def to_jagged_routes(chosen: Sequence[torch.Tensor]) -> torch.Tensor:
    """Joins the routes [n, L, k] of a micro-batch's sequences: verl's jagged int16 [B, n, L, k]."""
    rows = [experts.cpu().to(torch.int16) for experts in chosen]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def routes_of_batch(
    recorded: list[torch.Tensor], batches: Sequence[MicroBatch], config: Any
) -> torch.Tensor:
    """Gathers the routes that all stages recorded, jagged [B, n, L, k]; all stages call it."""
    whole: torch.Tensor = pp_gather(merge_nested_router_maps(recorded), config)
    indices = [batch.sequence_indices.tolist() for batch in batches]
    restored: torch.Tensor = restore_dynamic_batch(whole, indices)
    return restored
