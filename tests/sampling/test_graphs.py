"""Captured decode steps, with a stand-in for CUDA graphs: what they read stays where it is."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch

import prefixtree as pt
from prefixtree.sampling import Draws, Samples, TreeSampler
from prefixtree.sampling.forward import StepGraphs, state_of
from tests.sampling.cases import GREEDY, histories, models
from tests.support.full import mostly
from tests.support.hooks import limit, put, wrap
from tests.support.models import build
from tests.support.recorded_graphs import RecordedGraphs, watched


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraphs]:
    put(monkeypatch, "graphs of steps", RecordedGraphs)
    monkeypatch.setattr(RecordedGraphs, "made", [])
    # as on a GPU
    limit(monkeypatch, "steps between looks", {})
    return RecordedGraphs.made


def assert_same(one: Samples, two: Samples) -> None:
    assert one.paths == two.paths
    for a, b in zip(one.sequences, two.sequences, strict=True):
        assert np.array_equal(a, b)
    for p, q in zip(one.logprobs, two.logprobs, strict=True):
        torch.testing.assert_close(p, q, atol=1e-5, rtol=0)
    assert one.sampling_masks is not None and two.sampling_masks is not None
    for m, n in zip(one.sampling_masks, two.sampling_masks, strict=True):
        assert all(map(np.array_equal, m, n))


def grown(sampler: TreeSampler, seed: int, draws: Draws, tokens: int = 20) -> Samples:
    """Two calls with branchings and replies between, on one of two forests."""
    rows, stop = sampler.start(pt.PrefixForest.from_sequences(histories(seed))), (5, 11, 17)
    rows.branch(3)
    rows.generate(tokens, draws, stop)
    rows.drop([0, 4])
    rows.append({1: [7, 8], 2: [9]})
    rows.branch({1: 2})
    rows.generate(7, draws, stop)
    return rows.samples()


@pytest.mark.parametrize(
    "family",
    mostly(["gemma2", "qwen3_5", "qwen3_moe"], ["gemma2"]),
)
def test_replays_give_the_same_samples(family, recorded):
    """Windows, softcaps, states, experts; two forests, two ways to draw; more tokens than a step
    keeps."""
    # of each kind one
    model = build(family, **({"num_hidden_layers": 2} if family == "gemma2" else {})).eval()
    if family == "qwen3_moe":
        model.config._experts_implementation = "batched_mm"
    captured, plain = TreeSampler(model, 3000), TreeSampler(model, 3000, graphs=False)
    truncated = Draws(0.7, seed=2, top_k=20, return_sampling_mask=True)
    for seed in (5, 6):
        for way, draws in enumerate((Draws(seed=seed), truncated)):
            found = grown(captured, seed, draws)
            # each forest and each way once
            if way == seed - 5:
                assert_same(found, grown(plain, seed, draws))
    (graphs,) = recorded
    assert graphs.reason is None and graphs.replays > 60
    sizes = [step.size for step in captured._steps._kept.values()]
    assert 0 < graphs.num_captured <= 2 * len(sizes) and all(size % 8 == 0 for size in sizes)
    # of every size and way to draw a step, and nothing for each seed or forest
    again = graphs.num_captured
    grown(captured, 5, Draws(seed=5))
    assert graphs.num_captured == again
    grown(captured, 6, Draws(seed=6))
    assert graphs.num_captured == again


@pytest.mark.full
def test_steps_get_smaller_as_rows_stop(recorded):
    ours, _ = models()
    sampler, stop = TreeSampler(ours, 9000), list(range(3, 9))
    forest = pt.PrefixForest.from_sequences(histories(5))
    for seed in range(2):
        rows = sampler.start(forest)
        rows.branch(40 // len(rows) + 1)
        rows.generate(64, Draws(seed=seed), stop)
    sizes = {step.size for step in sampler._steps._kept.values()}
    assert len(sizes) > 2 and recorded[0].num_captured <= 2 * len(sizes)


def test_where_nothing_is_captured() -> None:
    """Said without asking for a GPU: where it is not wanted, and where there is none."""
    assert StepGraphs(torch.device("cuda"), wanted=False).reason == "graphs=False"
    assert StepGraphs(torch.device("cpu"), wanted=False).reason == "graphs=False"
    assert StepGraphs(torch.device("cpu")).reason == "the device has no CUDA graphs"


def test_sizes() -> None:
    size_of = RecordedGraphs(torch.device("cpu")).size_of
    sizes = [size_of(rows) for rows in range(1, 5000)]
    assert all(size >= rows for rows, size in enumerate(sizes, 1)) and sizes == sorted(sizes)
    assert all(size <= 1.25 * rows for rows, size in enumerate(sizes, 1) if rows >= 32)
    assert len(set(sizes)) == 33 and size_of(2316) == 2560 and sizes[127] == 128


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of PEFT
def test_updates_in_place_keep_graphs_and_others_do_not(recorded):
    """The tokens are always those of the weights as they are."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        build("qwen3", num_hidden_layers=1), LoraConfig(r=2, target_modules=["q_proj"])
    ).eval()
    inner = model.get_base_model()
    sampler = TreeSampler(model, 2000)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def check(number: int) -> None:
        found = grown(sampler, 5, Draws(seed=3), 5)
        assert len(recorded) == number and recorded[-1].replays > 0
        recorded[-1].replays = 0
        assert_same(found, grown(TreeSampler(model, 2000, graphs=False), 5, Draws(seed=3), 5))

    check(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    check(1)
    model.train(), model.eval()
    check(1)
    # another active adapter changes no address
    with model.disable_adapter():
        check(2)
    check(3)
    inner.model.norm.weight = torch.nn.Parameter(inner.model.norm.weight.detach() * 2)
    check(4)
    inner.model.layers[0].self_attn.scaling *= 1.5
    check(5)
    rows = sampler.start(pt.PrefixForest.from_sequences([[3, 4]]))
    inner.lm_head.weight = torch.nn.Parameter(inner.lm_head.weight.detach().clone())
    with pytest.raises(RuntimeError, match="the model's weights or adapters changed since"):
        rows.generate(2)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_:FutureWarning")
@pytest.mark.parametrize("family", ["qwen3", "gemma3n_text", "gpt_oss", "gpt2", "phi3"])
def test_a_forward_does_not_change_the_state(family):
    """Otherwise every call would capture anew."""
    model = build(family).eval()
    model.gradient_checkpointing_enable()
    before = state_of(model, [])
    TreeSampler(model, 300, graphs=False).sample([[3, 4, 5]], 2, 3)
    # as trainers do between two calls
    model.gradient_checkpointing_disable()
    model.gradient_checkpointing_enable()
    assert state_of(model, []) == before != state_of(model, [1])
    # a number is the same where another object says it
    model.own = [0.1 + 0.2, "a b"]
    before = state_of(model, [])
    model.own = [float("0.30000000000000004"), " ".join("ab")]
    assert state_of(model, []) == before
    model.own = [0.3, "a b"]
    assert state_of(model, []) != before
    # a hook that holds something is another one each time
    states = set()
    for scale in (1.0, 2.0):
        handle = model.register_forward_pre_hook(lambda module, args, scale=scale: None)
        states.add(state_of(model, []))
        handle.remove()
    assert len(states) == 2


def test_what_waits_for_the_device_is_not_captured(recorded):
    """And it is said once."""
    model = build("qwen3_moe").eval()
    model.config._experts_implementation = "eager"
    sampler = TreeSampler(model, 3000)
    with pytest.warns(UserWarning, match="not captured in a CUDA graph, because .*for the GPU"):
        found = grown(sampler, 5, GREEDY)
    assert recorded[0].reason and recorded[0].num_captured == 0
    assert_same(found, grown(TreeSampler(model, 3000, graphs=False), 5, GREEDY))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(found, grown(sampler, 5, GREEDY))


def test_under_autocast_nothing_is_replayed(recorded, monkeypatch):
    ours, _ = models()
    sampler = TreeSampler(ours, 2000)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    grown(sampler, 5, Draws())
    assert recorded[0].num_captured == 0


def test_an_interruption_leaves_nothing_in_a_kept_step(recorded):
    ours, _ = models()
    sampler, forest = TreeSampler(ours, 2000), pt.PrefixForest.from_sequences(histories(5))
    rows = TreeSampler(ours, 2000, graphs=False).start(forest)
    rows.generate(20, Draws(seed=1))
    whole = rows.samples()
    calls: list[None] = []

    def interrupt(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 6:
            raise KeyboardInterrupt

    rows = sampler.start(forest)
    # a hook is another state, so this step is made anew
    with (
        ours.model.layers[1].register_forward_pre_hook(interrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        rows.generate(20, Draws(seed=1))
    assert len(rows.new_tokens(0)) == 6
    rows.generate(14, Draws(seed=1))
    assert_same(whole, rows.samples())
    rows = sampler.start(forest)
    rows.generate(20, Draws(seed=1))
    assert_same(whole, rows.samples())


def test_an_interruption_while_lists_grow_leaves_no_old_graph(recorded, monkeypatch):
    """A graph of the lists from before would read other keys."""
    ours, _ = models()
    sampler, draws = TreeSampler(ours, 3000), Draws(seed=1)
    rows = sampler.start(pt.PrefixForest.from_sequences([[3, 4, 5]]))
    rows.branch(8)
    rows.generate(20, draws)
    (step,) = sampler._steps._kept.values()
    room, replays = step._works[None].capacity, recorded[0].replays
    assert replays > 0
    # as many rows, of which each sees many runs
    words = list(range(3, 43))
    forest = pt.PrefixForest.from_sequences([words[: 5 * n] for n in range(1, 9)])
    calls: list[None] = []

    def interrupted(fill: Any, *arguments: Any) -> None:
        calls.append(None)
        if len(calls) == 1:
            raise KeyboardInterrupt
        fill(*arguments)

    wrap(monkeypatch, "lists of a decode step", interrupted)
    rows = sampler.start(forest)
    with pytest.raises(KeyboardInterrupt):
        rows.generate(20, draws)
    rows.generate(19, draws)
    assert step._works[None].capacity != room and recorded[0].replays > replays
    plain = TreeSampler(ours, 3000, graphs=False).start(forest)
    plain.generate(20, draws)
    assert_same(rows.samples(), plain.samples())


def test_memory_is_free_when_nobody_has_the_sampler(recorded, monkeypatch):
    """At once: pools are most of a GPU, and the collector does not know."""
    ours, _ = models()

    def capture(self, step):
        # a graph does not keep the step, as the stand-in would
        method = weakref.WeakMethod(step)
        return lambda: method()()

    monkeypatch.setattr(RecordedGraphs, "_capture", capture)
    gc.collect()
    gc.disable()
    try:
        for captured in (True, False):
            sampler = TreeSampler(ours, 500, graphs=captured)
            rows = sampler.start(pt.PrefixForest.from_sequences([[3, 4, 5]]))
            rows.generate(8)
            pool = weakref.ref(sampler._forward.cache._pools[0][0])
            del sampler
            rows.generate(2)
            assert pool() is not None
            del rows
            assert pool() is None, captured
    finally:
        gc.enable()


def test_the_stand_in_sees_what_a_graph_would_not(recorded):
    """Host reads, moved tensors, and numbers that Python chose."""
    x, state = torch.zeros(3), {"y": torch.ones(3), "n": 1.0}
    assert watched(lambda: x.add_(1)).host == set()
    for read in (lambda: float(x.sum()), lambda: x[x > 0], lambda: x.nonzero()):
        assert watched(read).host
    replay = RecordedGraphs(x.device)._capture(lambda: x.add_(state["y"] * 2, alpha=state["n"]))
    replay(), replay()
    state["n"] = 2.0
    with pytest.raises(AssertionError, match="it changed"):
        replay()
    state["n"] = 1.0
    replay()
    state["y"] = torch.ones(3)
    with pytest.raises(AssertionError, match="it changed"):
        replay()
