"""Other values for a field of a configuration, by what it holds and what it may hold.

Activations, layer types and RoPEs are those that transformers lists; other enumerations are below,
as their models read them.
"""

from __future__ import annotations

import types
import typing
from typing import Any

from transformers.activations import ACT2FN
from transformers.configuration_utils import ALLOWED_LAYER_TYPES

# of functions that differ: what other names of ACT2FN stand for is like one of these
ACTIVATIONS = ("relu", "gelu", "tanh", "sigmoid", "relu2", "silu", "linear", "xielu")
# what models compare other strings with
_WORDS: dict[str, tuple[Any, ...]] = {
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "expert_selection_fn": ("softmax", "sigmoid"),
    "shared_expert_combination_strategy": ("average", "sum"),
    "position_embedding_type": ("rope", "nope", None),
    "gating": (True, False, "per-head", "per-element"),
    "use_bidirectional_attention": ("all", "vision", True, False, None),
    "sliding_window_pattern": (2, "LG", "LLG", None),
    "layers_block_type": (),
    "mamba_d_head": ("auto", 4, 16),
}
# tokens of the sequences, and others
_TOKENS = (0, 5, 96, None)
_LARGEST = 4096


def other_values(key: str, value: Any, hint: Any, num_layers: int) -> list[Any]:
    """Values to try in the place of one, itself left out.

    Args:
        key: the field's name. value: what the tiny configuration holds.
        hint: the field's annotation, or None.
        num_layers: of the model, the length of lists of layers.
    """
    kinds = _kinds(hint)
    if key in _WORDS:
        found = [*_WORDS[key]]
    elif key.endswith(("token_id", "token_index")):
        found = [*_TOKENS]
    elif isinstance(value, str) and value in ACT2FN:
        found = [*ACTIVATIONS]
    elif isinstance(value, (list, tuple)):
        found = _lists(list(value), num_layers)
    elif isinstance(value, str):
        found = []
    else:
        found = _scalars(value, kinds, num_layers)
    found += _literals(hint)
    if types.NoneType in kinds:
        found.append(None)
    return [f for i, f in enumerate(found) if _unlike(f, value) and f not in found[:i]]


def _scalars(value: Any, kinds: set[Any], num_layers: int) -> list[Any]:
    """Of a number, a boolean or None."""
    found: list[Any] = []
    if isinstance(value, bool) or (value is None and bool in kinds):
        found += [True, False]
    elif isinstance(value, float) or (float in kinds):
        number = float(value or 0.0)
        found += [2 * number, 0.3, 0.0, -number]
    elif isinstance(value, int):
        found += [n for n in (2 * value, value // 2, 0) if n <= _LARGEST]
    elif int in kinds:
        found += [1, 2, 5, 16]
    if value is None and any(typing.get_origin(kind) in (list, tuple) for kind in kinds):
        found += [[0], [1], [0.3] * num_layers, [2] * num_layers, *_layers(num_layers)]
    return found or ([True, 0.5, 2] if not kinds else [])


def _lists(value: list[Any], num_layers: int) -> list[Any]:
    if any(isinstance(v, str) for v in value):
        return [*_layers(len(value)), value[::-1], [value[0]] * len(value), value[1:] + value[:1]]
    if any(isinstance(v, bool) for v in value):
        return [[not v for v in value], value[::-1]]
    if any(isinstance(v, int) for v in value):
        return [[], [0], [num_layers - 1], [2 * v for v in value], [1 - v for v in value]]
    ramp = [0.3 + 0.2 * i for i in range(len(value))]
    return [ramp, [2 * v for v in value], value[::-1], [0.0 for _ in value]]


def _layers(count: int) -> list[list[str]]:
    """Lists of layer types: each in all layers, and in the last alone."""
    everywhere = [[kind] * count for kind in ALLOWED_LAYER_TYPES]
    last = [["full_attention"] * (count - 1) + [kind] for kind in ALLOWED_LAYER_TYPES]
    return everywhere + last


def _unlike(a: Any, b: Any) -> bool:
    return type(a) is not type(b) or a != b


def _kinds(hint: Any) -> set[Any]:
    """The types that an annotation allows."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return {kind for part in typing.get_args(hint) for kind in _kinds(part)}
    return set() if hint is None else {hint}


def _literals(hint: Any) -> list[Any]:
    kinds = _kinds(hint)
    return [
        word
        for kind in kinds
        if typing.get_origin(kind) is typing.Literal
        for word in typing.get_args(kind)
    ]


# ---- RoPE ----------------------------------------------------------------------------------------

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def other_ropes(rope: dict[str, Any], half: int) -> list[dict[str, Any]]:
    """Parameters of every kind of RoPE in the place of some, with what each kind reads.

    Args:
        rope: those of the tiny configuration. half: of the dimensions that turn.
    """
    kept = {k: v for k, v in rope.items() if k in ("rope_theta", "partial_rotary_factor")}
    kept |= {k: v for k, v in rope.items() if k.startswith("mrope")}
    llama = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    factors = {"short_factor": [1.5] * half, "long_factor": [3.0] * half}
    kinds: list[dict[str, Any]] = [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        _YARN,
        {**_YARN, "attention_factor": 1.3},
        {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.4},
        {**_YARN, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False},
        {**_YARN, **llama, "rope_type": "llama3"},
        {**_YARN, **factors, "rope_type": "longrope"},
        {"rope_type": "proportional", "partial_rotary_factor": 0.5},
        {"rope_type": "proportional", "factor": 4.0},
        {"rope_type": "axial"},
    ]
    return [kept | kind for kind in kinds if kept | kind != rope]
