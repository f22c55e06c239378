"""Routers of Megatron on packed forests: losses and counts of the replicated batch, and recorded
experts.

**Losses** (`ForestRouter`). A forest has each shared token once, a replicated batch once per
sequence that holds it. So the sums over tokens in the load-balancing losses, the z loss and the
bias of experts weigh each token by its number of copies. These numbers travel as Megatron's
`padding_mask`, an argument of every layer and every recomputed function: a recomputation sees those
of its own micro-batch, in pipelines too.

**Recorded routes.** A rollout engine records which experts each token took, and training runs the
same ones (router replay). `PrefixForest.from_sequences(..., routes=)` keys the forest by token and
route, so a prefix is shared only where both agree. `Recorded` stands in for Megatron's
`RouterReplay` during one call of a router. The weights of the experts come from the router's
scores, so its gradient is kept. `recording` keeps what routers choose, for a later replay.

Legend: T packed tokens, n rows of this rank (fewer than T under sequence parallelism), E experts, m
copies of a token, R tokens of the replicated batch (the sum of m), L layers of experts of this
stage, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from prefixtree._forest_inputs import check_counts
from prefixtree.errors import UnsupportedError
from prefixtree.models.changes import changing
from prefixtree.packing.layout import PackedForest

# ---- losses and counts ---------------------------------------------------------------------------

if TYPE_CHECKING:
    from megatron.core.transformer.moe.router import TopKRouter as _Router
else:
    _Router = object


@dataclass
class RoutedTokens:
    """A forest's tokens, as routers need them.

    Attributes:
        copies: int64 [T], how often the replicated batch has each packed token; 0 for padding.
        routes: None, or integers [T, L, k], the recorded experts of L layers.
        ordinals: with routes, the index among the L by the number of a layer.
        calls: the number of routers that have read it so far.
        is_dummy: whether copies are 0 for all tokens, on all ranks that have a part of them.
    """

    copies: torch.Tensor
    routes: torch.Tensor | None = None
    ordinals: dict[int, int] = field(default_factory=dict)
    calls: int = 0
    is_dummy: bool = False

    def as_mask(self) -> TokenMask:
        """Makes the tensor that travels as Megatron's padding_mask, [1, T]."""
        mask = torch.empty(1, len(self.copies), dtype=torch.bool, device="meta")
        carrier = mask.as_subclass(TokenMask)
        carrier.tokens = self
        return carrier


class TokenMask(torch.Tensor):
    """`RoutedTokens` that travel as Megatron's padding_mask, as do its transposed or cut tensors.

    It has no values: code that takes it for a mask of padding meets another device and raises.
    """

    tokens: RoutedTokens

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(out, cls) and args and isinstance(args[0], cls) and "tokens" in vars(args[0]):
            out.tokens = args[0].tokens
        return out


class Recorded:
    """Replaces Megatron's RouterReplay for one call of a router; experts: int64 [n, k]."""

    def __init__(self, experts: torch.Tensor) -> None:
        self._experts = experts

    def get_replay_topk(
        self, scores: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores [n, k] of the recorded experts among scores [n, E], and the experts."""
        return scores.gather(1, self._experts), self._experts


class ForestRouter(_Router):
    """A base before TopKRouter: a token weighs as much as its copies."""

    # int64 [n, 1], while a forest is routed
    _copies: torch.Tensor | None = None
    _is_dummy = False

    def forward(self, input: torch.Tensor, padding_mask: Any = None) -> Any:
        """Routes input [n, 1, d]: probabilities [n, E] and routes [n, E] of Megatron's router."""
        if not isinstance(padding_mask, TokenMask):
            return super().forward(input, padding_mask)
        tokens = padding_mask.tokens
        tokens.calls += 1
        self._copies = self._of_this_rank(tokens.copies, input)[:, None]
        self._is_dummy = tokens.is_dummy
        replay: Any = self.router_replay
        if tokens.routes is not None:
            experts = self._of_this_rank(tokens.routes, input)[
                :, tokens.ordinals[self.layer_number]
            ]
            self.router_replay: Any = Recorded(experts.long())
        try:
            return super().forward(input, None)
        finally:
            self._copies, self._is_dummy, self.router_replay = None, False, replay

    def _of_this_rank(self, whole: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        """The rows of [T, ...] whose hidden states are on this rank."""
        group, rows = self.tp_group, input.shape[0] * input.shape[1]
        if rows == len(whole):
            return whole
        if rows * group.size() != len(whole):
            raise UnsupportedError(
                f"a router got {rows} tokens of a forest of {len(whole)}, expected all of them or "
                f"one part of {group.size()}"
            )
        return whole[group.rank() * rows : (group.rank() + 1) * rows]

    def _weighed(self, scores: Any, routes: Any, kwargs: dict[str, Any]) -> Any:
        """Scores and routes [n, E] with which Megatron's sums over tokens are sums over copies."""
        if self._copies is None:
            return scores, routes, kwargs
        # with a padding mask, Megatron counts tokens by their routes
        return scores * self._copies, routes * self._copies, kwargs | {"with_padding_mask": True}

    def _apply_aux_loss(self, probs: Any, scores: Any, routes: Any, **kwargs: Any) -> Any:
        scores, routes, kwargs = self._weighed(scores, routes, kwargs)
        return super()._apply_aux_loss(probs, scores, routes, **kwargs)

    def _apply_seq_aux_loss(
        self, probs: Any, scores: Any, routes: Any, *sizes: Any, **kwargs: Any
    ) -> Any:
        # a THD micro-batch is one sequence to Megatron, and so is a forest
        scores, routes, kwargs = self._weighed(scores, routes, kwargs)
        return super()._apply_seq_aux_loss(probs, scores, routes, *sizes, **kwargs)

    def _apply_global_aux_loss(self, probs: Any, scores: Any, routes: Any, **kwargs: Any) -> Any:
        scores, routes, kwargs = self._weighed(scores, routes, kwargs)
        counted: Any = self.global_tokens_per_expert
        before = counted.clone() if self._is_dummy and counted is not None else None
        probs = super()._apply_global_aux_loss(probs, scores, routes, **kwargs)
        if before is not None:
            # a step without a token on any rank is not one of those that Megatron averages over
            self.ga_steps -= (self.global_tokens_per_expert == before).all().to(self.ga_steps.dtype)
        return probs

    def attach_and_log_load_balancing_loss(
        self, activation: Any, coefficient: float, loss: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self._is_dummy:
            # Megatron divided by the number of tokens
            loss = activation[:0].sum()
        if self._copies is not None and self.calculate_per_token_loss:
            # R, cut evenly between ranks as the replicated batch is
            size = self.tp_cp_group.size()
            kwargs["valid_token_count"] = self._replicated() / size
        return super().attach_and_log_load_balancing_loss(
            activation, coefficient, loss, *args, **kwargs
        )

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: Any = None) -> torch.Tensor:
        config = self.config
        on = config.moe_z_loss_coeff is not None and self.training and torch.is_grad_enabled()
        if self._copies is None or not on:
            return super().apply_z_loss(logits, padding_mask)
        # a mean of the ranks' means would be another loss, since their shares of R differ
        total = self._replicated()
        squares = logits.logsumexp(-1).square() * self._copies[:, 0]
        part = squares.sum() / total.clamp(min=1)
        get_moe_metrics_tracker().record(
            "z_loss",
            part.detach() * self.tp_cp_group.size(),
            self.layer_number,
            config.num_layers,
            avg_group=self.tp_dp_cp_group,
        )
        scale = total if self.calculate_per_token_loss else 1
        loss = part * config.moe_z_loss_coeff * scale
        return MoEAuxLossAutoScaler.apply(logits, loss)

    def _replicated(self) -> torch.Tensor:
        """R, summed over the ranks that have a part of the tokens."""
        assert self._copies is not None
        total = self._copies.sum()
        if self.tp_cp_group.size() > 1:
            torch.distributed.all_reduce(total, group=self.tp_cp_group)
        return total

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: Any = None) -> None:
        if self._copies is not None:
            routing_map = routing_map * self._copies
        super()._apply_expert_bias(routing_map, padding_mask)


def routers_of(language_model: Any) -> dict[str, Any]:
    """The routers of a model's layers of experts, by the names of the layers."""
    modules = language_model.named_modules()
    return {name: m.router for name, m in modules if isinstance(m, BaseMoELayer)}


# ---- recorded routes -----------------------------------------------------------------------------


def check_routes(language_model: Any, packed: PackedForest) -> None:
    """Refuses routes that the routers would not follow; without routes, a router's own replay."""
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
    """Refuses Megatron's own replay, whose rows are those of the replicated batch."""
    for name, router in routers_of(language_model).items():
        action = getattr(getattr(router, "router_replay", None), "router_replay_action", None)
        if action is not None:
            raise UnsupportedError(
                f"{name}.router has {action} set, whose rows are tokens of the replicated batch; "
                "give routes to PrefixForest.from_sequences instead"
            )


def ordinals_of(language_model: Any) -> tuple[dict[int, int], int]:
    """Indexes this stage's layers of experts by layer number; counts those of the whole model."""
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
    """A stand-in for Megatron's RouterReplay that keeps a router's choice, int64 [n, k]."""

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
    """A context in which one forward over a forest keeps the experts that the routers choose."""
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
        experts = torch.stack(rows, 1).int()
        if language_model.config.sequence_parallel:
            group = language_model.pg_collection.tp
            experts = gather_from_sequence_parallel_region(experts, group=group)
        return experts

    with changing(language_model) as changes:
        for name, choice in choices.items():
            changes.set(routers[name], router_replay=choice)
        yield chosen
