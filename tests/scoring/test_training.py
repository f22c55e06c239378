"""One model that trains on packed forests and generates; steps of an optimizer; what is saved."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from packaging import version
from transformers import AutoModelForCausalLM

import prefixtree as pt
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.support.alike import skip_if_repeated
from tests.support.full import each_once, in_turn, mostly
from tests.support.models import (
    EVERY_TIME,
    FAMILIES,
    TRANSFORMERS,
    VOCABULARY,
    Objective,
    assert_same,
    build,
    enable_checkpointing,
    gradients,
    make_objective,
    mostly_full,
    pack_sequences,
    ragged_objective,
    ragged_sequences,
    ready,
    run_packed,
    run_replicated,
    same_bits,
)

# ---- one model that generates and trains ---------------------------------------------------------

_PROMPTS = torch.from_numpy(np.random.default_rng(1).integers(3, VOCABULARY, (2, 11)))
_PADDING = torch.ones_like(_PROMPTS)
_PADDING[0, :4] = 0  # on the left, as generation wants it


def _generate(model: Any, **options: Any) -> Any:
    return model.generate(
        _PROMPTS,
        max_new_tokens=7,
        min_new_tokens=7,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )


def _same_generation(got: Any, expected: Any) -> None:
    assert torch.equal(got.sequences, expected.sequences)
    for ours, theirs in zip(got.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("model_type", "padded"), in_turn(mostly_full(FAMILIES), [False, True]))
def test_generate(model_type, padded):
    """Windows are shorter than the prompts, and softcaps and sinks take part."""
    skip_if_repeated(model_type, EVERY_TIME)
    options = {"attention_mask": _PADDING} if padded else {}
    model = pt.prepare(build(model_type)).eval()
    if model_type == "deepseek_v4" or (padded and model_type == "minimax_m3_vl_text"):
        # transformers' own functions of attention differ there
        with pytest.raises(pt.UnsupportedError, match="are not verified under"):
            _generate(model, **options)
        return
    got = _generate(model, **options)
    model.set_attn_implementation("eager")
    expected = _generate(model, **options)
    _same_generation(got, expected)


_GENERATING = {
    "static cache": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "beams and padding": {"use_cache": True, "num_beams": 2, "attention_mask": _PADDING},
}


@pytest.mark.parametrize("way, model_type", each_once(_GENERATING, ["llama", "qwen3", "mistral"]))
def test_other_ways_to_generate(model_type, way):
    options = _GENERATING[way]
    model = pt.prepare(build(model_type)).eval()
    got = _generate(model, **options)
    model.set_attn_implementation("sdpa")
    _same_generation(got, _generate(model, **options))


_BATCHES: dict[str, dict[str, Any]] = {
    "no mask": {},
    "mask without padding": {"attention_mask": torch.ones_like(_PADDING)},
    "padding": {"attention_mask": _PADDING},
    "static cache": {"cache_implementation": "static"},
    "static cache and padding": {"cache_implementation": "static", "attention_mask": _PADDING},
}


@pytest.mark.parametrize(
    "batch, model_type", each_once(_BATCHES, ["qwen3", "gemma3_text", "mistral", "qwen3_5"])
)
def test_an_ordinary_batch_gets_what_sdpa_gets(model_type, batch, monkeypatch):
    """The same calls of torch's attention: those without a mask run its fast kernels, which read
    grouped heads as they are."""
    right = torch.nn.functional.scaled_dot_product_attention
    calls: list[Any] = []

    def noted(query: Any, key: Any, value: Any, attn_mask: Any = None, **more: Any) -> Any:
        # a window is the same for all rows
        mask = None if attn_mask is None else (attn_mask.dtype, attn_mask.shape[2:])
        calls.append((query.shape, key.shape, mask, sorted(more.items(), key=str)))
        return right(query, key, value, attn_mask=attn_mask, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    model = pt.prepare(build(model_type)).eval()
    got = _generate(model, **_BATCHES[batch])
    ours, calls = calls, []
    model.set_attn_implementation("sdpa")
    _same_generation(got, _generate(model, **_BATCHES[batch]))
    assert ours == calls and len(calls) >= 7


def test_layers_whose_heads_have_sinks_generate_with_a_static_cache():
    """Through the family's own attention, which takes a mask in any case."""
    for model_type in ("gpt_oss", "gemma2"):
        model = pt.prepare(build(model_type)).eval()
        got = _generate(model, cache_implementation="static")
        model.set_attn_implementation("eager")
        _same_generation(got, _generate(model, cache_implementation="static"))


_IN_INFERENCE_MODE = {
    "pack": lambda packed, model: pack_sequences(ragged_sequences()),
    "micro-batch": lambda packed, model: pt.plan_micro_batches(packed.forest, 999)[0][0].packed,
    "options": lambda packed, model: packed.with_options(deterministic=True),
    "copy": lambda packed, model: copy.deepcopy(packed),
    "pickle": lambda packed, model: pickle.loads(pickle.dumps(packed)),
    "pickled micro-batch": lambda packed, model: (
        pickle.loads(pickle.dumps(pt.plan_micro_batches(packed.forest, 999)[0][0])).packed
    ),
    "scores": lambda packed, model: sequence_logprobs(model, packed) and packed,
}


@pytest.mark.parametrize("step", _IN_INFERENCE_MODE)
def test_a_forest_from_inference_mode_trains_later(step):
    """As where a reference model scores a batch before the update."""
    model, objective = build("gpt_oss"), ragged_objective()
    want = run_packed(model, pack_sequences(objective.sequences), objective)
    before = pack_sequences(objective.sequences)
    with torch.inference_mode():
        packed = _IN_INFERENCE_MODE[step](before, model)
    assert same_bits(run_packed(model, packed, objective), want)


def test_generating_between_updates_changes_nothing():
    """In training mode too, as TRL does it."""
    model, reference = build("gemma2"), build("gemma2", "eager")
    packed = pack_sequences(ragged_objective().sequences)
    run_packed(model, packed, ragged_objective())
    _same_generation(_generate(model), _generate(reference))
    assert_same(
        run_packed(model, packed, ragged_objective()), run_replicated(reference, ragged_objective())
    )


def test_a_batch_without_gradients_is_as_under_sdpa():
    model = build("qwen2").eval()
    with torch.no_grad():
        got = model(_PROMPTS, attention_mask=_PADDING).logits
        model.set_attn_implementation("sdpa")
        expected = model(_PROMPTS, attention_mask=_PADDING).logits
    torch.testing.assert_close(got[_PADDING == 1], expected[_PADDING == 1])


def _without_mask(packed: pt.PackedForest) -> dict[str, Any]:
    inputs = packed.model_inputs()
    del inputs["tree_mask"]
    return inputs


@pytest.mark.parametrize(("model_type", "use_cache"), in_turn(mostly_full(FAMILIES), [False, True]))
def test_a_forest_without_its_mask_never_runs(model_type, use_cache):
    """With gradients nothing without a mask runs; without, the positions give it away."""
    packed = pack_sequences(ragged_objective().sequences)
    inputs = {**_without_mask(packed), "use_cache": use_cache}
    model = ready(build(model_type))
    with pytest.raises(ValueError, match=r"needs the forest's mask.*packed\.model_inputs\(\)"):
        model(**inputs)
    # or the family does not even pass the positions to its attention
    message = (
        r"position_ids jump.*packed\.model_inputs\(\)|does not pass position_ids to its attention"
        r"|whose keys are compressed, are not verified"
    )
    with torch.no_grad(), pytest.raises((ValueError, pt.UnsupportedError), match=message):
        model(**inputs)
    # an ordinary batch does not train either
    for batch in ({}, {"attention_mask": _PADDING}, {"attention_mask": torch.ones_like(_PADDING)}):
        with pytest.raises(ValueError, match=r"needs the forest's mask|no attention_mask"):
            model(_PROMPTS, **batch)


def test_a_forest_with_an_attention_mask_instead_of_its_own():
    packed = pack_sequences(ragged_objective().sequences)
    inputs = {**_without_mask(packed), "use_cache": True}
    inputs["attention_mask"] = torch.ones(1, packed.num_tokens, dtype=torch.long)
    for kind in ("2-D", "4-D", "additive"):
        if kind == "4-D":
            inputs["attention_mask"] = torch.ones(1, 1, *[packed.num_tokens] * 2).tril().bool()
        elif kind == "additive":
            inputs["attention_mask"] = (~inputs["attention_mask"]).float() * -1e9
        with torch.no_grad(), pytest.raises(ValueError, match="position_ids jump"):
            build("qwen3")(**inputs)


def test_a_forest_with_both_masks_without_gradients():
    """One that hides nothing is none, as under "sdpa"."""
    packed = pack_sequences(ragged_objective().sequences)
    mask = torch.ones(1, packed.num_tokens, dtype=torch.long)
    with torch.no_grad():
        expected = build("llama")(**packed.model_inputs()).logits
        found = build("llama")(**packed.model_inputs(), attention_mask=mask).logits
    assert torch.equal(found, expected)
    mask[0, 0] = 0
    with torch.no_grad(), pytest.raises(ValueError, match="do not pass an attention_mask too"):
        build("llama")(**packed.model_inputs(), attention_mask=mask)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_does_not_train_without_the_mask(use_reentrant):
    """Reentrant checkpointing runs a layer's first forward without gradients."""
    model = build("qwen3")
    enable_checkpointing(model, use_reentrant)
    model.enable_input_require_grads()
    with pytest.raises(ValueError, match="needs the forest's mask"):
        model(_PROMPTS).logits.sum().backward()
    assert not any(p.grad is not None and p.grad.any() for p in model.model.layers.parameters())


@pytest.mark.skipif(
    version.parse("5.18") > TRANSFORMERS,
    reason="transformers <= 5.17 takes the cache away unseen, under sdpa too: wrong tokens",
)
def test_generating_where_checkpointing_takes_the_cache_away():
    """transformers < 5.24 would go on with wrong attention; ours says so. Later ones leave it."""
    model = build("qwen3")
    enable_checkpointing(model, use_reentrant=False)
    if version.parse("5.24") <= TRANSFORMERS:
        _same_generation(_generate(model), _generate(build("qwen3", "sdpa")))
    else:
        with pytest.raises(ValueError, match="Gradient checkpointing does that in training mode"):
            _generate(model)
    _same_generation(_generate(model.eval()), _generate(build("qwen3", "sdpa").eval()))


# ---- steps of an optimizer -----------------------------------------------------------------------


def _batches(count: int, seed: int = 0) -> list[Objective]:
    """Forests of different sizes."""
    rng = np.random.default_rng(seed)
    batches = []
    for i in range(count):
        sequences = ragged_sequences(seed + i)
        chosen = rng.choice(len(sequences), rng.integers(4, len(sequences) + 1), replace=False)
        batches.append(make_objective([sequences[j] for j in chosen], seed + i))
    return batches


def _backward(model: Any, objective: Objective, packed: bool) -> None:
    """Adds the gradients of one batch to what is there."""
    if packed:
        scores = sequence_logprobs(
            model,
            pack_sequences(objective.sequences),
            objective.temperatures,
            objective.loss_masks,
            return_entropy=True,
        )
        assert scores.entropy is not None
        objective.loss(scores.logprobs, scores.entropy).backward()
        return
    before = gradients(model)
    run_replicated(model, objective)
    for name, parameter in model.named_parameters():
        if name in before:
            parameter.grad += before[name]


def _distance(model: Any, reference: Any, origin: Any) -> float:
    """Norm of the difference of two models over the norm of what the reference moved."""
    pairs = zip(model.parameters(), reference.parameters(), origin.parameters(), strict=True)
    flat = [((a - b).flatten(), (b - o).flatten()) for a, b, o in pairs]
    difference, moved = (torch.cat(columns).norm() for columns in zip(*flat, strict=True))
    assert moved > 0
    return float(difference.detach() / moved.detach())


@pytest.mark.parametrize("model_type", mostly(["qwen3", "gemma2", "gpt_oss"], ["qwen3"]))
def test_three_steps_with_accumulation_and_clipping(model_type):
    """Two micro-batches a step, their joint norm clipped: the same parameters as replicated. SGD,
    since AdamW's first steps are signs, whose errors at gradients near 0 are as large as steps."""
    origin = build(model_type)
    models = copy.deepcopy(origin), copy.deepcopy(origin)
    models[1].set_attn_implementation("eager")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in models]
    norms: list[list[float]] = []
    for step in range(3):
        norms.append([])
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=True)
            for objective in _batches(2, seed=10 * step):
                _backward(model, objective, packed=model is models[0])
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert norm > 1  # so that the clipping does something
            norms[-1].append(float(norm))
            optimizer.step()
        assert norms[-1][0] == pytest.approx(norms[-1][1], rel=1e-4)
    assert _distance(models[0], models[1], origin) <= 1e-4


def test_micro_batches_add_up_to_one_batch():
    """The forest of all sequences at once, or of parts of it one after the other; and sequences
    that share a prefix may land in different parts."""
    objective = ragged_objective()
    model = build("qwen3")
    whole = run_packed(model, pack_sequences(objective.sequences), objective)
    model.zero_grad(set_to_none=True)
    for part in (slice(0, 5), slice(5, 6), slice(6, None)):
        assert objective.loss_masks is not None
        micro = Objective(
            objective.sequences[part],
            objective.temperatures[part],
            objective.loss_masks[part],
            objective.weights[part],
        )
        _backward(model, micro, packed=True)
    for name, gradient in gradients(model).items():
        error = (gradient - whole.gradients[name]).norm() / whole.gradients[name].norm()
        assert error <= 1e-5, name


@pytest.mark.full
def test_adamw_under_bfloat16_autocast():
    """Ten updates towards the same rollouts: packed learns what replicated learns."""
    objective = make_objective(ragged_sequences(), plain=True)
    models = build("qwen3"), build("qwen3", "eager")
    losses: list[list[float]] = [[], []]
    packed = pack_sequences(objective.sequences)
    for column, model in zip(losses, models, strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(10):
            with torch.autocast("cpu", torch.bfloat16):
                if model is models[0]:
                    run = run_packed(model, packed, _likelihood(objective))
                else:
                    run = run_replicated(model, _likelihood(objective))
            column.append(-float(torch.cat(run.logprobs).mean()))
            optimizer.step()
    assert losses[0][-1] < losses[0][0] - 0.5
    assert np.allclose(losses[0], losses[1], rtol=0.01)


def _likelihood(objective: Objective) -> Objective:
    total = sum(len(s) - 1 for s in objective.sequences)
    weights = [torch.tensor([-1.0 / total, 0.0]).expand(len(s) - 1, 2) for s in objective.sequences]
    return Objective(objective.sequences, objective.temperatures, None, weights)


# ---- what is saved -------------------------------------------------------------------------------

_LOAD = """
import sys
from packaging import version
from transformers import AutoModelForCausalLM
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "prefixtree":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(model.config._attn_implementation)
print(float(sum(p.double().sum() for p in model.parameters())))
"""


@pytest.mark.full
def test_save_after_training_and_load_without_prefixtree(tmp_path):
    """The saved configuration does not name the implementation, so that others can load it."""
    model = build("qwen3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    packed = pack_sequences(ragged_objective().sequences)
    run_packed(model, packed, ragged_objective())
    optimizer.step()
    model.save_pretrained(tmp_path)
    for file in tmp_path.glob("*.json"):
        assert "prefixtree" not in file.read_text(), file
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    implementation, total = done.stdout.split()[-2:]
    assert implementation == "sdpa"
    assert float(total) == float(sum(p.detach().double().sum() for p in model.parameters()))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="prefixtree")
    got = sequence_logprobs(loaded.train(), packed).logprobs
    expected = sequence_logprobs(model, packed).logprobs
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
