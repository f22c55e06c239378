"""Every refusal, by its name and through every public way, before anything runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.transformer.attention import CrossAttention, SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import FusedMLASelfAttention, MLASelfAttention
from megatron.core.transformer.transformer_layer import TransformerLayer

from prefixtree import PrefixForest, UnsupportedError, pack
from prefixtree.errors import ForestError
from prefixtree.integrations.megatron import (
    check_model,
    pack_batches,
    refusals,
    tree_logprobs,
    tree_outputs,
    tree_spec,
)
from prefixtree.integrations.megatron.context_parallel import ForestParams, LocalForest
from prefixtree.integrations.megatron.refusals import REFUSALS, counts_tokens
from tests.integrations.megatron.runs import (
    VOCABULARY,
    Case,
    build,
    layer_spec,
    make_config,
    make_sequences,
    packed_of,
    thd,
    wrapped,
)

SEQUENCES = [[1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 4, 6]]


def score(model: Any) -> Any:
    return tree_logprobs(model, packed_of(SEQUENCES))


def share_first(model: Any) -> Any:
    return pack_batches(model)


def run_shared(model: Any) -> Any:
    """A forward of a model that was shared before it changed."""
    return model(**thd(SEQUENCES))


WAYS: dict[str, Callable[[Any], Any]] = {
    "check_model": check_model,
    "tree_logprobs": score,
    "tree_outputs": lambda model: tree_outputs(model, packed_of(SEQUENCES)),
    "pack_batches": share_first,
}


@pytest.fixture
def model() -> Any:
    return build(Case({"num_layers": 1}))


def refused_everywhere(model: Any, message: str, shared: bool = True) -> None:
    """By every public way, and in the forward of a model that was shared before."""
    for way in WAYS.values():
        with pytest.raises(UnsupportedError, match=message):
            way(model)
    if shared:
        with pytest.raises(UnsupportedError, match=message):
            run_shared(model)


# ---- settings ------------------------------------------------------------------------------------

SETTINGS: dict[str, Any] = {
    "hybrid_context_parallel": True,
    "apply_rope_fusion": True,
    "experimental_attention_variant": "dsa",
    "apply_query_key_layer_scaling": True,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "moe_input_jitter_eps": 0.01,
    "mlp_chunks_for_training": 2,
    "moe_router_fusion": True,
    "calculate_per_token_loss": True,
    "moe_router_load_balancing_type": "sinkhorn",
    "moe_expert_capacity_factor": 1.0,
    "moe_expert_rank_capacity_factor": 1.0,
    "moe_token_dropping": True,
    "moe_router_force_load_balancing": True,
    "moe_router_force_biased": 0.1,
    "mtp_num_layers": 1,
    "enable_cuda_graph": True,
    "external_cuda_graph": True,
    "cuda_graph_impl": "local",
    "tp_comm_overlap": True,
    "fp8": "hybrid",
    "fp4": "e2m1",
    "quant_recipe": {"matchers": []},
    "qk_clip": True,
    "log_max_attention_logit": True,
    "fine_grained_activation_offloading": True,
}


#: What a setting is refused together with.
BESIDE: dict[str, dict[str, Any]] = {
    "apply_rope_fusion": {"multi_latent_attention": True},
    "mlp_chunks_for_training": {"moe_z_loss_coeff": 0.01},
    "moe_router_fusion": {"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "aux_loss"},
    "calculate_per_token_loss": {"moe_z_loss_coeff": 0.01, "sequence_parallel": True},
}


def set_all(model: Any, name: str) -> None:
    for setting, value in {name: SETTINGS[name], **BESIDE.get(name, {})}.items():
        setattr(model.config, setting, value)


def test_every_refused_setting_is_tested() -> None:
    assert SETTINGS.keys() == {refusal.name for refusal in REFUSALS}
    assert len(REFUSALS) == len(SETTINGS)


@pytest.fixture
def before_0_19(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "installed", lambda: "0.18.9")


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(model: Any, name: str, before_0_19: None) -> None:
    pack_batches(model)
    set_all(model, name)
    refused_everywhere(model, rf"{name}={re.escape(repr(SETTINGS[name]))}: .*(set|use|leave) ")


@pytest.mark.parametrize("name", [refusal.name for refusal in REFUSALS if refusal.only_training])
def test_what_only_training_does_is_served_in_evaluation(
    model: Any, name: str, before_0_19: None
) -> None:
    set_all(model, name)
    score(model.eval())


@pytest.mark.parametrize("name", BESIDE)
def test_what_is_refused_together_is_served_alone(model: Any, name: str, before_0_19: None) -> None:
    set_all(model, name)
    for other in BESIDE[name]:
        setattr(model.config, other, None if "z_loss" in other else 0)
        break
    check_model(model)


def test_a_z_loss_per_token_since_0_19(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "installed", lambda: "0.19.0")
    set_all(model, "calculate_per_token_loss")
    check_model(model)


def test_auxiliary_losses_that_are_off_and_lists_of_them(model: Any) -> None:
    config = model.config
    config.moe_aux_loss_coeff, config.moe_router_load_balancing_type = 0.1, "none"
    assert not counts_tokens(config)
    config.moe_router_load_balancing_type = ["none", "seq_aux_loss"]
    assert counts_tokens(config)
    config.moe_aux_loss_coeff = [0.1, 0.0]
    assert not counts_tokens(config)
    config.moe_aux_loss_coeff = [0.0, 0.1]
    assert counts_tokens(config)


def test_a_bias_that_is_kept_counts_nothing(model: Any) -> None:
    model.config.moe_router_enable_expert_bias = True
    model.config.moe_router_bias_update_rate = 0.0
    assert not counts_tokens(model.config)
    model.config.moe_router_bias_update_rate = 1e-3
    assert counts_tokens(model.config)


@pytest.fixture
def two_ranks(model: Any) -> Any:
    """A model that takes itself for one of two context-parallel ranks."""
    model.config.context_parallel_size = 2
    model.pg_collection.cp = SimpleNamespace(size=lambda: 2)
    return model


def test_parts_of_batches(two_ranks: Any) -> None:
    check_model(two_ranks)
    with pytest.raises(UnsupportedError, match=r"pack_batches .*context_parallel_size=2.*tree_log"):
        pack_batches(two_ranks)


def test_another_group_than_the_configurations(model: Any) -> None:
    """A forest would be divided otherwise than losses and gradients are."""
    model.config.context_parallel_size = 2
    message = "context_parallel_size=2 of the configuration, and the model's group has 1 ranks"
    refused_everywhere(model, message, shared=False)


def test_megatrons_packed_batch_beside_a_forest(model: Any) -> None:
    packed = packed_of(SEQUENCES)
    params = thd(SEQUENCES)["packed_seq_params"]
    score: Any = tree_logprobs
    with pytest.raises(TypeError, match="unexpected keyword argument 'packed_seq_params'"):
        score(model, packed, packed_seq_params=params)


def test_megatrons_own_attention_of_parts() -> None:
    model = build(Case({"num_layers": 1, "context_parallel_size": 2}))
    x = torch.zeros(4, 1, 4, 32, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match="DotProductAttention has no context parallelism"):
        model.decoder.layers[0].self_attention.core_attention(x, x, x, None)


def test_a_rotary_table_that_was_cut(model: Any) -> None:
    params = ForestParams.of(LocalForest(packed_of(SEQUENCES)))
    with pytest.raises(RuntimeError, match="has 4 rows, and the longest sequence 5 tokens"):
        params.at_depths(torch.zeros(4, 1, 1, 8))


def test_positions_of_images(model: Any) -> None:
    model.position_embedding_type = "mrope"
    refused_everywhere(model, "position_embedding_type='mrope'", shared=False)


def test_multi_token_prediction(model: Any) -> None:
    model.mtp_process = True
    refused_everywhere(model, "multi-token prediction", shared=False)


def test_a_window_that_sees_later_tokens() -> None:
    with pytest.raises(UnsupportedError, match=r"window_size=\(4, 1\)"):
        build(Case({"num_layers": 1, "window_size": (4, 1)}))


def test_a_window_without_a_limit_is_none() -> None:
    model = build(Case({"num_layers": 1, "window_size": (-1, 0)}))
    assert model.decoder.layers[0].self_attention.core_attention._forest_window is None


# ---- layers --------------------------------------------------------------------------------------


def test_a_model_without_the_spec() -> None:
    """Megatron's own attention would read the forest as one sequence."""
    plain = build(Case({"num_layers": 2}), lambda spec: spec)
    message = r"decoder\.layers\.0\.self_attention is a SelfAttention, .* tree_spec"
    refused_everywhere(plain, message, shared=False)
    refused_everywhere(wrapped(plain), message, shared=False)


@pytest.mark.parametrize("part", ["embedding", "decoder"])
def test_a_foreign_part_of_the_model(model: Any, part: str) -> None:
    """An embedding that looks at the tokens before, say."""
    pack_batches(model)
    setattr(model, part, _empty(ForeignLayer))
    refused_everywhere(model, rf"{part} is a .*ForeignLayer, expected one of Megatron's")


def test_one_layer_without_the_spec() -> None:
    model, plain = (build(Case({"num_layers": 2}), wrap) for wrap in (tree_spec, lambda s: s))
    pack_batches(model)
    model.decoder.layers[1] = plain.decoder.layers[1]
    refused_everywhere(model, r"decoder\.layers\.1\.self_attention is a SelfAttention")


def test_a_core_attention_without_the_spec(model: Any) -> None:
    """As Megatron-Bridge puts its own there for attention_backend=local."""
    pack_batches(model)
    attention = model.decoder.layers[0].self_attention
    attention.core_attention = (
        build(Case({"num_layers": 1}), lambda spec: spec)
        .decoder.layers[0]
        .self_attention.core_attention
    )
    refused_everywhere(model, r"self_attention\.core_attention is a DotProductAttention")


class OtherAttention(SelfAttention):
    """Somebody's, which may attend otherwise."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class OtherCore(DotProductAttention):
    """Somebody's, which may have another window or scale."""


@pytest.mark.parametrize("where", ["attention", "core"])
def test_subclasses_that_may_attend_otherwise(where: str) -> None:
    def other(spec: Any) -> Any:
        attention = spec.submodules.self_attention
        if where == "attention":
            changed = replace(attention, module=OtherAttention)
        else:
            changed = replace(
                attention, submodules=replace(attention.submodules, core_attention=OtherCore)
            )
        return tree_spec(replace(spec, submodules=replace(spec.submodules, self_attention=changed)))

    model = build(Case({"num_layers": 1}), other)
    refused_everywhere(model, "OtherAttention" if where == "attention" else "OtherCore", False)


def _empty(kind: type) -> Any:
    """A module of a class, of which only the class is looked at."""
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    module.core_attention = None
    return module


class ForeignLayer(torch.nn.Module):
    """Somebody's layer."""


class OtherLayer(TransformerLayer):
    """Somebody's subclass."""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ForeignLayer, "ForeignLayer, expected Megatron's TransformerLayer"),
        (OtherLayer, "OtherLayer, expected Megatron's TransformerLayer"),
    ],
)
def test_other_layers(model: Any, kind: type, message: str) -> None:
    pack_batches(model)
    model.decoder.layers[0] = _empty(kind)
    refused_everywhere(model, rf"decoder\.layers\.0 is .*{message}")


@pytest.mark.parametrize(
    ("part", "kind", "message"),
    [
        ("self_attention", FusedMLASelfAttention, "FusedMLASelfAttention, which reads"),
        ("self_attention", MLASelfAttention, "MLASelfAttention, which reads"),
        ("self_attention", GatedDeltaNet, "a layer of the gated delta rule"),
        ("self_attention", ForeignLayer, "ForeignLayer, expected self-attention"),
        ("cross_attention", CrossAttention, "cross attention"),
        ("mlp", ForeignLayer, "ForeignLayer, expected one of Megatron's"),
    ],
)
def test_other_parts_of_layers(model: Any, part: str, kind: type, message: str) -> None:
    pack_batches(model)
    setattr(model.decoder.layers[0], part, _empty(kind))
    refused_everywhere(model, rf"decoder\.layers\.0\.{part} is .*{message}")


@pytest.mark.parametrize(
    ("kind", "message"),
    [(MambaMixer, "Mamba mixer, whose state"), (ForeignLayer, "ForeignLayer, expected Mamba")],
)
def test_other_mixers(model: Any, kind: type, message: str) -> None:
    pack_batches(model)
    layer = _empty(MambaLayer)
    layer.mixer = _empty(kind)
    model.decoder.layers[0] = layer
    refused_everywhere(model, rf"decoder\.layers\.0\.mixer is a .*{message}")


def test_attention_that_is_not_called(model: Any) -> None:
    """The classes do not show it, so the calls are counted."""
    pack_batches(model)
    layer = model.decoder.layers[0]
    layer._forward_attention = lambda hidden_states, *args, **kwargs: (hidden_states, None)
    for run in (score, run_shared):
        with pytest.raises(UnsupportedError, match="0 attention calls followed the forest"):
            run(model)
    del layer._forward_attention
    score(model)
    run_shared(model)


def test_attention_that_is_called_by_position(model: Any) -> None:
    attention = model.decoder.layers[0].self_attention
    forward = attention.forward

    def rope_by_position(hidden: Any, packed_seq_params: Any, **kwargs: Any) -> Any:
        rope = kwargs["rotary_pos_emb"]
        return forward(hidden, None, None, None, rope, packed_seq_params=packed_seq_params)

    def all_by_position(hidden: Any, packed_seq_params: Any, **kwargs: Any) -> Any:
        return forward(hidden, None, *[None] * 7, packed_seq_params)

    attention.forward = rope_by_position
    with pytest.raises(UnsupportedError, match="positional arguments beside a packed forest"):
        score(model)
    attention.forward = all_by_position
    with pytest.raises(UnsupportedError, match="packed_seq_params came by position"):
        score(model)


def test_an_attention_bias(model: Any) -> None:
    core = model.decoder.layers[0].self_attention.core_attention
    forward = core.forward
    core.forward = lambda *args, **kwargs: forward(
        *args, **{**kwargs, "attention_bias": torch.zeros(1)}
    )
    with pytest.raises(UnsupportedError, match="no attention_bias"):
        score(model)


# ---- models and wrappers -------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [torch.nn.Sequential, lambda model: model.decoder])
def test_other_models_and_wrappers(model: Any, wrap: Callable[[Any], Any]) -> None:
    refused_everywhere(wrap(model), "expected Megatron's GPTModel or HybridModel", shared=False)


def test_tree_spec_of_something_else() -> None:
    for other in (None, 3, TransformerLayer, "spec"):
        with pytest.raises(TypeError, match="tree_spec takes a layer spec"):
            tree_spec(other)


class OtherModel(GPTModel):
    """Somebody's, which caps its logits."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs).clamp(-30, 30)


def test_a_model_with_another_forward(model: Any) -> None:
    model.__class__ = OtherModel
    with pytest.raises(UnsupportedError, match=r"OtherModel\.forward is not Megatron's"):
        score(model)
    model.__class__ = GPTModel
    model.forward = lambda **kwargs: GPTModel.forward(model, **kwargs)
    with pytest.raises(UnsupportedError, match=r"GPTModel\.forward is not Megatron's"):
        score(model)


def test_another_output_layer(model: Any) -> None:
    model.output_layer = torch.nn.Linear(64, VOCABULARY)
    with pytest.raises(UnsupportedError, match=r"output layer is a torch\.nn\..*Linear, expected"):
        score(model)


@pytest.mark.parametrize("name", ["use_mup", "defer_embedding_wgrad_compute"])
def test_settings_of_the_output_layer(model: Any, name: str) -> None:
    setattr(model.config, name, True)
    with pytest.raises(UnsupportedError, match=f"{name}=True"):
        score(model)


def test_a_hook_that_changes_logits(model: Any) -> None:
    handle = model.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(UnsupportedError, match="changed the model's logits"):
        score(model)
    handle.remove()

    def in_place(module: Any, args: Any, output: torch.Tensor) -> None:
        output.mul_(2)

    handle = model.register_forward_hook(in_place)
    with pytest.raises(UnsupportedError, match="changed the model's logits"):
        score(model)
    handle.remove()
    handle = model.register_forward_hook(lambda module, args, output: {"logits": output})
    with pytest.raises(UnsupportedError, match="returned dict, expected scores"):
        score(model)
    handle.remove()
    score(model)
    assert "forward" not in vars(model.output_layer)


def test_an_output_layer_that_is_not_called(model: Any) -> None:
    model._postprocess = lambda hidden_states, **kwargs: hidden_states
    with pytest.raises(UnsupportedError, match="called its output layer 0 times"):
        score(model)
    pack_batches(model)
    with pytest.raises(UnsupportedError, match="did not call its output layer"):
        run_shared(model)


# ---- arguments -----------------------------------------------------------------------------------


def test_arguments_of_tree_logprobs(model: Any) -> None:
    with pytest.raises(TypeError, match="takes a packed forest, got list"):
        tree_logprobs(model, SEQUENCES)
    with pytest.raises(ForestError, match="no token ids"):
        tree_logprobs(model, pack(PrefixForest.from_parents([-1, 0, 1], [1, 1, 1])))
    with pytest.raises(ValueError, match=f"token id {VOCABULARY} is beyond"):
        tree_logprobs(model, packed_of([[1, VOCABULARY]]))
    with pytest.raises(ValueError, match="temperatures must be finite and above 0"):
        tree_logprobs(model, packed_of(SEQUENCES), 0.0)
    with pytest.raises(ForestError, match="loss_mask"):
        tree_logprobs(model, packed_of(SEQUENCES), loss_mask=[[1]])
    with pytest.raises(ValueError, match="on meta, the model on cpu"):
        tree_logprobs(model, packed_of(SEQUENCES).to("meta"))
    model.config.sequence_parallel, model.config.tensor_model_parallel_size = True, 4
    with pytest.raises(ForestError, match=r"6 packed tokens: pack\(forest, pad_to_multiple_of=4"):
        tree_logprobs(model, packed_of(SEQUENCES))


SHARED_CALLS = {
    "output_processor": {"output_processor": lambda **kwargs: None},
    "decoder_input": {"decoder_input": torch.zeros(1)},
    "inference_context": {"inference_context": object()},
    "extra_block_kwargs": {"extra_block_kwargs": {"x": 1}},
}


@pytest.mark.parametrize("name", SHARED_CALLS)
def test_calls_of_a_shared_model(model: Any, name: str) -> None:
    pack_batches(model)
    with pytest.raises(UnsupportedError, match=f"not served together with {name}"):
        model(**thd(SEQUENCES) | SHARED_CALLS[name])
    run_shared(model)


def test_batches_of_a_shared_model(model: Any) -> None:
    pack_batches(model)
    inputs = thd(SEQUENCES)
    short = inputs["input_ids"][:, :5]
    nested = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])])
    for ids, message in (
        (None, "input_ids .* on every stage of the pipeline, got None"),
        (nested, "got nested"),
        (short.expand(2, -1), r"got \[2, 5\]"),
        (short, "got input_ids of 5 tokens and sequences that end at 16"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            model(**inputs | {"input_ids": ids})
    inputs["packed_seq_params"].local_cp_size = 2
    with pytest.raises(UnsupportedError, match="local_cp_size=2"):
        model(**inputs)
    run_shared(model)


def test_sharing_twice_is_sharing_once(model: Any) -> None:
    assert pack_batches(model) is model and pack_batches([model]) == [model]
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1


def test_what_was_refused_runs_once_it_is_mended() -> None:
    """No refusal is a matter of taste: the same model, mended, gives scores."""
    config = make_config(Case({"num_layers": 1}))
    assert tree_spec(layer_spec(config)).submodules.self_attention.module is not SelfAttention
    sequences = make_sequences()
    scores = tree_logprobs(build(Case({"num_layers": 1})), packed_of(sequences))
    assert not isinstance(scores, torch.Tensor)
    assert [len(x) for x in scores.logprobs] == [len(s) - 1 for s in sequences]
