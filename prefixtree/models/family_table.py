"""The model types that run exactly, and what is special about each.

A type is listed because a test compares its log-probabilities and all parameter gradients with
eager attention (tests/models/test_families.py). Nothing is inferred from what a class declares.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# transformers' names of layers that only attend, whose indexer chooses keys or blocks of them, that
# attend to compressed keys, that attend, and that carry a state
ATTENTION_TYPES = frozenset({"full_attention", "sliding_attention"})
INDEXED, INDEXED_BLOCKS = "indexed_attention", "minimax_m3_sparse"
COMPRESSED_TYPES = frozenset({"compressed_sparse_attention", "heavily_compressed_attention"})
INDEXED_TYPES = frozenset({INDEXED, INDEXED_BLOCKS}) | COMPRESSED_TYPES
ATTENDING_TYPES = ATTENTION_TYPES | {"hybrid"} | INDEXED_TYPES
# a convolution alone: its inputs are all of its state
CONVOLUTION = "conv"
_RECURRENT_TYPES = frozenset({"linear_attention", CONVOLUTION, "hybrid"})
# a kernel for the whole layer, which is not used along the tree
FUSED = "mamba2_split_conv1d_scan_combined"
#: The functions of transformers that recurrent layers call by name, which their wing replaces by
#: those along the tree.
REPLACED_FUNCTIONS = frozenset(
    {
        "causal_conv1d_fn",
        "torch_chunk_gated_delta_rule",
        "chunk_kimi_delta_attention",
        "mamba2_chunk_scan",
        FUSED,
    }
)
OLDEST_WITH_STATES = "5.17"
# earlier versions call layers with indexers in another way
OLDEST_WITH_INDEXERS = "5.23"


@functools.cache
def functions_of(kind: Any) -> frozenset[str]:
    """The `REPLACED_FUNCTIONS` that the forward of a module's class calls."""
    forward = inspect.unwrap(kind.forward)
    code = getattr(forward, "__code__", None)
    if code is None:
        return frozenset()
    # co_names has attributes too
    return frozenset(REPLACED_FUNCTIONS & set(code.co_names) & forward.__globals__.keys())


def layer_types_of(config: Any) -> Sequence[str]:
    """transformers' names of a configuration's layers; empty where it has no such list."""
    return getattr(config, "layer_types", None) or ()


def has_indexers(config: Any) -> bool:
    """Whether a configuration has layers with indexers."""
    return not INDEXED_TYPES.isdisjoint(layer_types_of(config))


@dataclass(frozen=True)
class Family:
    """Properties of a family: its treatment of logits, its positions, its layers.

    Attributes:
        softcap: config attribute holding c in c tanh(logits / c), or None.
        scale: attribute that logits are multiplied by, or None; the model, its base model and its
            configuration are searched in this order.
        divisor: config attribute that logits are divided by, or None.
        position_rows: rows of position_ids that the text model takes: those of the text, which its
            attention gets, and those of a multi-dimensional RoPE.
        ignores_window: whether its layers attend to everything whatever sliding_window says.
        hides_positions: whether its layers do not get position_ids.
        learns_positions: whether it has an embedding per position, up to
            config.max_position_embeddings.
        layer_types: the names that config.layer_types may hold.
        functions: the `REPLACED_FUNCTIONS` that its recurrent layers call; none where no layer
            carries a state.
        is_text_alone: whether images of its vision encoder are refused.
        is_tested: False for what a user allowed.
    """

    softcap: str | None = None
    scale: str | None = None
    divisor: str | None = None
    position_rows: int = 1
    ignores_window: bool = False
    hides_positions: bool = False
    learns_positions: bool = False
    layer_types: frozenset[str] = ATTENTION_TYPES
    functions: tuple[str, ...] = ()
    is_text_alone: bool = False
    is_tested: bool = True

    @property
    def recurrent_types(self) -> frozenset[str]:
        """Layer types that carry a state."""
        return self.layer_types & _RECURRENT_TYPES

    @property
    def has_indexers(self) -> bool:
        """Whether its layers have indexers, which `sparse.indexers` runs along the tree."""
        return not self.layer_types.isdisjoint(INDEXED_TYPES)

    @property
    def wings(self) -> tuple[str, ...]:
        """Names of the wings (`prefixtree.wings`) that its layers need to know the tree."""
        return ("sparse",) * self.has_indexers + ("states",) * bool(self.functions)

    @property
    def called_functions(self) -> tuple[str, ...]:
        """The `functions` that a recurrent layer calls once per packed forward."""
        return tuple(name for name in self.functions if name != FUSED)


def _hybrid(functions: tuple[str, ...], *layer_types: str, **more: Any) -> Family:
    kinds = frozenset({"full_attention", *layer_types})
    return Family(layer_types=kinds, functions=functions, **more)


def _indexed(*layer_types: str, **more: Any) -> Family:
    return Family(layer_types=frozenset({INDEXED, *layer_types}), **more)


_CONV = ("causal_conv1d_fn",)
_DELTA_RULE = (*_CONV, "torch_chunk_gated_delta_rule")
_KIMI = (*_CONV, "chunk_kimi_delta_attention")
_SSD = (*_CONV, "mamba2_chunk_scan", FUSED)

#: Families by `config.model_type`; `allow_model_type` adds to it.
FAMILIES: dict[str, Family] = {
    "afmoe": Family(),
    "apertus": Family(),
    "apertus1p5_text": Family(),
    "arcee": Family(),
    "aria_text": Family(),
    "axk1": Family(),
    "axk2": _indexed(hides_positions=True),
    "bailing_hybrid": _hybrid(_KIMI, "linear_attention"),
    "bamba": _hybrid(_SSD, "linear_attention"),
    "beam": Family(softcap="final_logit_softcapping"),
    "bitnet": Family(),
    "cohere": Family(scale="logit_scale"),
    "cohere2": Family(scale="logit_scale"),
    "cohere2_moe": Family(scale="logit_scale"),
    "cwm": Family(),
    "deepseek_v2": Family(),
    "deepseek_v3": Family(),
    "deepseek_v32": _indexed(hides_positions=True),
    "deepseek_v4": Family(
        layer_types=frozenset({"sliding_attention"}) | COMPRESSED_TYPES, hides_positions=True
    ),
    "dots1": Family(),
    "dots3_note_text": _indexed("sliding_attention"),
    "ernie4_5": Family(),
    "ernie4_5_moe": Family(),
    "exaone": Family(),
    "exaone4": Family(),
    "exaone_moe": Family(),
    "falcon_h1": _hybrid(_SSD, "hybrid", scale="lm_head_multiplier"),
    "flex_olmo": Family(),
    "flint": Family(),
    "gemma": Family(),
    "gemma2": Family(softcap="final_logit_softcapping"),
    # its text class caps logits, the whole does not
    "gemma3": Family(is_text_alone=True),
    "gemma3_text": Family(softcap="final_logit_softcapping"),
    "gemma3n_text": Family(softcap="final_logit_softcapping"),
    "gemma4": Family(softcap="final_logit_softcapping"),
    "gemma4_text": Family(softcap="final_logit_softcapping"),
    "gemma4_unified_text": Family(softcap="final_logit_softcapping"),
    "glm": Family(),
    "glm4": Family(),
    "glm46v": Family(position_rows=4),
    "glm4_moe": Family(),
    "glm4_moe_lite": Family(),
    "glm4v": Family(position_rows=4),
    "glm4v_text": Family(position_rows=4),
    "glm_moe_dsa": _indexed(hides_positions=True),
    "gpt2": Family(learns_positions=True),
    "gpt_neox": Family(),
    "gpt_oss": Family(),
    "granite": Family(divisor="logits_scaling"),
    "granite_swa": Family(divisor="logits_scaling"),
    "granitemoe": Family(divisor="logits_scaling"),
    "granitemoe_swa": Family(divisor="logits_scaling"),
    "granitemoehybrid": _hybrid(
        _SSD, "linear_attention", divisor="logits_scaling", hides_positions=True
    ),
    "granitemoeshared": Family(divisor="logits_scaling"),
    "helium": Family(),
    "hunyuan_v1_dense": Family(),
    "hunyuan_v1_moe": Family(),
    "hy_v3": Family(),
    "hy_v4": _indexed(hides_positions=True),
    "hyperclovax": Family(scale="logits_scaling"),
    "internlm3": Family(),
    "internvl": Family(is_text_alone=True),
    "iquestcoder": Family(),
    "jais2": Family(),
    "jetmoe": Family(),
    "kimi_linear": _hybrid(_KIMI, "linear_attention"),
    "kolibri1": Family(),
    "laguna": Family(),
    "lara_mini": _hybrid(_DELTA_RULE, "linear_attention", "sliding_attention"),
    "lfm2": _hybrid(_CONV, "conv"),
    "lfm2_moe": _hybrid(_CONV, "conv"),
    "lfm3": _hybrid(_CONV, "conv", "sliding_attention"),
    "llama": Family(),
    "longcat_flash": Family(),
    "mellum": Family(),
    "mimo_v2_flash": Family(),
    "minicpm3": Family(),
    "minimax_m2": Family(),
    "minimax_m3_vl_text": Family(layer_types=frozenset({"full_attention", INDEXED_BLOCKS})),
    "ministral": Family(),
    "ministral3": Family(),
    "mistral": Family(),
    "mistral3": Family(is_text_alone=True),
    "mixtral": Family(),
    "modernbert-decoder": Family(),
    "nanochat": Family(softcap="final_logit_softcapping"),
    "nemotron_h": _hybrid(_SSD, "linear_attention", "mlp", "moe"),
    "olmo": Family(),
    "olmo2": Family(),
    "olmo3": Family(),
    "olmo_hybrid": _hybrid(_DELTA_RULE, "linear_attention"),
    "olmoe": Family(ignores_window=True),
    "opt": Family(learns_positions=True),
    "phi": Family(),
    "phi3": Family(),
    "qwen2": Family(),
    "qwen2_5_vl": Family(position_rows=4),
    "qwen2_5_vl_text": Family(position_rows=4),
    "qwen2_moe": Family(),
    "qwen3": Family(),
    "qwen3_5": _hybrid(_DELTA_RULE, "linear_attention", position_rows=4),
    "qwen3_5_moe": _hybrid(_DELTA_RULE, "linear_attention", position_rows=4),
    "qwen3_5_moe_text": _hybrid(_DELTA_RULE, "linear_attention", position_rows=4),
    "qwen3_5_text": _hybrid(_DELTA_RULE, "linear_attention", position_rows=4),
    "qwen3_moe": Family(),
    "qwen3_next": _hybrid(_DELTA_RULE, "linear_attention"),
    "qwen3_vl": Family(position_rows=4),
    "qwen3_vl_moe": Family(position_rows=4),
    "qwen3_vl_moe_text": Family(position_rows=4),
    "qwen3_vl_text": Family(position_rows=4),
    "sarvam_mla": Family(),
    "sarvam_moe": Family(),
    "seed_oss": Family(),
    "smollm3": Family(),
    "solar_open": Family(),
    "starcoder2": Family(),
    "vaultgemma": Family(softcap="final_logit_softcapping"),
    "youtu": Family(),
    "zamba2": _hybrid(_SSD, "linear_attention", "hybrid"),
}
