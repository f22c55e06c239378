"""Tiny configurations of every verified family, the only place that lists them in the tests.

Each turns on what is special about its family (windows, softcaps, sinks, multipliers, biases, MLA,
experts, partial rotary) and off what is refused (dropout). Windows are far shorter than the trees
are deep (40 tokens); some family uses each allowed RoPE kind.
"""

from __future__ import annotations

from typing import Any

from tests.support.hybrid_configs import HYBRIDS

VOCABULARY = 97
HIDDEN = 32

TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _rope(kind: str = "default", **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **more}


_LLAMA3 = _rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
_YARN = _rope("yarn", factor=32.0, original_max_position_embeddings=16)
# tuples: transformers changes lists of layer types in place
_SLIDING = {
    "sliding_window": 6,
    "layer_types": ("sliding_attention", "full_attention", "sliding_attention"),
}
# layers from max_window_layers on slide
_LATE_SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# experts chosen within the best of two groups, one shared by all tokens
_GROUPS = {
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
}
_ROUTED = {**_GROUPS, "n_routed_experts": 6, "n_shared_experts": 1}
_FIRST_DENSE = {"mlp_layer_types": ("dense", "sparse", "sparse")}
# D = 24, Dv = 12
_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
# an indexer of 24 heads, more than one needs so that no two scores are equal: ties have a test of
# their own (tests/sparse/test_indexers.py). Paths are up to 40 tokens long
_INDEXED = {
    **_MLA,
    **_GROUPS,
    "n_routed_experts": 6,
    **_FIRST_DENSE,
    "index_topk": 7,
    "index_head_dim": 16,
    "index_n_heads": 24,
}
_SHARED_INDICES = {"indexer_types": ("full", "shared", "full")}
_MULTIPLIERS = {
    "embedding_multiplier": 1.3,
    "logits_scaling": 1.7,
    "residual_multiplier": 0.8,
    "attention_multiplier": 0.3,
}
_BIASES = {"attention_bias": True, "mlp_bias": True}
# sinks everywhere; the last layer turns no positions in
_GRANITE_SWA = {
    **_MULTIPLIERS,
    **_SLIDING,
    "attention_bias": True,
    "layer_rope_theta": (10000.0, 100.0, 0.0),
}
_GEMMA3 = {
    "head_dim": 16,
    **_SLIDING,
    "query_pre_attn_scalar": 24,
    "final_logit_softcapping": 4.0,
    "rope_parameters": {
        "full_attention": _rope("linear", factor=8.0),
        "sliding_attention": _rope(),
    },
}
GEMMA3N = {
    "head_dim": 16,
    **_SLIDING,
    "final_logit_softcapping": 3.0,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "laurel_rank": 4,
    "activation_sparsity_pattern": (0.5, 0.0, 0.0),
}
# unlike its sliding layers, the full ones have D = 16
GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    **_SLIDING,
    "final_logit_softcapping": 3.0,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
}
GEMMA4_UNIFIED = {
    "head_dim": 8,
    "global_head_dim": 16,
    **_SLIDING,
    "final_logit_softcapping": 3.0,
    # as real checkpoints have it: of images only
    "use_bidirectional_attention": "vision",
}
SHARED_KV = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 1,
    "layer_types": ("sliding_attention", "full_attention") * 2,
}
DEEPSEEK = {**_MLA, **_ROUTED, "first_k_dense_replace": 1, "attention_bias": True}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "patch_size": 4,
}
# of models whose images are refused
_OTHER_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_MINISTRAL3 = {
    "head_dim": 16,
    "sliding_window": 6,
    "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1},
}

FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {
        "head_dim": 16,
        **_SLIDING,
        **_EXPERTS,
        "num_shared_experts": 1,
        "num_dense_layers": 1,
        "route_scale": 1.5,
        "mup_enabled": True,
    },
    "apertus": {"hidden_act": "xielu", "rope_parameters": _LLAMA3},
    "apertus1p5_text": {"output_vocab_size": None},
    "arcee": {"head_dim": 16, **_BIASES, "rope_parameters": _YARN},
    "aria_text": {**_BIASES, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "axk1": {
        **_MLA,
        **_ROUTED,
        **_FIRST_DENSE,
        "attention_bias": True,
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    },
    "axk2": {
        **_INDEXED,
        "gated_norm_rank": 4,
        "n_routed_experts": 4,
        "n_group": None,
        "topk_group": None,
        "n_shared_experts": 1,
        "attention_bias": True,
    },
    # the full layer turns no positions in
    "beam": {
        "head_dim": 16,
        **_SLIDING,
        **_GROUPS,
        **_FIRST_DENSE,
        "num_experts": 6,
        "attention_bias": True,
        "final_logit_softcapping": 3.0,
    },
    "bitnet": {"attention_bias": True},
    "cohere": {"logit_scale": 0.3, "use_qk_norm": True, "attention_bias": True},
    "cohere2": {"logit_scale": 0.3, "head_dim": 16, **_SLIDING},
    "cohere2_moe": {
        "logit_scale": 0.3,
        "head_dim": 16,
        **_SLIDING,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "cwm": {"head_dim": 16, **_SLIDING, "rope_parameters": _LLAMA3},
    "deepseek_v2": {
        **DEEPSEEK,
        "n_routed_experts": 4,
        "topk_method": "greedy",
        "n_group": None,
        "topk_group": None,
    },
    "deepseek_v3": {
        **DEEPSEEK,
        "n_routed_experts": 8,
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    },
    "deepseek_v32": {
        **_INDEXED,
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    },
    # windows of 3 and of 5 tokens of a path; sinks, YaRN where keys are compressed
    "deepseek_v4": {
        "head_dim": 16,
        "num_key_value_heads": 1,
        "q_lora_rank": 16,
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": (
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ),
        "compress_rates": {
            "compressed_sparse_attention": 3,
            "heavily_compressed_attention": 5,
        },
        "mlp_layer_types": ("hash_moe", "moe", "moe"),
        "hc_mult": 2,
        "sliding_window": 4,
        "o_groups": 2,
        "o_lora_rank": 8,
        "index_topk": 3,
        "index_head_dim": 16,
        "index_n_heads": 24,
        "partial_rotary_factor": 0.5,
        "rope_parameters": _YARN,
    },
    "dots1": {"head_dim": 16, **_ROUTED, **_SLIDING, "first_k_dense_replace": 1},
    "dots3_note_text": {
        **_INDEXED,
        "layer_types": ("indexed_attention", "sliding_attention", "indexed_attention"),
        "sliding_window": 6,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 20,
        "swa_head_dim": 20,
        "swa_qk_nope_head_dim": 12,
        "swa_v_head_dim": 10,
        "head_dim": 24,
        "shared_experts_intermediate_size": 16,
    },
    "ernie4_5": {"head_dim": 16, "use_bias": True},
    "ernie4_5_moe": {
        "head_dim": 16,
        "use_bias": True,
        "moe_intermediate_size": 24,
        "moe_k": 2,
        "moe_num_experts": 4,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
    },
    "exaone": {"head_dim": 16, "rope_parameters": _LLAMA3},
    "exaone4": {"head_dim": 16, **_SLIDING},
    "exaone_moe": {
        "head_dim": 16,
        **_SLIDING,
        **_GROUPS,
        **_FIRST_DENSE,
        "num_experts": 6,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "flint": {
        "head_dim": 16,
        **_SLIDING,
        **_EXPERTS,
        "attention_bias": True,
        "mlp_only_layers": [0],
        "shared_expert_intermediate_size": 24,
    },
    "gemma": {"head_dim": 16},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 6,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {"text_config": {**TINY, **_GEMMA3}, "vision_config": _OTHER_VISION},
    "gemma3_text": _GEMMA3,
    "gemma3n_text": GEMMA3N,
    "gemma4": {
        "text_config": {**TINY, **GEMMA4},
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "patch_size": 4,
            "position_embedding_size": 16,
        },
        "audio_config": None,
    },
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4_UNIFIED,
    "glm": {"head_dim": 16, **_BIASES, "rope_parameters": _rope(partial_rotary_factor=0.5)},
    "glm4": {"head_dim": 16, **_BIASES, "rope_parameters": _rope(partial_rotary_factor=0.5)},
    "glm4_moe": {
        "head_dim": 16,
        **_ROUTED,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "rope_parameters": _rope(partial_rotary_factor=0.5),
    },
    "glm46v": {
        "text_config": {
            **TINY,
            "model_type": "glm4v_text",
            "hidden_size": 64,
            "rope_parameters": _rope(mrope_section=[1, 2, 1], partial_rotary_factor=0.5),
        },
        "vision_config": {
            **_VISION,
            "model_type": "glm4v_vision",
            "out_hidden_size": 64,
            "image_size": 16,
        },
    },
    "glm4_moe_lite": {**_MLA, **_ROUTED, **_FIRST_DENSE, "attention_bias": True},
    "glm_moe_dsa": {**_INDEXED, **_SHARED_INDICES, "n_shared_experts": 1},
    "gpt2": {
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "scale_attn_by_inverse_layer_idx": True,
    },
    "gpt_neox": {"attention_bias": True, "rope_parameters": _rope(partial_rotary_factor=0.25)},
    "gpt_oss": {
        "head_dim": 16,
        "sliding_window": 6,
        **_LOCAL_EXPERTS,
        "rope_parameters": {
            **_YARN,
            "rope_theta": 150000.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
    "glm4v": {
        "text_config": {
            **TINY,
            "hidden_size": 64,
            "rope_parameters": _rope(mrope_section=[1, 2, 1], partial_rotary_factor=0.5),
        },
        "vision_config": {**_VISION, "out_hidden_size": 64, "image_size": 16},
    },
    "granite": {**_MULTIPLIERS, **_BIASES},
    "granitemoe": {**_MULTIPLIERS, **_LOCAL_EXPERTS, "attention_bias": True},
    "granite_swa": {**_GRANITE_SWA, "mlp_bias": True},
    "granitemoeshared": {**_MULTIPLIERS, **_LOCAL_EXPERTS, "shared_intermediate_size": 24},
    "granitemoe_swa": {**_GRANITE_SWA, **_LOCAL_EXPERTS, "shared_intermediate_size": 24},
    "helium": {"head_dim": 8, **_BIASES},
    "hunyuan_v1_dense": {"head_dim": 16, "attention_bias": True},
    "hunyuan_v1_moe": {"head_dim": 16, "attention_bias": True, "num_experts": 4, "moe_topk": 2},
    "hy_v3": {"head_dim": 16, **_EXPERTS, **_FIRST_DENSE, "num_shared_experts": 1},
    "hy_v4": {**_INDEXED, **_SHARED_INDICES, "hc_mult": 2},
    "hyperclovax": {"head_dim": 16, **_MULTIPLIERS, **_BIASES, "use_post_norm": True},
    "internlm3": {"head_dim": 16, "bias": True, "qkv_bias": True},
    "internvl": {
        "text_config": {**TINY, "model_type": "qwen2", **_LATE_SLIDING},
        "vision_config": {**_OTHER_VISION, "image_size": (28, 28), "patch_size": (14, 14)},
    },
    "iquestcoder": {"head_dim": 16, **_BIASES},
    "jais2": {"head_dim": 16, **_BIASES},
    # as many heads as each layer is given
    "laguna": {
        "head_dim": 16,
        **_SLIDING,
        **_EXPERTS,
        **_FIRST_DENSE,
        "shared_expert_intermediate_size": 24,
        "num_attention_heads_per_layer": (4, 4, 2),
    },
    "llama": {**_BIASES, "rope_parameters": _LLAMA3},
    "jetmoe": {"kv_channels": 16, **_LOCAL_EXPERTS},
    "kolibri1": {
        "head_dim": 16,
        **_SLIDING,
        **_EXPERTS,
        "shared_expert_intermediate_size": 24,
    },
    # two attentions and an MLP beside the experts in each layer; of 6 experts two do nothing
    "longcat_flash": {
        **_MLA,
        "head_dim": 8,
        "num_layers": 3,
        "attention_bias": True,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 24,
        "moe_topk": 3,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "routed_scaling_factor": 1.5,
    },
    "mellum": {
        "head_dim": 16,
        **_SLIDING,
        **_EXPERTS,
        **_FIRST_DENSE,
        "num_experts": 3,
        "attention_bias": True,
    },
    # D = 16, Dv = 12; twice as many key heads and sinks where a layer slides
    "mimo_v2_flash": {
        "head_dim": 16,
        "v_head_dim": 12,
        **_SLIDING,
        **_GROUPS,
        **_FIRST_DENSE,
        "n_routed_experts": 6,
        "attention_bias": True,
        "attention_value_scale": 0.7,
        "rope_parameters": {
            "full_attention": _rope(partial_rotary_factor=0.5),
            "sliding_attention": _rope(partial_rotary_factor=0.25),
        },
    },
    "minicpm3": {
        **_MLA,
        **_BIASES,
        "scale_emb": 1.3,
        "scale_depth": 1.4,
        "dim_model_base": 16,
    },
    "minimax_m2": {
        "head_dim": 16,
        **_LOCAL_EXPERTS,
        "rope_parameters": _rope(partial_rotary_factor=0.5),
    },
    # blocks of 3 keys, of which a query sees those chosen by its key head, and its own
    "minimax_m3_vl_text": {
        "head_dim": 16,
        **_LOCAL_EXPERTS,
        **_FIRST_DENSE,
        "intermediate_size": 16,
        "dense_intermediate_size": 16,
        "shared_intermediate_size": 16,
        "layer_types": ("full_attention", "minimax_m3_sparse", "minimax_m3_sparse"),
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 3,
        "index_topk_blocks": 3,
        "routed_scaling_factor": 0.7,
        "rope_parameters": _rope(partial_rotary_factor=0.5),
    },
    "ministral": {"head_dim": 16, **_SLIDING},
    "ministral3": _MINISTRAL3,
    "mistral": {"head_dim": 16, "sliding_window": 6},
    "mistral3": {
        "text_config": {**TINY, "model_type": "mistral", "head_dim": 16, "sliding_window": 6},
        "vision_config": {**_OTHER_VISION, "model_type": "pixtral", "head_dim": 8},
        "image_token_index": VOCABULARY,
    },
    "mixtral": {"head_dim": 16, "sliding_window": 6, **_LOCAL_EXPERTS},
    "modernbert-decoder": {
        **_SLIDING,
        **_BIASES,
        "local_attention": 12,
        "norm_bias": True,
        "decoder_bias": True,
    },
    "nanochat": {"final_logit_softcapping": 3.0, "attention_bias": True},
    "olmo": {"clip_qkv": 0.5, "attention_bias": True},
    "olmo2": {"attention_bias": True},
    "olmo3": {"attention_bias": True, **_SLIDING},
    "olmoe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "clip_qkv": 0.5,
        "norm_topk_prob": True,
    },
    "opt": {"ffn_dim": 48, "dropout": 0.0, "word_embed_proj_dim": 16},
    "phi": {"qk_layernorm": True, "rope_parameters": _rope(partial_rotary_factor=0.5)},
    # of the 16 dimensions of a head 12 turn
    "phi3": {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "sliding_window": 6,
        "rope_parameters": _rope(partial_rotary_factor=0.75),
    },
    "qwen2": _LATE_SLIDING,
    # image and video ids lie outside the tests' vocabulary: none occurs in text
    "qwen2_5_vl": {
        "text_config": {
            **TINY,
            **_LATE_SLIDING,
            "rope_parameters": _rope(mrope_section=[1, 1, 2]),
        },
        "vision_config": {**_VISION, "fullatt_block_indexes": [0]},
    },
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 24, "norm_topk_prob": True},
    "qwen3": {"head_dim": 16, "attention_bias": True, **_LATE_SLIDING},
    "qwen3_moe": {
        "head_dim": 16,
        **_EXPERTS,
        "norm_topk_prob": True,
        "use_sliding_window": True,
        "sliding_window": 5,
    },
    "qwen3_vl": {
        "text_config": {
            **TINY,
            "head_dim": 16,
            "attention_bias": True,
            "rope_parameters": _rope(mrope_section=[4, 2, 2], mrope_interleaved=True),
        },
        "vision_config": {
            **_VISION,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
    },
    "qwen3_vl_moe": {
        "text_config": {
            **TINY,
            **_EXPERTS,
            "head_dim": 16,
            "attention_bias": True,
            "rope_parameters": _rope(mrope_section=[4, 2, 2], mrope_interleaved=True),
        },
        "vision_config": {
            **_VISION,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
    },
    "sarvam_mla": {**DEEPSEEK, "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
    "sarvam_moe": {
        "head_dim": 16,
        **_ROUTED,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "attention_bias": True,
    },
    "seed_oss": {
        "head_dim": 16,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
        **_BIASES,
        "attention_out_bias": True,
    },
    # the second layer turns no positions in
    "smollm3": {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, **_SLIDING, **_BIASES},
    "solar_open": {"head_dim": 16, **_ROUTED},
    "starcoder2": {"use_bias": True, "sliding_window": 6},
    "vaultgemma": {
        "head_dim": 16,
        **_SLIDING,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "youtu": {**_MLA, "attention_bias": True},
}
FAMILIES |= HYBRIDS

# whose layers have an indexer
INDEXED = tuple(name for name, config in FAMILIES.items() if "index_n_heads" in config)
