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

import numpy as np
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
    dense = _has_experts(config).count(False)
    if config.pipeline_model_parallel_size > 1 and dense:
        raise UnsupportedError(
            f"router_replay.mode=R2 with pipeline_model_parallel_size="
            f"{config.pipeline_model_parallel_size} and {dense} layers without experts: a "
            "stage may have nothing to record, which was not compared; set router_replay.mode to R3"
        )


def _has_experts(config: Any) -> list[bool]:
    return [bool(is_moe_layer(config, at)) for at in range(config.num_layers)]


def routes_of(data: TensorDict, mode: str, config: Any) -> list[np.ndarray]:
    """The experts of every sequence, integers [n or n - 1, L, k], as `PrefixForest` takes them."""
    routed = data.get("routed_experts", None)
    if routed is None or not routed.is_nested:
        raise UnsupportedError(
            f"router_replay.mode={mode}: the batch has no jagged routed_experts, which "
            "compute_log_prob (R2) or the rollout engine (R3) records; for R3 set "
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
        )
    values = routed.values().cpu().numpy()
    if values.shape[1] == config.num_layers:
        # engines may name layers without experts too
        values = values[:, _has_experts(config)]
    routes = np.split(values, routed.offsets()[1:-1].cpu().numpy())
    if mode == "R3":
        # verl routes what has no response anew, such as its padding, of which nobody reads anything
        anything = np.arange(values.shape[2], dtype=values.dtype)
        for place, mask in enumerate(data["response_mask"].unbind()):
            if not mask.any():
                routes[place] = np.broadcast_to(anything, routes[place].shape)
    return routes


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
