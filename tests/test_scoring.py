"""`sequence_logprobs` beyond the families: temperatures, masks, memory, heads, wrappers, dtypes."""

from __future__ import annotations

import copy
import types
import weakref
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from models import (
    HIDDEN,
    VOCABULARY,
    Objective,
    Run,
    assert_same,
    build,
    counted,
    enable_checkpointing,
    errors,
    gradients,
    make_objective,
    ragged_sequences,
    run_packed,
    run_replicated,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import prefixtree as pt
from prefixtree.integrations import scoring
from prefixtree.integrations.transformers import SequenceScores, sequence_logprobs


@cache
def _objective() -> Objective:
    return make_objective(ragged_sequences())


@cache
def _packed() -> pt.PackedForest:
    return _pack(_objective().sequences)


def _pack(sequences: Any) -> pt.PackedForest:
    return pt.pack(pt.PrefixForest.from_sequences(sequences))


def _replicated(model: Any, objective: Objective | None = None) -> Run:
    """The reference of a model that runs prefixtree: a copy of it, eager."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    return run_replicated(model, objective or _objective())


def _same_bits(a: Run, b: Run) -> bool:
    assert a.gradients.keys() == b.gradients.keys()
    pairs = [*zip(a.logprobs, b.logprobs, strict=True), *zip(a.entropy, b.entropy, strict=True)]
    pairs += [(a.gradients[name], b.gradients[name]) for name in a.gradients]
    return all(torch.equal(x, y) for x, y in pairs)


# ---- what comes back -----------------------------------------------------------------------------


def test_shapes_dtypes_and_zeros():
    objective = _objective()
    for dtype in (torch.float32, torch.bfloat16):
        scores = sequence_logprobs(
            build("qwen3").to(dtype),
            _packed(),
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
    assert sequence_logprobs(build("qwen3"), _packed()).entropy is None


def test_the_defaults_are_temperature_1_and_every_token():
    objective = make_objective(ragged_sequences(), plain=True)
    model = build("qwen3")
    model.zero_grad()
    scores = sequence_logprobs(model, _packed())
    zeros = [torch.zeros_like(p) for p in scores.logprobs]
    objective.loss(scores.logprobs, zeros).backward()
    with_entropy = run_packed(model, _packed(), objective)
    reference = _replicated(model, objective)
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
    run = run_packed(model, _pack(sequences), objective)
    assert [len(p) for p in run.logprobs] == [len(s) - 1 for s in sequences]
    if max(map(len, sequences)) > 1:
        assert_same(run, _replicated(model, objective))
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
        _packed(),
        loss_mask=[np.zeros(len(s)) for s in _objective().sequences],
        return_entropy=True,
    )
    assert not any(v.any() for v in [*scores.logprobs, *scores.entropy])
    torch.cat([*scores.logprobs, *scores.entropy]).sum().backward()
    assert gradients(model).keys() == dict(model.named_parameters()).keys()
    assert not any(g.any() for g in gradients(model).values())


def test_under_no_grad():
    model = build("gpt_oss")
    with torch.no_grad():
        scores = sequence_logprobs(model, _packed(), return_entropy=True)
    expected = sequence_logprobs(model, _packed(), return_entropy=True)
    for got, want in zip(
        [*scores.logprobs, *scores.entropy], [*expected.logprobs, *expected.entropy], strict=True
    ):
        assert not got.requires_grad and torch.equal(got, want)
    with torch.inference_mode():
        sequence_logprobs(model, _packed())


# ---- temperatures, masks, entropy ----------------------------------------------------------------


@pytest.fixture
def scored_rows(monkeypatch) -> list[int]:
    """Rows that the head scores, a call each."""
    rows: list[int] = []

    def spy(hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows.append(len(hidden))
        return original(hidden, *rest)

    original = scoring.linear_logprobs
    monkeypatch.setattr(scoring, "linear_logprobs", spy)
    return rows


def _distinct(objective: Objective) -> int:
    """Distinct (path, temperature) among the scored tokens, by a set of Python tuples."""
    masks = objective.loss_masks or [np.ones(len(s)) for s in objective.sequences]
    return len(
        {
            (tuple(tokens[: i + 1]), temperature)
            for tokens, temperature, mask in zip(
                objective.sequences, objective.temperatures, masks, strict=True
            )
            for i in range(1, len(tokens))
            if mask[i]
        }
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("temperature", ["one", "equal", "two", "all different"])
def test_each_distinct_edge_and_temperature_is_scored_once(temperature, masked, scored_rows):
    objective = _objective()
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
        given = sequence_logprobs(model, _packed(), temperature=0.8, loss_mask=masks)
        expected = _replicated(model, objective).logprobs
        for got, want in zip(given.logprobs, expected, strict=True):
            torch.testing.assert_close(got.detach(), want, atol=2e-6, rtol=1e-5)
    else:
        assert_same(run_packed(model, _packed(), objective), _replicated(model, objective))
    assert scored_rows == [_distinct(objective)]


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_temperatures_of_every_kind(kind):
    model, temperatures = build("qwen3"), _objective().temperatures
    expected = sequence_logprobs(model, _packed(), temperature=temperatures).logprobs
    got = sequence_logprobs(model, _packed(), temperature=kind(temperatures)).logprobs
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    "kind",
    [
        np.ndarray.tolist,
        lambda m: m.astype(bool),
        lambda m: m.astype(np.float32) * 0.25,
        torch.from_numpy,
        lambda m: torch.from_numpy(m).bool(),
    ],
    ids=["list", "bool", "float", "tensor", "bool tensor"],
)
def test_loss_masks_of_every_kind(kind):
    """Nonzero selects; weights belong into the loss."""
    model, masks = build("qwen3"), _objective().loss_masks
    expected = sequence_logprobs(model, _packed(), loss_mask=masks).logprobs
    got = sequence_logprobs(model, _packed(), loss_mask=[kind(m) for m in masks]).logprobs
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_the_first_entry_of_a_loss_mask_is_ignored():
    model, masks = build("qwen3"), _objective().loss_masks
    expected = sequence_logprobs(model, _packed(), loss_mask=masks).logprobs
    for first in (0, 1):
        other = [np.concatenate([[first], m[1:]]) for m in masks]
        got = sequence_logprobs(model, _packed(), loss_mask=other).logprobs
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("temperatures", [[1.0, 1.0], [1.0, 0.5]], ids=["equal", "different"])
def test_a_shared_token_scored_in_one_sequence_only(temperatures):
    """The other sequence gets 0 there, and no gradient flows back from it."""
    sequences = [np.array([5, 6, 7, 8, 9]), np.array([5, 6, 7, 8, 4])]
    masks = [np.array([1, 1, 1, 1, 1]), np.array([1, 0, 0, 1, 1])]
    model, packed = build("llama"), _pack(sequences)
    scores = sequence_logprobs(
        model, packed, temperature=temperatures, loss_mask=masks, return_entropy=True
    )
    assert scores.logprobs[1][:2].tolist() == scores.entropy[1][:2].tolist() == [0.0, 0.0]
    assert (scores.logprobs[0] < 0).all() and (scores.logprobs[1][2:] < 0).all()
    (scores.logprobs[1][:2].sum() + scores.entropy[1][:2].sum()).backward()
    assert not any(g.any() for g in gradients(model).values())
    weights = [torch.randn(4, 2) for _ in sequences]
    objective = Objective(sequences, temperatures, masks, weights)
    assert_same(run_packed(model, packed, objective), _replicated(model, objective))


def test_entropy_alone_has_the_right_gradient():
    objective = _objective()
    weights = [w * torch.tensor([0.0, 1.0]) for w in objective.weights]
    alone = Objective(objective.sequences, objective.temperatures, objective.loss_masks, weights)
    model = build("gemma3_text")
    run = run_packed(model, _packed(), alone)
    reference = _replicated(model, alone)
    assert_same(run, reference)
    assert all(g.any() for g in reference.gradients.values())


# ---- same results however it is packed -----------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [1, 2, 50, 10**6, None])
def test_the_chunk_size_changes_nothing(chunk_size):
    model = build("qwen3_moe")
    run = run_packed(model, _packed(), _objective(), chunk_size)
    found = errors(run, run_packed(model, _packed(), _objective(), 7))
    assert found.largest <= 1e-6, found


@pytest.mark.parametrize("multiple", [2, 64, 1024])
@pytest.mark.parametrize("model_type", ["mistral", "qwen3_moe", "gpt_oss"])
def test_padding_changes_nothing(multiple, model_type):
    model = build(model_type)
    packed = pt.pack(_packed().forest, pad_to_multiple_of=multiple)
    assert packed.num_tokens % multiple == 0 and packed.num_padding > 0
    found = errors(run_packed(model, packed, _objective()), _replicated(model))
    assert found.largest <= 1e-5, found


def test_the_order_of_siblings_changes_nothing():
    model = build("mistral")
    packed = pt.pack(pt.PrefixForest.from_sequences(_objective().sequences, order="input"))
    assert not torch.equal(packed.input_ids, _packed().input_ids)
    assert_same(run_packed(model, packed, _objective()), _replicated(model))


def test_without_sharing_it_is_document_packing():
    sequences = ragged_sequences()
    objective = make_objective(sequences)
    packed = pt.pack(pt.PrefixForest.from_sequences(sequences, keys=list(range(len(sequences)))))
    assert packed.num_tokens == sum(map(len, sequences))
    model = build("mistral")
    assert_same(run_packed(model, packed, objective), _replicated(model, objective))


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_the_masks_options_reach_every_layer(backend):
    model = build("gemma2")
    packed = _packed().with_options(backend=backend, deterministic=True)
    assert_same(run_packed(model, packed, _objective()), _replicated(model))


@pytest.mark.parametrize("model_type", ["qwen3", "gpt_oss"])
def test_two_runs_are_equal_to_the_bit(model_type):
    model = build(model_type)
    first = run_packed(model, _packed(), _objective())
    assert _same_bits(first, run_packed(model, _packed(), _objective()))
    assert _same_bits(first, run_packed(model, _pack(_objective().sequences), _objective()))


def test_gradients_accumulate_over_calls():
    """Two forests before one step, and two losses on one call's scores."""
    model = build("qwen3")
    once = run_packed(model, _packed(), _objective()).gradients
    scores = sequence_logprobs(
        model, _packed(), _objective().temperatures, _objective().loss_masks, True
    )
    _objective().loss(scores.logprobs, scores.entropy).backward()
    for name, gradient in gradients(model).items():
        assert (gradient - 2 * once[name]).norm() <= 2e-5 * once[name].norm(), name


# ---- memory and work -----------------------------------------------------------------------------


class _LogitRows(TorchDispatchMode):
    """Remembers the most rows of any tensor [..., V] but a weight, whatever makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.ndim > 1 and x.shape[-1] == VOCABULARY:
                # [d, V] is the transposed weight
                rows = 0 if x.shape[0] == HIDDEN else x.numel() // VOCABULARY
                self.most = max(self.most, rows)
        return out


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("head", ["plain", "adapter"])
def test_logits_are_never_more_than_a_chunk(head, checkpointing):
    model = build("gemma2", tie_word_embeddings=False)
    if head == "adapter":
        model.lm_head = AdaptedHead(model.lm_head)
    if checkpointing:
        enable_checkpointing(model, use_reentrant=False)
    with _LogitRows() as rows:
        run_packed(model, _packed(), _objective(), chunk_size=5)
    assert rows.most == 5
    with _LogitRows() as rows:  # and the recorder does see what an eager model makes
        _replicated(model)
    assert rows.most == max(map(len, _objective().sequences))


@pytest.mark.parametrize("head", ["plain", "adapter"])
def test_no_logits_are_kept_for_the_backward(head):
    """They are made again there, chunk by chunk: chunks that all stay alive save nothing."""
    model = build("gemma2", tie_word_embeddings=False)
    if head == "adapter":
        model.lm_head = AdaptedHead(model.lm_head)
    saved: list[tuple[int, ...]] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        sequence_logprobs(model, _packed(), return_entropy=True, chunk_size=5)
    assert len(saved) > 50
    # [d, V] is the transposed weight
    assert [s for s in saved if len(s) > 1 and s[-1] == VOCABULARY and s[0] != HIDDEN] == []


def test_the_packed_tokens_are_not_all_given_to_the_head():
    """Only the predictors' hidden states reach it."""
    model = build("qwen3")
    masks = [np.zeros(len(s)) for s in _objective().sequences]
    masks[0][-3:] = 1
    seen = []
    handle = model.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    sequence_logprobs(model, _packed(), loss_mask=masks)
    handle.remove()
    assert seen == [(1, 3, HIDDEN)]


@pytest.mark.parametrize("head", ["plain", "adapter"])
def test_the_decoder_runs_once(head):
    model = build("qwen3")
    if head == "adapter":
        model.lm_head = AdaptedHead(model.lm_head)
    with counted([model.model]) as decoder, counted(model.model.layers) as layers:
        run_packed(model, _packed(), _objective(), chunk_size=2)
        assert decoder() == 1 and layers() == len(model.model.layers)


def test_no_graph_is_kept_alive():
    """Neither the model nor its head holds on to a call's tensors."""
    model, outputs = build("qwen3"), []
    handle = model.model.layers[1].register_forward_hook(
        lambda module, args, output: outputs.append(weakref.ref(output))
    )
    scores = sequence_logprobs(model, _packed())
    handle.remove()
    assert outputs[0]() is not None
    del scores
    assert outputs[0]() is None


# ---- the model is as it was ----------------------------------------------------------------------


def _hooks(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Every hook and every attribute of every module."""
    return {
        name: (
            dict(module._forward_hooks),
            dict(module._forward_pre_hooks),
            dict(module._backward_hooks),
            vars(module).get("forward"),
            set(vars(module)),
        )
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("head_has_its_own_forward", [False, True])
@pytest.mark.parametrize("broken", [None, "layer", "head", "backward"])
def test_nothing_stays_behind(broken, head_has_its_own_forward):
    model = build("qwen3")
    if head_has_its_own_forward:
        model.lm_head.forward = types.MethodType(nn.Linear.forward, model.lm_head)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("broken on purpose")

    if broken == "layer":
        model.model.layers[1].mlp.forward = fail
    elif broken == "head":
        model.lm_head.register_forward_pre_hook(fail)
    before = _hooks(model)
    if broken in ("layer", "head"):
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            sequence_logprobs(model, _packed())
    else:
        scores = sequence_logprobs(model, _packed())
        if broken == "backward":
            torch.cat(scores.logprobs).register_hook(fail)
            bad = torch.cat(scores.logprobs)
            bad.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                bad.sum().backward()
        else:
            torch.cat(scores.logprobs).sum().backward()
    assert _hooks(model) == before


def test_the_model_serves_ordinary_batches_afterwards():
    model = build("qwen3")
    ids = torch.from_numpy(_objective().sequences[0])[None]
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        expected = model(ids).logits
        model.set_attn_implementation("prefixtree")
        sequence_logprobs(model, _packed())
        model.set_attn_implementation("sdpa")
        assert torch.equal(model(ids).logits, expected)
        assert model.eval().generate(ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]


def test_save_and_load(tmp_path):
    model = build("gemma3_text")
    expected = sequence_logprobs(model, _packed()).logprobs
    names = set(model.state_dict())
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="prefixtree")
    assert set(loaded.state_dict()) == names
    got = sequence_logprobs(loaded.train(), _packed()).logprobs
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.config._attn_implementation != "prefixtree"


# ---- heads ---------------------------------------------------------------------------------------


class AdaptedHead(nn.Module):
    """A low-rank adapter around the head, which stays inside as `base_layer`, as PEFT has it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(3)
        self.base_layer = base
        self.down = nn.Parameter(torch.randn(4, base.in_features, generator=g) * 0.3)
        self.up = nn.Parameter(torch.randn(base.out_features, 4, generator=g) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + x @ self.down.t() @ self.up.t()


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


@pytest.mark.parametrize("frozen_base", [False, True])
@pytest.mark.parametrize("adapter", [AdaptedHead, LinearWithAdapter])
@pytest.mark.parametrize("model_type", ["qwen3", "gemma2"])
def test_a_head_with_an_adapter(model_type, adapter, frozen_base, scored_rows):
    model = build(model_type)
    model.requires_grad_(not frozen_base)
    model.lm_head = adapter(model.lm_head)
    run = run_packed(model, _packed(), _objective())
    assert scored_rows == []  # not the path of a plain linear head
    reference = _replicated(model)
    assert any("down" in name for name in reference.gradients)
    assert_same(run, reference)


def test_a_head_with_a_bias(scored_rows):
    model = build("qwen3")
    head = nn.Linear(HIDDEN, VOCABULARY)
    nn.init.normal_(head.bias)
    model.lm_head = head
    run = run_packed(model, _packed(), _objective())
    assert len(scored_rows) == 1 and run.gradients["lm_head.bias"].any()
    assert_same(run, _replicated(model))


@pytest.mark.parametrize("model_type", ["qwen3", "llama", "gemma2"])
def test_tied_embeddings(model_type):
    model = build(model_type, tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same(run_packed(model, _packed(), _objective()), _replicated(model))


def test_a_frozen_head_and_a_frozen_decoder():
    for frozen in ("lm_head", "model"):
        model = build("qwen3")
        getattr(model, frozen).requires_grad_(False)
        run = run_packed(model, _packed(), _objective())
        assert not any(name.startswith(frozen) for name in run.gradients)
        assert_same(run, _replicated(model))


def test_a_parametrised_head():
    """The weight is computed anew at each access: its gradient must reach the original."""
    model = build("qwen3")

    class Halve(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 0.5

    nn.utils.parametrize.register_parametrization(model.lm_head, "weight", Halve())
    assert_same(run_packed(model, _packed(), _objective()), _replicated(model))


def test_a_head_with_its_own_forward():
    """As accelerate's hooks leave it: an attribute of the instance, honoured and put back."""
    model = build("qwen3")
    calls = []

    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape)
        return 0.5 * nn.functional.linear(x, self.weight)

    model.lm_head.forward = own = types.MethodType(forward, model.lm_head)
    run = run_packed(model, _packed(), _objective())
    assert calls and model.lm_head.forward is own
    reference_model = build("qwen3")
    reference_model.lm_head.forward = types.MethodType(forward, reference_model.lm_head)
    reference_model.set_attn_implementation("eager")
    assert_same(run, run_replicated(reference_model, _objective()))


def test_a_hook_on_the_head_that_changes_logits_is_not_ignored():
    """Silently wrong otherwise: honoured or refused, but not passed over."""
    model = build("qwen3")
    model.lm_head.register_forward_hook(lambda module, args, output: output * 0.5)
    reference_model = build("qwen3", "eager")
    reference_model.lm_head.register_forward_hook(lambda module, args, output: output * 0.5)
    try:
        run = run_packed(model, _packed(), _objective())
    except pt.UnsupportedError:
        return
    assert_same(run, run_replicated(reference_model, _objective()))


# ---- wrappers ------------------------------------------------------------------------------------


class Wrapper(nn.Module):
    """A module around the model that calls it, as trainers have them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class ForwardWrapper(Wrapper):
    """As PEFT does it: around the module's hooks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.forward(*args, **kwargs)


@pytest.mark.parametrize("wrap", [Wrapper, ForwardWrapper, lambda m: Wrapper(ForwardWrapper(m))])
@pytest.mark.parametrize("model_type", ["qwen3", "gemma2"])
def test_a_module_around_the_model(wrap, model_type):
    model = build(model_type)
    expected = run_packed(model, _packed(), _objective())
    wrapper = wrap(model)
    run = run_packed(wrapper, _packed(), _objective())
    names = {name: name.replace("inner.", "") for name in run.gradients}
    got = Run(run.logprobs, run.entropy, {names[n]: g for n, g in run.gradients.items()})
    assert _same_bits(got, expected)


def test_a_forward_that_was_wrapped_on_the_instance():
    """As accelerate's `prepare` does for mixed precision: it must be called, and stay."""
    model = build("qwen3")
    expected = run_packed(model, _packed(), _objective())
    calls, inner = [], model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs.keys())
        return inner(*args, **kwargs)

    model.forward = forward
    assert _same_bits(run_packed(model, _packed(), _objective()), expected)
    assert len(calls) == 1 and model.forward is forward


@pytest.fixture(scope="module")
def process_group(tmp_path_factory):
    """A group of one process, gloo."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


_DDP = {
    "plain": {},
    "find unused": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "bucket view": {"gradient_as_bucket_view": True},
}


# torch's DDP itself does not combine a search for unused parameters with reentrant checkpointing
_DDP_CASES = [
    (options, checkpointing)
    for options in _DDP
    for checkpointing in ("none", "reentrant", "non-reentrant")
    if (options, checkpointing) != ("find unused", "reentrant")
]


@pytest.mark.parametrize(("options", "checkpointing"), _DDP_CASES)
@pytest.mark.parametrize("model_type", ["qwen3", "gemma2"])
@pytest.mark.usefixtures("process_group")
def test_distributed_data_parallel(model_type, options, checkpointing):
    """Every gradient goes through the reduction, which here triples it: one that went around it
    would be right on a single process and wrong, without an error, on two."""
    model = build(model_type)
    expected = run_packed(model, _packed(), _objective())
    if checkpointing != "none":
        enable_checkpointing(model, checkpointing == "reentrant")
    wrapper = nn.parallel.DistributedDataParallel(model, **_DDP[options])

    def reduce(state, bucket):  # DDP looks at annotations, and takes no strings
        future = torch.futures.Future()
        future.set_result(bucket.buffer() * 3)
        return future

    wrapper.register_comm_hook(None, reduce)
    for _ in range(3):  # static graphs differ between the first step and later ones
        run = run_packed(wrapper, _packed(), _objective())
        for name, gradient in expected.gradients.items():
            got = run.gradients["module." + name]
            torch.testing.assert_close(got, 3 * gradient, rtol=1e-5, atol=1e-6, msg=name)
        assert all(torch.equal(a, b) for a, b in zip(run.logprobs, expected.logprobs, strict=True))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("head", ["in the root", "sharded alone", "adapter"])
@pytest.mark.usefixtures("process_group")
# torch's, about its own hooks
@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
def test_fully_sharded_data_parallel(head, checkpointing):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def make() -> Any:
        model = build("qwen3")
        if head == "adapter":
            model.lm_head = AdaptedHead(model.lm_head)
        return model

    expected = run_packed(make(), _packed(), _objective())
    model = make()
    if checkpointing:
        enable_checkpointing(model, use_reentrant=False)
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if head == "sharded alone":
        fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        run = run_packed(model, _packed(), _objective())
        for name, gradient in expected.gradients.items():
            got = run.gradients[name].full_tensor()
            torch.testing.assert_close(got, gradient, rtol=1e-5, atol=1e-6, msg=name)


# ---- compiled ------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["qwen3", "gpt_oss"])
# dynamo's own look at .grad of its inputs
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_layers(model_type):
    """One graph for every forest, without a break."""
    model = build(model_type)
    expected = run_packed(model, _packed(), _objective())
    attention = model.model.layers[1].self_attn
    attention.forward = torch.compile(attention.forward, backend="eager", fullgraph=True)
    assert errors(run_packed(model, _packed(), _objective()), expected).largest <= 1e-6
    torch._dynamo.reset()


# ---- precision -----------------------------------------------------------------------------------


def _no_worse_than_eager(run: Run, eager: Run, reference: Run) -> None:
    """Mean errors against the float32 run of the same weights at most twice eager's own, plus a
    little: gradients by the norm over all parameters and of each large one."""

    def mean(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
        return float((torch.cat(a).float() - torch.cat(b)).abs().mean())

    def distance(a: Run, names: Any) -> float:
        return (
            sum(
                float((a.gradients[n].float() - reference.gradients[n].float()).norm()) ** 2
                for n in names
            )
            ** 0.5
        )

    for kind in ("logprobs", "entropy"):
        ours, theirs = (mean(getattr(r, kind), getattr(reference, kind)) for r in (run, eager))
        assert torch.cat(getattr(run, kind)).isfinite().all()
        assert ours <= 2 * theirs + 1e-3, (kind, ours, theirs)
    names = reference.gradients.keys()
    assert run.gradients.keys() == eager.gradients.keys() == names
    total = sum(float(g.norm()) ** 2 for g in reference.gradients.values()) ** 0.5
    ours, theirs = distance(run, names) / total, distance(eager, names) / total
    assert ours <= 2 * theirs + 1e-3, (ours, theirs)
    for name in names:
        ours, theirs = distance(run, [name]) / total, distance(eager, [name]) / total
        assert ours <= 2 * theirs + 2e-3, (name, ours, theirs)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "gemma2", "mistral", "gpt_oss"])
def test_bfloat16(model_type):
    model = build(model_type).bfloat16()
    run = run_packed(model, _packed(), _objective())
    assert {g.dtype for g in run.gradients.values()} == {torch.bfloat16}
    reference = _replicated(copy.deepcopy(model).float())
    _no_worse_than_eager(run, _replicated(model), reference)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("head", ["plain", "adapter"])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "gemma2", "deepseek_v3"])
def test_autocast(model_type, head, checkpointing):
    """float32 weights under bfloat16 autocast: rotary embeddings leave q and k in float32 and v in
    bfloat16, which eager and sdpa take."""
    model = build(model_type)
    if head == "adapter":
        model.lm_head = AdaptedHead(model.lm_head)
    reference = _replicated(model)
    with torch.autocast("cpu", torch.bfloat16):
        eager = _replicated(model)
        if checkpointing:
            enable_checkpointing(model, use_reentrant=False)
        run = run_packed(model, _packed(), _objective())
    assert {g.dtype for g in run.gradients.values()} == {torch.float32}
    _no_worse_than_eager(run, eager, reference)
