"""Tiny configurations of the verified families whose layers carry a state, as `family_configs`.

Each has layers with states on both sides of an attention layer, so that states are read by
attention and attention by states; head counts of keys and values, groups and head sizes differ
where they may.
"""

from __future__ import annotations

from typing import Any

# older versions of transformers do not hand recurrent layers the tree: refused there
OLDEST_WITH_STATES = "5.17"
SINCE = {"lara_mini": "5.24", "lfm2": "5.23", "lfm2_moe": "5.23", "lfm3": "5.23"}

# tuples: transformers changes lists of layer types in place
_DELTA_LAYERS = {
    "num_hidden_layers": 4,
    "layer_types": (
        "linear_attention",
        "linear_attention",
        "full_attention",
        "linear_attention",
    ),
}
_DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    # what the rule reads of one token is one direction: its norm would blow up rounding
    "rms_norm_eps": 1e-3,
    **_DELTA_LAYERS,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
_KIMI = {
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "rms_norm_eps": 1e-3,
    **_DELTA_LAYERS,
}
_SSD = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_CONV = {
    "num_hidden_layers": 4,
    "layer_types": ("conv", "conv", "full_attention", "conv"),
    "conv_L_cache": 3,
    "block_multiple_of": 8,
}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
_TEXT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
}

_LAYERS = list(_DELTA_LAYERS["layer_types"])

HYBRIDS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {
        **_KIMI,
        "num_local_experts": 4,
        "first_k_dense_replace": 1,
        "head_dim": 8,
        "num_mtp_layers": 0,
    },
    "bamba": {**_SSD, "num_hidden_layers": 4, "attn_layer_indices": [2]},
    "falcon_h1": {
        **_SSD,
        "head_dim": 16,
        "mamba_d_ssm": 64,
        "lm_head_multiplier": 0.6,
        "embedding_multiplier": 1.3,
        "key_multiplier": 0.8,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.9,
        "ssm_in_multiplier": 1.4,
        "ssm_out_multiplier": 0.7,
        "mlp_multipliers": (1.1, 0.9),
        "ssm_multipliers": (0.8, 1.2, 0.9, 1.1, 0.7),
    },
    "granitemoehybrid": {
        **_SSD,
        "num_hidden_layers": 4,
        "layer_types": ("mamba", "mamba", "attention", "mamba"),
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "embedding_multiplier": 1.3,
        "logits_scaling": 1.7,
        "residual_multiplier": 0.8,
        "attention_multiplier": 0.3,
    },
    "kimi_linear": {
        **_KIMI,
        "head_dim": 8,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "n_routed_experts": 4,
        "num_experts": 4,
        "num_experts_per_token": 2,
    },
    "lfm2": {**_CONV},
    "lfm2_moe": {
        **_CONV,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "num_dense_layers": 1,
    },
    "lara_mini": {
        **_DELTA,
        **_EXPERTS,
        "sliding_window": 6,
        "layer_types": (
            "linear_attention",
            "sliding_attention",
            "linear_attention",
            "full_attention",
        ),
    },
    "lfm3": {
        "num_hidden_layers": 5,
        "layer_types": (
            "conv",
            "sliding_attention",
            "conv",
            "full_attention",
            "conv",
        ),
        "head_dim": 16,
        "sliding_window": 6,
        "conv_L_cache": 5,
        "conv_bias": True,
        "attention_bias": True,
    },
    "nemotron_h": {
        "head_dim": 16,
        "num_hidden_layers": 5,
        "layers_block_type": (
            "linear_attention",
            "mlp",
            "full_attention",
            "linear_attention",
            "moe",
        ),
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 12,
        "conv_kernel": 4,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
        "n_group": 1,
        "topk_group": 1,
    },
    "olmo_hybrid": {**_DELTA, "linear_num_key_heads": 4, "linear_allow_neg_eigval": True},
    "qwen3_5": {
        "text_config": {**_TEXT, **_DELTA, **_MROPE, "layer_types": _LAYERS},
        "vision_config": {**_VISION},
    },
    "qwen3_5_moe": {
        "text_config": {**_TEXT, **_DELTA, **_EXPERTS, **_MROPE, "layer_types": _LAYERS},
        "vision_config": {**_VISION},
    },
    "qwen3_next": {**_DELTA, **_EXPERTS, "decoder_sparse_step": 1},
    "zamba2": {
        "num_hidden_layers": 4,
        "hybrid_layer_ids": [2],
        "layer_types": ("linear_attention", "linear_attention", "hybrid", "linear_attention"),
        "num_key_value_heads": 4,
        "attention_head_dim": 16,
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "mamba_d_state": 12,
        "mamba_expand": 2,
        "mamba_headdim": 8,
        "chunk_size": 16,
        "num_mem_blocks": 1,
        "use_mem_rope": True,
        "adapter_rank": 4,
    },
}
