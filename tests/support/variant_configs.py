"""Further proofs of verified families, as tiny configurations, and what other tests must know of a
family."""

from __future__ import annotations

from typing import Any

from tests.support.family_configs import (
    DEEPSEEK,
    FAMILIES,
    GEMMA3N,
    GEMMA4,
    GEMMA4_UNIFIED,
    HIDDEN,
    SHARED_KV,
    TINY,
)

# further proofs of a family, named FAMILY/WHAT
VARIANTS: dict[str, dict[str, Any]] = {
    "deepseek_v2/grouped": {**DEEPSEEK, "topk_method": "group_limited_greedy"},
    "gemma3n_text/shared keys": {
        **GEMMA3N,
        **SHARED_KV,
        "activation_sparsity_pattern": (0.5, 0.0, 0.0, 0.0),
    },
    "gemma4_text/shared keys": {**GEMMA4, **SHARED_KV},
    "gemma4_text/keys as values": {
        **GEMMA4,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "gemma4_text/experts": {
        **GEMMA4,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
    "gemma4_unified_text/shared keys": {
        **GEMMA4_UNIFIED,
        **SHARED_KV,
        "use_double_wide_mlp": True,
    },
    "gemma4_unified_text/keys as values": {
        **GEMMA4_UNIFIED,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    # public checkpoints of ministral3 are so
    "mistral3/of ministral3": {
        **FAMILIES["mistral3"],
        "text_config": {**TINY, **FAMILIES["ministral3"], "model_type": "ministral3"},
    },
    "opt/norm after": {
        "ffn_dim": 48,
        "dropout": 0.0,
        "word_embed_proj_dim": HIDDEN,
        "do_layer_norm_before": False,
    },
}

# model types of parts, which need no separate proof: their wholes are proven
PARTS = {
    "glm4v_text": "glm4v",
    "qwen2_5_vl_text": "qwen2_5_vl",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_5_text": "qwen3_5",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
    "qwen3_vl_text": "qwen3_vl",
}

# families whose forward computes a load-balancing loss
WITH_ROUTER_LOSS = (
    "deepseek_v4",
    "ernie4_5_moe",
    "flex_olmo",
    "flint",
    "gpt_oss",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "jetmoe",
    "laguna",
    "mellum",
    "minimax_m2",
    "minimax_m3_vl_text",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_5_moe",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_vl_moe",
)


# Older transformers give these families no positions, or an attention mask, or call their layers
# with indexers otherwise: they are refused there.
REFUSED_BELOW = {
    **dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"), "5.23"),
    "ministral3": "5.23",
    "opt": "5.23",
}
# transformers checkpoints no layer of these
CANNOT_CHECKPOINT = {"jetmoe"}
# older transformers cannot run these at all
BROKEN_BELOW = {
    "deepseek_v2/grouped": "5.17",
    # in training it asks for token_type_ids
    "gemma3": "5.17",
    "mistral3/of ministral3": REFUSED_BELOW["ministral3"],
}
# older transformers do not hand their keywords to the loss: labels= goes unseen there
LABELS_UNSEEN_BELOW = {"glm46v": "5.17", "glm4v": "5.17", "qwen3_vl": "5.17"}
