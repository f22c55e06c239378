"""Recorded routes: a forest against Megatron's RouterReplay, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from prefixtree import PrefixForest, UnsupportedError, pack
from prefixtree.integrations.megatron import pack_batches, routers, tree_logprobs
from prefixtree.integrations.megatron.routers import ordinals_of
from tests.integrations.megatron import replay_runs
from tests.integrations.megatron.replay_runs import compared, routes_of
from tests.integrations.megatron.router_runs import losses
from tests.integrations.megatron.runs import Case, build, make_sequences, moe, packed_of, thd
from tests.integrations.megatron.test_one_process import FULL
from tests.integrations.megatron.test_routers import RECOMPUTED

SIGMOID = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.0,
}
CASES = {
    "softmax, experts recomputed": Case(moe() | RECOMPUTED),
    "sigmoid and bias, all recomputed": Case(moe(**SIGMOID) | FULL),
}
SEQUENCES = [[1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 4, 6]]


@pytest.mark.parametrize("name", CASES)
def test_equals_megatrons_replay(name: str) -> None:
    found = compared(CASES[name])
    assert found.worst < 1e-13, found


@pytest.mark.parametrize("mistake", ["next_layers_routes", "weights_without_gradient"])
def test_a_mistake_is_seen(mistake: str) -> None:
    with getattr(replay_runs, mistake)():
        assert compared(Case(moe())).gradients > 1e-2


@pytest.mark.parametrize("config", [moe(), moe(**SIGMOID)], ids=["softmax", "sigmoid, bias"])
def test_what_a_forest_records(config: dict[str, Any]) -> None:
    """Each sequence has the experts that Megatron records of it alone."""
    found = replay_runs.recorded(Case(config))
    assert found["rows"] > 100 and found["other"] == 0


def test_a_router_that_chooses_unseen_is_not_recorded() -> None:
    model = build(Case(moe()))
    with routers.recording(model) as chosen, pytest.raises(UnsupportedError, match="cannot be rec"):
        chosen()


def test_prefixes_part_where_routes_differ() -> None:
    sequences = make_sequences()
    forest = PrefixForest.from_sequences(sequences, routes=routes_of(sequences))
    assert forest.num_tokens > PrefixForest.from_sequences(sequences).num_tokens


def packed_routes(layers: int = 3, chosen: int = 2, largest: int = 3) -> Any:
    routes = [np.tile(np.arange(chosen), (len(s), layers, 1)) for s in SEQUENCES]
    routes[0][0, 0, 0] = largest
    return pack(PrefixForest.from_sequences(SEQUENCES, routes=routes))


@pytest.mark.parametrize(
    ("packed", "config", "error", "message"),
    [
        (packed_routes(layers=2), {}, ValueError, "routes have 2 layers of experts, the model 3"),
        (packed_routes(chosen=3), {}, ValueError, "routes have 3 experts .*moe_router_topk"),
        (packed_routes(largest=9), {}, ValueError, "name expert 9, the model has 4"),
        (packed_routes(), losses("aux_loss"), UnsupportedError, "last tokens, whose experts"),
        (packed_routes(), {"moe_router_fusion": True}, UnsupportedError, "moe_router_fusion=True"),
    ],
)
def test_routes_that_do_not_fit(packed: Any, config: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        tree_logprobs(build(Case(moe() | config)), packed)


def test_routers_that_would_not_follow() -> None:
    model = build(Case(moe()))
    plain = build(Case(moe()), lambda spec: spec)
    model.decoder.layers[1].mlp.router = plain.decoder.layers[1].mlp.router
    with pytest.raises(
        UnsupportedError, match=r"layers\.1\.mlp\.router is a TopKRouter, which would"
    ):
        tree_logprobs(model, packed_routes())
    with pytest.raises(ValueError, match="routes have 3 layers of experts, the model 0"):
        tree_logprobs(build(Case()), packed_routes())


def test_megatrons_own_replay_is_refused() -> None:
    """Its rows are tokens of the replicated batch; what it records would be rows of the forest."""
    RouterReplay.clear_global_router_replay_instances()
    model = build(Case(moe(moe_enable_routing_replay=True)))
    pack_batches(model)
    for action in RouterReplayAction:
        RouterReplay.set_global_router_replay_action(action)
        for run in (
            lambda: tree_logprobs(model, packed_of(SEQUENCES)),
            lambda: model(**thd(SEQUENCES)),
        ):
            with pytest.raises(UnsupportedError, match=f"{action.name}.*give routes to"):
                run()
    RouterReplay.clear_global_router_replay_action()
    assert isinstance(tree_logprobs(model, packed_of(SEQUENCES)).logprobs[0], torch.Tensor)
    model(**thd(SEQUENCES))


def test_layers_of_experts_on_pipeline_stages() -> None:
    """They are numbered over all stages, by the configuration."""
    model = build(Case(moe()))
    config = model.config
    config.pipeline_model_parallel_size, config.num_layers = 2, 6
    for at, layer in enumerate(model.decoder.layers, 4):
        layer.mlp.router.layer_number = at
    assert ordinals_of(model) == ({4: 3, 5: 4, 6: 5}, 6)
    config.moe_layer_freq = [0, 1, 0, 1, 1, 1]
    assert ordinals_of(model) == ({4: 1, 5: 2, 6: 3}, 4)
    config.moe_layer_freq = [1, 1, 1, 1, 0, 1]
    with pytest.raises(UnsupportedError, match="says which layers"):
        ordinals_of(model)
