"""Checks that keep out transformers models that do not run exactly; the list is
`models.family_table`.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from importlib import metadata
from typing import Any

import numpy as np
from packaging import version
from torch import nn

from prefixtree.errors import Refusal, UnsupportedError, refuse
from prefixtree.kernels.splitmix import path_keys
from prefixtree.models.family_table import (
    FAMILIES,
    INDEXED,
    OLDEST_WITH_INDEXERS,
    OLDEST_WITH_STATES,
    Family,
    layer_types_of,
)
from prefixtree.models.layers import GradientPaths
from prefixtree.models.low_precision import check_low_precision, check_quantizer
from prefixtree.models.rope import check_rope_types
from prefixtree.models.unserved import UNSERVED
from prefixtree.packing.layout import PackedForest

# read once: layers check it in compiled code
_TRANSFORMERS = metadata.version("transformers")
_IS_TOO_OLD = version.parse(_TRANSFORMERS) < version.parse(OLDEST_WITH_STATES)


# model types whose norms, rotary embeddings, MLPs and experts may be Liger Kernel's
# (tests/models/test_liger.py, on a GPU)
LIGER_LAYERS = (
    "deepseek_v2",
    "deepseek_v3",
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "glm4",
    "gpt_oss",
    "granite",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "llama",
    "ministral",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)

# model types of vision encoders, which attend both ways within an image
ENCODERS = frozenset(
    {
        "gemma4_vision",
        "glm4v_vision",
        "qwen2_5_vl_vision",
        "qwen3_5_moe_vision",
        "qwen3_5_vision",
        "qwen3_vl_moe_vision",
        "qwen3_vl_vision",
    }
)

# the keyword that holds a vision encoder's attention function while images of a forest are encoded
ENCODES = "tree_encodes"

# the keywords in which layers with indexers pass their choice of keys
CHOICES = ("indices", "block_indices")

# keywords of other ways of packing, as layers and their functions name them
PACKING_KEYWORDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
# says that the caller's load-balancing loss counts a shared token once per sequence
COUNTS_COPIES = "router_loss_counts_copies"
# the keyword of recorded routes, and the mark of attention layers in a model that replays them
ROUTES = "tree_routes"
REPLAYS = "_prefixtree_replays"
# the seed of a model that shares dropout (`models.dropout`), and the keyword of its tokens' keys
SEED = "_prefixtree_dropout_seed"
KEYS = "tree_dropout_keys"
ROUTER_LOGITS = (
    "output_router_logits asks the model for its load-balancing loss, which counts a shared token "
    "once where the replicated batch counts every copy: take scores.aux_loss of "
    "prefixtree.sequence_logprobs(model, packed, output_router_logits=True), or set "
    "config.output_router_logits to False and pass no output_router_logits"
)

# names under which configurations keep a dropout or a jitter of the forward
_DROPOUTS = (
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "resid_pdrop",
    "residual_dropout",
    "embd_pdrop",
    "embedding_dropout",
    "embed_dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
    "activation_dropout",
    "dropout",
    "layerdrop",
)
# torch's layers that draw random numbers, by their public names
DROPOUT_LAYERS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)
_JITTERS = ("router_jitter_noise", "input_jitter_noise", "jitter_noise", "moe_jitter_eps")


def supported_model_types() -> list[str]:
    """Lists the model types that run.

    Returns:
        Values of `config.model_type`, sorted: the types that a test compares with their eager run,
        and those that `allow_model_type` added in this process.
    """
    return sorted(FAMILIES)


def allow_model_type(
    model_type: str,
    *,
    softcap: str | None = None,
    scale: str | None = None,
    divisor: str | None = None,
) -> None:
    """Allows a model type that this project has not tested; verify it yourself first.

    For a listed type, the call allows a class or a forward that you changed.

    Run `prefixtree verify --model CONFIG FILE`, or compare log-probabilities and every parameter
    gradient with eager attention per sequence. A model that ignores the mask, keeps a recurrent
    state or looks at the whole batch gives wrong gradients without an error.

    Args:
        model_type: `config.model_type` of the text model.
        softcap: the configuration attribute that holds c, where the forward caps logits after the
            lm_head to c tanh(logits / c). Default: none.
        scale: the configuration attribute that the forward multiplies logits by. Default: none.
        divisor: the configuration attribute that the forward divides logits by. Default: none.
    """
    FAMILIES[model_type] = replace(
        FAMILIES.get(model_type, Family()),
        softcap=softcap,
        scale=scale,
        divisor=divisor,
        is_tested=False,
    )


def family_of(config: Any) -> Family:
    """The family of a configuration; `UnsupportedError` for one that is not on the list."""
    model_type = getattr(config, "model_type", None)
    if model_type not in FAMILIES and model_type in UNSERVED:
        raise UnsupportedError(f"model type {model_type!r} is not served: {UNSERVED[model_type]}")
    if model_type not in FAMILIES:
        raise UnsupportedError(
            f"model type {model_type!r} is not verified to run exactly on packed forests; verified "
            f"are {', '.join(supported_model_types())}. If you have verified yours, call "
            "prefixtree.integrations.transformers.allow_model_type"
        )
    return FAMILIES[model_type]


def check_config(config: Any, training: bool) -> None:
    """Refuses settings of a configuration with which packed and replicated runs differ."""
    family = family_of(config)
    if family.functions:
        _check_version(config)
    if INDEXED in family.layer_types - set(layer_types_of(config)):
        raise UnsupportedError(
            f"{config.model_type} has indexers, verified from transformers {OLDEST_WITH_INDEXERS} "
            f'on; {_TRANSFORMERS} is installed: pip install "transformers>={OLDEST_WITH_INDEXERS}"'
        )
    if family.ignores_window and getattr(config, "sliding_window", None) is not None:
        raise UnsupportedError(
            f"{config.model_type} ignores config.sliding_window ({config.sliding_window}) in its "
            "other attentions, so that results would differ; set it to None"
        )
    for layer_type in sorted(set(layer_types_of(config)) - family.layer_types):
        raise UnsupportedError(
            f"layers of type {layer_type!r} are not verified in {config.model_type}: they may mix "
            "tokens by packed order, not along the tree; only "
            f"{', '.join(sorted(family.layer_types))} run exactly"
        )
    # "vision" is for images, which text models do not take
    both_ways = getattr(config, "use_bidirectional_attention", None)
    if both_ways not in (None, False, "vision") or not getattr(config, "is_causal", True):
        raise UnsupportedError("bidirectional attention has no prefix to share; use a causal model")
    check_rope_types(config)
    _check_groups(config)
    if training:
        check_noise(config)


def _check_groups(config: Any) -> None:
    """Refuses experts that do not divide into their groups: routers would reach over tokens."""
    groups = getattr(config, "n_group", None) or 1
    if groups == 1 or getattr(config, "topk_method", None) == "greedy":
        return
    for name in ("n_routed_experts", "num_experts", "num_local_experts"):
        if (getattr(config, name, None) or 0) % groups:
            raise UnsupportedError(
                f"config.{name} ({getattr(config, name)}) does not divide into config.n_group "
                f"({groups}) groups: transformers' router would mix the scores of several tokens"
            )


def check_noise(config: Any, name: str = "config") -> None:
    """Refuses a configuration with dropout or jitter in training; `name` is for messages."""
    for attribute in (*_DROPOUTS, *_JITTERS):
        if isinstance(value := getattr(config, attribute, None), (int, float)) and value > 0:
            raise UnsupportedError(
                f"{name}.{attribute} is {value}: a shared token would draw one noise where the "
                "replicated batch draws several; set it to 0 (or call model.eval())"
            )


def _check_version(config: Any) -> None:
    if _IS_TOO_OLD:
        raise UnsupportedError(
            f"{config.model_type} has recurrent layers, which take the tree from transformers "
            f"{OLDEST_WITH_STATES} on; {_TRANSFORMERS} is installed: pip install "
            f'"transformers>={OLDEST_WITH_STATES}"'
        )


def check_tokens(config: Any, tokens: np.ndarray, sees: bool = True) -> None:
    """Warns of placeholders of images, videos and sound that are read as text.

    transformers reads them so without pixels: a policy may have sampled them.
    """
    for modality in ("image", "video", "audio"):
        token = getattr(config, f"{modality}_token_id", None)
        if token is None or not (tokens == token).any():
            continue
        mend = "which is not verified here: drop them"
        if sees and modality != "audio" and not family_of(config).is_text_alone:
            mend = (
                "make the forest of images.sequences and pass images=images, with images = "
                "Images.from_batch(sequences, pixel_values, image_grid_thw, model.config)"
            )
        warnings.warn(
            f"the sequences hold {modality}_token_id {token}: no {modality} was given, so it is "
            "read as text, as transformers reads it. That is right where a policy sampled it; "
            f"where it shows an image or sound, {mend}",
            stacklevel=2,
        )


def _neftune(given: tuple[str, nn.Module]) -> Any:
    name, module = given
    alpha = vars(module).get("neftune_noise_alpha")
    return module.training and alpha and {"layer": name, "alpha": alpha}


def _dropout(given: tuple[str, nn.Module]) -> Any:
    name, module = given
    is_active = isinstance(module, DROPOUT_LAYERS) and module.training and module.p > 0
    return is_active and {"layer": name, "p": module.p}


#: Refusals of a module and its name. Configurations have plain checks, which layers run compiled.
MODULES = (
    Refusal(
        "use_kernels",
        lambda given: vars(given[1]).get("_use_kernels"),
        "use_kernels replaces layers of the model: load it without",
    ),
    Refusal(
        "neftune_noise_alpha",
        _neftune,
        "NEFTune is active on {layer} (neftune_noise_alpha={alpha}): a shared token would draw one "
        "noise where the replicated batch draws several; leave neftune_noise_alpha at None or call "
        "model.eval()",
    ),
    Refusal(
        "dropout",
        _dropout,
        "{layer} is an active dropout (p = {p}): a shared token would draw one mask where the "
        "replicated batch draws several; set it to 0 (lora_dropout=0 for an adapter), or call "
        "model.eval(), or prefixtree.share_dropout(model, seed) for one mask of LoRA's dropout",
    ),
)


def check_modules(model: nn.Module, *, may_change: bool = False) -> None:
    """Refuses modules that draw noise, mix tokens in low precision, or were replaced by kernels.

    Args:
        may_change: whether other parameters may train before the next check.
    """
    paths = GradientPaths(model, may_change=may_change)
    for name, module in model.named_modules():
        check_low_precision(name, module, paths)
        check_quantizer(module)
        refuse(MODULES, (name, module))


def forward_inputs(packed: PackedForest, transformer: Any) -> dict[str, Any]:
    """Makes the keywords of a model's forward over a packed forest, as its family takes them."""
    inputs = packed.model_inputs()
    if (rows := family_of(transformer.config).position_rows) > 1:
        inputs["position_ids"] = inputs["position_ids"].expand(rows, 1, -1)
    if (seed := seed_of(transformer)) is not None:
        of_tokens = inputs["input_ids"][0], packed.position_ids, packed.subtree_end
        inputs[KEYS] = path_keys(*of_tokens, seed)
    return inputs


def seed_of(transformer: Any) -> int | None:
    """Gives the seed of the dropout that a model shares and that is active, or None."""
    return vars(transformer).get(SEED) if transformer.training else None


def check_checkpointing(model: nn.Module, config: Any) -> None:
    """Refuses reentrant checkpointing where layers use keys of earlier ones: it loses gradients."""
    if getattr(config, "num_kv_shared_layers", 0) and checkpoints_reentrantly(model):
        raise UnsupportedError(
            f"reentrant checkpointing loses gradients in {config.model_type} with "
            'num_kv_shared_layers > 0: enable it with {"use_reentrant": False}'
        )


def checkpoint_wrappers(model: nn.Module) -> list[Any]:
    """Lists torch's CheckpointWrappers, which recompute what they hold whatever is planned.

    They are known by name: the class is not public, and FSDP2 puts a subclass in its place.
    """
    name = "CheckpointWrapper"
    return [m for m in model.modules() if name in (c.__name__ for c in type(m).__mro__)]


def checkpoints_reentrantly(model: nn.Module) -> bool:
    """Whether a layer of transformers runs in reentrant checkpoints, which is its default."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    modules = list(model.modules())
    # the module that holds such layers has the switch too, and does not use it
    layers = [m for m in modules if isinstance(m, GradientCheckpointingLayer)]
    for module in layers or modules:
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        options = getattr(checkpoint, "keywords", {})
        if getattr(module, "gradient_checkpointing", False) and options.get("use_reentrant", True):
            return True
    return False


def router_keywords(config: Any, computes_loss: bool) -> dict[str, Any]:
    """Makes the keywords that turn the load-balancing loss on or off despite the configuration."""
    if not hasattr(config.get_text_config(), "output_router_logits"):
        return {}
    return {"output_router_logits": computes_loss, COUNTS_COPIES: True}


def check_replayed(module: nn.Module, keywords: dict[str, Any]) -> None:
    """Refuses recorded routes in a model whose routers would choose by themselves."""
    if keywords.get(ROUTES) is not None and not getattr(module, REPLAYS, False):
        raise UnsupportedError(
            "the forest has recorded routes, and the model's routers would choose by themselves: "
            "score it with sequence_logprobs, which makes them take the routes"
        )


def check_router_logits(config: Any, keywords: dict[str, Any]) -> None:
    """Refuses a forward over a packed forest whose load-balancing loss the model would compute."""
    if keywords.get(COUNTS_COPIES):
        return
    asked = keywords.get("output_router_logits")
    if getattr(config, "output_router_logits", False) if asked is None else asked:
        raise UnsupportedError(ROUTER_LOGITS)
