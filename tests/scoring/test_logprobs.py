"""`sequence_logprobs` beyond the families: temperatures, masks, packing, heads."""

from __future__ import annotations

import copy
import dataclasses
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import prefixtree as pt
from prefixtree.loops import sequence_copies
from prefixtree.scoring import lm_head as scoring_lm_head
from prefixtree.scoring.edges import find_edges
from prefixtree.scoring.logprobs import SequenceScores, sequence_logprobs
from tests.support.full import each_once, in_turn, mostly
from tests.support.models import (
    HIDDEN,
    VOCABULARY,
    AdaptedHead,
    Objective,
    assert_same,
    build,
    cases,
    errors,
    gradients,
    make_objective,
    numbers_and_logprob,
    pack_sequences,
    ragged_objective,
    ragged_packed,
    ragged_sequences,
    run_eager,
    run_packed,
    run_replicated,
    same_bits,
)
from tests.support.pairs import pairwise

# ---- what comes back -----------------------------------------------------------------------------


def test_shapes_dtypes_and_zeros():
    objective = ragged_objective()
    for dtype in (torch.float32, torch.bfloat16):
        scores = sequence_logprobs(
            build("qwen3").to(dtype),
            ragged_packed(),
            loss_mask=objective.loss_masks,
            return_entropy=True,
        )
        assert isinstance(scores, SequenceScores) and isinstance(scores.logprobs, list)
        for values in (scores.logprobs, scores.entropy):
            assert len(values) == len(objective.sequences)
            for value, tokens, mask in zip(
                values, objective.sequences, objective.loss_masks, strict=True
            ):
                assert value.dtype == torch.float32 and value.shape == (len(tokens) - 1,)
                assert value.requires_grad and value.device.type == "cpu"
                assert torch.equal(value == 0, torch.from_numpy(mask[1:] == 0))
        assert all((p <= 0).all() for p in scores.logprobs)


def test_entropy_only_on_request():
    assert sequence_logprobs(build("qwen3"), ragged_packed()).entropy is None


@pytest.mark.parametrize(
    ("model_type", "adapted"),
    each_once(
        ["qwen3", "gemma2"],
        [pytest.param(False, id="plain head"), pytest.param(True, id="adapter")],
    ),
)
def test_statistics_are_those_of_each_sequence(model_type, adapted):
    """From the logits of every sequence alone; 0 where the mask is 0, and without gradients."""
    model = build(model_type)
    if adapted:
        model.lm_head = AdaptedHead(model.lm_head)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")

    def logits_of(tokens: np.ndarray) -> torch.Tensor:
        with torch.no_grad():
            return eager(input_ids=torch.from_numpy(tokens)[None]).logits[0]

    # each goes on with its likeliest token
    objective = make_objective(
        [np.append(tokens, logits_of(tokens)[-1].argmax()) for tokens in ragged_sequences()]
    )
    packed = pack_sequences(objective.sequences)
    names = ["log_sum_sq_probs", "mean_logits", "is_top1"]
    rest = {"temperature": objective.temperatures, "loss_mask": objective.loss_masks}
    scores = sequence_logprobs(
        model, packed, **rest, return_entropy=True, return_statistics=names, chunk_size=7
    )
    assert list(scores.statistics) == names
    plain = sequence_logprobs(model, packed, **rest, return_entropy=True, chunk_size=7)
    assert plain.statistics == {}
    hits = 0
    for at, (tokens, mask, temperature) in enumerate(
        zip(objective.sequences, objective.loss_masks, objective.temperatures, strict=True)
    ):
        ids = torch.from_numpy(tokens)
        z = logits_of(tokens)[:-1].double() / temperature
        wanted = {
            "mean_logits": z.mean(-1),
            "is_top1": (z.argmax(-1) == ids[1:]).double(),
            "log_sum_sq_probs": z.softmax(-1).square().sum(-1).log(),
        }
        scored = torch.from_numpy(mask[1:] != 0)
        hits += int(wanted["is_top1"][scored].sum())
        for name, values in scores.statistics.items():
            got = values[at]
            assert got.dtype == torch.float32 and not got.requires_grad
            expected = wanted[name].where(scored, 0.0)
            torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-5)
        assert torch.equal(scores.logprobs[at], plain.logprobs[at])
        assert torch.equal(scores.entropy[at], plain.entropy[at])
    assert hits > 0


def test_statistics_that_are_not_known():
    with pytest.raises(ValueError, match=r"return_statistics takes .*; got 'perplexity'"):
        sequence_logprobs(build("qwen3"), ragged_packed(), return_statistics=["perplexity"])


def test_the_defaults_are_temperature_1_and_every_token():
    objective = make_objective(ragged_sequences(), plain=True)
    model = build("qwen3")
    model.zero_grad()
    scores = sequence_logprobs(model, ragged_packed())
    zeros = [torch.zeros_like(p) for p in scores.logprobs]
    objective.loss(scores.logprobs, zeros).backward()
    with_entropy = run_packed(model, ragged_packed(), objective)
    reference = run_eager(model, objective)
    assert_same(with_entropy, reference)
    for got, want in zip(scores.logprobs, reference.logprobs, strict=True):
        torch.testing.assert_close(got.detach(), want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "sequences",
    [
        [[5]],
        [[5], [5, 6, 7]],
        [[5, 6, 7], [5], [8], [5]],
        [[5, 6]],
        [[9, 8, 7]] * 3,
        [[5, 6, 7, 8], [5, 6], [5, 6, 7, 8, 9, 10]],
    ],
    ids=["one token", "a root", "several", "one edge", "identical", "prefixes"],
)
def test_short_sequences(sequences):
    """Of one token there is nothing to score; where that is all, there is still a backward."""
    objective = make_objective([np.array(s) for s in sequences], plain=True)
    model = build("mistral")
    run = run_packed(model, pack_sequences(sequences), objective)
    assert [len(p) for p in run.logprobs] == [len(s) - 1 for s in sequences]
    if max(map(len, sequences)) > 1:
        assert_same(run, run_eager(model, objective))
    else:
        assert run.gradients.keys() == dict(model.named_parameters()).keys()
        assert not any(g.any() for g in run.gradients.values())


@pytest.mark.parametrize("head", ["plain", "adapter"])
def test_nothing_scored_at_all(head):
    """A micro-batch without a scored token: every rank still takes part in the backward."""
    model = build("gemma2")
    if head == "adapter":
        model.lm_head = AdaptedHead(model.lm_head)
    scores = sequence_logprobs(
        model,
        ragged_packed(),
        loss_mask=[np.zeros(len(s)) for s in ragged_objective().sequences],
        return_entropy=True,
    )
    assert not any(v.any() for v in [*scores.logprobs, *scores.entropy])
    torch.cat([*scores.logprobs, *scores.entropy]).sum().backward()
    assert gradients(model).keys() == dict(model.named_parameters()).keys()
    assert not any(g.any() for g in gradients(model).values())


def test_under_no_grad():
    model = build("gpt_oss")
    with torch.no_grad():
        scores = sequence_logprobs(model, ragged_packed(), return_entropy=True)
    expected = sequence_logprobs(model, ragged_packed(), return_entropy=True)
    for got, want in zip(
        [*scores.logprobs, *scores.entropy], [*expected.logprobs, *expected.entropy], strict=True
    ):
        assert not got.requires_grad and torch.equal(got, want)
    with torch.inference_mode():
        sequence_logprobs(model, ragged_packed())


# ---- temperatures, masks, entropy ----------------------------------------------------------------


@pytest.fixture
def scored_rows(monkeypatch) -> list[int]:
    """Rows that the head scores, a call each."""
    rows: list[int] = []

    def spy(hidden: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        rows.append(len(hidden))
        return original(hidden, *rest, **options)

    original = scoring_lm_head.linear_logprobs
    monkeypatch.setattr(scoring_lm_head, "linear_logprobs", spy)
    return rows


def _distinct(objective: Objective) -> int:
    """Distinct (path, temperature) among the scored tokens, by a set of Python tuples."""
    masks = objective.loss_masks or [np.ones(len(s)) for s in objective.sequences]
    return len(
        {
            (tuple(tokens[: i + 1]), np.broadcast_to(np.float32(temperature), len(tokens))[i])
            for tokens, temperature, mask in zip(
                objective.sequences, objective.temperatures, masks, strict=True
            )
            for i in range(1, len(tokens))
            if mask[i]
        }
    )


@pytest.mark.parametrize(
    ("temperature", "masked"), in_turn(["one", "equal", "two", "all different"], [False, True])
)
def test_each_distinct_edge_and_temperature_is_scored_once(temperature, masked, scored_rows):
    objective = ragged_objective()
    count = len(objective.sequences)
    values = {
        "one": [0.8] * count,
        "equal": [0.8] * count,
        "two": [0.8, 1.0] * (count // 2),
        "all different": [0.5 + 0.1 * i for i in range(count)],
    }[temperature]
    masks = objective.loss_masks if masked else None
    objective = Objective(objective.sequences, values, masks, objective.weights)
    model = build("qwen2")
    if temperature == "one":
        given = sequence_logprobs(model, ragged_packed(), temperature=0.8, loss_mask=masks)
        expected = run_eager(model, objective).logprobs
        for got, want in zip(given.logprobs, expected, strict=True):
            torch.testing.assert_close(got.detach(), want, atol=2e-6, rtol=1e-5)
    else:
        assert_same(run_packed(model, ragged_packed(), objective), run_eager(model, objective))
    assert scored_rows == [_distinct(objective)]


@pytest.mark.parametrize("masked", [False, True])
def test_many_temperatures_are_found_in_one_pass(masked, monkeypatch):
    """By temperature, then by token; the copies are listed once, not once per temperature."""
    listed: list[int] = []

    def counted(*args: Any) -> Any:
        index, counts = list_copies(*args)
        listed.append(len(index))
        return index, counts

    list_copies = sequence_copies.copy_index
    monkeypatch.setattr(sequence_copies, "copy_index", counted)
    objective, packed = ragged_objective(), ragged_packed()
    count = len(objective.sequences)
    # not in order, and each twice
    temperatures = [0.5 + 0.1 * (5 * i % count // 2) for i in range(count)]
    masks = objective.loss_masks if masked else None
    found = find_edges(packed, temperatures, masks)
    assert len(listed) == 1
    pairs = []
    for s, temperature in enumerate(temperatures):
        index, _ = packed.copy_index(np.array([s]))
        scored = index[1:] if masks is None else index[1:][np.asarray(masks[s][1:]) != 0]
        pairs.append({(np.float32(temperature), token) for token in scored})
        own = found.of_copies[sum(found.lengths[:s]) :][: found.lengths[s]]
        is_scored = own >= 0
        assert np.array_equal(found.token[own[is_scored]], scored)
        assert np.all(found.temperature[own[is_scored]] == np.float32(temperature))
    expected = sorted(set().union(*pairs))
    assert list(zip(found.temperature, found.token, strict=True)) == expected
    assert len({t for t, _ in expected}) > 3


@pytest.mark.parametrize("masked", [False, True])
def test_one_temperature_is_found_by_tokens_as_by_copies(masked):
    """An array per sequence is gone through copy by copy, one number token by token."""
    objective, packed = ragged_objective(), ragged_packed()
    masks = objective.loss_masks if masked else None
    by_tokens = find_edges(packed, 0.7, masks)
    by_copies = find_edges(packed, [np.full(len(s), 0.7) for s in objective.sequences], masks)
    for name in ("predictor", "token", "temperature", "of_copies", "lengths"):
        got, expected = (np.asarray(getattr(found, name)) for found in (by_tokens, by_copies))
        assert np.array_equal(got, expected) and got.dtype == expected.dtype, name
    assert (by_tokens.of_copies < 0).any() == masked and len(by_tokens.token) > 20


def by_turns(objective: Objective) -> Objective:
    """Each token's temperature: by its place, so that copies agree, and in every third sequence
    another one behind token 12; 0 where nothing is scored."""
    temperatures: list[Any] = []
    for i, tokens in enumerate(objective.sequences):
        place = np.arange(len(tokens))
        each = np.where(place % 5 < 3, 0.7, 1.3) + 0.2 * ((place > 12) & (i % 3 == 1))
        temperatures.append(each * (place > 0) * objective.loss_masks[i])
    # one number, as good as an array of it
    temperatures[2] = 0.9
    return dataclasses.replace(objective, temperatures=temperatures)


def test_a_temperature_per_token(scored_rows):
    objective, model = by_turns(ragged_objective()), build("gemma2")
    run = run_packed(model, ragged_packed(), objective, measured=True)
    replicated = [np.where(np.asarray(t) == 0, 1.0, t) for t in objective.temperatures]
    assert_same(run, run_eager(model, dataclasses.replace(objective, temperatures=replicated)))
    assert scored_rows == [_distinct(objective)]
    # a turn's temperature is not nothing
    turned = [np.where(np.asarray(t) > 1.2, 1.0, t) for t in replicated]
    assert (
        errors(run, run_eager(model, dataclasses.replace(objective, temperatures=turned))).largest
        > 0.05
    )


@pytest.mark.parametrize("masked", [False, True])
def test_the_same_temperature_for_all_tokens(masked):
    """The bits and the order of numbers, and of rows of edges."""
    objective, model = ragged_objective(), build("qwen3")
    rest: dict[str, Any] = {"return_entropy": True, "measure": numbers_and_logprob}
    if masked:
        rest["loss_mask"] = objective.loss_masks
    expected = sequence_logprobs(model, ragged_packed(), objective.temperatures, **rest)
    pairs = zip(objective.temperatures, objective.sequences, strict=True)
    for kind in (np.full, lambda n, t: torch.full((n,), t), lambda n, t: [t] * n):
        arrays = [kind(len(s), t) for t, s in pairs]
        got = sequence_logprobs(model, ragged_packed(), arrays, **rest)
        assert torch.equal(got.measured_edges, expected.measured_edges)
        for a, b in zip(
            got.logprobs + got.entropy, expected.logprobs + expected.entropy, strict=True
        ):
            assert torch.equal(a, b)
        pairs = zip(objective.temperatures, objective.sequences, strict=True)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_temperatures_of_every_kind(kind):
    model, temperatures = build("qwen3"), ragged_objective().temperatures
    expected = sequence_logprobs(model, ragged_packed(), temperature=temperatures).logprobs
    got = sequence_logprobs(model, ragged_packed(), temperature=kind(temperatures)).logprobs
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    "kind",
    [
        np.ndarray.tolist,
        lambda m: m.astype(bool),
        lambda m: m.astype(np.float32),
        torch.from_numpy,
        lambda m: torch.from_numpy(m).bool(),
    ],
    ids=["list", "bool", "float", "tensor", "bool tensor"],
)
def test_loss_masks_of_every_kind(kind):
    model, masks = build("qwen3"), ragged_objective().loss_masks
    expected = sequence_logprobs(model, ragged_packed(), loss_mask=masks).logprobs
    got = sequence_logprobs(model, ragged_packed(), loss_mask=[kind(m) for m in masks]).logprobs
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_the_first_entry_of_a_loss_mask_is_ignored():
    model, masks = build("qwen3"), ragged_objective().loss_masks
    expected = sequence_logprobs(model, ragged_packed(), loss_mask=masks).logprobs
    for first in (0, 1):
        other = [np.concatenate([[first], m[1:]]) for m in masks]
        got = sequence_logprobs(model, ragged_packed(), loss_mask=other).logprobs
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("temperatures", [[1.0, 1.0], [1.0, 0.5]], ids=["equal", "different"])
def test_a_shared_token_scored_in_one_sequence_only(temperatures):
    """The other sequence gets 0 there, and no gradient flows back from it."""
    sequences = [np.array([5, 6, 7, 8, 9]), np.array([5, 6, 7, 8, 4])]
    masks = [np.array([1, 1, 1, 1, 1]), np.array([1, 0, 0, 1, 1])]
    model, packed = build("llama"), pack_sequences(sequences)
    scores = sequence_logprobs(
        model, packed, temperature=temperatures, loss_mask=masks, return_entropy=True
    )
    assert scores.logprobs[1][:2].tolist() == scores.entropy[1][:2].tolist() == [0.0, 0.0]
    assert (scores.logprobs[0] < 0).all() and (scores.logprobs[1][2:] < 0).all()
    (scores.logprobs[1][:2].sum() + scores.entropy[1][:2].sum()).backward()
    assert not any(g.any() for g in gradients(model).values())
    weights = [torch.randn(4, 2) for _ in sequences]
    objective = Objective(sequences, temperatures, masks, weights)
    assert_same(run_packed(model, packed, objective), run_eager(model, objective))


def test_entropy_alone_has_the_right_gradient():
    objective = ragged_objective()
    weights = [w * torch.tensor([0.0, 1.0]) for w in objective.weights]
    alone = Objective(objective.sequences, objective.temperatures, objective.loss_masks, weights)
    model = build("gemma3_text")
    run = run_packed(model, ragged_packed(), alone)
    reference = run_eager(model, alone)
    assert_same(run, reference)
    assert all(g.any() for g in reference.gradients.values())


# ---- same results however it is packed -----------------------------------------------------------


@pytest.mark.parametrize("chunk_size", mostly([1, 2, 50, 10**6, None], [1, 50, None]))
def test_the_chunk_size_changes_nothing(chunk_size):
    model = build("qwen3_moe")
    run = run_packed(model, ragged_packed(), ragged_objective(), chunk_size)
    found = errors(run, run_packed(model, ragged_packed(), ragged_objective(), 7))
    assert found.largest <= 1e-6, found


@pytest.mark.parametrize(
    "multiple, model_type", each_once([2, 64, 1024], ["mistral", "qwen3_moe", "gpt_oss"])
)
def test_padding_changes_nothing(multiple, model_type):
    model = build(model_type)
    packed = pt.pack(ragged_packed().forest, pad_to_multiple_of=multiple)
    assert packed.num_tokens % multiple == 0 and packed.num_padding > 0
    found = errors(run_packed(model, packed, ragged_objective()), run_eager(model))
    assert found.largest <= 1e-5, found


def test_the_order_of_siblings_changes_nothing():
    model = build("mistral")
    packed = pt.pack(pt.PrefixForest.from_sequences(ragged_objective().sequences, order="input"))
    assert not torch.equal(packed.input_ids, ragged_packed().input_ids)
    assert_same(run_packed(model, packed, ragged_objective()), run_eager(model))


def test_without_sharing_it_is_document_packing():
    sequences = ragged_sequences()
    objective = make_objective(sequences)
    packed = pt.pack(
        pt.PrefixForest.from_sequences(sequences, namespaces=list(range(len(sequences))))
    )
    assert packed.num_tokens == sum(map(len, sequences))
    model = build("mistral")
    assert_same(run_packed(model, packed, objective), run_eager(model, objective))


@pytest.mark.parametrize(
    ("backend", "model_type"), each_once(["reference", "sdpa"], ["gemma2", *cases(["afmoe"])])
)
def test_the_masks_options_reach_every_layer(backend, model_type):
    """Afmoe takes a view of what attention returns."""
    model = build(model_type)
    packed = ragged_packed().with_options(backend=backend, deterministic=True)
    assert_same(run_packed(model, packed, ragged_objective()), run_eager(model))


@pytest.mark.parametrize("model_type", mostly(["qwen3", "gpt_oss"], ["gpt_oss"]))
def test_two_runs_are_equal_to_the_bit(model_type):
    model = build(model_type)
    first = run_packed(model, ragged_packed(), ragged_objective())
    assert same_bits(first, run_packed(model, ragged_packed(), ragged_objective()))
    assert same_bits(
        first, run_packed(model, pack_sequences(ragged_objective().sequences), ragged_objective())
    )


def test_gradients_accumulate_over_calls():
    """Two forests before one step, and two losses on one call's scores."""
    model = build("qwen3")
    once = run_packed(model, ragged_packed(), ragged_objective()).gradients
    scores = sequence_logprobs(
        model,
        ragged_packed(),
        ragged_objective().temperatures,
        ragged_objective().loss_masks,
        return_entropy=True,
    )
    ragged_objective().loss(scores.logprobs, scores.entropy).backward()
    for name, gradient in gradients(model).items():
        assert (gradient - 2 * once[name]).norm() <= 2e-5 * once[name].norm(), name


# ---- heads ---------------------------------------------------------------------------------------


class LinearWithAdapter(nn.Linear):
    """The same as a subclass: `weight` alone is not the head."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        g = torch.Generator().manual_seed(3)
        self.weight = base.weight
        self.down = nn.Parameter(torch.randn(4, base.in_features, generator=g) * 0.3)
        self.up = nn.Parameter(torch.randn(base.out_features, 4, generator=g) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x @ self.down.t() @ self.up.t()


@pytest.mark.parametrize(
    ("model_type", "adapter", "frozen_base"),
    mostly(
        pairwise(["qwen3", "gemma2"], [AdaptedHead, LinearWithAdapter], [False, True]),
        [("qwen3", AdaptedHead, False), ("gemma2", LinearWithAdapter, False)],
    ),
)
def test_a_head_with_an_adapter(model_type, adapter, frozen_base, scored_rows):
    model = build(model_type)
    model.requires_grad_(not frozen_base)
    model.lm_head = adapter(model.lm_head)
    run = run_packed(model, ragged_packed(), ragged_objective())
    assert scored_rows == []  # not the path of a plain linear head
    reference = run_eager(model)
    assert any("down" in name for name in reference.gradients)
    assert_same(run, reference)


def test_a_head_with_a_bias(scored_rows):
    model = build("qwen3")
    head = nn.Linear(HIDDEN, VOCABULARY)
    nn.init.normal_(head.bias)
    model.lm_head = head
    run = run_packed(model, ragged_packed(), ragged_objective())
    assert len(scored_rows) == 1 and run.gradients["lm_head.bias"].any()
    assert_same(run, run_eager(model))


@pytest.mark.parametrize("model_type", mostly(["qwen3", "llama", "gemma2"], ["gemma2"]))
def test_tied_embeddings(model_type):
    model = build(model_type, tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same(run_packed(model, ragged_packed(), ragged_objective()), run_eager(model))


def test_a_frozen_head_and_a_frozen_decoder():
    for frozen in ("lm_head", "model"):
        model = build("qwen3")
        getattr(model, frozen).requires_grad_(False)
        run = run_packed(model, ragged_packed(), ragged_objective())
        assert not any(name.startswith(frozen) for name in run.gradients)
        assert_same(run, run_eager(model))


def test_a_parametrised_head():
    """The weight is computed anew at each access: its gradient must reach the original."""
    model = build("qwen3")

    class Halve(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 0.5

    nn.utils.parametrize.register_parametrization(model.lm_head, "weight", Halve())
    assert_same(run_packed(model, ragged_packed(), ragged_objective()), run_eager(model))


def test_a_head_with_its_own_forward():
    """As accelerate's hooks leave it: an attribute of the instance, honoured and put back."""
    model = build("qwen3")
    calls = []

    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape)
        return 0.5 * nn.functional.linear(x, self.weight)

    model.lm_head.forward = own = types.MethodType(forward, model.lm_head)
    run = run_packed(model, ragged_packed(), ragged_objective())
    assert calls and model.lm_head.forward is own
    reference_model = build("qwen3")
    reference_model.lm_head.forward = types.MethodType(forward, reference_model.lm_head)
    reference_model.set_attn_implementation("eager")
    assert_same(run, run_replicated(reference_model, ragged_objective()))


def test_a_hook_on_the_head_that_changes_logits_is_not_ignored():
    """Silently wrong otherwise: honoured or refused, but not passed over."""
    model = build("qwen3")
    model.lm_head.register_forward_hook(lambda module, args, output: output * 0.5)
    reference_model = build("qwen3", "eager")
    reference_model.lm_head.register_forward_hook(lambda module, args, output: output * 0.5)
    try:
        run = run_packed(model, ragged_packed(), ragged_objective())
    except pt.UnsupportedError:
        return
    assert_same(run, run_replicated(reference_model, ragged_objective()))
