"""verl's Megatron engines with packed micro-batches against verl's own, on one rank and on two.

They need an environment with verl and Megatron (`make test-verl-megatron`). Not run:
TransformerEngine (both engines have Megatron's own layers), THD batches of verl's engine, its
optimizer and offloading, and its function that makes the model, in whose place Megatron-Bridge's
is called.
"""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import pytest

from tests.support.spawn import run_ranks

if importlib.util.find_spec("megatron") is None:
    pytest.skip("this environment has no Megatron", allow_module_level=True)

from tests.integrations.verl.megatron_rank import CASES, PARALLEL, REFUSED, Case, largest


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


def test_without_the_attention_nothing_is_packed(found: dict[str, Any]) -> None:
    packs, messages = found["not packed"]
    assert not packs and any("nothing is packed" in m for m in messages)


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
    critic = transformer_impl.MegatronEngineWithValueHead.prepare_model_outputs
    assert critic(None, "values", None) == {"values": "values"}
