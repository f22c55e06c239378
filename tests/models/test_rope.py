"""RoPE that looks at the longest sequence of a forward: exact where lengths change no frequency,
refused elsewhere. The reference is transformers, a sequence at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import prefixtree as pt
from prefixtree.sampling import Draws, TreeSampler
from tests.support.full import mostly
from tests.support.models import (
    Objective,
    Run,
    assert_same,
    build,
    gradients,
    make_objective,
    pack_sequences,
    reward_model,
    run_packed,
    run_replicated,
)

# the longest sequence of fixed frequencies
LIMIT = 16
_DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


def _longrope(pairs: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "short_factor": [1.0 + 0.3 * i for i in range(pairs)],
        "long_factor": [2.0 + i for i in range(pairs)],
        "original_max_position_embeddings": LIMIT,
    }


def _by_layer(full: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_attention": _DEFAULT, "full_attention": full}


# in which 8 or 16 numbers of a head are rotated
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("internlm3", {"rope_parameters": _DYNAMIC, "max_position_embeddings": LIMIT}),
    "dynamic, alpha": (
        "hunyuan_v1_dense",
        {"rope_parameters": {**_DYNAMIC, "alpha": 100.0}, "max_position_embeddings": LIMIT},
    ),
    "dynamic, a layer type": (
        "gemma3_text",
        {"rope_parameters": _by_layer(_DYNAMIC), "max_position_embeddings": LIMIT},
    ),
    "longrope": (
        "phi3",
        {"rope_parameters": _longrope(8), "original_max_position_embeddings": LIMIT},
    ),
    "longrope, a layer type": ("gemma3_text", {"rope_parameters": _by_layer(_longrope(8))}),
}
SHORT, LONG = (4, LIMIT), (LIMIT + 1, 30)


def model_of(name: str) -> Any:
    family, changes = MODELS[name]
    return build(family, **copy.deepcopy(changes))


def sequences_of(shortest: int, longest: int) -> list[np.ndarray]:
    """A trunk, its beginning, and branches that leave it anywhere."""
    rng = np.random.default_rng(shortest)
    trunk = rng.integers(3, 90, longest)
    found = [trunk, trunk[:shortest]]
    for _ in range(6):
        length = int(rng.integers(shortest, longest + 1))
        shared = int(rng.integers(1, length))
        found.append(np.concatenate([trunk[:shared], rng.integers(3, 90, length - shared)]))
    return found


def replicated(name: str, objective: Objective) -> Run:
    model = model_of(name)
    model.set_attn_implementation("eager")
    return run_replicated(model, objective)


def kept(model: Any, objective: Objective) -> Run:
    """The same in micro-batches with kept trunks."""
    model.zero_grad(set_to_none=True)
    cost = pt.import_cost(model)
    plan = pt.plan_micro_batches(objective.sequences, 24, trunks=True, import_cost=cost)
    logprobs: dict[int, torch.Tensor] = {}
    with pt.kept_trunks(model, plan[0]) as scored:
        for batch, scores in scored:
            weights = [objective.weights[i][:, 0] for i in batch.sequence_indices]
            pairs = zip(weights, scores.logprobs, strict=True)
            sum(((w * p).sum() for w, p in pairs), torch.tensor(0.0)).backward()
            found = [p.detach() for p in scores.logprobs]
            logprobs |= zip(batch.sequence_indices, found, strict=True)
    ordered = [logprobs[i] for i in range(len(objective.sequences))]
    return Run(ordered, ordered, gradients(model))


WAYS: dict[str, dict[str, Any]] = {
    "one forward": {},
    "recomputed": {"recompute": "all"},
    "auto": {"recompute": "auto"},
    "steps": {"max_step_tokens": 20},
}


@pytest.mark.parametrize("name", mostly(MODELS, {"dynamic", "longrope"}))
def test_short_sequences(name):
    """In every way of running; parts see the positions of their tokens alone. A trace for "auto"
    takes a second: of the others there is one below."""
    objective = make_objective(sequences_of(*SHORT))
    expected = replicated(name, objective)
    packed = pack_sequences(objective.sequences)
    for way, options in WAYS.items():
        if way != "auto" or name == "dynamic":
            assert_same(run_packed(model_of(name), packed, objective, **options), expected)


@pytest.mark.parametrize("name", mostly(MODELS, {"dynamic", "longrope, a layer type"}))
def test_short_sequences_with_kept_trunks(name):
    objective = make_objective(sequences_of(*SHORT), plain=True)
    for weights in objective.weights:
        # of entropies, which are not asked for here
        weights[:, 1] = 0
    expected = replicated(name, objective)
    found = kept(model_of(name), objective)
    assert_same(found, Run(expected.logprobs, expected.logprobs, expected.gradients))


@pytest.mark.parametrize(
    "name", mostly((name for name in MODELS if "longrope" in name), {"longrope"})
)
def test_long_sequences_of_longrope(name):
    """In one forward, whatever ran before; parts of it would see short positions."""
    objective = make_objective(sequences_of(*LONG))
    expected = replicated(name, objective)
    model, packed = model_of(name), pack_sequences(objective.sequences)
    pt.sequence_logprobs(model, pack_sequences(sequences_of(*SHORT)))
    for way in ("one forward", "recomputed", *(["auto"] if name == "longrope" else [])):
        assert_same(run_packed(model, packed, objective, **WAYS[way]), expected)
    with pytest.raises(
        pt.UnsupportedError, match="each step of max_step_tokens would show it a part"
    ):
        pt.sequence_logprobs(model, packed, max_step_tokens=20)
    # it fits one
    pt.sequence_logprobs(model, packed, max_step_tokens=1000)
    with pytest.raises(pt.UnsupportedError, match="kept trunks would show it a part"):
        kept(model, objective)


def refusals(model: Any, sequences: list[np.ndarray]) -> Iterator[str]:
    packed = pack_sequences(sequences)
    calls = [
        lambda: pt.sequence_logprobs(model, packed),
        lambda: pt.sequence_logprobs(model, packed, max_step_tokens=20),
        lambda: model(**packed.model_inputs()),
        lambda: pt.Teacher(model, packed),
        lambda: TreeSampler(model, 1000).start(packed.forest),
    ]
    for call in calls:
        with pytest.raises(pt.UnsupportedError) as refused:
            call()
        yield str(refused.value)


@pytest.mark.parametrize("name", MODELS)
def test_long_and_short_sequences(name):
    """Refused with the lengths and what to do in every call; none asks for another model."""
    for message in refusals(model_of(name), sequences_of(6, 30)):
        if "longrope" in name:
            assert "sequences have 6 to 30 tokens. Score two forests" in message
        else:
            assert "max_position_embeddings (16)" in message and "30 tokens: leave out" in message
        assert "rope_parameters" not in message


def test_one_token_beyond():
    sequences = [np.arange(3, 3 + LIMIT + 1)]
    for message in refusals(model_of("dynamic"), sequences):
        assert "a sequence of this forest has 17 tokens" in message


def test_a_mask_that_knows_no_sequences():
    """One that ends inside another is seen in no mask."""
    packed = pack_sequences(sequences_of(*LONG))
    inputs = {**packed.model_inputs(), "tree_mask": pt.TreeMask(packed.subtree_end)}
    with pytest.raises(pt.UnsupportedError, match="does not know where sequences end"):
        model_of("longrope")(**inputs)


@pytest.mark.parametrize("name", ["dynamic", "dynamic, a layer type"])
def test_frequencies_of_an_earlier_longer_sequence(name):
    """transformers keeps them for a sequence of just the limit."""
    model, packed = model_of(name), pack_sequences(sequences_of(*SHORT))
    expected = pt.sequence_logprobs(model, packed).logprobs
    with torch.no_grad():
        model.eval()(input_ids=torch.arange(3, 33)[None], use_cache=False)
    with pytest.raises(pt.UnsupportedError, match="frequencies of a sequence of 30 tokens"):
        pt.sequence_logprobs(model, packed)
    with torch.no_grad():
        model(input_ids=torch.arange(3, 9)[None], use_cache=False)
    for got, want in zip(pt.sequence_logprobs(model, packed).logprobs, expected, strict=True):
        assert torch.equal(got, want)


def test_ordinary_batches_are_those_of_transformers():
    model, ids = model_of("longrope").eval(), torch.arange(3, 33)[None]
    other = copy.deepcopy(model)
    other.set_attn_implementation("sdpa")
    with torch.no_grad():
        assert torch.equal(model(ids).logits, other(ids).logits)


@pytest.mark.parametrize("lengths", [(4, 12), LONG])
def test_sampling(lengths):
    """Rows stay on one side of the limit."""
    model, forest = model_of("longrope"), pack_sequences(sequences_of(*lengths)).forest
    sampler = TreeSampler(model, 1000)
    rows = sampler.start(forest)
    if lengths != LONG:
        with pytest.raises(pt.UnsupportedError, match=r"rows may come to have 17, .*lower max_new"):
            rows.generate(5)
    rows.generate(4, Draws(seed=1))
    samples = rows.samples()
    with torch.no_grad():
        scores = pt.sequence_logprobs(model, pt.pack(samples.forest)).logprobs
    for drawn, score, mask in zip(samples.logprobs, scores, samples.loss_masks, strict=True):
        scored = torch.as_tensor(mask[1:]) == 1
        torch.testing.assert_close(drawn[scored], score[scored], atol=2e-5, rtol=0)


def test_values():
    critic = reward_model("llama")
    critic.config.rope_parameters = dict(_DYNAMIC)
    critic.config.max_position_embeddings = LIMIT
    with pytest.raises(pt.UnsupportedError, match="dynamic RoPE"):
        pt.sequence_values(critic, pack_sequences(sequences_of(6, 30)))


@pytest.mark.full
def test_compiled_layers():
    """torch runs such layers as they are, where lengths are seen."""
    model, packed = model_of("longrope").eval(), pack_sequences(sequences_of(*SHORT))
    mixed = pack_sequences(sequences_of(6, 30)).model_inputs()
    with torch.no_grad():
        expected = pt.sequence_logprobs(model, packed).logprobs
        pt.compile_layers(model, backend="eager")
        found = pt.sequence_logprobs(model, packed).logprobs
        with pytest.raises(pt.UnsupportedError, match="Score two forests"):
            model(**mixed)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)


def test_unknown_types_are_refused_without_advice_that_makes_another_model():
    model = build("qwen3")
    model.config.rope_parameters["rope_type"] = "spiral"
    with pytest.raises(pt.UnsupportedError, match="RoPE type 'spiral' is not verified") as refused:
        pt.sequence_logprobs(model, pack_sequences(sequences_of(*SHORT)))
    assert "set" not in str(refused.value)
