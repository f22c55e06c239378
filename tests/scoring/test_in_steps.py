"""`sequence_logprobs(max_step_tokens=)`: a packed forest scored in steps, against one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.lib.workloads import forest_of, single
from prefixtree import ForestError, PrefixForest, UnsupportedError, pack, plan_micro_batches
from prefixtree.parallel.ledger import Exchange
from prefixtree.planning.costs import ImportCost
from prefixtree.planning.steps import plan_steps
from prefixtree.recompute.layers import MODES
from prefixtree.scoring.in_steps import step_cost_of
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.scoring.steps_cases import PLAN, compare, number_of_steps, run, score
from tests.support.alike import skip_if_repeated
from tests.support.family_configs import FAMILIES, INDEXED
from tests.support.full import mostly
from tests.support.hybrid_configs import HYBRIDS
from tests.support.models import (
    EVERY_TIME,
    Run,
    assert_same,
    attentions,
    build,
    cases,
    counted,
    enable_checkpointing,
    errors,
    gradients,
    make_objective,
    mostly_full,
    pack_sequences,
    ragged_objective,
    ragged_packed,
    ragged_sequences,
    same_bits,
)
from tests.support.replay import drawn_routes, routers_of
from tests.support.step_ranks import LIGHT, loss_of
from tests.support.variant_configs import VARIANTS

_OTHERS = {*HYBRIDS, *INDEXED}
ATTENDING = [name for name in (*FAMILIES, *VARIANTS) if name.partition("/")[0] not in _OTHERS]

# ---- what is computed ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model_type", mostly_full(ATTENDING, {"gemma3_text", "gpt_oss", "deepseek_v3"})
)
def test_every_family_with_attention_alone(model_type: str) -> None:
    skip_if_repeated(model_type, EVERY_TIME, ATTENDING)
    model = build(model_type)
    with counted([model]) as forwards:
        run(model)
        # the graph of the last step is kept
        assert forwards() == 2 * number_of_steps() - 1 >= 9
    compare(model)


@pytest.mark.parametrize("use_reentrant", mostly([False, True], [True]))
def test_calls_of_attention_under_checkpointing(use_reentrant: bool) -> None:
    model = build("qwen3")
    enable_checkpointing(model, use_reentrant)
    with counted(attentions(model)) as calls:
        run(model)
        # without a graph, with one, and again; the last step is not run without one
        assert calls() == (3 * number_of_steps() - 1) * len(attentions(model))


@pytest.mark.parametrize("max_step_tokens", mostly([8, 33, 60, 90], [8, 60]))
def test_budgets(max_step_tokens: int) -> None:
    compare(
        build("qwen3"), max_step_tokens=max_step_tokens, import_cost=ImportCost(token_bytes=1e9)
    )


def test_a_forest_that_fits_is_computed_in_one_forward() -> None:
    model = build("qwen3")
    with counted([model]) as forwards:
        got = run(model, max_step_tokens=91)
        assert forwards() == 1
    assert same_bits(got, run(model, max_step_tokens=None))


def test_a_sequence_longer_than_a_step() -> None:
    rng = np.random.default_rng(0)
    trunk = rng.integers(3, 90, 300)
    branches = [np.concatenate([trunk[:at], rng.integers(3, 90, 9)]) for at in (280, 150, 40, 290)]
    objective = make_objective([trunk, *branches])
    model = build("qwen3")
    cost = ImportCost(token_bytes=36 * 8 * 256 * 6 / 0.3)
    steps = plan_steps(pack_sequences(objective.sequences), 128, import_cost=cost)
    assert len(steps) > 3 and max(steps.stats.imported_tokens) > 128 and not steps.stats.on_host
    compare(model, objective, max_step_tokens=128, import_cost=cost)
    # what is imported fills the device: it waits on the host
    compare(model, objective, max_step_tokens=80, import_cost=cost)


def test_steps_that_score_nothing() -> None:
    """A prompt without a loss: its keys alone have gradients."""
    objective = ragged_objective()
    masks = [np.arange(len(s)) >= max(1, len(s) - 2) for s in objective.sequences]
    compare(build("qwen3"), replace(objective, loss_masks=masks))


def test_padding() -> None:
    padded = pack(PrefixForest.from_sequences(ragged_objective().sequences), 64)
    assert padded.num_padding
    compare(build("qwen3"), packed=padded)


def test_autocast_is_that_of_the_forward() -> None:
    """The backward runs outside of it or inside, and computes every step again, in each mode."""
    model, objective = build("qwen3", num_hidden_layers=2), ragged_objective()
    seen: list[bool] = []
    model.model.layers[1].mlp.register_forward_hook(
        lambda *_: seen.append(torch.is_autocast_enabled("cpu"))
    )

    def found(max_step_tokens: int | None, inside: bool = False, recompute: Any = None) -> Run:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            # leaves casts of all weights in autocast's cache
            score(model, objective, max_step_tokens=None)
            seen.clear()
            scores = score(model, objective, max_step_tokens=max_step_tokens, recompute=recompute)
            if inside:
                loss_of(objective, scores).backward()
        if not inside:
            loss_of(objective, scores).backward()
        values = ([x.detach() for x in of] for of in (scores.logprobs, scores.entropy))
        return Run(*values, gradients(model))

    exact = run(model)
    assert not any(seen)
    whole, stepped = found(None), found(33)
    assert all(seen) and len(seen) == 2 * number_of_steps(33) - 1 >= 5
    assert errors(whole, exact).gradient > 3e-3
    # as far from float32 as one forward
    assert errors(stepped, exact).gradient < 1.5 * errors(whole, exact).gradient
    for recompute in MODES:
        assert same_bits(found(None, False, recompute), whole), recompute
        for inside in (False, True):
            assert same_bits(found(33, inside, recompute), stepped), (recompute, inside)


def test_without_gradients() -> None:
    model = build("qwen3").eval()
    with counted([model]) as forwards, torch.inference_mode():
        scores = score(model, ragged_objective())
        assert forwards() == number_of_steps()
    assert not scores.logprobs[0].requires_grad
    assert_same(
        Run(scores.logprobs, scores.entropy, {}),
        replace(run(model, max_step_tokens=None), gradients={}),
    )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert not score(model, ragged_objective()).logprobs[0].requires_grad


def test_eval_mode() -> None:
    compare(build("qwen3").eval())


def test_the_same_bits_every_time() -> None:
    model = build("qwen3")
    assert same_bits(run(model), run(model))


# ---- the checks can fail -------------------------------------------------------------------------


def test_gradients_that_a_layer_does_not_take_are_missed(monkeypatch) -> None:
    monkeypatch.setattr(Exchange, "take", lambda self: [])
    with pytest.raises(RuntimeError, match="did not reach the attention of 3 layers"):
        run(build("qwen3"))


# ---- work and memory -----------------------------------------------------------------------------


class Tokens:
    """Counts the tokens that a model's layers compute."""

    def __init__(self, model: Any) -> None:
        self.count = 0
        model.get_decoder().layers[0].mlp.register_forward_pre_hook(self._note)

    def _note(self, module: nn.Module, args: Sequence[torch.Tensor]) -> None:
        self.count += args[0].shape[1]


@pytest.mark.full
@pytest.mark.usefixtures("unprobed")
def test_work_is_that_of_checkpointing_in_one_forward() -> None:
    """A prompt of 24 with 128 responses of 8 at 32: cut, whole, and in steps."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, 90, 24)
    sequences = [np.concatenate([prompt, [i % 97], rng.integers(3, 90, 7)]) for i in range(90)]
    forest = PrefixForest.from_sequences(sequences)
    plan = plan_micro_batches(forest, 32, reuse=True, import_cost=LIGHT)
    (batch,) = plan[0]
    model = build("qwen3")
    enable_checkpointing(model, False)
    tokens = Tokens(model)
    torch.cat(sequence_logprobs(model, batch.packed).logprobs).sum().backward()
    whole, tokens.count = tokens.count, 0
    assert whole == 2 * forest.num_tokens
    cost = {"max_step_tokens": 32, "import_cost": LIGHT, "recompute": "nothing"}
    torch.cat(sequence_logprobs(model, batch.packed, **cost).logprobs).sum().backward()
    stepped, tokens.count = tokens.count, 0
    assert batch.steps is not None
    assert stepped == whole - batch.steps.own_tokens[-1]
    for cut in plan_micro_batches(forest, 32)[0]:
        torch.cat(sequence_logprobs(model, cut.packed).logprobs).sum().backward()
    assert tokens.count > 3 * whole


def test_the_weight_of_an_imported_token_is_read_from_the_model() -> None:
    model = build("qwen3")
    device = torch.device("cpu")
    kept = step_cost_of(model, model, device, None)
    assert (kept.layers, kept.kv_heads, kept.kept_copies) == (3, 2, 1.0)
    assert kept == step_cost_of(model, model, device, "nothing")
    enable_checkpointing(model, False)
    recomputed = step_cost_of(model, model, device, None)
    assert recomputed.kept_copies == 0 and recomputed.token_bytes < 0.5 * kept.token_bytes
    assert recomputed == step_cost_of(model, model, device, "all")
    expected = run(model, max_step_tokens=None)
    assert_same(run(model, max_step_tokens=40, import_cost=None), expected)


def test_large_prompts_of_the_issue() -> None:
    """A prompt of 24K with 128 responses of 8K: what is kept, and where."""
    stats = plan_steps(pack(forest_of(single(24576, 128, 8192))), 32768).stats
    assert stats.exported_tokens == 24576 and stats.exported_bytes == 24576 * 36 * 4096
    assert sum(stats.own_tokens) == 24576 + 128 * 8192
    cost = ImportCost()
    held = stats.held_bytes(cost)
    assert held == 24576 * 36 * (4096 + 8192)
    # with the activations of a step: no more than the budget, and what a step exports
    assert stats.peak * cost.token_bytes <= 32768 * cost.token_bytes


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "20"])
def test_budgets_that_are_none(value: Any) -> None:
    with pytest.raises(ValueError, match="max_step_tokens must be an integer >= 1, got"):
        score(build("qwen3"), ragged_objective(), max_step_tokens=value)


def test_a_budget_that_is_too_little() -> None:
    objective = make_objective([np.arange(3, 90)])
    with pytest.raises(
        ForestError, match=r"max_step_tokens 10 is too little .* the least max_step_tokens"
    ):
        score(
            build("qwen3"), objective, max_step_tokens=10, import_cost=ImportCost(token_bytes=1e4)
        )


def test_arguments_that_do_not_go_together() -> None:
    model = build("qwen3")
    with pytest.raises(ValueError, match="import_cost goes with max_step_tokens"):
        sequence_logprobs(model, ragged_packed(), import_cost=LIGHT)
    for bad, message in (("some", "recompute must be None, 'auto'"), (PLAN, "a plan for 1 layers")):
        with pytest.raises(ValueError, match=message):
            score(model, ragged_objective(), recompute=bad, import_cost=None)
    with pytest.raises(ValueError, match="the weight of an imported token needs token_bytes"):
        score(model, ragged_objective(), import_cost=replace(LIGHT, token_bytes=None))


@pytest.mark.parametrize("model_type", mostly_full(["gpt_oss", "qwen3_next"], {"gpt_oss"}))
def test_recorded_routes(model_type: str) -> None:
    model, sequences = build(model_type), ragged_sequences()
    if model_type == "gpt_oss":
        enable_checkpointing(model, use_reentrant=True)
    routes = drawn_routes(sequences, len(routers_of(model)), routers_of(model)[0].num_experts)
    routed = pack(PrefixForest.from_sequences(sequences, routes=routes))
    found = compare(model, packed=routed)
    # what the routers choose by themselves is far off
    assert errors(found, run(model, max_step_tokens=None)).largest > 0.1


@pytest.mark.parametrize("model_type", cases(["qwen3_next"]))
def test_the_load_balancing_loss(model_type: str) -> None:
    """Of all tokens of the forest, not of a step's; also where a router has no graph behind it."""
    model = build(model_type)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name)
    # as much gradient as the scores have
    balanced = replace(ragged_objective(), balance=300.0)
    found = compare(model, balanced, recompute="all")
    assert errors(found, run(model)).gradient > 0.01


def test_deepspeed_is_refused() -> None:
    model = build("qwen3")
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.ds_id = 3
    with pytest.raises(UnsupportedError, match="DeepSpeed counts one backward per micro-batch"):
        score(model, ragged_objective())

    class Engine(nn.Module):
        """As if DeepSpeed had made it."""

        __module__ = "deepspeed.runtime.engine"

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    with pytest.raises(UnsupportedError, match="DeepSpeed counts one backward per micro-batch"):
        score(Engine(build("qwen3")), ragged_objective())


def test_static_graphs_are_refused(tmp_path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(build("qwen3"), static_graph=True)
        with pytest.raises(UnsupportedError, match="static_graph=True expects one backward per up"):
            score(model, ragged_objective())
        assert score(model, ragged_objective(), max_step_tokens=91).logprobs[0].requires_grad
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("model_type", mostly(cases(["qwen3", "qwen3_5"]), ["qwen3_5"]))
def test_the_example_of_the_docs(model_type: str) -> None:
    """The page's loop, at a budget below its trees: the gradients are those of one micro-batch."""
    page = (Path(__file__).parents[2] / "docs/larger-trees.md").read_text()
    code = page.split("## Example\n\n```python\n")[1].split("```")[0]
    model, objective = build(model_type), ragged_objective()
    names: dict[str, Any] = {
        "model": model,
        "sequences": objective.sequences,
        "masks": objective.loss_masks,
        "advantages": np.linspace(-1, 1, len(objective.sequences)),
    }
    found = []
    for max_tokens in (70, 1000):
        model.zero_grad(set_to_none=True)
        with counted([model]) as forwards:
            exec(code, names | {"max_tokens": max_tokens})
            found.append((forwards(), gradients(model)))
    (several, got), (one, expected) = found
    assert several > one == 1
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-5, rtol=1e-4)
