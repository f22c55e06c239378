"""Recomputation of layers: the same bits whatever the plan, and the plan that recomputes least of
those that fit."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from runpy import run_path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import prefixtree as pt
from prefixtree.kernels.attention import operator
from prefixtree.kernels.recurrence import operator as recurrence
from prefixtree.models.layers import layers_of
from prefixtree.planning.model_cost import LayerCost, ModelCost
from prefixtree.recompute import choose, layers, plan
from prefixtree.recompute.choose import plan_recomputation
from prefixtree.recompute.layers import MODES, recomputing
from prefixtree.recompute.memory import LayerMemory, ModelMemory
from prefixtree.recompute.plan import RecomputePlan, Work, plan_for, scoring_bytes, tokens_that_fit
from prefixtree.scoring import forward as scoring
from tests.support.alike import skip_if_repeated
from tests.support.family_configs import FAMILIES
from tests.support.full import mostly
from tests.support.models import (
    build,
    enable_checkpointing,
    gradients,
    mostly_full,
    ragged_objective,
    ragged_packed,
    run_packed,
    same_bits,
)
from tests.support.variant_configs import CANNOT_CHECKPOINT

# a layer of it attends twice
_NOT_PLANNED = {"longcat_flash"}
_PLANNED_EVERY_TIME = {"gpt_oss", "qwen3_5", *_NOT_PLANNED}
_SAME_EVERY_TIME = {"qwen3", "qwen3_moe", "qwen3_5", "nemotron_h"}
_CHECKPOINTED = [name for name in FAMILIES if name not in CANNOT_CHECKPOINT]


def mixed(model: Any) -> RecomputePlan:
    """Every mode in turn, from the last on."""
    layers = len(layers_of(model))
    return RecomputePlan(tuple(MODES[-1 - i % 3] for i in range(layers))[::-1], 0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators of attention and of recurrences that ran, one name each."""
    ran: list[str] = []

    def note(mask: Any, of: str) -> None:
        ran.append(of)

    monkeypatch.setattr(operator, "note_call", note)
    monkeypatch.setattr(recurrence, "note_call", note)
    monkeypatch.setattr(scoring, "every_layer_attends", lambda *_: nullcontext())
    return ran


# ---- the same bits -------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", mostly_full(_CHECKPOINTED, {"qwen3_moe", "nemotron_h"}))
def test_the_same_bits_in_every_family(model_type):
    """As transformers' own checkpointing, values and all gradients."""
    skip_if_repeated(model_type, _SAME_EVERY_TIME)
    model, packed, objective = build(model_type), ragged_packed(), ragged_objective()
    enable_checkpointing(model, use_reentrant=False)
    want = run_packed(model, packed, objective)
    assert same_bits(run_packed(model, packed, objective, recompute=mixed(model)), want)
    if model_type in ("qwen3", "gemma2", "qwen3_5"):
        plan = plan_recomputation(model, packed, memory=1 << 40)
        assert same_bits(run_packed(model, packed, objective, recompute=plan), want)


@pytest.mark.parametrize(
    "model_type", mostly_full(_CHECKPOINTED, _PLANNED_EVERY_TIME - {"qwen3_5"})
)
def test_every_family_is_planned(model_type):
    skip_if_repeated(model_type, _PLANNED_EVERY_TIME)
    model, packed = build(model_type), ragged_packed()
    if model_type in _NOT_PLANNED:
        with pytest.raises(pt.UnsupportedError, match="layers of longcat_flash"):
            plan_recomputation(model, packed)
        with pytest.warns(UserWarning, match="recompute='auto' recomputes every layer: what"):
            pt.sequence_logprobs(model, packed, recompute="auto")
        return
    plan = plan_recomputation(model, packed, memory=1 << 40)
    assert plan.modes == ("nothing",) * len(layers_of(model))


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize(
    "model_type",
    mostly_full(["qwen3", "gpt_oss", "qwen3_5", "nemotron_h"], {"gpt_oss", "qwen3_5"}),
)
def test_modes_recompute_what_they_say(model_type, calls):
    """Seen by the operators that run: a mode that did nothing would give the same numbers."""
    model, packed, objective = build(model_type), ragged_packed(), ragged_objective()
    runs, ran = {}, {}
    for mode in MODES:
        calls.clear()
        runs[mode] = run_packed(model, packed, objective, recompute=mode)
        ran[mode] = sorted(calls)
    assert len(ran["nothing"]) >= len(layers_of(model)) / 2
    assert ran["all"] == sorted(2 * ran["nothing"])
    # convolutions are computed again: they are cheaper than what they would keep
    convolutions = ran["all_but_attention"].count("recurrence") - ran["nothing"].count("recurrence")
    linear = (getattr(model.config.get_text_config(), "layer_types", None) or []).count(
        "linear_attention"
    )
    assert convolutions == linear
    assert ran["all_but_attention"].count("attention") == ran["nothing"].count("attention") > 0
    assert same_bits(runs["all"], runs["nothing"])
    assert same_bits(runs["all_but_attention"], runs["nothing"])


@pytest.mark.parametrize(
    ("model_type", "autocast"),
    mostly(
        product(["qwen3", "qwen3_5", "nemotron_h"], [False, True]),
        [("qwen3", False), ("nemotron_h", True)],
    ),
)
def test_several_backwards_of_one_graph_add_up(model_type, autocast):
    """In every mode, as torch has it: what was kept serves every run of a layer."""
    model, packed = build(model_type), ragged_packed()

    def run(mode: Any, times: int) -> dict[str, torch.Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            scores = pt.sequence_logprobs(model, packed, recompute=mode, return_entropy=True)
        losses = torch.cat(scores.logprobs).sum(), torch.cat(scores.entropy).sum()
        for i in range(times):
            (losses[i % 2] if times > 1 else sum(losses)).backward(retain_graph=i + 1 < times)
        return gradients(model)

    whole = run(None, 1)
    for mode in MODES:
        for name, found in run(mode, 4).items():
            error = (found / 2 - whole[name]).norm() / whole[name].norm()
            assert error < (0.05 if autocast else 1e-4), (mode, name)


def test_a_kept_output_that_a_layer_writes_to_is_refused():
    model = build("qwen3")
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(
        lambda module, args: (args[0].mul_(2),)
    )
    scores = pt.sequence_logprobs(model, ragged_packed(), recompute="all_but_attention")
    with pytest.raises(pt.UnsupportedError, match="wrote in place to an output of"):
        torch.cat(scores.logprobs).sum().backward()


def test_what_was_set_before_is_set_again():
    """After a forward that fails, too."""
    model, packed = build("qwen3"), ragged_packed()
    plain = pt.sequence_logprobs(model, packed)
    assert not any(layer.gradient_checkpointing for layer in layers_of(model))
    enable_checkpointing(model, use_reentrant=True)
    before = [dict(vars(layer)) for layer in layers_of(model)]

    def fail(*_: Any) -> None:
        raise RuntimeError("stop")

    handle = layers_of(model)[-1].register_forward_hook(fail)
    before_hook = [dict(vars(layer)) for layer in layers_of(model)]
    with pytest.raises(RuntimeError, match="stop"):
        pt.sequence_logprobs(model, packed, recompute="nothing")
    assert [dict(vars(layer)) for layer in layers_of(model)] == before_hook
    handle.remove()
    again = pt.sequence_logprobs(model, packed, recompute="auto")
    assert [dict(vars(layer)) for layer in layers_of(model)] == before
    assert all(map(torch.equal, again.logprobs, plain.logprobs))


def test_whose_switches_are_set():
    """The layers', and those of modules within that can recompute on their own: one whose class
    has the switch, and one that alone has it."""
    model = build("qwen3")
    first = layers_of(model)[0]
    first.mlp.own = torch.nn.Identity()
    first.mlp.own.gradient_checkpointing = True
    first.mlp.of_class = type("Switched", (torch.nn.Identity,), {"gradient_checkpointing": True})()
    switched = {*layers_of(model), first.mlp.own, first.mlp.of_class}
    before = {m: dict(vars(m)) for m in model.modules()}
    with recomputing(model, ["all"] * len(layers_of(model))):
        assert {m for m in before if vars(m) != before[m]} == switched
        assert first.gradient_checkpointing
        assert not (
            first.mlp.own.gradient_checkpointing or first.mlp.of_class.gradient_checkpointing
        )
    assert all(vars(m) == before[m] for m in before)


def test_a_mode_more_is_noticed_where_three_are_known(monkeypatch):
    monkeypatch.setattr(layers, "MODES", (*MODES, "half"))
    with pytest.raises(AssertionError):
        run_path(plan.__file__)
    with pytest.raises(AssertionError, match="no checkpoint of a vision encoder: 'half'"):
        layers.checkpoint_of_encoder(torch.nn.Linear(1, 1), "half")


def test_without_gradients_nothing_is_planned(monkeypatch):
    monkeypatch.setattr(choose, "plan_for", None)
    with torch.no_grad():
        pt.sequence_logprobs(build("qwen3").eval(), ragged_packed(), recompute="auto")


def test_bad_input():
    model, packed = build("qwen3"), ragged_packed()
    with pytest.raises(ValueError, match=r"recompute must be None, 'auto', 'all'.*got 'some'"):
        pt.sequence_logprobs(model, packed, recompute="some")
    with pytest.raises(ValueError, match=r"a plan for 2 layers, and the model has \d"):
        pt.sequence_logprobs(model, packed, recompute=RecomputePlan(("all", "all"), 0))
    with pytest.raises(pt.UnsupportedError, match=r"in training mode alone; call model\.train\(\)"):
        pt.sequence_logprobs(build("qwen3").eval(), packed, recompute="auto")
    wrapped = build("qwen3")
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    wrapped.model.layers[0] = checkpoint_wrapper(wrapped.model.layers[0])
    with pytest.raises(pt.UnsupportedError, match="inside torch's CheckpointWrapper"):
        pt.sequence_logprobs(wrapped, packed, recompute="auto")


@pytest.mark.parametrize("name", CANNOT_CHECKPOINT)
def test_a_family_that_is_not_checkpointed(name):
    with pytest.raises(pt.UnsupportedError, match="does not checkpoint the layers"):
        pt.sequence_logprobs(build(name), ragged_packed(), recompute="auto")


# ---- the plan ------------------------------------------------------------------------------------


def memory_of(layers: list[list[tuple[int, int]]], per_pair: int, unit: int) -> ModelMemory:
    """Made-up layers: of each, (held, working) units of bytes per token in every mode."""
    costs = tuple(LayerCost("full_attention", 10 + i, per_pair, None) for i in range(len(layers)))
    cost = ModelCost("made up", 1, costs, *[1] * 9)
    by_mode = {
        mode: tuple(
            LayerMemory((layer[n][0] * unit, 1.0), (layer[n][1] * unit, 3.0)) for layer in layers
        )
        for n, mode in enumerate(MODES)
    }
    return ModelMemory(by_mode, 2.0, 3.0, cost)


_BYTES = st.tuples(st.integers(1, 50), st.integers(1, 90))
# beside the bytes of a chunk of logits: next to nothing, as many, and many more
_UNITS = st.sampled_from([1, 1 << 16, 1 << 20, 1 << 26])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(_BYTES, min_size=3, max_size=3), min_size=1, max_size=6),
    st.integers(0, 40),
    st.floats(0, 1),
    _UNITS,
    st.integers(0, 2),
)
def test_the_plan_recomputes_least_of_those_that_fit(layers, per_pair, share, unit, frozen):
    memory, count = replace(memory_of(layers, per_pair, unit), frozen=frozen), len(layers)
    forest = pt.PrefixForest.from_parents([-1, 0, 0], [30, 7, 5])
    work = Work(forest, 20, trains_lm_head=False)
    pairs = pt.pack(forest).mask.dense().sum().item()
    plans = {}
    for a in range(count + 1):
        for b in range(a, count + 1):
            modes = ("all",) * a + ("all_but_attention",) * (b - a) + ("nothing",) * (count - b)
            cost = sum(
                (mode != "nothing") * x.weights * 42 + (mode == "all") * x.per_pair * pairs
                for mode, x in [*zip(modes, memory.cost.layers, strict=True)][frozen:]
            )
            plans[modes] = cost, memory.peak(42, modes, scoring_bytes(memory, work))
    peaks = [peak for _, peak in plans.values()]
    available = min(peaks) + share * (max(peaks) - min(peaks))
    best = min((cost, peak) for cost, peak in plans.values() if peak <= available)
    # predictions are whole bytes
    plan = plan_for(memory, work, available + 0.5)
    assert plans[plan.modes] == pytest.approx(best)
    assert plan.peak_bytes == plans[plan.modes][1] <= available + 1
    with pytest.raises(torch.OutOfMemoryError):
        plan_for(memory, work, min(peaks) - 1)


def test_what_is_left_for_activations(monkeypatch):
    """Free bytes and those that torch's allocator holds unused, less the reserve, gradients that
    are still to come, and what FSDP2 gathers."""
    model = build("qwen3")
    layers = layers_of(model)
    # one gradient that is there, one weight without any
    model.lm_head.weight.grad = torch.zeros_like(model.lm_head.weight)
    layers[0].mlp.up_proj.weight.requires_grad_(False)
    there = (model.lm_head.weight, layers[0].mlp.up_proj.weight)
    wanted = sum(4 * p.numel() for p in model.parameters() if all(p is not x for x in there))
    bytes_of = {"mem_get_info": (50 << 30, 80 << 30), "memory_reserved": 7 << 30}
    for name, size in (bytes_of | {"memory_allocated": 4 << 30}).items():
        monkeypatch.setattr(torch.cuda, name, lambda _, size=size: size)
    left = (50 + 7 - 4 - 4) << 30
    gpu = torch.device("cuda", 0)
    assert choose.available_bytes(gpu) == left
    assert choose.left_for_activations(model, gpu) == (model, left - wanted)
    monkeypatch.setattr(choose, "gathered_bytes", lambda _: 1000)
    assert choose.left_for_activations(model, gpu) == (model, left - wanted - 1000)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_what_fsdp2_gathers(together, kept):
    """Four units; all layers too, in the dtype of the products, if they stay whole until their
    backward."""
    model = build("qwen3")
    layers = list(layers_of(model))
    # one layer less than the others
    layers[1].mlp = torch.nn.Identity()
    sizes = [sum(4 * p.numel() for p in layer.parameters()) for layer in layers]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        options = {
            "mesh": init_device_mesh("cpu", (1,)),
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
            "reshard_after_forward": not kept,
        }
        for unit in [layers] if together else layers:
            fully_shard(unit, **options)
        fully_shard(model, **options)
        unit = sum(sizes) if together else max(sizes)
        assert choose.gathered_bytes(model) == 4 * unit + kept * sum(sizes) // 2
    finally:
        dist.destroy_process_group()


def test_parameters_of_several_meshes_are_gathered():
    """As those of experts may be, which torch 2.13 keeps in groups of their own."""
    common = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    if not hasattr(common, "ShardPlacementResult"):
        pytest.skip("this torch has one mesh per unit")
    model = build("qwen3")
    sizes = [sum(4 * p.numel() for p in layer.parameters()) for layer in layers_of(model)]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        other = DeviceMesh.from_group(dist.new_group([0]), "cpu")
        info = common.FSDPMeshInfo(other, shard_mesh_dim=0)

        def place(parameter):
            return common.ShardPlacementResult(Shard(0), info) if parameter.ndim > 1 else None

        for layer in layers_of(model):
            fully_shard(layer, mesh=mesh, shard_placement_fn=place)
            assert len(layer._get_fsdp_state()._fsdp_param_groups) == 2
        assert choose.gathered_bytes(model) == 4 * max(sizes)
    finally:
        dist.destroy_process_group()


def test_a_forest_that_does_not_fit_is_refused_before_it_runs():
    """And the number of tokens that the message names does fit."""
    model, packed = build("qwen3"), ragged_packed()
    with pytest.raises(torch.OutOfMemoryError, match=r"distinct tokens needs about .* GiB") as e:
        plan_recomputation(model, packed, memory=1 << 20)
    assert "with every layer recomputed" in str(e.value)
    # logits alone take more
    assert "not one token fits" in str(e.value) and "shard the model" in str(e.value)
    memory = choose.memory_of(model, model, packed.device)
    for available in (1 << 30, 1 << 34):
        fit = tokens_that_fit(memory, available, 1.0)
        assert fit > 0
        # what takes just so much fits
        work = Work(pt.PrefixForest.from_parents([-1], [fit]), fit)
        exactly = memory.peak(fit, "all", scoring_bytes(memory, work))
        assert tokens_that_fit(memory, exactly, 1.0) == fit

        def of(tokens: int, available: int = available) -> RecomputePlan:
            chain = pt.PrefixForest.from_parents([-1], [tokens])
            return plan_for(memory, Work(chain, tokens), available)

        of(fit)
        with pytest.raises(torch.OutOfMemoryError, match=f"at most {fit:,} tokens"):
            of(fit + 1)
