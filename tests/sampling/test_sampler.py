"""`TreeSampler`: the tokens of `generate`, the log-probabilities of `sequence_logprobs`, and draws
that depend on nothing but the seed and the tree."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

import prefixtree as pt
from prefixtree.sampling import Draws, Samples, TreeSampler
from prefixtree.sampling import rows as rows_module
from prefixtree.sampling.growing_forest import GrowingForest
from prefixtree.sampling.step import DecodeStep
from tests.sampling.cases import (
    GREEDY,
    check_greedy,
    generated,
    histories,
    models,
    same_samples,
    steps_after_the_end,
    turns,
    words,
)
from tests.support.family_configs import VOCABULARY
from tests.support.full import mostly
from tests.support.hooks import limit, wrap
from tests.support.models import build, quantised, with_random_lora

# ---- tokens and log-probabilities ----------------------------------------------------------------


@pytest.mark.parametrize("seed", mostly(range(6), range(3)))
def test_greedy_equals_generate(seed):
    """On random forests; all of seeds 0 to 199 were run once."""
    assert check_greedy(seed) > 0


@pytest.mark.parametrize(
    "draws",
    [
        pytest.param(Draws(seed=1), id="T=1", marks=pytest.mark.full),
        pytest.param(Draws(0.7, seed=2), id="T=0.7", marks=pytest.mark.full),
        pytest.param(
            Draws(1.3, seed=3, top_k=20, top_p=0.8, return_sampling_mask=True), id="truncated"
        ),
        pytest.param(GREEDY, id="greedy"),
    ],
)
def test_logprobs_are_those_of_training(draws, poison):
    """Of every sampled token, over three turns with replies; and nothing but those is marked. What
    a pool holds beside the keys is NaN."""
    ours, other = models()
    samples = turns(ours, draws)
    assert poison.tensors > 2 * len(ours.model.layers)
    packed = pt.pack(samples.forest)
    temperature = draws.temperature or 1.0
    with torch.no_grad():
        given = packed, temperature, samples.loss_masks
        scores = pt.sequence_logprobs(ours, *given)
        drawn = pt.sequence_logprobs(ours, *given, sampling_masks=samples.sampling_masks)
    for i, tokens in enumerate(samples.sequences):
        mask = samples.loss_masks[i][1:]
        assert 10 > mask.sum() / 3 > 0 and samples.logprobs[i].dtype == torch.float32
        torch.testing.assert_close(samples.logprobs[i], scores.logprobs[i], atol=2e-5, rtol=0)
        with torch.no_grad():
            logits = other(torch.from_numpy(tokens)[None]).logits[0, :-1] / temperature
        alone = logits.log_softmax(-1).gather(1, torch.from_numpy(tokens)[1:, None])[:, 0]
        torch.testing.assert_close(
            samples.logprobs[i], alone * torch.from_numpy(mask), atol=2e-5, rtol=0
        )
        kept = samples.log_kept_mass[i]
        assert bool((kept[mask] < 0).all()) == bool(draws.warpers) and not kept[~mask].any()
        of_draw = samples.logprobs[i] - kept
        torch.testing.assert_close(drawn.logprobs[i], of_draw, atol=2e-5, rtol=0)
        if draws.warpers:
            assert (samples.logprobs[i] <= kept + 1e-6).all()
    plan = pt.plan_micro_batches(samples.sequences, 100, groups=samples.source)
    assert len(plan[0]) > 1


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_weights_of_4_bits():
    """QLoRA: samples and scores of the same adapter beside the same rounded weights."""
    # not in eval(), for which bitsandbytes lays out weights anew, and such small ones it cannot
    ours = pt.prepare(with_random_lora(quantised(build("qwen3")), "q_proj", "down_proj"))
    samples = turns(ours, Draws(seed=1))
    with torch.no_grad():
        scores = pt.sequence_logprobs(ours, pt.pack(samples.forest), loss_mask=samples.loss_masks)
        for found, expected, tokens, mask in zip(
            samples.logprobs, scores.logprobs, samples.sequences, samples.loss_masks, strict=True
        ):
            torch.testing.assert_close(found, expected, atol=5e-5, rtol=0)
            ours.set_attn_implementation("sdpa")
            log_p = ours(torch.from_numpy(tokens)[None]).logits[0, :-1].log_softmax(-1)
            ours.set_attn_implementation("prefixtree")
            alone = log_p.gather(1, torch.from_numpy(tokens)[1:, None])[:, 0]
            torch.testing.assert_close(found, alone * torch.from_numpy(mask[1:]), atol=5e-5, rtol=0)


def test_a_truncated_draw_without_its_set_leaves_no_masks():
    rows = TreeSampler(models()[0], 500).start(pt.PrefixForest.from_sequences([[9, 8, 7]]))
    rows.generate(2, Draws())
    assert rows.samples().sampling_masks == [[None] * 5]
    rows.generate(2, Draws(top_k=3, return_sampling_mask=True))
    found = rows.samples().sampling_masks
    assert found is not None and [0 if ids is None else len(ids) for ids in found[0]] == [
        *[0] * 5,
        *[3, 3],
    ]
    rows.generate(2, Draws(top_k=3))
    assert rows.samples().sampling_masks is None


def test_what_samples_say_of_the_tree():
    ours, _ = models()
    rows = TreeSampler(ours, 500).start(pt.PrefixForest.from_sequences([[9, 8, 7], [9, 8], [4]]))
    rows.branch([1, 2, 2])
    rows.generate(3, Draws(seed=4))
    rows.branch({1: 3, 4: 0})
    rows.generate(2, Draws(seed=4))
    samples = rows.samples()
    assert samples.paths == [(0,), (1, 0, 0), (1, 0, 1), (1, 0, 2), (1, 1), (2, 0)]
    assert samples.source.tolist() == [0, 1, 1, 1, 1, 2]
    # those that branched from one row have one number
    assert samples.parents.tolist() == [-1, 0, 0, 0, 1, 2]
    assert samples.forest.num_sequences == 6 and len(rows) == 6
    starts = [[9, 8, 7], *[[9, 8]] * 4, [4]]
    for start, sequence in zip(starts, samples.sequences, strict=True):
        assert sequence[: len(start)].tolist() == start and len(sequence) == len(start) + 5
    shared = [s[:5].tolist() for s in samples.sequences[1:4]]
    assert shared[0] == shared[1] == shared[2] != samples.sequences[4][:5].tolist()
    assert not samples.finished.any()


def test_turns_tell_draws_apart_that_chance_made_equal():
    """Greedy rows that branched before a draw all draw the same."""
    ours, _ = models()
    sampler = TreeSampler(ours, 500)
    rows = sampler.start(pt.PrefixForest.from_sequences([[9, 8, 7], [9, 8, 7]]))
    rows.branch([2, 1])
    rows.generate(2, GREEDY)
    rows.append({row: [5] for row in range(3)})
    rows.branch([2, 1, 0])
    rows.generate(2, GREEDY)
    samples = rows.samples()
    assert len({tuple(s.tolist()) for s in samples.sequences}) == 1
    said, reply = [-1] * 3, [-1]
    expected = [
        [*said, 0, 0, *reply, 1, 1],
        [*said, 0, 0, *reply, 2, 2],
        [*said, 3, 3, *reply, 4, 4],
    ]
    assert [t.tolist() for t in samples.turns] == expected
    plan = pt.plan_micro_batches(samples.sequences, 99)
    weights = plan.token_weights("token-mean", samples.loss_masks, turns=samples.turns)
    # ten draws
    shares = [[0, 0, 0, 1 / 2, 1 / 2, 0, 1, 1]] * 2 + [[0, 0, 0, 1, 1, 0, 1, 1]]
    torch.testing.assert_close(torch.stack(weights).mul(10), torch.tensor(shares).double())
    # rows that leave a batch of rows that stopped are in the same turn
    stop = list(range(3, VOCABULARY, 6))
    rows = sampler.start(pt.PrefixForest.from_sequences(histories(1)))
    rows.generate(10, GREEDY, stop)
    many = rows.samples()
    sampled = [set(t[m].tolist()) for t, m in zip(many.turns, many.loss_masks, strict=True)]
    assert len({int(m.sum()) for m in many.loss_masks}) > 2
    assert sampled == [{number} for number in range(len(rows))]


@pytest.mark.usefixtures("unprobed")
def test_every_token_is_read_once():
    """The prompt by the prefill, a reply once for all rows that branch behind it."""
    ours, _ = models()
    read: list[int] = []
    handle = ours.get_input_embeddings().register_forward_pre_hook(
        lambda _, args: read.append(args[0].numel())
    )
    with handle:
        forest = pt.PrefixForest.from_sequences(histories(3))
        rows = TreeSampler(ours, 3000).start(forest)
        assert read == [forest.num_tokens]
        number = len(rows)
        rows.branch(4)
        rows.generate(5, Draws())
        # the last token is not read before anything follows
        assert read[1:] == [4 * number] * 4
        rows.append({0: [5, 6, 7], 1: []})
        rows.branch({0: 8, 1: 2})
        assert read[5:] == [4 + 1]
        rows.generate(2, Draws(), rows=range(10))
        assert read[6:] == [10]
        rows.generate(1, Draws())
        # the last tokens of all
        assert read[7:] == [len(rows)]


# ---- draws depend on the seed and the tree alone -------------------------------------------------


def test_a_call_ends_when_all_rows_have_stopped(monkeypatch):
    limit(monkeypatch, "steps between looks", {"cpu": 16})
    assert steps_after_the_end(TreeSampler(models()[0], 400), VOCABULARY) == 0


def test_other_batches_give_the_same_tokens(monkeypatch):
    """Rows that leave the batch at once, never, or are alone in it; one call, or two."""
    ours, _ = models()
    draws, stop = Draws(seed=11), [5, 11, 17, 23, 31, 41, 51]
    forest = pt.PrefixForest.from_sequences(histories(5))
    sampler = TreeSampler(ours, 3000)

    def run(*calls: int, **keywords: Any) -> Samples:
        rows = sampler.start(forest)
        rows.branch(3)
        for number in calls:
            rows.generate(number, draws, stop, **keywords)
        return rows.samples()

    one = run(12)
    lengths = {len(p) for p in map(np.flatnonzero, one.loss_masks)}
    assert len(lengths) > 3 and one.finished.any() and not one.finished.all()
    assert same_samples(one, run(5, 7))
    batches: list[int] = []
    original = DecodeStep.begin
    monkeypatch.setattr(
        DecodeStep, "begin", lambda *a: (batches.append(len(a[2])), original(*a))[1]
    )
    for share in (0.0, 1.0):
        limit(monkeypatch, "rows that fill a batch", share)
        assert same_samples(one, run(12))
        # never narrowed, or at every step at which a row stops
        assert (len(batches) == 1) == (share == 0.0)
        batches.clear()
    limit(monkeypatch, "steps between looks", {"cpu": 4})
    assert same_samples(one, run(12))
    for kept in (0, 4):
        rows = sampler.start(forest)
        rows.branch(3)
        rows.drop(i for i in range(len(rows)) if i != kept)
        rows.generate(12, draws, stop)
        assert rows.samples().sequences[0].tolist() == one.sequences[kept].tolist()
    # another seed, and another number among its siblings, are other draws
    assert not same_samples(one, run(12, rows=[0]))
    other = sampler.start(forest)
    other.branch(3)
    other.generate(12, Draws(seed=12), stop)
    assert not same_samples(one, other.samples())
    assert len({tuple(s) for s in map(tuple, one.sequences)}) == len(one.sequences)


def test_rows_may_branch_in_any_order():
    """Two branchings of different rows, either first, give the same rows."""
    ours, _ = models()
    sampler = TreeSampler(ours, 2000)
    found = []
    for order in ((0, 1), (1, 0)):
        rows = sampler.start(pt.PrefixForest.from_sequences([[3, 4, 5], [3, 4, 6]]))
        places = [0, 1]
        for source in order:
            rows.branch({places[source]: 2})
            places = [place + (source == 0) * (n == 1) for n, place in enumerate(places)]
        rows.generate(6, Draws(seed=1))
        found.append(rows.samples())
    assert same_samples(*found) and found[0].paths == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_keys_that_move_give_the_same_tokens(monkeypatch):
    ours, _ = models()
    moves: list[int] = []

    def moving(original: Any, growing: GrowingForest) -> np.ndarray:
        moves.append(growing.num_free)
        return original(growing)

    wrap(monkeypatch, "keys that move", moving)
    whole = turns(ours, Draws(seed=5))
    assert not moves
    assert same_samples(whole, turns(ours, Draws(seed=5), max_keys=520))
    assert moves


def test_long_replies_are_read_in_several_forwards(monkeypatch):
    ours, _ = models()
    whole = turns(ours, Draws(seed=5))
    limit(monkeypatch, "tokens read at once", 5)
    tokens: list[int] = []
    with ours.get_input_embeddings().register_forward_pre_hook(
        lambda _, args: tokens.append(args[0].numel())
    ):
        pieces = turns(ours, Draws(seed=5))
    assert tokens.count(5) > 10 and same_samples(whole, pieces)
    for one, two in zip(whole.logprobs, pieces.logprobs, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=0)


def test_one_call():
    ours, other = models()
    prompts = [[7, 8, 9, 10], [7, 8], [30]]
    samples = TreeSampler(ours, 200).sample(prompts, n=2, max_new_tokens=6, draws=GREEDY, stop=[])
    expected = generated(other, prompts, 6, [])
    found = [s.tolist() for s in samples.sequences]
    assert found == [p + e for p, e in zip(prompts, expected, strict=True) for _ in range(2)]
    assert samples.parents.tolist() == samples.source.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.full
def test_compiled_layers_serve_every_sampler_and_number_of_rows():
    ours, _ = models()
    model = copy.deepcopy(ours).eval()

    def sample(n: int) -> Samples:
        """Replies are read by the graph of steps."""
        forest = pt.PrefixForest.from_sequences([[3, 4, 5], [3, 4, 6, 7]])
        rows = TreeSampler(model, 1000).start(forest)
        rows.branch(n)
        rows.generate(3, Draws(seed=1))
        rows.append({row: [8] * (2 + row) for row in range(n)})
        rows.generate(3, Draws(seed=2))
        return rows.samples()

    expected = [sample(n) for n in (3, 5)]
    torch._dynamo.reset()
    counters.clear()
    pt.compile_layers(model, backend="eager")
    made = []
    for n, want in zip((3, 5), expected, strict=True):
        found = sample(n)
        assert [s.tolist() for s in found.sequences] == [s.tolist() for s in want.sequences]
        for new, old in zip(found.logprobs, want.logprobs, strict=True):
            torch.testing.assert_close(new, old, atol=2e-5, rtol=0)
        made.append(counters["stats"]["unique_graphs"])
    assert made == [len(set(model.config.layer_types))] * 2
    torch._dynamo.reset()


# ---- refusals ------------------------------------------------------------------------------------


def test_more_rows_than_room():
    ours, _ = models()
    rows = TreeSampler(ours, 100, max_rows=8).start(pt.PrefixForest.from_sequences([[3, 4, 5]]))
    rows.branch(8)
    with pytest.raises(MemoryError, match=r"8 rows need room for 160 keys, and 97 of the pool's 1"):
        rows.generate(20)
    assert not rows.new_tokens(0)
    rows.generate(10)
    rows.branch(2)
    with pytest.raises(MemoryError, match=r"16 rows are to go on, and .* was made for 8"):
        rows.generate(1)
    rows.generate(1, rows=range(2))
    with pytest.raises(MemoryError, match=r"3 distinct tokens, the pool room for 2 keys"):
        TreeSampler(ours, 2).start(pt.PrefixForest.from_sequences([[3, 4, 5]]))


def _start(model: Any, forest: Any = None) -> Any:
    return TreeSampler(model, 100).start(forest or pt.PrefixForest.from_sequences([[3, 4], [3]]))


def test_forests_that_are_refused():
    ours, _ = models()
    with pytest.raises(TypeError, match="start takes a PrefixForest, got list"):
        _start(ours, [[3, 4]])
    with pytest.raises(pt.ForestError, match="no token ids"):
        _start(ours, pt.PrefixForest.from_parents([-1], [3]))
    routes = [np.zeros((2, 1, 1), int)]
    with pytest.raises(pt.UnsupportedError, match="recorded routes"):
        _start(ours, pt.PrefixForest.from_sequences([[3, 4]], routes=routes))
    with pytest.raises(ValueError, match="beyond the model's vocabulary"):
        _start(ours, pt.PrefixForest.from_sequences([[3, 9999]]))


def test_placeholders_that_were_sampled_before_are_text():
    images = build("qwen3_vl").eval()
    images.config.image_token_id = 95
    for call in (
        lambda: _start(images, pt.PrefixForest.from_sequences([[3, 95]])),
        lambda: _start(images).append({0: [3, 95]}),
    ):
        with pytest.warns(UserWarning, match=r"hold image_token_id .* read as text"):
            call()


def test_models_that_are_refused(monkeypatch):
    ours, other = models()
    with pytest.raises(
        pt.UnsupportedError, match=r"attn_implementation='sdpa'.*prefixtree\.prepare"
    ):
        _start(other)
    with pytest.raises(pt.UnsupportedError, match=r"config.attention_dropout is 0.1"):
        _start(build("qwen3", attention_dropout=0.1))
    _start(build("qwen3", attention_dropout=0.1).eval())
    for noisy in (build("opt", dropout=0.1), build("mixtral", router_jitter_noise=0.1)):
        rows = _start(noisy.eval())
        rows.generate(2)
        noisy.train()
        with pytest.raises(pt.UnsupportedError, match=r"dropout|router_jitter_noise"):
            rows.generate(2)
        rows.samples()
    # as DeepSpeed's ZeRO-3 leaves a parameter
    model = copy.deepcopy(ours)
    model.lm_head.weight = torch.nn.Parameter(torch.empty(0))
    with pytest.raises(pt.UnsupportedError, match=r"sharded over ranks \(lm_head.weight: FSDP"):
        _start(model)
    model = copy.deepcopy(ours)
    model.model.norm.to("meta")
    with pytest.raises(pt.UnsupportedError, match="the parameters are on cpu, meta, and keys"):
        _start(model)
    monkeypatch.setattr("prefixtree.sampling.forward.FSDPModule", torch.nn.Embedding)
    with pytest.raises(pt.UnsupportedError, match=r"sharded over ranks \(model.embed_tokens: FS"):
        _start(ours)


@pytest.mark.parametrize("draws", [Draws(), Draws(top_p=0.5), GREEDY])
def test_logits_that_are_no_numbers_are_refused(draws):
    """As by `generate`: their argmax would be a token."""
    ours, _ = models()
    model = copy.deepcopy(ours)
    with torch.no_grad():
        model.lm_head.weight[7] = torch.nan
    with pytest.raises(RuntimeError, match="gave NaN or infinite logits in 2 rows"):
        _start(model).generate(3, draws)


def test_a_layer_that_attends_elsewhere_is_seen(monkeypatch):
    """In the prefill, and in a step alone."""
    ours, _ = models()
    model = copy.deepcopy(ours)
    rows = _start(model)
    layer = model.model.layers[1].self_attn
    original = layer.forward
    layer.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(pt.UnsupportedError, match=r"attention calls of a forward read"):
        rows.generate(3)
    with pytest.raises(pt.UnsupportedError, match=r"attention calls followed the tree"):
        _start(model)
    layer.forward = original
    _start(model).generate(3)


def test_calls_that_are_refused():
    ours, _ = models()
    rows = _start(ours)
    for counts in ([1], [1, -1], -1, [1, 2, 3]):
        with pytest.raises(ValueError, match="branch takes one number >= 0 for each of 2 rows"):
            rows.branch(counts)
    for call in (
        lambda: rows.drop([2]),
        lambda: rows.append({-1: [3]}),
        lambda: rows.new_tokens(5),
        lambda: rows.generate(3, rows=[0, 2]),
        lambda: rows.branch({2: 1}),
    ):
        with pytest.raises(IndexError, match=r"row -?\d does not exist; expected 0 to 1"):
            call()
    for wrong in (5, None, ["5"], [5.0]):
        with pytest.raises(TypeError, match=r"stop takes a list of token ids, got"):
            rows.generate(3, stop=wrong)
    for number in (0, True, 1.5):
        with pytest.raises(ValueError, match="max_new_tokens must be an integer >= 1"):
            rows.generate(number)
    with pytest.raises(pt.ForestError):
        rows.append({0: [-3]})
    with pytest.raises(ValueError, match="token id 9999 is beyond the model's vocabulary"):
        rows.append({0: [3], 1: [9999]})
    assert [len(s) for s in rows.samples().sequences] == [2, 1]
    with pytest.raises(ValueError, match="max_keys must be an integer >= 1"):
        TreeSampler(ours, 0)
    rows.branch(np.int64(2))
    assert len(rows) == 4
    rows.drop(range(4))
    rows.generate(3)
    with pytest.raises(pt.ForestError, match="all rows were dropped, so there are no samples"):
        rows.samples()


def test_calls_of_another_autocast_are_refused():
    ours, _ = models()
    rows = _start(ours)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(
            pt.UnsupportedError, match=r"kept in torch.float32, and .* the same tor"
        ):
            rows.generate(3)
        samples = TreeSampler(ours, 100).sample([[3, 4]], 2, 3)
        scores = pt.sequence_logprobs(ours, pt.pack(samples.forest), loss_mask=samples.loss_masks)
    for new, old in zip(scores.logprobs, samples.logprobs, strict=True):
        torch.testing.assert_close(new.detach(), old, atol=2e-2, rtol=0)
    rows.generate(2)
    assert [len(s) for s in rows.samples().sequences] == [5, 4]


def test_rows_that_stopped_go_on_after_a_reply():
    ours, other = models()
    rows = TreeSampler(ours, 300).start(pt.PrefixForest.from_sequences([[3, 4, 5], [30, 31]]))
    first = generated(other, [[3, 4, 5]], 6, [])[0]
    rows.generate(6, GREEDY, stop=[first[1]])
    assert rows.new_tokens(0) == first[: first.index(first[1]) + 1] and 0 in rows.stopped()
    before = [s.tolist() for s in rows.samples().sequences]
    rows.generate(2, GREEDY, rows=[1])
    rows.append({0: []})
    assert 0 not in rows.stopped()
    rows.append({0: [8, 9]})
    rows.generate(4, GREEDY, rows=[0])
    expected = generated(other, [before[0] + [8, 9]], 4, [])[0]
    assert rows.new_tokens(0) == expected
    assert rows.samples().sequences[0].tolist() == before[0] + [8, 9] + expected


# ---- it turns red --------------------------------------------------------------------------------


@pytest.mark.parametrize("mistake", ["a run is lost", "one position off", "rows swapped"])
def test_mistakes_are_seen(mistake, monkeypatch):
    """By the comparison with `generate`, which passes without them."""
    check_greedy(2)
    if mistake == "one position off":
        from prefixtree.sampling.forward import CachedForward

        step = CachedForward.step
        monkeypatch.setattr(CachedForward, "step", lambda self, i, p: step(self, i, p + 1))
    else:
        original = GrowingForest.runs_and_tails

        def wrong(*args: Any) -> tuple[np.ndarray, np.ndarray]:
            runs, tails = original(*args)
            return (runs[1:], tails) if mistake == "a run is lost" else (runs, tails[::-1].copy())

        monkeypatch.setattr(GrowingForest, "runs_and_tails", wrong)
    with pytest.raises((AssertionError, ValueError)):
        check_greedy(2)


def test_rows_known_by_their_number_would_be_seen(monkeypatch):
    """A row that is alone would draw as the first one."""
    ours, _ = models()
    forest = pt.PrefixForest.from_sequences(histories(5))
    original = rows_module.row_keys
    for by_number in (False, True):
        if by_number:
            monkeypatch.setattr(
                rows_module,
                "row_keys",
                lambda seed, paths: original(seed, [(n,) for n, _ in enumerate(paths)]),
            )
        found = []
        for alone in (False, True):
            rows = TreeSampler(ours, 3000).start(forest)
            if alone:
                rows.drop(n for n in range(len(rows)) if n != 1)
            rows.generate(6, Draws(seed=1))
            found.append(rows.samples().sequences[0 if alone else 1].tolist())
        assert (found[0] == found[1]) != by_number


def test_another_temperature_would_be_seen():
    ours, _ = models()
    samples = turns(ours, Draws(0.7, seed=2))
    with torch.no_grad():
        scores = pt.sequence_logprobs(ours, pt.pack(samples.forest), 0.75, samples.loss_masks)
    pairs = zip(scores.logprobs, samples.logprobs, strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) > 1e-2


def test_words_are_of_the_vocabulary():
    # what the cases draw from, so that forests share little by chance
    assert len(set(words(np.random.default_rng(0), 200))) > 60
