"""Linear layers of low precision: those that treat every token alone run, others are refused.

Here those of bitsandbytes, and of no name; torchao's are in test_torchao.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import prefixtree as pt
from prefixtree import UnsupportedError
from prefixtree.models import low_precision
from prefixtree.scoring.lm_head import check_rows_alone
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.support.full import mostly
from tests.support.models import (
    assert_same,
    build,
    quantised,
    ragged_objective,
    ragged_packed,
    run_packed,
    run_replicated,
    with_random_lora,
)


class _Rounded(nn.Linear):
    """Rounds its input: with one scale for all tokens, or with one per token."""

    dim: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax() if self.dim is None else x.abs().amax(self.dim, keepdim=True)
        x = (x / scale * 16).round() * scale / 16
        return super().forward(x)


class _RoundedByRow(_Rounded):
    dim = -1


def with_layer(change: Any, implementation: str = "prefixtree") -> Any:
    model = build("llama", implementation)
    change(model.model.layers[1].mlp.up_proj)
    return model


def of_class(kind: type) -> Any:
    return lambda linear: setattr(linear, "__class__", kind)


def test_a_scale_for_all_tokens_is_refused() -> None:
    message = r"layers\.1\.mlp\.up_proj .*another output when other tokens stand beside it.*rowwise"
    with pytest.raises(UnsupportedError, match=message):
        sequence_logprobs(with_layer(of_class(_Rounded)), ragged_packed())


class _Strict(torch.autograd.Function):
    """Wants a contiguous gradient, as custom kernels do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if not gradient.is_contiguous():
            raise RuntimeError("expected a contiguous gradient")
        return gradient


class _RoundedStrictly(_Rounded):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Strict.apply(super().forward(x))


class _RoundedInPlace(_Rounded):
    """Whose own trial of gradients fails on a leaf."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(1.0))


class _WithoutBackward(_Rounded):
    """Whose gradient cannot be tried at all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError("no backward here")
        return super().forward(x)


@pytest.mark.parametrize("kind", [_RoundedStrictly, _RoundedInPlace, _WithoutBackward])
def test_a_trial_of_gradients_that_fails_hides_no_scale(kind: type) -> None:
    """Tokens are tried apart from gradients."""
    with pytest.raises(UnsupportedError, match="another output when other tokens"):
        run_packed(with_layer(of_class(kind)), ragged_packed(), ragged_objective())


def test_what_treats_every_token_alone_runs() -> None:
    change, objective = of_class(_RoundedByRow), ragged_objective()
    packed = run_packed(with_layer(change), ragged_packed(), objective)
    assert_same(packed, run_replicated(with_layer(change, "eager"), objective))


def test_a_layer_is_tried_once() -> None:
    model = with_layer(of_class(_RoundedByRow))
    layer, calls = model.model.layers[1].mlp.up_proj, []
    layer.forward = lambda x: calls.append(x.shape[1]) or _RoundedByRow.forward(layer, x)
    for _ in range(2):
        low_precision.check_low_precision("up_proj", layer)
    assert len(calls) == 2 and calls[0] == calls[1]


# ---- what passes no gradient ---------------------------------------------------------------------


class _Stopped(_RoundedByRow):
    """Gives its input no gradient, its own weight one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.detach())


def _training(implementation: str, *trained: str, **changes: Any) -> Any:
    """With such a layer in the second of three, and a few parameters that train."""
    model = build("llama", implementation, **changes)
    of_class(_Stopped)(model.model.layers[1].mlp.up_proj)
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        parameter.requires_grad_(any(part in name for part in trained))
    assert all(any(part in name for name in named) for part in trained)
    return model


@pytest.mark.parametrize(
    ("trained", "max_step_tokens"),
    mostly(
        [
            (("lm_head",), 24),
            (("layers.2.", "lm_head"), None),
            (("layers.1.mlp.up_proj", "layers.2.mlp"), 24),
        ],
        [(("layers.1.mlp.up_proj", "layers.2.mlp"), 24)],
    ),
)
def test_what_trains_behind_a_layer_without_gradients(
    trained: tuple[str, ...], max_step_tokens: int | None
) -> None:
    objective = ragged_objective()
    model = _training("prefixtree", *trained)
    packed = run_packed(model, ragged_packed(), objective, max_step_tokens=max_step_tokens)
    assert_same(packed, run_replicated(_training("eager", *trained), objective))
    assert packed.gradients.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    assert all(gradient.any() for gradient in packed.gradients.values())
    # without gradients everything may train
    with torch.no_grad():
        sequence_logprobs(model.requires_grad_(True), ragged_packed())


@pytest.mark.parametrize(
    ("trained", "changes"),
    [
        ("embed_tokens", {}),
        ("layers.0.mlp.down_proj", {}),
        # runs before it, and is listed after it
        ("layers.1.post_attention_layernorm", {}),
        # where it stands is not known
        ("model.norm", {}),
        # the embedding too
        ("embed_tokens", {"tie_word_embeddings": True}),
    ],
)
def test_what_trains_before_it_is_refused(trained: str, changes: dict[str, Any]) -> None:
    model = _training("prefixtree", trained, "layers.2.", **changes)
    message = r"layers\.1\.mlp\.up_proj .*gives its input no gradient.*all but later decoder layers"
    with pytest.raises(UnsupportedError, match=message):
        sequence_logprobs(model, ragged_packed())
    # tried anew when something else trains
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.2." in name)
    sequence_logprobs(model, ragged_packed())


def test_an_output_embedding_without_gradients() -> None:
    """All else stands before it."""
    model = build("llama")
    of_class(_Stopped)(model.lm_head)
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    sequence_logprobs(model, ragged_packed())
    model.model.layers[2].requires_grad_(True)
    with pytest.raises(UnsupportedError, match=r"lm_head .*gives its input no gradient"):
        sequence_logprobs(model, ragged_packed())


# ---- bitsandbytes --------------------------------------------------------------------------------


def _loaded(model_type: str, **settings: Any) -> Any:
    """As transformers loads it quantised, with LoRA, in training mode."""
    model = quantised(build(model_type, "eager"), **settings)
    return with_random_lora(model, "q_proj", "v_proj", "up_proj", "down_proj")


_NF4 = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_compute_dtype": torch.float32,
    "bnb_4bit_use_double_quant": True,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "settings", [_NF4, {"load_in_8bit": True, "llm_int8_threshold": 0.0}], ids=["4 bit", "8 bit"]
)
def test_bitsandbytes(settings: dict[str, Any]) -> None:
    """QLoRA: adapters' gradients of the packed forest, and of each sequence alone."""
    model = _loaded("qwen3", **settings)
    # in 4 bits layers give no gradient in eval(); in 8 bits they quantise no tokens in train()
    model.train("load_in_4bit" in settings)
    expected = run_replicated(model, ragged_objective())
    assert len(expected.gradients) > 5 and all(
        name.split(".")[-2] == "default" for name in expected.gradients
    )
    plain = run_packed(build("qwen3"), ragged_packed(), ragged_objective())
    pt.prepare(model)
    found = run_packed(model, ragged_packed(), ragged_objective())
    assert_same(found, expected, 1e-5)
    # quantised indeed
    assert float((torch.cat(found.logprobs) - torch.cat(plain.logprobs)).abs().max()) > 1e-2
    if model.training:
        again = run_packed(model, ragged_packed(), ragged_objective(), recompute="all")
        assert_same(again, expected, 5e-5)
    if "load_in_4bit" in settings:
        planned = run_packed(model.train(), ragged_packed(), ragged_objective(), recompute="auto")
        assert_same(planned, expected, 5e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_layer_that_bitsandbytes_stores_for_inference_is_refused() -> None:
    """Its gradients would be lost without an error, in training mode too."""
    model = pt.prepare(_loaded("qwen3", **_NF4))
    layer = model.get_base_model().model.layers[1].mlp.up_proj.base_layer
    message = (
        r"layers\.1\.mlp\.up_proj.*no gradient after a forward in evaluation mode.*model\.train"
    )
    # one that the first forward would store so, on some CPUs
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = module is layer
    sequence_logprobs(model, ragged_packed())
    with pytest.raises(UnsupportedError, match=message):
        sequence_logprobs(model.eval(), ragged_packed())
    layer.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(UnsupportedError, match=message):
        sequence_logprobs(model.train(), ragged_packed())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_quantisers_that_are_refused() -> None:
    outliers = _loaded("qwen3", load_in_8bit=True)
    with pytest.raises(UnsupportedError, match=r"a threshold \(6.0\).*llm_int8_threshold=0.0"):
        pt.prepare(outliers)
    other = build("qwen3")
    other.hf_quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method="gptq"))
    with pytest.raises(UnsupportedError, match=r"\(quantization_config\) by gptq are not verified"):
        sequence_logprobs(other, ragged_packed())


def test_a_head_with_one_scale_is_refused() -> None:
    """Its probe holds a row that is larger than the others."""

    torch.manual_seed(0)
    hidden = torch.randn(5, 16)
    for kind in (_RoundedByRow, nn.Linear):
        head = kind(16, 40)
        assert check_rows_alone(head, head.forward, hidden, "the output embedding") == 40
    head = _Rounded(16, 40)
    with pytest.raises(UnsupportedError, match=r"the output embedding \(_Rounded\) gives a token"):
        check_rows_alone(head, head.forward, hidden, "the output embedding")
