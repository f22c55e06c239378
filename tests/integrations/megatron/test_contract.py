"""The parts of Megatron that the adapter relies on, a test for each; and TransformerEngine's core
attention, by its signature, since it needs a GPU."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import megatron.core
import pytest
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.extensions import transformer_engine
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba_context_parallel import MambaContextParallel
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import FusedMLASelfAttention, MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from packaging.version import Version

from prefixtree import UnsupportedError
from prefixtree.integrations.megatron import tree_logprobs, tree_spec, version
from prefixtree.integrations.megatron.context_parallel import ForestParams, LocalForest
from prefixtree.integrations.megatron.layers import is_served_latent
from prefixtree.integrations.megatron.refusals import REFUSALS
from tests.integrations.megatron.runs import (
    Case,
    Weights,
    build,
    errors,
    make_sequences,
    packed_of,
    run_forest,
    run_replicated,
)
from tests.support.hooks import put

CORE = Path(megatron.core.__file__).parent


def names(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


# ---- versions ------------------------------------------------------------------------------------


def test_this_version_is_tested() -> None:
    first, last = (Version(v) for v in version.TESTED)
    # its sources in a repository add the commit to it
    assert first <= Version(Version(megatron.core.__version__).public) <= last


@pytest.mark.parametrize(
    ("installed", "outcome"),
    [("0.17.0", UnsupportedError), ("0.18.5", None), ("0.19.9", None), ("0.20.0", UserWarning)],
)
def test_other_versions(monkeypatch: pytest.MonkeyPatch, installed: str, outcome: Any) -> None:
    monkeypatch.setattr(version.importlib.metadata, "version", lambda name: installed)
    if outcome is UnsupportedError:
        with pytest.raises(UnsupportedError, match=f"this is {installed}: install"):
            version.check_version()
    elif outcome is UserWarning:
        with pytest.warns(UserWarning, match=f"megatron-core {installed} is newer than"):
            version.check_version()
    else:
        version.check_version()


def test_sources_on_the_path_have_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise version.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(version.importlib.metadata, "version", missing)
    assert version.installed() == megatron.core.__version__


# ---- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [GPTModel, HybridModel])
def test_arguments_of_models(kind: Any) -> None:
    arguments = names(kind.forward)
    assert {"input_ids", "position_ids", "attention_mask", "packed_seq_params"} <= set(arguments)
    assert {"decoder_input", "inference_context", "padding_mask"} <= set(arguments)


@pytest.mark.parametrize("model", ["gpt", "hybrid"])
def test_attributes_of_models(model: str) -> None:
    built = build(Case({"num_layers": 1}, model=model))
    for name in ("post_process", "vocab_size", "position_embedding_type", "mtp_process"):
        assert hasattr(built, name), name
    assert built.pg_collection.tp.size() == built.pg_collection.cp.size() == 1
    # its table is cut by the group of its own where it is given none
    assert {"packed_seq", "cp_group"} <= set(names(built.rotary_pos_emb.forward))
    assert "cp_group" in vars(built.rotary_pos_emb)
    assert len(built.decoder.layers) > 0
    layer = built.output_layer
    assert type(layer) is ColumnParallelLinear and layer.bias is None
    assert layer.tp_group.size() == 1 and layer.sequence_parallel is False


def test_the_output_layer_is_called_by_the_model_with_its_weight() -> None:
    assert names(ColumnParallelLinear.forward) == [
        *("self", "input_", "weight", "runtime_gather_output"),
    ]
    model = build(Case({"num_layers": 1}, tied=True))
    seen: list[Any] = []
    model.output_layer.register_forward_pre_hook(
        lambda layer, args, kwargs: seen.append((args, kwargs)), with_kwargs=True
    )
    model(torch.tensor([[1, 2]]), torch.tensor([[0, 1]]), torch.zeros(1, 1, 2, 2).bool())
    ((args, kwargs),) = seen
    assert [x.shape for x in args] == [(2, 1, 64)]
    assert kwargs["weight"] is model.embedding.word_embeddings.weight


def test_wrappers_have_a_module() -> None:
    assert names(DistributedDataParallel.forward)[1:] == ["inputs", "kwargs"]


# ---- attention -----------------------------------------------------------------------------------


def test_self_attention() -> None:
    assert SelfAttention.forward is Attention.forward
    arguments = names(Attention.forward)
    assert arguments[1:3] == ["hidden_states", "attention_mask"]
    assert {"rotary_pos_emb", "packed_seq_params"} <= set(arguments)


def test_latent_attention() -> None:
    """It asks its rotary embedding for a length and a table, and is called by keyword."""
    arguments = names(MLASelfAttention.get_query_key_value_tensors)
    assert arguments[1:5] == [
        *("hidden_states", "key_value_states", "position_ids", "packed_seq_params"),
    ]
    source = inspect.getsource(MLASelfAttention.get_query_key_value_tensors)
    assert set(re.findall(r"self\.rotary_pos_emb\W(\w*)", source)) == {
        *("get_rotary_seq_len", "get_cached_cos_sin", "rotary_seq_len", ""),
    }
    assert is_served_latent(MLASelfAttention) and not is_served_latent(FusedMLASelfAttention)


def test_core_attention() -> None:
    made = names(DotProductAttention.__init__)
    assert made[1:3] == ["config", "layer_number"] and "softmax_scale" in made
    called = names(DotProductAttention.forward)
    assert called[1:5] == ["query", "key", "value", "attention_mask"]
    assert {"packed_seq_params", "attention_bias"} <= set(called)


def transformer_engines(method: str) -> list[str]:
    """Parameters of a method of TEDotProductAttention, from the source: its base is missing."""
    tree = ast.parse(Path(transformer_engine.__file__).read_text())
    (kind,) = (
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "TEDotProductAttention"
    )
    (found,) = (n for n in kind.body if isinstance(n, ast.FunctionDef) and n.name == method)
    return [a.arg for a in (*found.args.args, *found.args.kwonlyargs)]


def test_transformer_engines_core_attention() -> None:
    made, called = transformer_engines("__init__"), transformer_engines("forward")
    assert made[1:3] == ["config", "layer_number"] and "softmax_scale" in made
    assert called[1:5] == ["query", "key", "value", "attention_mask"]
    assert {"packed_seq_params", "attention_bias"} <= set(called)


def test_the_format_is_compared_with_thd_alone() -> None:
    """So a forest takes the code of unpacked batches, wherever one asks for its format."""
    compared = set()
    for folder in ("transformer", "models/gpt", "models/hybrid", "models/common", "ssm"):
        for file in (CORE / folder).rglob("*.py"):
            compared |= set(re.findall(r"qkv_format *[!=]= *['\"](\w+)['\"]", file.read_text()))
    assert compared == {"thd"}


class TransformerEnginesAttention(torch.nn.Module):
    """TEDotProductAttention's signatures; it raises for formats that TransformerEngine does not
    know, and otherwise attends as Megatron's."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = "p2p",
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        self.inner = DotProductAttention(
            config,
            layer_number,
            attn_mask_type,
            attention_type,
            softmax_scale=softmax_scale,
            pg_collection=pg_collection,
        )

    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        attn_mask_type: Any,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
        num_splits: int | None = None,
    ) -> Any:
        kept = {} if packed_seq_params is None else vars(packed_seq_params)
        assert kept.get("qkv_format", "sbhd") in ("sbhd", "bshd", "thd"), "unknown qkv_format"
        return self.inner(query, key, value, attention_mask)


def test_the_stand_in_has_transformer_engines_signature() -> None:
    ours = names(TransformerEnginesAttention.__init__)
    assert set(ours) <= set(transformer_engines("__init__")) | {"num_splits"}
    assert ours[:7] == transformer_engines("__init__")[:7]
    ours = names(TransformerEnginesAttention.forward)
    assert ours[:8] == transformer_engines("forward")[:8]


def _with_core(spec: Any) -> Any:
    spec.submodules.self_attention.submodules.core_attention = TransformerEnginesAttention
    return spec


def test_a_model_with_transformer_engines_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, "core of TransformerEngine", lambda: TransformerEnginesAttention)
    case, sequences = Case({"num_layers": 2, "softmax_scale": 0.2}), make_sequences()
    weights = Weights.of(sequences)
    expected = run_replicated(build(case, _with_core), sequences, weights)
    model = build(case, lambda spec: tree_spec(_with_core(spec)))
    found = errors(run_forest(model, case, sequences, weights), expected)
    assert found.worst < 1e-13, found


def test_transformer_engine_refuses_a_forest_that_it_was_not_made_for() -> None:
    """Where somebody goes round the checks: it raises, and does not read one sequence."""
    model = build(Case({"num_layers": 1}, positions="none"), _with_core)
    packed = packed_of(make_sequences())
    inputs = {"input_ids": packed.input_ids[None], "position_ids": packed.position_ids[None]}
    with pytest.raises(AssertionError, match="unknown qkv_format"):
        model(**inputs, attention_mask=None, packed_seq_params=ForestParams.of(LocalForest(packed)))
    with pytest.raises(UnsupportedError):
        tree_logprobs(model, packed)


# ---- what stands around them ---------------------------------------------------------------------


def test_packed_parameters() -> None:
    known = {f.name for f in fields(PackedSeqParams)}
    assert {"qkv_format", "cu_seqlens_q", "cu_seqlens_q_padded", "max_seqlen_q"} <= known
    assert {"max_seqlen_kv", "local_cp_size"} <= known


@pytest.mark.parametrize("kind", [RotaryEmbedding, YarnRotaryEmbedding])
def test_the_rotary_table_has_a_row_per_position(kind: Any) -> None:
    rotary = kind(kv_channels=8, rotary_percent=1.0, use_cpu_initialization=True)
    packed = packed_of([[1, 2, 3, 4, 5], [1, 2, 6]])
    params = ForestParams.of(LocalForest(packed))
    length = rotary.get_rotary_seq_len(None, None, None, None, params)
    assert length == 5
    table = rotary(length, packed_seq=False)
    table = table[0] if isinstance(table, tuple) else table
    rows = params.at_depths((table, None))
    assert rows[1] is None and params.at_depths(table) is rows[0]
    assert torch.equal(rows[0], table[packed.position_ids])


@pytest.mark.parametrize(
    ("name", "arguments"),
    {
        "forward": ["input", "padding_mask"],
        "apply_z_loss": ["logits", "padding_mask"],
        "_apply_aux_loss": ["probs", "scores_for_aux_loss", "routing_map", "with_padding_mask"],
        "_apply_global_aux_loss": [
            *("probs", "scores_for_aux_loss", "routing_map", "with_padding_mask"),
        ],
        "_apply_seq_aux_loss": [
            *("probs", "scores_for_aux_loss", "routing_map", "seq_length", "bsz"),
            "with_padding_mask",
        ],
        "_apply_expert_bias": ["routing_map", "padding_mask"],
    }.items(),
)
def test_routers(name: str, arguments: list[str]) -> None:
    assert names(getattr(TopKRouter, name))[1:] == arguments
    assert "valid_token_count" in names(TopKRouter.attach_and_log_load_balancing_loss)


def test_layers_with_a_state() -> None:
    """The gated delta rule calls a convolution by the name of its module, and a rule of its own;
    Mamba's training is one method."""
    code = GatedDeltaNet.forward.__code__
    assert "causal_conv1d" in code.co_names and "gated_delta_rule" in code.co_names
    assert "causal_conv1d" in GatedDeltaNet.forward.__globals__ and not code.co_freevars
    assert "packed_seq_params" in names(GatedDeltaNet.forward)
    assert names(MambaMixer._ssm_training) == ["self", "zxBCdt", "packed_seq_params"]
    assert "_ssm_training" in MambaMixer.forward.__code__.co_names
    # a copy of a mixer takes itself for the only context-parallel rank
    assert "cp_size" in code.co_names and "pg_collection" in code.co_names
    for method in ("pre_conv_ssm", "_slice_conv_param", "_slice_vector_param"):
        assert "cp_size" in getattr(MambaContextParallel, method).__code__.co_names


def test_layers_of_experts_have_a_router_in_their_submodules() -> None:
    assert {f.name for f in fields(MoESubmodules)} >= {"router", "experts"}
    assert MoESubmodules(experts=None).router is TopKRouter
    assert names(MoELayer.forward)[1:] == ["hidden_states", "intermediate_tensors", "padding_mask"]


def test_windows() -> None:
    assert names(is_layer_window_attention) == [
        *("window_size", "window_attn_skip_freq", "layer_number"),
    ]


def test_regions_of_sequence_parallelism() -> None:
    gathered = names(gather_from_sequence_parallel_region)
    assert gathered[:2] == ["input_", "tensor_parallel_output_grad"] and "group" in gathered
    assert "group" in names(scatter_to_sequence_parallel_region)


def test_refused_settings_exist() -> None:
    """A setting that was renamed would no longer be refused."""
    known = {f.name for f in fields(TransformerConfig)}
    assert {refusal.name for refusal in REFUSALS} <= known
    for name in ("use_mup", "defer_embedding_wgrad_compute", "window_size", "softmax_type"):
        assert name in known
