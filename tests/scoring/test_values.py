"""`sequence_values`: critics and reward models beside every sequence alone, all gradients."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import prefixtree as pt
from prefixtree.models.layers import layers_of
from prefixtree.recompute import choose
from prefixtree.scoring.logprobs import sequence_logprobs
from prefixtree.scoring.values import sequence_values
from tests.support.float64 import Float64
from tests.support.full import mostly
from tests.support.hooks import limit
from tests.support.models import (
    Run,
    assert_same,
    build,
    counted,
    enable_checkpointing,
    gradients,
    ragged_packed,
    ragged_sequences,
    randomise,
)
from tests.support.operator_calls import count_attentions
from tests.support.step_ranks import LIGHT

_CLASSES = {
    "token": AutoModelForTokenClassification,
    "sequence": AutoModelForSequenceClassification,
}


def classifier(
    auto: Any, model_type: str, implementation: str = "prefixtree", labels: int = 2, **changes: Any
) -> Any:
    config = build(model_type, num_labels=labels, classifier_dropout=0.0, **changes).config
    model = auto.from_config(config, attn_implementation=implementation)
    randomise(model)
    return model.train()


def squares(values: list[torch.Tensor]) -> torch.Tensor:
    """A loss that is another one for each sequence: returns differ where tokens are shared."""
    total: Any = sum(((v - 0.3 * i) ** 2).sum() for i, v in enumerate(values))
    return total


def run(values: list[torch.Tensor], loss: torch.Tensor, model: Any) -> Run:
    """Values in the place of log-probabilities, to be compared as a run is."""
    loss.backward()
    flat = [v.detach().reshape(-1) for v in values]
    return Run(flat, flat, gradients(model))


def alone(model: Any) -> list[torch.Tensor]:
    """The score layer at every token of each sequence."""
    found = []
    for tokens in ragged_sequences():
        output = model.base_model(torch.from_numpy(tokens)[None], use_cache=False)
        found.append(model.score(output.last_hidden_state)[0])
    return found


@pytest.mark.parametrize(("model_type", "kind"), [("gemma2", "sequence"), ("deepseek_v3", "token")])
def test_each_sequence_alone(model_type, kind):
    model = classifier(_CLASSES[kind], model_type)
    forward = model.forward
    with counted([model.model]) as calls:
        values = sequence_values(model, ragged_packed())
        assert calls() == 1
    assert model.forward == forward and not model.score._forward_hooks
    assert [v.shape for v in values] == [(len(s), 2) for s in ragged_sequences()]
    got = run(values, squares(values), model)
    assert all(g.any() for name, g in got.gradients.items() if "expert" not in name)
    reference = classifier(_CLASSES[kind], model_type, "eager")
    expected = alone(reference)
    assert_same(got, run(expected, squares(expected), reference))


@pytest.mark.parametrize("kind", mostly(["sequence", "a frozen lm_head"], ["a frozen lm_head"]))
def test_what_fits_has_no_gradient_of_an_lm_head(kind, monkeypatch):
    """What `max_micro_batch_tokens` says fits, and one token more does not; the refusal says so."""
    limit(monkeypatch, "left free by probes", 0.0)
    if kind in _CLASSES:
        model = classifier(_CLASSES[kind], "qwen3", vocab_size=50_000)
    else:
        model = build("qwen3", vocab_size=50_000)
        model.lm_head.requires_grad_(False)
    trained = build("qwen3", vocab_size=50_000)
    # of a head that trains: its gradient in float32, and a chunk of logits
    memory = (1 << 29) + (1 << 21)
    fit = pt.max_micro_batch_tokens(model, memory, 0.1)
    assert fit > 0 == pt.max_micro_batch_tokens(trained, memory, 0.1)
    for tokens in (fit, fit + 1):
        packed = pt.pack(pt.PrefixForest.from_sequences([np.zeros(tokens, np.int64)]))
        planned = partial(pt.plan_recomputation, model, packed, memory, int(0.1 * tokens))
        if tokens == fit:
            planned()
            continue
        with pytest.raises(torch.OutOfMemoryError, match=rf"give at most {fit:,} tokens"):
            planned()
    for function in (pt.max_micro_batch_tokens, partial(pt.plan_recomputation, packed=packed)):
        with pytest.raises(pt.UnsupportedError, match="AutoModelForCausalLM gives; Qwen3Model"):
            function(model.base_model)


def in_float64(forward: Any, *args: Any, **kwargs: Any) -> Any:
    with Float64():
        return forward(*args, **kwargs)


@pytest.mark.parametrize("recompute", mostly(["auto", "a plan"], ["auto"]))
def test_layers_recompute_what_is_asked_for(recompute, monkeypatch):
    """Exact in float64, and seen by the operators that run: other modes give the same numbers."""
    model, reference = (
        classifier(AutoModelForSequenceClassification, "qwen3", name).double()
        for name in ("prefixtree", "eager")
    )
    packed, layers, plans = ragged_packed(), layers_of(model), list[Any]()
    for part in (part for layer in layers for part in layer.children()):
        # a backward is a call of torch, in which the mode around it is off
        part.forward = partial(in_float64, part.forward)
    plan, modes = recompute, (recompute,) * len(layers)
    whole = pt.plan_recomputation(model, packed, 1 << 40)
    assert set(whole.modes) == {"nothing"}
    if recompute == "a plan":
        modes = "all", "all_but_attention", *modes[2:-1], "nothing"
        plan = pt.RecomputePlan(modes, 0)
    elif recompute == "auto":
        monkeypatch.setattr(choose, "available_bytes", lambda _: 0.9 * whole.peak_bytes)
        real = choose.plan_for

        def planned(*given: Any, **options: Any) -> Any:
            plans.append(real(*given, **options))
            return plans[-1]

        monkeypatch.setattr(choose, "plan_for", planned)
    attentions = count_attentions(monkeypatch)
    with Float64(), counted([layer.mlp for layer in layers]) as products:
        values = sequence_values(model, packed, recompute=plan)
        got = run(values, squares(values), model)
        if plans:
            modes = plans[0].modes
            assert set(modes) != {"nothing"} and plans[0].peak_bytes <= 0.9 * whole.peak_bytes
        assert len(attentions) == len(layers) + modes.count("all")
        assert products() == 2 * len(layers) - modes.count("nothing")
        expected = alone(reference)
        want = run(expected, squares(expected), reference)
    found, exact = ([*r.logprobs, *r.gradients.values()] for r in (got, want))
    assert all(torch.allclose(x, y, 1e-11, 1e-12) for x, y in zip(found, exact, strict=True))
    assert got.gradients.keys() == want.gradients.keys()


def test_a_reward_a_sequence():
    """At the last token, as transformers pools it; some end inside the tree. A pairwise loss of
    chosen and rejected sequences that share a prompt."""
    model, reference = (
        classifier(AutoModelForSequenceClassification, "qwen3", name, labels=1)
        for name in ("prefixtree", "eager")
    )
    rewards = [v[-1] for v in sequence_values(model, ragged_packed())]
    expected = [reference(torch.from_numpy(s)[None]).logits[0] for s in ragged_sequences()]

    def pairwise(found: list[torch.Tensor]) -> torch.Tensor:
        return -nn.functional.logsigmoid(torch.cat(found[::2]) - torch.cat(found[1::2])).mean()

    assert_same(
        run(rewards, pairwise(rewards), model), run(expected, pairwise(expected), reference)
    )


# PEFT asks transformers under the old name of the property
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", mostly(_CLASSES, ["sequence"]))
def test_lora(kind):
    """PEFT keeps a copy of the score layer, and trains it."""
    peft = pytest.importorskip("peft")
    task = {"token": "TOKEN_CLS", "sequence": "SEQ_CLS"}[kind]
    models = []
    for implementation in ("prefixtree", "eager"):
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type=task)
        model = peft.get_peft_model(classifier(_CLASSES[kind], "qwen3", implementation), config)
        randomise(model)
        models.append(model.train())
    values, expected = (
        sequence_values(models[0], ragged_packed()),
        alone(models[1].base_model.model),
    )
    got = run(values, squares(values), models[0])
    assert any("score" in name for name in got.gradients)
    assert_same(got, run(expected, squares(expected), models[1]))


def test_dtypes_and_no_gradients():
    model = classifier(AutoModelForSequenceClassification, "qwen3")
    with torch.no_grad():
        assert sequence_values(model.bfloat16(), ragged_packed())[0].dtype == torch.float32
        assert sequence_values(model.double(), ragged_packed())[0].dtype == torch.float64


# ---- in steps ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "kind"),
    mostly([("qwen3", "token"), ("qwen3_next", "sequence")], [("qwen3", "token")]),
)
def test_in_steps(model_type: str, kind: str) -> None:
    """A forest that is larger than the budget; one that fits takes one forward."""
    model = classifier(_CLASSES[kind], model_type)
    expected = sequence_values(model, ragged_packed())
    want = run(expected, squares(expected), model)
    want_values = [x.detach() for x in expected]
    calls = []
    for max_step_tokens in (20, 1000):
        model.zero_grad()
        with counted([model]) as forwards:
            values = sequence_values(
                model, ragged_packed(), max_step_tokens=max_step_tokens, import_cost=LIGHT
            )
            got = run(values, squares(values), model)
            calls.append(forwards())
        assert_same(got, want)
    assert calls[0] > 5 and calls[1] == 1
    with torch.no_grad():
        found = sequence_values(model, ragged_packed(), max_step_tokens=20, import_cost=LIGHT)
    torch.testing.assert_close(found, want_values, atol=1e-5, rtol=1e-5)


def test_what_steps_refuse() -> None:
    model = classifier(AutoModelForTokenClassification, "qwen3")
    with pytest.raises(ValueError, match="import_cost goes with max_step_tokens"):
        sequence_values(model, ragged_packed(), import_cost=LIGHT)
    with pytest.raises(ValueError, match="max_step_tokens must be"):
        sequence_values(model, ragged_packed(), max_step_tokens=0)
    values = sequence_values(model, ragged_packed(), max_step_tokens=20, import_cost=LIGHT)
    with torch.no_grad():
        model.score.weight.mul_(2)
    with pytest.raises(RuntimeError, match="between a call with max_step_tokens= and its backward"):
        squares(values).backward()


# ---- what is refused -----------------------------------------------------------------------------


def test_a_language_model():
    with pytest.raises(pt.UnsupportedError, match="values need a token or sequence class"):
        sequence_values(build("qwen3"), ragged_packed())
    with pytest.raises(TypeError, match="model must be a torch module, got str"):
        sequence_values("qwen3", ragged_packed())  # type: ignore[arg-type]


def test_a_classifier_has_no_log_probabilities():
    model = classifier(AutoModelForSequenceClassification, "qwen3")
    with pytest.raises(pt.UnsupportedError, match="needs a transformers model with a language"):
        sequence_logprobs(model, ragged_packed())
    output = model(**ragged_packed().model_inputs()).logits
    with pytest.raises(pt.ForestError, match=r"values must be \[T, \.\.\.\]"):
        ragged_packed().unpack(output)


def test_the_heads_own_dropout():
    config = build("qwen3", num_labels=1).config  # transformers' default is 0.1
    model = AutoModelForTokenClassification.from_config(config, attn_implementation="prefixtree")
    with pytest.raises(pt.UnsupportedError, match=r"dropout is an active dropout \(p = 0\.1\)"):
        sequence_values(model.train(), ragged_packed())
    assert len(sequence_values(model.eval(), ragged_packed())) == len(ragged_sequences())
    with pytest.raises(pt.UnsupportedError, match="in training mode alone"):
        sequence_values(model, ragged_packed(), recompute="all")
    model.dropout.p = 0.0
    unknown: Any = "some"
    with pytest.raises(ValueError, match="recompute must be None, 'auto', 'all'"):
        sequence_values(model.train(), ragged_packed(), recompute=unknown)


def test_a_forward_of_somebody_else():
    model = classifier(AutoModelForSequenceClassification, "qwen3")
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    with pytest.raises(pt.UnsupportedError, match="forward is not transformers' but comes from"):
        sequence_values(model, ragged_packed())


class Centred(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x - x.mean(-2, keepdim=True))


def test_a_score_layer_that_looks_at_neighbours():
    model = classifier(AutoModelForSequenceClassification, "qwen3")
    model.score = Centred(model.score)
    with pytest.raises(pt.UnsupportedError, match=r"the score layer \(Centred\) gives a"):
        sequence_values(model, ragged_packed())


def test_tokens_that_the_model_does_not_have():
    model = classifier(AutoModelForTokenClassification, "qwen3")
    packed = pt.pack(pt.PrefixForest.from_sequences([np.array([5, 10**6])]))
    with pytest.raises(ValueError, match="beyond the model's vocabulary"):
        sequence_values(model, packed)


def test_another_attention():
    model = classifier(AutoModelForTokenClassification, "qwen3", "eager")
    with pytest.raises(pt.UnsupportedError, match="run another attention"):
        sequence_values(model, ragged_packed())


def test_checkpoints_that_lose_gradients():
    model = classifier(AutoModelForTokenClassification, "qwen3")
    model.config.num_kv_shared_layers = 1
    enable_checkpointing(model, use_reentrant=False)
    sequence_values(model, ragged_packed())
    enable_checkpointing(model, use_reentrant=True)
    with pytest.raises(pt.UnsupportedError, match="reentrant checkpointing loses gradients"):
        sequence_values(model, ragged_packed())


def test_a_classifier_that_is_called_by_itself_gives_no_row_for_a_forest() -> None:
    """Also a copy or a pickle of a prepared one; a token classifier gives all rows, and
    a single path has one last token."""
    model, packed = (
        pt.prepare(classifier(AutoModelForSequenceClassification, "qwen3")),
        ragged_packed(),
    )
    many = packed.model_inputs()
    message = r"packed forest is one row: it gave \[1, 2\] .*\.sequence_values\(model, packed\)"
    for called in (model, pt.prepare(copy.deepcopy(model)), pickle.loads(pickle.dumps(model))):
        with pytest.raises(pt.UnsupportedError, match=message):
            called(**many)
        assert len(called._forward_hooks) == 1
    expected = pt.sequence_values(model, packed)
    one = pt.pack(pt.PrefixForest.from_sequences([ragged_sequences()[0]]))
    torch.testing.assert_close(model(**one.model_inputs()).logits[0], expected[0][-1])
    tokens = pt.prepare(classifier(AutoModelForTokenClassification, "qwen3"))(**many).logits
    assert tokens.shape == (1, packed.num_tokens, 2)
