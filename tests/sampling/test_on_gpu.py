"""On a GPU: decode steps that are captured in CUDA graphs and replayed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import prefixtree as pt
from prefixtree.sampling import Draws, Samples, TreeSampler
from prefixtree.sampling.forward import StepGraphs
from prefixtree.sampling.step import DecodeStep
from tests.sampling.cases import GREEDY, steps_after_the_end, words
from tests.support.models import build, cases

pytestmark = pytest.mark.gpu

VOCABULARY = 997


def model_of(dtype: torch.dtype = torch.bfloat16, attention: str = "prefixtree") -> Any:
    """A small Qwen3 with heads that GPUs have kernels for."""
    torch.manual_seed(0)
    config = Qwen3Config(
        num_hidden_layers=3,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        attn_implementation=attention,
        # logits that spread, so that hardly any draw is a tie
        initializer_range=0.1,
    )
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def forest_of(seed: int) -> pt.PrefixForest:
    """Three trees of histories, some the beginning of others."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(3):
        tree = [words(rng, int(rng.integers(100, 400)))]
        for _ in range(6):
            above = tree[rng.integers(len(tree))]
            tree.append(above[: rng.integers(1, len(above) + 1)] + words(rng, rng.integers(0, 60)))
        found += tree
    return pt.PrefixForest.from_sequences(found)


def grown(sampler: TreeSampler, seed: int, draws: Draws, stop: list[int] | None = None) -> Samples:
    """Rows that branch, hear replies and are dropped between two calls."""
    rng = np.random.default_rng(seed)
    rows = sampler.start(forest_of(seed))
    rows.branch(4)
    rows.generate(40, draws, stop or [])
    rows.drop(range(0, len(rows), 5))
    rows.append({row: words(rng, rng.integers(0, 9)) for row in range(0, len(rows), 2)})
    rows.branch(dict.fromkeys(range(0, len(rows), 7), 3))
    rows.generate(30, draws, stop or [])
    return rows.samples()


def graphs_of(sampler: TreeSampler) -> StepGraphs:
    graphs = sampler._steps.graphs
    assert isinstance(graphs, StepGraphs) and graphs.reason is None
    return graphs


@contextmanager
def counted_replays() -> Iterator[list[None]]:
    found: list[None] = []
    replay = torch.cuda.CUDAGraph.replay

    def counting(graph: torch.cuda.CUDAGraph) -> None:
        found.append(None)
        replay(graph)

    with patch.object(torch.cuda.CUDAGraph, "replay", counting):
        yield found


def close(one: Samples, two: Samples, atol: float, ties: int = 1) -> None:
    """The same tokens, and log-probabilities up to rounding: padded rows are another GEMM.

    ties: sequences that may differ, because rounding chose between two tokens.
    """
    assert one.paths == two.paths
    pairs = zip(one.sequences, two.sequences, strict=True)
    same = [i for i, (a, b) in enumerate(pairs) if np.array_equal(a, b)]
    assert len(same) >= len(one.paths) - ties
    for i in same:
        torch.testing.assert_close(one.logprobs[i], two.logprobs[i], atol=atol, rtol=0)


@contextmanager
def never_captured() -> Iterator[None]:
    """Steps of the same sizes, over the same lists, run one by one."""
    with patch.object(StepGraphs, "captured", lambda self: lambda step: step()):
        yield


@pytest.mark.parametrize(
    "draws",
    [Draws(seed=3), Draws(0.7, seed=4, top_p=0.9, return_sampling_mask=True), GREEDY],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_replays_are_what_steps_are_bit_by_bit(dtype: torch.dtype, draws: Draws) -> None:
    """Two forests; tokens and log-probabilities."""
    model = model_of(dtype)
    captured, plain = TreeSampler(model, 20_000), TreeSampler(model, 20_000)
    with counted_replays() as replays:
        found = [grown(captured, seed, draws) for seed in (0, 1)]
    assert len(replays) > 100 and graphs_of(captured).num_captured > 0
    with never_captured():
        expected = [grown(plain, seed, draws) for seed in (0, 1)]
    for one, two in zip(found, expected, strict=True):
        close(one, two, 0.0, ties=0)
        for m, n in zip(one.sampling_masks, two.sampling_masks, strict=True):
            assert all(map(np.array_equal, m, n))


# of inductor, about speed
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_steps_of_compiled_layers_are_captured() -> None:
    """Their operator finds the pools on the host, and waits for nothing."""
    model = model_of()
    pt.compile_layers(model)
    captured, plain = TreeSampler(model, 20_000), TreeSampler(model, 20_000)
    with counted_replays() as replays:
        found = grown(captured, 0, Draws(seed=3))
    assert len(replays) > 50 and graphs_of(captured).num_captured > 0
    with never_captured():
        close(found, grown(plain, 0, Draws(seed=3)), 0.0, ties=0)
    torch._dynamo.reset()


def test_without_graphs_the_samples_are_the_same() -> None:
    """float32, where rounding moves no token."""
    model = model_of(torch.float32)
    one = grown(TreeSampler(model, 20_000), 0, Draws(seed=3))
    two = grown(TreeSampler(model, 20_000, graphs=False), 0, Draws(seed=3))
    close(one, two, 1e-4)


def test_logprobs_are_those_of_training() -> None:
    model = model_of(torch.float32)
    samples = grown(TreeSampler(model, 20_000), 1, Draws(0.8, seed=5))
    packed = pt.pack(samples.forest).to("cuda")
    with torch.no_grad():
        scores = pt.sequence_logprobs(model, packed, 0.8, loss_mask=samples.loss_masks)
    for new, old in zip(scores.logprobs, samples.logprobs, strict=True):
        torch.testing.assert_close(new.cpu(), old, atol=2e-4, rtol=0)


@pytest.mark.filterwarnings("ignore:recurrent layers run through torch")
@pytest.mark.parametrize("family", cases(["qwen3_5", "bamba", "lfm3"]))
def test_states_move_in_graphs(family: str) -> None:
    """Bit by bit as steps that are not captured, with rows that stop; and log-probabilities are
    those of training."""
    model = build(family).eval().cuda()
    captured, plain = TreeSampler(model, 20_000), TreeSampler(model, 20_000)
    how = Draws(0.9, seed=5), [5, 11, 17]
    with counted_replays() as replays:
        found = [grown(captured, seed, *how) for seed in (0, 1)]
    assert len(replays) > 40 and graphs_of(captured).num_captured > 0
    with never_captured():
        expected = [grown(plain, seed, *how) for seed in (0, 1)]
    for one, two in zip(found, expected, strict=True):
        close(one, two, 0.0, ties=0)
    packed = pt.pack(found[1].forest).to("cuda")
    with torch.no_grad():
        scores = pt.sequence_logprobs(model, packed, 0.9, loss_mask=found[1].loss_masks)
    for new, old in zip(scores.logprobs, found[1].logprobs, strict=True):
        torch.testing.assert_close(new.cpu(), old, atol=5e-4, rtol=0)


def test_greedy_equals_generate() -> None:
    ours, other = model_of(torch.float32), model_of(torch.float32, "sdpa")
    rng = np.random.default_rng(0)
    prompts = [words(rng, 50) for _ in range(6)]
    samples = TreeSampler(ours, 5000).sample(prompts, 2, 32, GREEDY)
    expected = other.generate(
        input_ids=torch.tensor(prompts, device="cuda"),
        attention_mask=torch.ones(6, 50, dtype=torch.int64, device="cuda"),
        max_new_tokens=32,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    ).tolist()
    assert [s.tolist() for s in samples.sequences] == [e for e in expected for _ in range(2)]


def test_nothing_in_a_step_waits_for_the_gpu() -> None:
    """Replays, and what the host does around them, but for the looks every 16 tokens."""
    model = model_of()
    sampler, draws = TreeSampler(model, 20_000), Draws(0.9, seed=1, top_p=0.9)
    grown(sampler, 0, draws, [5])
    checked: list[int] = []
    run = DecodeStep.run

    def guarded(step: DecodeStep) -> None:
        if step._count == 16:
            # what was drawn goes to the host first
            step._unload()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        checked.append(step.size)

    before = graphs_of(sampler).num_captured
    with patch.object(DecodeStep, "run", guarded), counted_replays() as replays:
        grown(sampler, 0, draws, [5])
    assert len(checked) == len(replays) > 20 and graphs_of(sampler).num_captured == before


def test_a_call_ends_two_steps_after_its_last_row() -> None:
    """The host learns it without waiting for the steps that it launched since."""
    sampler = TreeSampler(model_of(), 2000)
    # the first calls capture
    assert [steps_after_the_end(sampler, VOCABULARY) for _ in range(4)] == [2] * 4


@pytest.mark.parametrize("autocast", [False, True])
def test_updates_are_seen_and_moved_weights_are_not_replayed(autocast: bool) -> None:
    """Also with autocast inside of the model's forward, where accelerate puts it."""
    model = model_of(torch.float32)
    if autocast:
        model.forward = torch.autocast("cuda", torch.bfloat16)(model.forward)
    sampler = TreeSampler(model, 20_000)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    first = grown(sampler, 0, Draws(seed=2))
    graphs, captured = graphs_of(sampler), graphs_of(sampler).num_captured
    scores = pt.sequence_logprobs(model, pt.pack(first.forest).to("cuda"))
    sum(row.sum() for row in scores.logprobs).backward()
    optimizer.step()
    optimizer.zero_grad()

    def check() -> None:
        found = grown(sampler, 0, Draws(seed=2))
        close(found, grown(TreeSampler(model, 20_000, graphs=False), 0, Draws(seed=2)), 2e-4)
        pairs = zip(first.sequences, found.sequences, strict=False)
        assert any(not np.array_equal(a, b) for a, b in pairs)

    with counted_replays() as replays:
        check()
    assert len(replays) > 50
    assert graphs_of(sampler) is graphs and graphs.num_captured == captured
    weight = model.model.layers[1].mlp.up_proj.weight
    rows = sampler.start(forest_of(0))
    weight.data = weight.data * -1
    with pytest.raises(RuntimeError, match="the model's weights or adapters changed since"):
        rows.generate(4)
    check()
    assert graphs_of(sampler) is not graphs


def test_the_number_of_graphs_and_the_room_they_take() -> None:
    """Rows stop, so steps get smaller; later forests of this kind bring no more graphs."""
    model = model_of()
    sampler = TreeSampler(model, 200_000)
    rng = np.random.default_rng(0)
    prompts = pt.PrefixForest.from_sequences([words(rng, 99) for _ in range(8)])
    counts, reserved = [], []
    for seed in range(4):
        rows = sampler.start(prompts)
        rows.branch(16)
        rows.generate(400, Draws(seed=seed), list(range(3, 23)))
        counts.append(graphs_of(sampler).num_captured)
        reserved.append(torch.cuda.memory_allocated())
    sizes = {step.size for step in sampler._steps._kept.values()}
    assert max(sizes) == 128 and len(sizes) >= 4
    assert counts[0] >= 4 and counts[-1] <= 3 * len(sizes), (counts, sizes)
    assert sizes <= {graphs_of(sampler).size_of(n) for n in range(1, 129)}
    assert reserved[-1] <= 1.02 * reserved[0] + (8 << 20), reserved


def test_memory_is_the_pools() -> None:
    model = model_of()
    # libraries take their workspaces
    TreeSampler(model, 2000).sample([[3, 4]], 2, 24)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    sampler = TreeSampler(model, 400_000)
    rows = sampler.start(forest_of(0))
    formula = 400_000 * 3 * 2 * 2 * 64 * 2
    held = torch.cuda.memory_allocated() - before
    # beside them: the logits of each row
    assert formula <= held <= 1.02 * formula, (held, formula)
    rows.branch(4)
    torch.cuda.reset_peak_memory_stats()
    rows.generate(64, Draws(seed=1))
    peak = torch.cuda.max_memory_allocated() - before
    # logits of 84 rows and their noise are small here; so are partial results
    assert peak <= 1.02 * formula + (64 << 20), (peak, formula)


def test_experts_that_ask_the_host_are_not_captured() -> None:
    from tests.support.models import build

    model = build("qwen3_moe").eval().to("cuda")
    model.config._experts_implementation = "eager"
    prompts = [words(np.random.default_rng(0), 20)]
    sampler = TreeSampler(model, 2000)
    with pytest.warns(UserWarning, match=r"not captured in a CUDA graph, because .*moe.*GPU"):
        found = sampler.sample(prompts, 4, 40, GREEDY)
    assert sampler._steps.graphs is not None and sampler._steps.graphs.num_captured == 0
    plain = TreeSampler(model, 2000, graphs=False).sample(prompts, 4, 40, GREEDY)
    close(found, plain, 1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler.sample(prompts, 4, 40, GREEDY)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "gpt_oss", "deepseek_v3", "gpt2"])
def test_families(family: str) -> None:
    """Windows, softcaps, sinks, latent attention, learned positions."""
    from tests.support.models import build

    model = build(family).eval().to("cuda")
    rng = np.random.default_rng(0)
    prompts = [words(rng, 30) for _ in range(3)]
    with warnings.catch_warnings():
        # experts may wait for the GPU
        warnings.simplefilter("ignore")
        found = TreeSampler(model, 2000).sample(prompts, 3, 24, Draws(seed=1))
    plain = TreeSampler(copy.deepcopy(model), 2000, graphs=False)
    close(found, plain.sample(prompts, 3, 24, Draws(seed=1)), 1e-3)
