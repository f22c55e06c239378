"""Layers that attend to gathered latents: exact in float64, red where a gradient is lost, and as
the family expands them wherever something is not verified."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import prefixtree as pt
from prefixtree.kernels.latents import definition, gathered
from prefixtree.sparse import latents
from tests.sparse.test_indexers import SHORT, _alone, _packed, _with_triton, _worst
from tests.support.float64 import Float64
from tests.support.full import mostly
from tests.support.hybrid_cases import in_float64
from tests.support.models import (
    assert_same,
    build,
    cases,
    enable_checkpointing,
    errors,
    pack_sequences,
    ragged_objective,
    ragged_packed,
    run_packed,
    run_replicated,
    tolerance,
    with_random_lora,
)
from tests.support.ties import LowestFirst

_NOTHING = {"window": None, "softcap": None, "sinks": None}
GATHER = ["deepseek_v32", "glm_moe_dsa", "axk2", "dots3_note_text"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The definition gathers wherever it may; queries of each call."""
    calls: list[int] = []

    def noted(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        calls.append(len(q))
        return gathered.gathered_attention(q, *rest)

    monkeypatch.setattr(latents, "pays", lambda *_: True)
    monkeypatch.setattr(latents, "kernels_for", lambda *_: definition)
    monkeypatch.setattr(latents, "gathered_attention", noted)
    return calls


@pytest.mark.parametrize("family", mostly(cases(GATHER), ["deepseek_v32", "dots3_note_text"]))
def test_float64_is_exact(family: str, asked: list[int]) -> None:
    """Against each sequence alone, which expands its keys."""
    rng = np.random.default_rng(0)
    sequences = ragged_objective().sequences
    weights = [torch.from_numpy(rng.standard_normal(len(s) - 1)) for s in sequences]
    with Float64(), LowestFirst():
        expected = _alone(in_float64(family, "eager"), sequences, weights)
        found = _packed(in_float64(family), sequences, weights)
    logp, gradient = _worst(found, expected)
    print(f"{family}: float64 log p {logp:.1e}, gradient {gradient:.1e}")
    assert logp < 1e-11 and gradient < 1e-10
    assert len(asked) == (2 if family == "dots3_note_text" else 3)


def _errors(**changes: Any) -> Any:
    run = run_packed(build("deepseek_v32", **changes), ragged_packed(), ragged_objective())
    return errors(run, run_replicated(build("deepseek_v32", "eager"), ragged_objective()))


@pytest.mark.parametrize("lost", ["ancestors' latents", "the projection"])
def test_a_lost_gradient_turns_red(
    lost: str, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities do not tell: they stay exact."""
    inner = latents.gathered_attention

    def detached(q: Any, rows: Any, w: Any, *rest: Any) -> torch.Tensor:
        if lost == "the projection":
            return inner(q, rows, (w + w.detach()) / 2, *rest)
        return inner(q, torch.cat([rows[:9].detach(), rows[9:]]), w, *rest)

    assert _errors().largest < 1e-5
    monkeypatch.setattr(latents, "gathered_attention", detached)
    found = _errors()
    assert found.logprob < 1e-5 and found.gradient > 1e-2


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_of_the_projection_count(asked: list[int]) -> None:
    """They are in the matrix, and have gradients."""

    def with_adapters(implementation: str = "prefixtree") -> Any:
        return with_random_lora(build("deepseek_v32", implementation), "kv_b_proj", "q_b_proj")

    want = run_replicated(with_adapters("eager"), ragged_objective())
    found = run_packed(with_adapters(), ragged_packed(), ragged_objective())
    assert asked
    assert_same(found, want, tolerance("deepseek_v32"))
    assert any("kv_b_proj.lora_A" in name for name in found.gradients)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_variant_of_adapters_expands_as_before(asked: list[int]) -> None:
    """KaSA has the modules of LoRA, and another forward."""
    peft = pytest.importorskip("peft")

    def with_variant(implementation: str = "prefixtree") -> Any:
        options = {"kasa_config": peft.tuners.lora.config.KasaConfig()}
        return with_random_lora(build("deepseek_v32", implementation), "kv_b_proj", **options)

    found = run_packed(with_variant(), ragged_packed(), ragged_objective())
    assert not asked
    want = run_replicated(with_variant("eager"), ragged_objective())
    assert_same(found, want, tolerance("deepseek_v32"))


@pytest.mark.parametrize("use_reentrant", mostly([True, False], [True]))
def test_checkpoints_gather_again(use_reentrant: bool, asked: list[int]) -> None:
    reference = run_packed(build("glm_moe_dsa"), ragged_packed(), ragged_objective())
    model = build("glm_moe_dsa")
    enable_checkpointing(model, use_reentrant)
    found = run_packed(model, ragged_packed(), ragged_objective())
    assert_same(found, reference, tolerance("glm_moe_dsa"))
    assert len(asked) == 3 + 6


class _Rounding(nn.Linear):
    """As quantised modules are: a subclass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def _quantised(projection: Any) -> None:
    projection.__class__ = _Rounding


def _with_bias(projection: Any) -> None:
    projection.register_buffer("bias", torch.zeros(projection.out_features))


def _patched(projection: Any) -> None:
    projection.forward = projection.forward


@pytest.mark.parametrize("change", mostly([_quantised, _with_bias, _patched], [_quantised]))
def test_an_unknown_projection_expands_as_before(change: Any, asked: list[int]) -> None:
    model = build("deepseek_v32")
    projection = model.model.layers[0].self_attn.kv_b_proj
    if change is _with_bias:
        del projection.bias
    change(projection)
    found = run_packed(model, ragged_packed(), ragged_objective())
    assert len(asked) == 2, "two layers of three gather"
    reference = run_packed(build("deepseek_v32"), ragged_packed(), ragged_objective())
    assert_same(found, reference, 1e-4)


def test_sinks_repeatable_gradients_and_parts_expand_as_before(asked: list[int]) -> None:
    run_packed(build("hy_v4"), ragged_packed(), ragged_objective())
    packed = ragged_packed()
    mask = packed.mask
    model = pt.prepare(build("deepseek_v32"))
    with torch.no_grad():
        model(**packed.model_inputs() | {"tree_mask": mask.with_options(deterministic=True)})
    assert not asked
    layer = model.model.layers[0].self_attn
    assert latents._gathers(layer, mask)
    assert not latents._gathers(layer, mask.for_queries([(3, 9)]))
    assert not latents._gathers(layer, None)
    with FakeTensorMode(allow_non_fake_inputs=True):
        held = latents.Latents(torch.zeros(1, 1, 9, 20), torch.zeros(1, 1, 9, 8))
        given = {"chosen": torch.zeros(9, 1, dtype=torch.int32), "scale": 1.0, **_NOTHING}
        assert latents.attend(layer, torch.zeros(9, 4, 20), held, mask, **given) is None
    layer.config._attn_implementation = "sdpa"
    assert not latents._gathers(layer, mask)


def test_the_choice_is_by_pairs() -> None:
    """A chain of V3.2's shape pays from about 6.8 times as many pairs as are chosen on."""
    shape = (192, 128), (512, 64)
    for tokens, most, expected in ((32768, 2048, True), (16384, 2048, False), (700, 2048, False)):
        host = pt.pack(pt.PrefixForest.from_parents([-1], [tokens])).mask.host
        ratio = host.visible_pairs(0) / host.visible_pairs(most)
        assert gathered.pays(host, most, *shape) is expected is (ratio > 6.8)
    assert gathered.kernels_for("auto", torch.device("cpu")) is None
    assert gathered.kernels_for("sdpa", torch.device("cuda")) is None


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_triton_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    # in the interpreter a layer takes two seconds
    one: dict[str, Any] = {"num_hidden_layers": 1, "mlp_layer_types": ("sparse",)}
    model = build("deepseek_v32", **one)
    reference = run_packed(model, pack_sequences(SHORT.sequences), SHORT)
    monkeypatch.setattr(latents, "pays", lambda *_: True)
    calls: list[int] = []
    inner = latents.attend

    def noted(*args: Any, **options: Any) -> Any:
        found = inner(*args, **options)
        calls.append(found is not None)
        return found

    monkeypatch.setattr(latents, "attend", noted)
    found = run_packed(build("deepseek_v32", **one), _with_triton(), SHORT)
    assert calls == [True]
    assert_same(found, reference, tolerance("deepseek_v32"))
