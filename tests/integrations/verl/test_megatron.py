"""verl's Megatron engines with packed micro-batches against verl's own, on one rank and on two.

They need an environment with verl and Megatron (`make test-verl-megatron`). Not run:
TransformerEngine (both engines have Megatron's own layers), THD batches of verl's engine, its
optimizer and offloading, and its function that makes the model, in whose place Megatron-Bridge's
is called.
"""

from __future__ import annotations

import importlib.util
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefixtree import UnsupportedError
from prefixtree.scoring.edges import find_edges
from tests.support.spawn import run_ranks

if importlib.util.find_spec("megatron") is None:
    pytest.skip("this environment has no Megatron", allow_module_level=True)

from tests.integrations.verl.megatron_rank import CASES, PARALLEL, REFUSED, Case, largest
from tests.integrations.verl.runs import jagged


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("megatron")
    return run_ranks("tests.integrations.verl.megatron_rank", folder, 1)[0]


@pytest.mark.parametrize("name", CASES)
def test_equals_verls_engine(found: dict[str, Any], name: str) -> None:
    _check(CASES[name], found[name])
    assert found[name]["prefixtree"]["scores"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("parallel")
    return run_ranks("tests.integrations.verl.megatron_rank", folder)


@pytest.mark.parametrize("name", PARALLEL)
def test_equals_verls_engine_on_two_ranks(ranks: list[dict[str, Any]], name: str) -> None:
    case = PARALLEL[name]
    for rank in ranks:
        _check(case, rank[name])
    # of a pipeline the last stage gives scores
    with_scores = [bool(rank[name]["prefixtree"]["scores"]) for rank in ranks]
    assert with_scores == [not case.engine.get("pipeline_model_parallel_size"), True]
    whole = 1 if "pipeline_model_parallel_size" in case.engine else 2
    assert [rank[name]["prefixtree"]["layers"] for rank in ranks] == [whole, whole]


def _check(case: Case, found: dict[str, Any]) -> None:
    ours, theirs = found["prefixtree"], found["stock"]
    assert ours["engine"].startswith("PackedMegatron") and not theirs["engine"].startswith("Packed")
    assert ours["attention"] == "ForestSelfAttention" and theirs["attention"] == "SelfAttention"
    expected = {"values"} if case.role == "critic" else {"log_probs", "entropy"}
    assert ours["scores"].keys() == theirs["scores"].keys()
    assert not ours["scores"] or ours["scores"].keys() == expected
    for score, value in theirs["scores"].items():
        assert largest(ours["scores"][score], value) < 1e-5, score
    assert ours["gradients"].keys() == theirs["gradients"].keys()
    for parameter, gradient in theirs["gradients"].items():
        assert gradient.any() and largest(ours["gradients"][parameter], gradient) < 1e-4, parameter


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.replay])
def test_router_replay(found: dict[str, Any], name: str) -> None:
    _check_replay(CASES[name], found[name])


@pytest.mark.parametrize("name", [name for name, case in PARALLEL.items() if case.replay])
def test_router_replay_on_two_ranks(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        _check_replay(PARALLEL[name], rank[name])


def _check_replay(case: Case, found: dict[str, Any]) -> None:
    """Without the routes the gradients are others; those that a forward records are verl's."""
    ours, theirs = found["prefixtree"], found["stock"]
    off = [largest(ours["not replayed"][n], g) for n, g in theirs["gradients"].items()]
    assert max(off) > 0.1
    assert ("routes" in ours) == (case.replay == "R2")
    for mine, other in zip(ours.get("routes", []), theirs.get("routes", []), strict=True):
        assert mine.dtype == other.dtype and torch.equal(mine, other)


@pytest.mark.parametrize("name", CASES)
def test_metrics_of_packing(found: dict[str, Any], name: str) -> None:
    assert not found[name]["stock"]["packing"]
    (saved,) = found[name]["prefixtree"]["packing"]["prefixtree/replicated_over_packed"]
    assert saved > 1.3


def test_verls_metrics_are_there(found: dict[str, Any]) -> None:
    ours, theirs = (found["actor"][vendor]["metrics"] for vendor in ("prefixtree", "stock"))
    assert ours.keys() == theirs.keys() and "actor/pg_loss" in ours
    assert ours["actor/pg_loss"] == pytest.approx(theirs["actor/pg_loss"], rel=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_settings(found: dict[str, Any], name: str) -> None:
    assert name in found["refusals"][name]


ROUTES = [torch.tensor([[[1, 2], [2, 3]]] * n, dtype=torch.int16) for n in (4, 2)]


def _rows(
    routes: list[torch.Tensor] | None,
    mode: str,
    frequency: Any = 1,
    padded: bool = False,
    sets: list[Any] | None = None,
) -> Any:
    """Rows with their routes; the first ends with a tool's answer, and of the second, as of verl's
    padding, nothing is scored."""
    from prefixtree.integrations.verl.batches import add_routes, rows_of
    from prefixtree.integrations.verl.routes import has_experts

    masks = [torch.tensor([1, 0, 0]), torch.tensor([0])]
    ids = [torch.tensor([5, 6, 7, 8]), torch.tensor([5, 6])]
    data: dict[str, Any] = {"input_ids": jagged(ids), "response_mask": jagged(masks)}
    if padded:
        data["response_mask"] = data["response_mask"].to_padded_tensor(0)
        data["attention_mask"] = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    if routes is not None:
        data["routed_experts"] = jagged(routes)
    if sets is not None:
        prompts = [torch.tensor([5])] * 2
        data |= {"sampling_masks": sets, "prompts": jagged(prompts), "responses": jagged(masks)}
    rows = rows_of(data)
    add_routes(
        data, rows, has_experts(SimpleNamespace(num_layers=2, moe_layer_freq=frequency)), mode
    )
    return rows


@pytest.mark.parametrize("padded", [False, True], ids=["jagged", "of the v0 trainer"])
def test_what_nobody_recorded_has_any_experts(padded: bool) -> None:
    """Of padding, and after the last generation, verl's rollouts have zeros, which no model would
    choose."""
    zeros = [ROUTES[0].clone(), torch.zeros_like(ROUTES[1])]
    zeros[0][1:] = 0
    rows = _rows(zeros, "R3", padded=padded)
    # this batch does not say what is prompt
    assert [mask.tolist() for mask in rows.masks] == [[1, 1, 0, 0], [1, 0]]
    replayed, padding = rows.packed.unpack(torch.from_numpy(rows.forest.routes.copy()))
    assert replayed.tolist() == [[[1, 2], [2, 3]], *[[[-1, -1]] * 2] * 3]
    assert padding.tolist() == [[[-1, -1]] * 2] * 2
    find_edges(rows.packed, 1.0, rows.masks)


def test_sets_of_tokens_that_nothing_scores_any_more() -> None:
    """One per token of a response, also after the last that was recorded."""
    rows = _rows([ROUTES[0], torch.zeros_like(ROUTES[1])], "R3", sets=[[[6, 1], [7], []], None])
    assert [of["counts"].tolist() for of in rows.sampling_masks] == [[0, 2, 1, 0], [0, 0]]
    found = find_edges(rows.packed, 1.0, rows.masks, rows.sampling_masks)
    assert found.count == 1 and found.sets.ids.tolist() == [1, 6]
    assert [r.tolist() for r in _rows(ROUTES, "R2").routes] == [r.tolist() for r in ROUTES]


def test_routes_of_layers_without_experts() -> None:
    assert _rows(ROUTES, "R3", [0, 1]).routes[0].tolist() == ROUTES[0][:, 1:].tolist()


def test_stages_of_which_one_may_record_nothing() -> None:
    from prefixtree.integrations.verl.routes import check_stages

    stages = SimpleNamespace(num_layers=2, pipeline_model_parallel_size=2, moe_layer_freq=1)
    check_stages(stages)
    stages.moe_layer_freq = [0, 1]
    with pytest.raises(UnsupportedError, match="and 1 layers without experts"):
        check_stages(stages)
    stages.pipeline_model_parallel_size = 1
    check_stages(stages)


def test_a_batch_without_routes() -> None:
    with pytest.raises(UnsupportedError, match="mode=R2: the batch has no jagged"):
        _rows(None, "R2")


def test_without_the_attention_nothing_is_packed(found: dict[str, Any]) -> None:
    packs, messages = found["not packed"]
    assert not packs and any("nothing is packed" in m for m in messages)


def test_fused_kernels_are_turned_off(found: dict[str, Any]) -> None:
    on, messages = found["fused"]
    assert on == [False, False]
    assert sum("use_fused_kernels=True is turned off" in m for m in messages) == 1


def test_what_the_engines_rely_on() -> None:
    """The parts of verl's engine that are overridden or called."""
    from verl.workers.engine.megatron import transformer_impl

    engine = transformer_impl.MegatronEngineWithLMHead
    assert list(inspect.signature(engine.forward_step).parameters) == [
        *("self", "batch_iter", "model", "logits_processor_func", "postprocess_micro_batch_func"),
    ]
    assert list(inspect.signature(engine.forward_backward_batch).parameters) == [
        *("self", "data", "loss_function", "forward_only"),
    ]
    assert list(inspect.signature(engine.postprocess_micro_batch_func).parameters)[:5] == [
        *("self", "output", "data", "forward_only", "loss_function"),
    ]
    source = inspect.getsource(transformer_impl.MegatronEngine._build_tf_config)
    assert "self.provider = provider" in source
    scaled = inspect.getsource(engine.postprocess_micro_batch_func)
    assert 'loss * data["num_micro_batch"]' in scaled
    # what a forward of old log-probabilities records, and when
    source = inspect.getsource(engine.forward_backward_batch)
    assert 'output["model_output"]["routed_experts"] = layers_topk_idx' in source
    assert 'key="enable_routing_replay"' in source and 'router_replay.mode == "R2"' in source
    critic = transformer_impl.MegatronEngineWithValueHead.prepare_model_outputs
    assert critic(None, "values", None) == {"values": "values"}
