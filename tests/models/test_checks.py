"""Models that are not what their type says: part of one runs another attention, or its forward, its
wrappers or its head treat logits in a way of their own. Exact or refused, never silently other.
"""

from __future__ import annotations

import copy
import functools
import math
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2DoubleHeadsModel, LlamaForCausalLM

import prefixtree as pt
from prefixtree.integrations.transformers import allow_model_type
from prefixtree.models import families
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.support.alike import skip_if_repeated
from tests.support.family_configs import FAMILIES
from tests.support.full import each_once, mostly
from tests.support.models import (
    EVERY_TIME,
    HIDDEN,
    VOCABULARY,
    assert_same,
    build,
    cases,
    enable_checkpointing,
    mostly_full,
    pack_sequences,
    ragged_objective,
    ragged_packed,
    randomise,
    run_eager,
    run_packed,
    run_replicated,
    tolerance,
)

# ---- half the model another attention ------------------------------------------------------------


def _insert_copy(model: Any) -> Any:
    """Depth up-scaling, as merges do it: a layer once more, with a configuration of its own."""
    model.model.layers.append(copy.deepcopy(model.model.layers[1]))
    model.model.layers[3].self_attn.layer_idx = 3
    model.config.num_hidden_layers = 4
    return model


def _replicate(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(
        model,
        LoraConfig(
            r=2,
            lora_alpha=4,
            target_modules=["q_proj"],
            layer_replication=[[0, 2], [1, 3]],
            task_type="CAUSAL_LM",
        ),
    )
    randomise(adapted)
    return adapted


@pytest.mark.parametrize("change", [_insert_copy, _replicate])
# PEFT asks transformers under the old name of the property
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_copies_of_layers_with_a_configuration_of_their_own(change):
    """log p was off by up to 1.96. Copied after the attention was set, they are exact."""
    late = change(build("llama", "sdpa"))
    late.set_attn_implementation("prefixtree")
    match = r"of 4 attention modules run another.*layers\.\d\.self_attn: .*'sdpa'.*is a copy"
    with pytest.raises(pt.UnsupportedError, match=match):
        sequence_logprobs(late, ragged_packed())
    run = run_packed(change(build("llama")), ragged_packed(), ragged_objective())
    assert_same(run, run_replicated(change(build("llama", "eager")), ragged_objective()))


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_a_part_of_a_model_is_set_to_another_attention(model_type):
    """log p was off by 4.71."""
    for late in (True, False):
        model = build(model_type, "sdpa")
        if late:
            model.set_attn_implementation("prefixtree")
            model.set_attn_implementation({"text_config": "sdpa"})
        else:
            model.set_attn_implementation({"": "prefixtree", "text_config": "sdpa"})
        match = r"3 of 3 attention modules run another.*prefixtree\.prepare\(model\)"
        with pytest.raises(pt.UnsupportedError, match=match):
            sequence_logprobs(model, ragged_packed())


@pytest.mark.parametrize("model_type", mostly(["qwen2_5_vl", "qwen3_vl"], ["qwen3_vl"]))
def test_the_text_model_alone_is_set(model_type):
    """Which was refused: the image encoder may run what it likes."""
    model = build(model_type, "sdpa")
    model.set_attn_implementation({"text_config": "prefixtree"})
    run = run_packed(model, ragged_packed(), ragged_objective())
    assert_same(run, run_replicated(build(model_type, "eager"), ragged_objective()))


class _OwnAttention(nn.Module):
    """One that asks nobody which attention to run."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        x = self.proj(hidden_states)[:, None]
        out = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        return out[:, 0], None


@pytest.mark.parametrize(
    ("how", "compiled"), mostly([("module", True), ("forward", False)], [("forward", False)])
)
# dynamo's own look at .grad of its inputs
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_layer_that_computes_attention_on_its_own(how, compiled):
    model = build("qwen3")
    own = _OwnAttention()
    if how == "module":
        model.model.layers[1].self_attn = own
    else:
        model.model.layers[1].self_attn.forward = own.forward
    if compiled:
        for layer in model.model.layers:
            layer.compile(backend="eager")
    with pytest.raises(pt.UnsupportedError, match=r"2 attention calls.*has 3 attention layers"):
        sequence_logprobs(model, ragged_packed())
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "use_reentrant, backend", each_once([None, False, True], ["auto", "reference"])
)
def test_every_call_is_counted_once(use_reentrant, backend):
    """Recomputations come with the backward; a layer that stands twice runs twice."""

    def make(implementation: str) -> Any:
        model = build("llama", implementation)
        model.model.layers.append(model.model.layers[1])
        model.config.num_hidden_layers = 4
        return model

    model = make("prefixtree")
    if use_reentrant is not None:
        enable_checkpointing(model, use_reentrant)
        model.enable_input_require_grads()
    run = run_packed(model, ragged_packed().with_options(backend=backend), ragged_objective())
    assert_same(run, run_replicated(make("eager"), ragged_objective()))


# ---- rows ----------------------------------------------------------------------------------------


def _double_heads() -> Any:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=2, n_head=4, num_labels=1,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, summary_first_dropout=0,
    )  # fmt: skip
    config._attn_implementation = "prefixtree"
    model = GPT2DoubleHeadsModel(config)
    randomise(model)
    return model.train()


class _EveryRow(LlamaForCausalLM):
    """Its head gets all tokens, whatever logits_to_keep says."""

    def forward(self, logits_to_keep: Any = None, **kwargs: Any) -> Any:
        return super().forward(**kwargs)


def _every_row() -> Any:
    model = build("llama")
    model.__class__ = _EveryRow
    return model


@pytest.mark.parametrize("make", [_double_heads, _every_row])
@pytest.mark.parametrize("how", ["no gradients", "frozen body", "all"])
def test_a_forward_that_hands_every_row_to_the_head(make, how, monkeypatch):
    """log p was off by 2.26, the head's gradient by 52 %."""
    for model_type in ("llama", "gpt2"):
        monkeypatch.setitem(
            families.FAMILIES, model_type, families.Family(is_tested=False)
        )  # the class itself is let through
    model = make()
    if how == "frozen body":
        model.requires_grad_(False)
        model.lm_head.requires_grad_(True)
    with (
        torch.set_grad_enabled(how != "no gradients"),
        pytest.raises(pt.UnsupportedError, match="does not honour logits_to_keep"),
    ):
        sequence_logprobs(model, ragged_packed())


# ---- what is done to logits ----------------------------------------------------------------------


class _Scaled(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 0.5
        return output


def _subclass(model: Any) -> None:
    model.__class__ = _Scaled


def _halved(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def halved(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = output.logits * 0.5
        return output

    return halved


def _patch(model: Any) -> None:
    model.forward = _halved(model.forward)


def _patch_method(model: Any) -> None:
    model.forward = types.MethodType(_halved(type(model).forward), model)


def _patch_partial(model: Any) -> None:
    model.forward = functools.partial(_halved(type(model).forward), model)


def _patch_below(model: Any) -> None:
    """Under a wrapper that says it wraps the class's, as TRL's does."""
    patched = _halved(model.forward)

    def outer(*args: Any, **kwargs: Any) -> Any:
        return patched(*args, **kwargs)

    known = types.FunctionType(
        outer.__code__, {"__name__": "trl.trainer.utils"}, closure=outer.__closure__
    )
    model.forward = functools.update_wrapper(known, type(model).forward)


@pytest.mark.parametrize("change", [_subclass, _patch, _patch_method, _patch_partial, _patch_below])
def test_a_forward_of_ones_own(change):
    """log p was off by 1.2 to 2.2: what it did to the logits was lost."""
    model = build("llama")
    change(model)
    match = r"is not the one .* 'llama' but comes from tests\..*test_checks.*allow_model_type"
    with pytest.raises(pt.UnsupportedError, match=match):
        sequence_logprobs(model, ragged_packed())


def test_a_forward_patched_for_the_whole_class(monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "forward", _halved(LlamaForCausalLM.forward))
    with pytest.raises(pt.UnsupportedError, match=r"comes from tests\..*test_checks"):
        sequence_logprobs(build("llama"), ragged_packed())


def test_a_forward_of_ones_own_that_is_let_through(monkeypatch):
    """With the rule it needs."""
    monkeypatch.setattr(families, "FAMILIES", dict(families.FAMILIES))
    allow_model_type("llama", scale="my_scale")
    model, reference = build("llama", my_scale=0.5), build("llama", "eager")
    _subclass(model)
    _subclass(reference)
    run = run_packed(model, ragged_packed(), ragged_objective())
    assert_same(run, run_replicated(reference, ragged_objective()))


def test_a_forward_that_is_let_through_without_its_rule(monkeypatch):
    """log p was that of logits twice as large."""
    monkeypatch.setattr(families, "FAMILIES", dict(families.FAMILIES))
    allow_model_type("llama")
    model = build("llama")
    _subclass(model)
    with pytest.raises(pt.UnsupportedError, match=r"scale=1.0.*\('llama', scale=\.\.\."):
        sequence_logprobs(model, ragged_packed())


class _Inherits(LlamaForCausalLM):
    """A class of one's own with transformers' forward is what it was."""


def test_a_subclass_that_keeps_the_forward():
    model = build("llama")
    model.__class__ = _Inherits
    assert_same(run_packed(model, ragged_packed(), ragged_objective()), run_eager(build("llama")))


class _Wrapper(nn.Module):
    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.change = build("llama"), change

    def forward(self, **inputs: Any) -> Any:
        output = self.inner(**inputs)
        output.logits = self.change(output.logits)
        return output


_CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "product": lambda x: x * 0.5,
    "in place": lambda x: x.mul_(0.5),
    "another shape": lambda x: x[:, 1:],
    "another order": lambda x: x.flip(1),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", _CHANGES)
def test_a_wrapper_that_changes_logits(change, mode):
    with mode(), pytest.raises(pt.UnsupportedError, match="changed the model's logits"):
        sequence_logprobs(_Wrapper(_CHANGES[change]), ragged_packed())


def test_a_wrapper_that_copies_logits():
    """As DDP does for some graphs."""
    expected = sequence_logprobs(build("llama"), ragged_packed()).logprobs
    got = sequence_logprobs(_Wrapper(torch.clone), ragged_packed()).logprobs
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_a_forward_kept_from_before(model_type):
    """As PEFT keeps one for prompts that are switched off: the family's treatment of logits would
    be done to scores."""
    model = build(model_type)
    expected = sequence_logprobs(model, ragged_packed()).logprobs

    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.forward = model, model.forward

    if model_type == "gemma2":
        with pytest.raises(pt.UnsupportedError, match="changed the model's logits"):
            sequence_logprobs(Kept(), ragged_packed())
    else:
        got = sequence_logprobs(Kept(), ragged_packed()).logprobs
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


class _Neighbours(nn.Module):
    """A head that adds a part of the token before."""

    def __init__(self, base: nn.Linear, part: float) -> None:
        super().__init__()
        self.base_layer, self.part = base, part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x + self.part * nn.functional.pad(x, (0, 0, 1, 0))[..., :-1, :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", [1.0, 0.1, 0.0])
def test_a_head_that_looks_along_the_row(part, dtype):
    model = build("llama").to(dtype)
    if part != 1:
        # tokens that are ruled out, beside which no difference is large
        bias = torch.zeros(model.config.vocab_size, dtype=dtype)
        bias[-2:] = -torch.inf
        model.lm_head.bias = nn.Parameter(bias)
    model.lm_head = _Neighbours(model.lm_head, part)
    if part:
        with pytest.raises(pt.UnsupportedError, match="other logits when other tokens stand"):
            sequence_logprobs(model, ragged_packed())
    else:
        sequence_logprobs(model, ragged_packed())


# ---- configurations ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model_type", mostly_full(FAMILIES, {"olmoe", "qwen3", "gemma3_text", "gpt_oss"})
)
def test_a_window_set_in_any_family(model_type):
    """OLMoE's eager attention has none: log p was off by 3.43. The others are exact or refused."""
    skip_if_repeated(model_type, {"olmoe", *EVERY_TIME})
    objective, more = ragged_objective(), {"sliding_window": 4}
    if "text_config" in FAMILIES[model_type]:
        more["use_sliding_window"] = True
    model = build(model_type, **more)
    try:
        run = run_packed(model, ragged_packed(), objective)
    except pt.UnsupportedError as refusal:
        assert "window" in str(refusal)
        return
    assert model_type != "olmoe"
    reference = run_replicated(build(model_type, "eager", **more), objective)
    assert_same(run, reference, tolerance(model_type))


_SCALED = [name for name, family in families.FAMILIES.items() if family.scale or family.divisor]


@pytest.mark.parametrize("model_type", mostly_full(_SCALED, {"cohere", "granite"}))
def test_a_factor_changed_after_the_model_was_made(model_type):
    """Cohere's models go on with the one they were made with, Granite's do not."""
    family = families.FAMILIES[model_type]
    model = build(model_type)
    setattr(model.config, family.scale or family.divisor, 0.31)
    run = run_packed(model, ragged_packed(), ragged_objective())
    assert_same(run, run_eager(model), tolerance(model_type))


@pytest.mark.parametrize("model_type", cases(["falcon_h1"]))
def test_a_factor_of_the_model_inside(model_type):
    """Its multiplier counted as 1: log p was off by 5.67 at 2.0."""
    model = build(model_type, lm_head_multiplier=2.0)
    assert_same(run_packed(model, ragged_packed(), ragged_objective()), run_eager(model), 5e-5)
    model.model.lm_head_multiplier = 0.039
    assert_same(run_packed(model, ragged_packed(), ragged_objective()), run_eager(model), 5e-5)


def test_a_factor_of_zero():
    """It counted as 1."""
    model = build("cohere", logit_scale=0.0)
    scores = sequence_logprobs(model, ragged_packed())
    for logprobs in scores.logprobs:
        torch.testing.assert_close(logprobs, torch.full_like(logprobs, -math.log(VOCABULARY)))
    torch.cat(scores.logprobs).sum().backward()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    "model_type, name", [("granite", "logits_scaling"), ("gemma2", "final_logit_softcapping")]
)
def test_a_divisor_of_zero(model_type, name):
    with pytest.raises(ValueError, match=rf"config\.{name} .* must be above 0, got 0\.0"):
        sequence_logprobs(build(model_type, **{name: 0.0}), ragged_packed())


# ---- threads -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unprobed")
def test_an_ordinary_forward_of_another_thread():
    """It got scores for logits while another thread was inside `sequence_logprobs`."""
    model = build("llama").eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    seen: list[torch.Tensor] = []

    def ordinary() -> None:
        with torch.no_grad():
            seen.append(model(ids, use_cache=False).logits)

    def meanwhile(module: nn.Module, args: Any) -> None:
        handle.remove()
        thread = threading.Thread(target=ordinary)
        thread.start()
        thread.join()

    handle = model.model.layers[1].register_forward_pre_hook(meanwhile)
    scores = sequence_logprobs(model, ragged_packed()).logprobs
    assert torch.equal(seen[0], expected)
    for got, want in zip(scores, sequence_logprobs(model, ragged_packed()).logprobs, strict=True):
        assert torch.equal(got, want)


def test_two_threads_score_one_model():
    model = build("llama")
    forests = [pack_sequences([[3, 4, 5, i], [3, 4, 9, 9, i]]) for i in range(10, 18)]
    expected = [torch.cat(sequence_logprobs(model, packed).logprobs) for packed in forests]
    got: list[Any] = [None] * len(forests)
    start = threading.Barrier(4)

    def score(first: int) -> None:
        start.wait()
        for i in range(first, len(forests), 4):
            got[i] = torch.cat(sequence_logprobs(model, forests[i]).logprobs)

    threads = [threading.Thread(target=score, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert "forward" not in vars(model) and "forward" not in vars(model.lm_head)


class _Threaded(nn.Module):
    """Runs its model in a thread, as nn.DataParallel does its replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build("llama").eval()

    def forward(self, **inputs: Any) -> Any:
        outputs: list[Any] = []

        def run() -> None:
            with torch.no_grad():
                outputs.append(self.inner(**inputs))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return outputs[0]


def test_a_wrapper_with_a_thread_of_its_own():
    with pytest.raises(pt.UnsupportedError, match=r"0 attention calls|in the thread that called"):
        sequence_logprobs(_Threaded(), ragged_packed())


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", [[[1, 2], [1, 3]], pt.PrefixForest.from_sequences([[1, 2]]), None]
)
def test_something_else_for_a_packed_forest(given):
    mend = "forest" if isinstance(given, pt.PrefixForest) else "PrefixForest.from_seq"
    match = rf"takes a packed forest, got {type(given).__name__}; pack\({mend}"
    with pytest.raises(TypeError, match=match):
        sequence_logprobs(build("llama"), given)


def test_a_path_for_a_model():
    with pytest.raises(TypeError, match=r"got str; AutoModelForCausalLM\.from_pretrained\(path"):
        sequence_logprobs("Qwen/Qwen3-0.6B", ragged_packed())


def test_a_token_beyond_the_vocabulary():
    """An IndexError, or on a GPU an assertion that ends the process."""
    packed = pack_sequences([[3, 4, VOCABULARY], [3, 4, 5]])
    match = rf"token id {VOCABULARY} is beyond the model's vocabulary of {VOCABULARY}"
    with pytest.raises(ValueError, match=match):
        sequence_logprobs(build("llama"), packed)
    # rows that were added count
    model = build("llama")
    model.resize_token_embeddings(VOCABULARY + 3, mean_resizing=False)
    sequence_logprobs(model, packed)
