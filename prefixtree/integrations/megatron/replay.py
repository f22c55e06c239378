"""Recorded routes: Megatron's routers run the experts that were recorded with a forest's tokens.

A rollout engine records which experts each token took, and training runs the same ones (router
replay). `PrefixForest.from_sequences(..., routes=)` keys the forest by token and route, so a
prefix is one only where both agree. Megatron asks an object, its `RouterReplay`, for the experts;
for one call of a router `routers.Recorded` stands in its place. The weights of the experts come
from the router's scores, as in Megatron's own replay, so its gradient is kept. `recording` keeps
what routers choose by themselves, for a later replay.

Legend: T packed tokens, n rows of a rank (fewer under sequence parallelism), E experts, L layers of
experts of this stage, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from prefixtree._routes import check_counts
from prefixtree.errors import UnsupportedError
from prefixtree.integrations.megatron.routers import ForestRouter, routers_of
from prefixtree.models.changes import changing
from prefixtree.packing.layout import PackedForest


def check_routes(language_model: Any, packed: PackedForest) -> None:
    """Refuses routes that the model's routers would not follow; and, where the forest has none, a
    router that is to record or to replay by itself.

    Raises:
        UnsupportedError: a setting or a router that is not verified.
        ValueError: routes of another number of layers or of experts per token, or with an expert
            that the model does not have.
    """
    routes = packed.forest.routes
    if routes is None:
        check_no_replay(language_model)
        return
    config, routers = language_model.config, routers_of(language_model)
    for name, router in routers.items():
        if not isinstance(router, ForestRouter):
            raise UnsupportedError(
                f"{name}.router is a {type(router).__name__}, which would not follow recorded "
                "routes: build the model from tree_spec(its layer spec)"
            )
    if getattr(config, "moe_router_fusion", False):
        raise UnsupportedError(
            "moe_router_fusion=True with recorded routes: fused routers choose by themselves; set "
            "it to False"
        )
    _, count = ordinals_of(language_model)
    check_counts(routes, count, config.moe_router_topk, config.num_moe_experts, "moe_router_topk")


def check_no_replay(language_model: Any) -> None:
    """Refuses Megatron's own replay, whose rows are those of the replicated batch.

    Raises:
        UnsupportedError: with the way to mend it.
    """
    for name, router in routers_of(language_model).items():
        action = getattr(getattr(router, "router_replay", None), "router_replay_action", None)
        if action is not None:
            raise UnsupportedError(
                f"{name}.router has {action} set, whose rows are tokens of the replicated batch; "
                "give routes to PrefixForest.from_sequences instead"
            )


def ordinals_of(language_model: Any) -> tuple[dict[int, int], int]:
    """Which layer of experts each router of this stage is, by its layer's number; and how many the
    whole model has.

    Raises:
        UnsupportedError: a pipeline whose layers of experts are not where the configuration says.
    """
    routers, config = routers_of(language_model), language_model.config
    numbers = [router.layer_number for router in routers.values()]
    if config.pipeline_model_parallel_size == 1:
        return {number: at for at, number in enumerate(numbers)}, len(numbers)
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        frequency = [int(at % frequency == 0) for at in range(config.num_layers)]
    if not isinstance(language_model, GPTModel) or not all(frequency[n - 1] for n in numbers):
        raise UnsupportedError(
            "recorded routes on pipeline stages need a GPTModel whose moe_layer_freq "
            f"({config.moe_layer_freq}) says which layers have experts; use one stage"
        )
    return {number: sum(frequency[: number - 1]) for number in numbers}, sum(frequency)


class _Choice:
    """In the place of Megatron's RouterReplay: keeps the experts that a router chooses.

    Attributes:
        experts: int64 [n, k], or None before the call.
    """

    experts: torch.Tensor | None = None

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> Any:
        """The router's own choice among scores [n, E]: scores [n, k] and experts [n, k]."""
        found = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        self.experts = found[1]
        return found


@contextmanager
def recording(language_model: Any) -> Iterator[Callable[[], torch.Tensor]]:
    """While open, one forward over a forest keeps which experts the routers choose.

    Args:
        language_model: a stage, without context parallelism.

    Yields:
        A function that gives them after that forward, int32 [T, L, k], on every rank.

    Raises:
        UnsupportedError: from that function; a router that did not ask.
    """
    routers = routers_of(language_model)
    choices = {name: _Choice() for name in routers}

    def chosen() -> torch.Tensor:
        rows = []
        for name, choice in choices.items():
            if choice.experts is None:
                raise UnsupportedError(
                    f"{name}.router chose its experts where nobody sees it, so they cannot be "
                    "recorded; set moe_router_fusion to False"
                )
            rows.append(choice.experts)
        found = torch.stack(rows, 1).int()
        if language_model.config.sequence_parallel:
            group = language_model.pg_collection.tp
            found = gather_from_sequence_parallel_region(found, group=group)
        return found

    with changing(language_model) as changes:
        for name, choice in choices.items():
            changes.set(routers[name], router_replay=choice)
        yield chosen
