"""Settings of a Megatron model under which a forest would not give the replicated batch's results,
or which were not compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from packaging.version import Version

from prefixtree.errors import Refusal, refuse
from prefixtree.integrations.megatron.version import installed


def check_config(config: Any, training: bool, mtp: bool) -> None:
    """Refuses a configuration, with the first reason; `MTP` says what else `mtp` rules out."""
    before = "packed forests are not served with {name}={value!r}: "
    rows = [row for row in REFUSALS if not (mtp and row.name == "mtp_num_layers")]
    refuse(rows, config, before, training=training)


def _get(name: str, default: Any = None) -> Callable[[Any], Any]:
    return lambda config: getattr(config, name, default)


def _balancing(config: Any) -> list[str]:
    kinds = getattr(config, "moe_router_load_balancing_type", "none")
    return [kinds] if isinstance(kinds, str) else list(kinds)


def _auxiliary(config: Any) -> bool:
    """Whether a kind of balancing that is a loss has a coefficient."""
    kinds, given = _balancing(config), getattr(config, "moe_aux_loss_coeff", 0)
    coefficients = given if isinstance(given, (list, tuple)) else [given] * len(kinds)
    return any(c and kind in _LOSSES for kind, c in zip(kinds, coefficients, strict=False))


def _balances_by_batch(config: Any) -> bool:
    """Whether the experts of a token depend on other tokens of the batch."""
    return not set(_balancing(config)) <= {"none", *_LOSSES}


def _updates_bias(config: Any) -> bool:
    return bool(
        getattr(config, "moe_router_enable_expert_bias", False)
        and getattr(config, "moe_router_bias_update_rate", 0)
    )


def counts_tokens(config: Any) -> bool:
    """Whether routers take sums over tokens in training: for a loss, or an expert's bias."""
    return bool(_auxiliary(config) or _get("moe_z_loss_coeff")(config) or _updates_bias(config))


def _loses_z_loss(config: Any) -> bool:
    """Whether the z loss's sum is too small, as ranks scale it by their own tokens (< 0.19)."""
    return bool(
        _get("calculate_per_token_loss")(config)
        and _get("moe_z_loss_coeff")(config)
        and _get("sequence_parallel")(config)
        and Version(installed()) < Version("0.19")
    )


_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
_DROPS = "which tokens an expert drops depends on the tokens beside them; "

#: Every setting that is refused, in the order of the checks.
REFUSALS = (
    Refusal(
        "hybrid_context_parallel",
        _get("hybrid_context_parallel"),
        "groups would change between micro-batches; set it to False",
    ),
    Refusal(
        "apply_rope_fusion",
        lambda c: _get("apply_rope_fusion")(c) and _get("multi_latent_attention")(c),
        "the fused rotary embedding of latent attention was not compared; set it to False",
    ),
    Refusal(
        "experimental_attention_variant",
        lambda c: _get("experimental_attention_variant")(c) not in (None, "gated_delta_net"),
        "this attention does not follow a forest; leave it at None or 'gated_delta_net'",
    ),
    Refusal(
        "apply_query_key_layer_scaling",
        _get("apply_query_key_layer_scaling"),
        "tree attention does not divide scores by a layer's number; set it to False",
    ),
    Refusal(
        "attention_dropout",
        _get("attention_dropout"),
        "tree attention has no dropout; set it to 0, or call model.eval()",
        only_training=True,
    ),
    Refusal(
        "hidden_dropout",
        _get("hidden_dropout"),
        "the copies of a shared token would drop the same values; set it to 0, or call "
        "model.eval()",
        only_training=True,
    ),
    Refusal(
        "moe_input_jitter_eps",
        _get("moe_input_jitter_eps"),
        "the copies of a shared token would share their noise; set it to None",
        only_training=True,
    ),
    Refusal(
        "mlp_chunks_for_training",
        lambda c: _get("mlp_chunks_for_training", 1)(c) > 1 and counts_tokens(c),
        "routers with losses would not know the tokens of their chunk; set it to 1",
        only_training=True,
    ),
    Refusal(
        "moe_router_fusion",
        lambda c: _get("moe_router_fusion")(c) and counts_tokens(c),
        "fused routers with losses were not compared; set it to False",
        only_training=True,
    ),
    Refusal(
        "calculate_per_token_loss",
        _loses_z_loss,
        "this Megatron divides the z loss by the number of ranks; install megatron-core>=0.19, or "
        "set moe_z_loss_coeff to None",
        only_training=True,
    ),
    Refusal(
        "moe_router_load_balancing_type",
        _balances_by_batch,
        "the experts of a token would depend on the tokens beside it; use 'none'",
    ),
    Refusal(
        "moe_expert_capacity_factor",
        lambda c: getattr(c, "moe_expert_capacity_factor", None) is not None,
        f"{_DROPS}set it to None",
    ),
    Refusal(
        "moe_expert_rank_capacity_factor",
        lambda c: getattr(c, "moe_expert_rank_capacity_factor", None) is not None,
        f"{_DROPS}set it to None",
    ),
    Refusal("moe_token_dropping", _get("moe_token_dropping"), f"{_DROPS}set it to False"),
    Refusal(
        "moe_router_force_load_balancing",
        _get("moe_router_force_load_balancing"),
        "it routes tokens at random; set it to False",
    ),
    Refusal(
        "moe_router_force_biased",
        lambda c: getattr(c, "moe_router_force_biased", None) is not None,
        "it routes tokens at random; set it to None",
    ),
    Refusal(
        "mtp_num_layers",
        _get("mtp_num_layers"),
        "multi-token prediction is scored by tree_logprobs(..., mtp=True) alone; set it to None",
    ),
    Refusal(
        "enable_cuda_graph",
        _get("enable_cuda_graph"),
        "CUDA graphs replay fixed shapes; set it to False",
    ),
    Refusal(
        "external_cuda_graph",
        _get("external_cuda_graph"),
        "CUDA graphs replay fixed shapes; set it to False",
    ),
    Refusal(
        "cuda_graph_impl",
        lambda c: getattr(c, "cuda_graph_impl", "none") not in ("none", None),
        "CUDA graphs replay fixed shapes; set it to 'none'",
    ),
    Refusal(
        "tp_comm_overlap",
        _get("tp_comm_overlap"),
        "its buffers hold a fixed number of tokens; set it to False",
    ),
    Refusal("fp8", _get("fp8"), "FP8 was not compared; set it to None"),
    Refusal("fp4", _get("fp4"), "FP4 was not compared; set it to None"),
    Refusal(
        "quant_recipe",
        _get("quant_recipe"),
        "recipes that quantise some layers were not compared; set it to None",
    ),
    Refusal(
        "qk_clip",
        _get("qk_clip"),
        "tree attention does not record the largest score that clipping needs; set it to False",
    ),
    Refusal(
        "log_max_attention_logit",
        _get("log_max_attention_logit"),
        "tree attention does not record the largest score; set it to False",
    ),
    Refusal(
        "fine_grained_activation_offloading",
        _get("fine_grained_activation_offloading"),
        "it frees tensors that attention saves, which was not compared; set it to False",
    ),
)


#: Settings that multi-token prediction is not verified with, and what to set them to.
_ALONE = {
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "sequence_parallel": False,
}


def _is_parallel(asked: Any) -> Any:
    others = [name for name, fine in _ALONE.items() if getattr(asked.config, name, fine) != fine]
    return others and {"setting": others[0], "fine": _ALONE[others[0]]}


#: Refusals of layers of multi-token prediction (`mtp=True`), of `AskedLayers`.
MTP = (
    # first, as stages before the last have no block
    Refusal(
        "parallelism",
        _is_parallel,
        "mtp=True is not verified with pipeline, context or sequence parallelism; set {setting} to "
        "{fine}",
    ),
    Refusal(
        "mtp_block_spec",
        lambda asked: not asked.has_block,
        "mtp=True needs a model with layers of multi-token prediction; give GPTModel "
        "mtp_block_spec, or leave mtp out",
    ),
    Refusal(
        "foreign code",
        lambda asked: not asked.is_megatrons,
        "layers of multi-token prediction are verified with Megatron's GPTModel and its own block "
        "and layers; use these, or leave mtp out",
    ),
    Refusal(
        "state",
        lambda asked: asked.has_state,
        "a layer of mtp has a state, which would begin before the tokens that it reads; give the "
        "block a spec with self-attention",
    ),
    Refusal(
        "routes",
        lambda asked: asked.has_routes,
        "recorded routes are of the model's own layers, and mtp has routers too; make the forest "
        "without routes, or leave mtp out",
    ),
    Refusal(
        "recompute_granularity",
        lambda asked: asked.config.recompute_granularity == "full",
        "mtp=True is not verified with full recomputation; set recompute_granularity='selective'",
        only_training=True,
    ),
    Refusal(
        "router losses",
        lambda asked: counts_tokens(asked.config),
        "losses of routers and updates of their biases are not verified with mtp=True, whose "
        "routers see fewer tokens; set their coefficients to 0",
        only_training=True,
    ),
)
