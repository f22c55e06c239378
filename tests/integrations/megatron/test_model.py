"""A model from `tree_spec` keeps what callers rely on: ordinary batches, checkpoints, arguments;
and the arguments of `tree_logprobs`."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec

from prefixtree import tree_attention
from prefixtree.integrations.megatron import (
    context_parallel,
    pack_batches,
    tree_logprobs,
    tree_spec,
)
from prefixtree.integrations.megatron.layers import ForestCoreAttention, ForestSelfAttention
from prefixtree.scoring.edges import SequenceScores
from tests.integrations.megatron.runs import (
    TEMPERATURE,
    VOCABULARY,
    Case,
    alone,
    build,
    columns,
    layer_spec,
    logits_of,
    make_config,
    make_sequences,
    moe,
    packed_of,
    stack_spec,
    thd,
)

CASES = {
    "gpt": Case(),
    "hybrid": Case(model="hybrid"),
    "sinks": Case({"softmax_type": "learnable"}),
    "experts": Case(moe()),
}


def plain(spec: Any) -> Any:
    return spec


def scored(*args: Any, **kwargs: Any) -> SequenceScores:
    scores = tree_logprobs(*args, **kwargs)
    assert not isinstance(scores, torch.Tensor)
    return scores


# ---- what stays ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_an_ordinary_batch_is_megatrons_bit_for_bit(name: str) -> None:
    ours, theirs = build(CASES[name]), build(CASES[name], plain)
    pack_batches(ours)
    ids = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool).triu(1)
    outputs = [model(ids, torch.arange(9).expand(2, 9), mask) for model in (ours, theirs)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.logsumexp(-1).sum().backward()
    for ours_p, theirs_p in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(ours_p.grad, theirs_p.grad)


@pytest.mark.parametrize("name", CASES)
def test_checkpoints_have_megatrons_names(name: str) -> None:
    ours, theirs = build(CASES[name]), build(CASES[name], plain)
    pack_batches(ours)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    sharded = [m.sharded_state_dict(metadata={"dp_cp_group": group}) for m in (ours, theirs)]
    assert list(sharded[0]) == list(sharded[1])
    for mine, other in zip(*(s.values() for s in sharded), strict=True):
        assert mine.key == other.key and type(mine) is type(other)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(2)
    ours.load_state_dict(theirs.state_dict())
    assert all(
        torch.equal(*both) for both in zip(*(m.parameters() for m in (ours, theirs)), strict=True)
    )


def modules_of(node: Any) -> list[Any]:
    """Every module that a spec names."""
    if isinstance(node, ModuleSpec):
        return [node.module, *modules_of(node.submodules)]
    if isinstance(node, list):
        return [m for n in node for m in modules_of(n)]
    if is_dataclass(node) and not isinstance(node, type):
        return [m for f in fields(node) for m in modules_of(getattr(node, f.name))]
    return [node] if isinstance(node, type) else []


@pytest.mark.parametrize("make", [layer_spec, stack_spec])
def test_a_spec_is_copied_and_no_class_changes(make: Any) -> None:
    spec = make(make_config(Case()))
    before = modules_of(spec)
    forward = SelfAttention.forward
    mapped = tree_spec(spec)
    assert modules_of(spec) == before and SelfAttention.forward is forward
    changed = [m for m, old in zip(modules_of(mapped), before, strict=True) if m is not old]
    assert len(changed) == 2
    assert issubclass(changed[0], ForestSelfAttention) and issubclass(changed[0], SelfAttention)
    assert issubclass(changed[1], ForestCoreAttention)
    # once more changes nothing
    assert modules_of(tree_spec(mapped)) == modules_of(mapped)


def test_specs_of_blocks_and_of_functions() -> None:
    config = make_config(Case())

    def make(config: Any, vp_stage: int | None = None) -> Any:
        """Somebody's."""
        return get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
        )

    block = tree_spec(make(config))
    assert [modules_of(x) for x in block.layer_specs] == [
        modules_of(x) for x in tree_spec(make)(config, vp_stage=None).layer_specs
    ]
    attention = block.layer_specs[0].submodules.self_attention
    assert issubclass(attention.module, ForestSelfAttention)
    assert tree_spec(make).__doc__ == "Somebody's."


def test_a_spec_that_names_its_core_by_a_spec_or_by_a_place() -> None:
    """As older specs do, and those that import late."""
    spec = get_gpt_layer_local_spec()
    attention = spec.submodules.self_attention
    core = attention.submodules.core_attention
    for named in (ModuleSpec(core), ModuleSpec((core.__module__, core.__name__))):
        attention.submodules.core_attention = named
        mapped = tree_spec(spec).submodules.self_attention.submodules.core_attention
        assert issubclass(mapped.module, ForestCoreAttention)


# ---- the arguments of tree_logprobs --------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_forests_of_all_shapes(seed: int) -> None:
    """Three tokens, so that sequences share, repeat and end inside others by chance."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 13, (14,), generator=generator).tolist()
    sequences = [torch.randint(0, 3, (n,), generator=generator).tolist() for n in lengths]
    model = build(Case({"num_layers": 2, "window_size": (3, 0)} if seed % 2 else {"num_layers": 2}))
    expected = [columns(alone(model, s, None)[0], s)[0] for s in sequences]
    found = scored(model, packed_of(sequences), TEMPERATURE).logprobs
    pack_batches(model)
    inputs = thd(sequences, gap=seed % 3)
    logits = logits_of(model(**inputs), inputs, len(sequences))
    shared = [columns(x, s)[0] for x, s in zip(logits, sequences, strict=True)]
    for want, *both in zip(expected, found, shared, strict=True):
        for got in both:
            torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def test_masks_temperatures_and_chunks() -> None:
    model, sequences = build(Case()), make_sequences()
    generator = torch.Generator().manual_seed(2)
    masks = [torch.randint(0, 2, (len(s),), generator=generator) for s in sequences]
    temperatures = [0.5 if n % 2 else 1.25 for n in range(len(sequences))]
    scores = scored(
        model, packed_of(sequences), temperatures, masks, return_entropy=True, chunk_size=7
    )
    assert scores.entropy is not None and scores.statistics == {}
    for at, (sequence, mask) in enumerate(zip(sequences, masks, strict=True)):
        logits = alone(model, sequence, None)[0] * (TEMPERATURE / temperatures[at])
        expected = [x * mask[1:] for x in columns(logits, sequence)]
        for got, want in zip((scores.logprobs[at], scores.entropy[at]), expected, strict=True):
            assert got.shape == want.shape
            torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


@pytest.mark.parametrize("asked", [True, False])
def test_megatrons_deterministic_mode(monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
    model, given = build(Case({"deterministic_mode": asked})), []

    def attend(*args: Any, deterministic: bool | None, **kwargs: Any) -> Any:
        given.append(deterministic)
        return tree_attention(*args, deterministic=deterministic, **kwargs)

    monkeypatch.setattr(context_parallel, "tree_attention", attend)
    scored(model, packed_of(make_sequences()))
    assert given == [True if asked else None] * 3


def test_without_entropies_and_gradients() -> None:
    model, packed = build(Case()).eval(), packed_of(make_sequences())
    with torch.no_grad():
        scores = scored(model, packed)
    assert scores.entropy is None and not scores.logprobs[0].requires_grad
    expected = scored(model, packed, return_entropy=True).logprobs
    assert all(torch.equal(a, b) for a, b in zip(scores.logprobs, expected, strict=True))


def test_a_model_in_bfloat16_gives_float32_scores() -> None:
    case = Case({"bf16": True, "pipeline_dtype": torch.bfloat16}, dtype=torch.bfloat16)
    bare = build(case)
    model = Float16Module(bare.config, bare)
    sequences = make_sequences()
    exact = scored(build(Case()), packed_of(sequences)).logprobs
    ours = scored(model, packed_of(sequences)).logprobs
    # of those of its own attention, which rounds too
    with torch.no_grad():
        theirs = [
            (alone(model, s, None)[0].float().log_softmax(-1)[:-1]).gather(
                1, torch.tensor(s[1:], dtype=torch.int64)[:, None]
            )[:, 0]
            for s in sequences
        ]
    assert all(x.dtype == torch.float32 for x in ours)
    error, allowed = (
        sum(float((x - y).abs().sum()) for x, y in zip(found, exact, strict=True))
        for found in (ours, theirs)
    )
    assert 0 < error < 1.5 * allowed


# ---- what callers of a shared model send and get -------------------------------------------------


def test_losses_of_a_shared_model() -> None:
    """Labels in, losses of every token out."""
    model, sequences = build(Case(tied=True)), make_sequences()
    pack_batches(model)
    inputs = thd(sequences)
    labels = inputs["input_ids"].roll(-1, 1)
    losses = model(**inputs, labels=labels)
    logits = model(**inputs)
    want = -logits.log_softmax(-1).gather(2, labels[..., None])[..., 0]
    # Megatron's cross entropy is float32
    torch.testing.assert_close(losses, want.float(), atol=1e-4, rtol=1e-6)


def test_arguments_by_position_and_padding_masks() -> None:
    model, sequences = build(Case(moe())), make_sequences()
    pack_batches(model)
    inputs = thd(sequences)
    params = inputs["packed_seq_params"]
    padding = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    padding[:, -1] = True
    by_position = model(
        inputs["input_ids"], None, None, packed_seq_params=params, padding_mask=padding
    )
    assert torch.equal(by_position, model(**inputs))
    assert by_position.shape == (*inputs["input_ids"].shape, VOCABULARY)


class ValueHead(torch.nn.Linear):
    """A critic's head, put in the output layer's place as trainers do, after `pack_batches`."""

    def forward(self, hidden: Any, weight: Any = None, runtime_gather_output: Any = None) -> Any:
        return super().forward(hidden).float(), None


def test_values_of_a_shared_critic() -> None:
    model, sequences = build(Case()), make_sequences()
    pack_batches(model)
    torch.manual_seed(1)
    model.output_layer = ValueHead(64, 1).double()
    inputs = thd(sequences)
    values = logits_of(model(**inputs), inputs, len(sequences))
    for got, sequence in zip(values, sequences, strict=True):
        torch.testing.assert_close(got, alone(model, sequence, None)[0], atol=1e-5, rtol=0)
    assert not model.output_layer._forward_pre_hooks


def test_a_shared_model_can_be_scored_too() -> None:
    model, sequences = build(Case()), make_sequences()
    before = scored(model, packed_of(sequences)).logprobs
    pack_batches(model)
    inputs = thd(sequences)
    model(**inputs)
    after = scored(model, packed_of(sequences)).logprobs
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_each_distinct_token_is_computed_once() -> None:
    model, sequences = build(Case()), make_sequences()
    pack_batches(model)
    rows = []
    model.decoder.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["hidden_states"].shape[0]),
        with_kwargs=True,
    )
    inputs = thd(sequences)
    output = model(**inputs)
    padding = inputs["packed_seq_params"].cu_seqlens_q.diff()[len(sequences) :].sum()
    distinct = packed_of(sequences).num_tokens + int(padding)
    assert rows == [distinct] and distinct < output.shape[1] / 2
    assert len(logits_of(output, inputs, len(sequences))) == len(sequences)
