"""Refusals of hybrid models: models that are not prepared or not as proven, and bad calls."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging import version
from transformers import CONFIG_MAPPING

import prefixtree as pt
from prefixtree.models import families
from tests.support.full import each_once, mostly
from tests.support.hybrid_cases import (
    FEW,
    SERVED,
    logprobs_of,
    long_packed,
    needs_states,
    packed_inputs,
)
from tests.support.hybrid_configs import HYBRIDS, OLDEST_WITH_STATES, SINCE
from tests.support.models import (
    TRANSFORMERS,
    build,
    cases,
    ragged_objective,
    ragged_packed,
)


def test_prepare_of_a_model_without_states_changes_nothing_and_checks() -> None:
    model = build("qwen3")
    kinds, state = [type(m) for m in model.modules()], vars(model.model.layers[0].self_attn).copy()
    assert pt.prepare(model) is model
    assert [type(m) for m in model.modules()] == kinds
    assert vars(model.model.layers[0].self_attn) == state
    # a bare call cannot see that a later layer runs another attention
    other = copy.deepcopy(model.config)
    other._attn_implementation = "eager"
    model.model.layers[1].self_attn.config = other
    with pytest.raises(pt.UnsupportedError, match=r"1 of 3 attention modules run another"):
        pt.prepare(model)
    with pytest.raises(pt.UnsupportedError, match="active dropout"):
        pt.prepare(torch.nn.Sequential(build("qwen3"), torch.nn.Dropout(0.1)).train())
    with pytest.raises(pt.UnsupportedError, match="holds no transformers model"):
        pt.prepare(torch.nn.Linear(2, 2))
    path: Any = "path"
    with pytest.raises(TypeError, match="got str; AutoModelForCausalLM"):
        pt.prepare(path)


@pytest.mark.skipif(SERVED, reason="this transformers hands recurrent layers the tree")
@pytest.mark.parametrize("family", sorted(HYBRIDS))
def test_older_transformers_are_refused(family: str) -> None:
    assert OLDEST_WITH_STATES == families.OLDEST_WITH_STATES
    refused = pytest.raises(pt.UnsupportedError, match=r'pip install "transformers>=5.17"')
    with refused:
        families.check_config(SimpleNamespace(model_type=family), training=False)
    if family in FEW and family != "nemotron_h":  # whose layers had other names then
        with refused:
            pt.prepare(build(family))
        with refused:
            pt.sequence_logprobs(build(family), ragged_packed())


@pytest.mark.parametrize("family", SINCE)
def test_layers_that_are_not_handed_the_tree_are_refused(family: str) -> None:
    if version.parse(SINCE[family]) <= TRANSFORMERS:
        pt.prepare(build(family))
        return
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {TRANSFORMERS} does not know {family}")
    with pytest.raises(pt.UnsupportedError, match="pip install"):
        pt.prepare(build(family))


@needs_states
def test_masks_and_batches_that_states_do_not_know() -> None:
    model = pt.prepare(build("qwen3_5"))
    inputs = packed_inputs(model)
    mask = inputs["tree_mask"]
    with pytest.raises(pt.UnsupportedError, match=r"TreeMask.for_queries"):
        model(**inputs | {"tree_mask": mask.for_queries([(0, 5)])})
    with pytest.raises(ValueError, match="batch size 1, got 2"):
        model(**inputs | {"input_ids": inputs["input_ids"].expand(2, -1)})
    with pytest.raises(ValueError, match="use_cache=False"):
        model(**inputs | {"use_cache": True})
    with pytest.raises(TypeError, match="tree_mask must be a TreeMask"):
        model(**inputs | {"tree_mask": mask.subtree_end})
    for wrong in (torch.arange(mask.num_tokens)[None], None):
        positions = wrong if wrong is None else wrong.expand(4, 1, -1)
        with pytest.raises((ValueError, pt.UnsupportedError), match=r"tokens' positions|positions"):
            model(**inputs | {"position_ids": positions})


@needs_states
@pytest.mark.parametrize("family", FEW)
def test_a_mask_on_another_device(family: str) -> None:
    model = pt.prepare(build(family))
    inputs = packed_inputs(model)
    with pytest.raises(ValueError, match=r"on cpu, the mask on meta; use packed.to\(cpu\)"):
        model(**inputs | {"tree_mask": inputs["tree_mask"].to("meta")})


@needs_states
@pytest.mark.parametrize("dtype, family", each_once([torch.bfloat16, torch.float16], FEW))
def test_half_precision(family: str, dtype: torch.dtype) -> None:
    """About as near to float32 as each sequence alone in this dtype."""
    packed = ragged_packed()
    with torch.no_grad():
        exact = pt.sequence_logprobs(build(family), packed).logprobs
        found = pt.sequence_logprobs(build(family).to(dtype), packed).logprobs
        eager = build(family, "eager").to(dtype)
        alone = []
        for tokens in ragged_objective().sequences:
            ids = torch.as_tensor(tokens)
            logits = eager(input_ids=ids[None], use_cache=False).logits[0].float()
            alone.append(logprobs_of(logits[:-1], ids[1:]))

    def worst(parts: Any) -> float:
        pairs = [(a.float(), b) for a, b in zip(parts, exact, strict=True) if len(b)]
        return max(float((a[-len(b) :] - b).abs().max()) for a, b in pairs)

    print(f"{family} {dtype}: packed {worst(found):.1e}, replicated {worst(alone):.1e}")
    assert 0 < worst(found) < 2 * worst(alone)


@needs_states
@pytest.mark.parametrize("family", mostly(FEW, ["nemotron_h"]))
def test_two_threads_score_one_model(family: str) -> None:
    """Both prepare it; each gets what it gets alone."""
    packed = [ragged_packed(), long_packed()]
    with torch.no_grad():
        alone = [pt.sequence_logprobs(build(family), p).logprobs for p in packed]
    model = build(family)

    def score(part: Any) -> list[Any]:
        with torch.no_grad():
            return [pt.sequence_logprobs(model, part).logprobs for _ in range(3)]

    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(score, packed))
    for expected, runs in zip(alone, together, strict=True):
        for found in runs:
            for a, b in zip(expected, found, strict=True):
                assert torch.equal(a, b)


@needs_states
@pytest.mark.parametrize("family", cases(["falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"]))
def test_wrong_positions_are_seen_behind_recurrent_layers(family: str) -> None:
    model = pt.prepare(build(family))
    model(**packed_inputs(model))
    wrong = torch.arange(ragged_packed().num_tokens)[None]
    with pytest.raises(ValueError, match="are not the tokens' positions"):
        model(**packed_inputs(model) | {"position_ids": wrong})
    # a packed forest without its mask is no ordinary batch
    inputs = packed_inputs(model)
    del inputs["tree_mask"]
    with torch.no_grad(), pytest.raises(ValueError, match="position_ids jump"):
        model.eval()(**inputs)


@needs_states
def test_layers_that_are_not_as_proven() -> None:
    model = build("qwen3_5")
    model.config.text_config.layer_types[0] = "ngram_memory"
    with pytest.raises(
        pt.UnsupportedError, match="'ngram_memory' are not verified in qwen3_5_text"
    ):
        pt.prepare(model)

    def mixer(model: Any) -> Any:
        return model.model.language_model.layers[1].linear_attn

    model = build("qwen3_5")
    mixer(model).conv1d._hf_hook = object()
    with pytest.raises(pt.UnsupportedError, match=r"linear_attn.conv1d has a hook of accelerate"):
        pt.prepare(model)
    model = build("qwen3_5")
    mixer(model).forward = mixer(model).forward
    with pytest.raises(pt.UnsupportedError, match="has a forward of its own"):
        pt.prepare(model)

    class Patched(type(mixer(model))):
        def forward(self, hidden_states: Any, **kwargs: Any) -> Any:
            return causal_conv1d_fn(hidden_states)  # noqa: F821

    model = build("qwen3_5")
    mixer(model).__class__ = Patched
    with pytest.raises(
        pt.UnsupportedError, match="3 recurrent layers by its layer_types, of which 2"
    ):
        pt.prepare(model)


@pytest.mark.parametrize(
    "model_type", ["minimax", "recurrent_gemma", "mamba", "falcon_mamba", "jamba"]
)
def test_recurrences_that_are_not_served(model_type: str) -> None:
    """By name, with what stands in the way."""
    config = type("Config", (), {"model_type": model_type})()
    with pytest.raises(pt.UnsupportedError, match=r"lightning|RG-LRU|Mamba-1"):
        families.family_of(config)
