"""Every family that samples on a growing forest: the tokens of its own `generate`, and the
log-probabilities of its own eager forward."""

from __future__ import annotations

import pytest
import torch
from packaging import version

import prefixtree as pt
from prefixtree.integrations.transformers import supported_model_types
from prefixtree.models.families import family_of
from prefixtree.sampling import Draws, TreeSampler, forest_cache
from tests.sampling.cases import GREEDY, generated
from tests.support.alike import skip_if_repeated
from tests.support.family_configs import FAMILIES, INDEXED
from tests.support.hybrid_configs import HYBRIDS
from tests.support.models import (
    EVERY_TIME,
    TRANSFORMERS,
    build,
    mostly_full,
    ragged_sequences,
)
from tests.support.variant_configs import PARTS, VARIANTS

# beyond the windows (5 and 6); one the beginning of another, one a tree of its own
_PROMPTS = [ragged_sequences()[i].tolist() for i in (0, 1, 3, 5)]
_SAMPLED = [name for name in (*FAMILIES, *VARIANTS) if name not in INDEXED]


def _check(model_type: str) -> float:
    """Two turns with a branching, a dropped row and replies; the largest difference."""
    model = build(model_type).eval()
    rows = TreeSampler(model, 400).start(pt.PrefixForest.from_sequences(_PROMPTS))
    rows.generate(4, GREEDY)
    greedy = [rows.new_tokens(i) for i in range(4)]
    rows.branch([2, 0, 2, 1])
    rows.append({0: [5, 6, 7], 3: [8], 4: [9, 9]})
    rows.generate(4, Draws(0.9, seed=1))
    samples = rows.samples()
    model.set_attn_implementation("eager")
    # before 5.17, layers that share keys do so in `generate` alone: without a cache, and so in
    # training, they compute their own
    if "shared keys" not in model_type or version.parse("5.17") <= TRANSFORMERS:
        # padding reaches the convolutions of some hybrids in transformers
        padded = model_type.partition("/")[0] not in HYBRIDS
        assert greedy == generated(model, _PROMPTS, 4, [], padded)
    # the sampled ones, once more alone; each kind of row once
    worst = 0.0
    for i in (0, 1, 4):
        tokens = torch.from_numpy(samples.sequences[i])
        with torch.no_grad():
            logits = model(tokens[None], use_cache=False).logits[0, :-1].float()
        second = samples.loss_masks[i][1:].copy()
        second[: len(second) - 4] = False
        alone = (logits / 0.9).log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        worst = max(worst, float((alone - samples.logprobs[i])[second].abs().max()))
    return worst


# one with several rows of positions, too
_EVERY_TIME = {*EVERY_TIME, "qwen3_vl"}


@pytest.mark.parametrize(
    "model_type",
    mostly_full(_SAMPLED, {"qwen3_vl", "gpt_oss", "deepseek_v3", "qwen3_5", "nemotron_h"}),
)
def test_equals_generate_and_eager(model_type):
    skip_if_repeated(model_type, _EVERY_TIME, _SAMPLED)
    # the norms behind recurrent layers blow up rounding
    assert _check(model_type) < (3e-5 if model_type.partition("/")[0] in HYBRIDS else 1e-5)


def test_every_supported_type_is_here():
    known = {*_SAMPLED, *PARTS, *INDEXED}
    assert set(supported_model_types()) <= known
    for name in HYBRIDS:
        assert family_of(type("Config", (), {"model_type": name})()).functions


@pytest.mark.parametrize(
    ("model_type", "lost"),
    [
        ("gemma3_text", {"window": None}),
        ("gemma2", {"softcap": None}),
        ("gpt_oss", {"sinks": None}),
        ("granite", {"scale": 0.5}),
    ],
)
def test_what_a_family_says_of_its_attention_matters(model_type, lost, monkeypatch):
    attend, build_work = forest_cache.cascade_attention, forest_cache.DecodeWork
    monkeypatch.setattr(
        forest_cache, "cascade_attention", lambda *args, **given: attend(*args, **{**given, **lost})
    )
    if "window" in lost:
        monkeypatch.setattr(
            forest_cache,
            "DecodeWork",
            lambda *args, **given: build_work(*args, **{**given, **lost}),
        )
    with pytest.raises(AssertionError):
        assert _check(model_type) < 1e-2
