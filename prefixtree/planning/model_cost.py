"""The cost of a token in a model: parameters, the linear weights it meets, and visible pairs.

The costs are read from the model, built on the meta device, layer by layer. So a gated and a plain
MLP, fused projections, latent attention, shared and routed experts count as what they are.
The planner's `CostModel` and `report --model` read it from here.

A token meets every weight of a linear layer once: 2 FLOPs per weight in a forward. It meets k / E
of the weights of E routed experts, k per token. An embedding is looked up and costs none. A visible
query-key pair costs 2 x (query heads) x (D + Dv) FLOPs in a forward. Layers without softmax
attention have no pairs. In them a token meets the layer's states, per head of K x V (delta rule)
or of P x N (Mamba-2), in chunks of C tokens. Products within a chunk count whole:

    delta rule   3 K V + C (2 K + V)      state read for its error and for the output, and updated
    Mamba-2      2 P N + C (P + N)        state updated and read
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prefixtree.errors import UnsupportedError
from prefixtree.models.family_table import CONVOLUTION, FAMILIES, Family, functions_of

# the projection back to the hidden size that an attention layer ends in
_ATTENTION_END = ("o_proj", "out_proj", "c_proj", "dense", "wo")
# layers whose attention has visible pairs
SOFTMAX = ("full_attention", "sliding_attention")
# layers that neither attend nor carry a state
FEED_FORWARD = ("mlp", "moe")
# tokens of a chunk of the recurrent kernels
CHUNK = 64


@dataclass(frozen=True)
class LayerCost:
    """The cost of a token in one layer."""

    # transformers' name: full_attention, sliding_attention, linear_attention or others
    kind: str
    # linear weights that a token meets, over the experts it is routed to
    weights: int
    # query heads x (D + Dv); 0 for a layer without softmax attention
    per_pair: int
    # in tokens, the token itself included
    window: int | None
    # multiply-adds that a token has with the layer's state and its chunk
    state: int = 0
    # channels of the convolution before a state
    channels: int = 0
    # numbers of the layer's state, over all heads
    state_numbers: int = 0
    # multiply-adds per pair of an indexer, which has no backward
    index_per_pair: int = 0


@dataclass(frozen=True)
class ModelCost:
    """The cost of a token in a causal language model."""

    model_type: str
    # parameters of the whole model; a tied weight counts once
    parameters: int
    layers: tuple[LayerCost, ...]
    # linear weights a token meets outside layers, embedding and lm_head
    outside_weights: int
    # only scored tokens meet them
    lm_head_weights: int
    hidden: int
    vocabulary: int
    # heads and head dims are of the config; single layers may have others
    heads: int
    # the most of any layer
    kv_heads: int
    head_dim: int
    value_dim: int
    # bytes per element of weights and activations
    element_bytes: int

    @property
    def token_weights(self) -> int:
        """Linear weights that every token meets, outside embedding and lm_head."""
        return self.outside_weights + sum(layer.weights for layer in self.layers)

    @property
    def token_states(self) -> int:
        """Multiply-adds that every token has with the states of all layers."""
        return sum(layer.state for layer in self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer; None for none."""
        return tuple(layer.window for layer in self.layers)


def model_cost(model: Any, element_bytes: int | None = None) -> ModelCost:
    """Reads the cost of a token off a model of transformers, or off the model of a config.

    element_bytes are of weights and activations; None: of the config's dtype, or 2 where it has
    none.
    """
    # of a config the model is built on the meta device, without weights
    import torch
    from torch import nn

    config = getattr(model, "config", model)
    model = model if isinstance(model, nn.Module) else on_meta(config)
    text = config.get_text_config()
    layers = _layers(model, text)
    experts = _first(
        text, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"
    )
    active = _first(
        text, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"
    )
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    skipped = {id(end.weight) for end in ends if end is not None}
    skipped |= {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}

    def weights(module: nn.Module, number: int) -> dict[str, int]:
        """Linear weights that a token meets, by name."""
        count, chosen = _of_layer(experts, number), _of_layer(active, number)
        met = {}
        for name, weight in module.named_parameters():
            *_, owner, _ = ("", *name.split("."))
            # norms of all heads at once have two dimensions too
            if weight.ndim < 2 or id(weight) in skipped or "norm" in owner or name.endswith("bias"):
                continue
            met[name] = weight.numel()
            routed = weight.ndim == 3 and weight.shape[0] == count
            of_expert = "experts" in name.split(".") and "router" not in name.split(".")
            if chosen and count and (routed or of_expert):
                met[name] = met[name] * chosen // count
        return met

    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        slides = window is not None and getattr(text, "use_sliding_window", True)
        kinds = ["sliding_attention" if slides else "full_attention"] * len(layers)
    heads = told(text, "num_attention_heads") or _attention(layers[0]).num_heads
    # other types may use the name of a layer for something else
    with_state = FAMILIES.get(text.model_type, Family()).recurrent_types - {CONVOLUTION}
    costs, dims = [], []
    for number, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
        met = weights(layer, number)
        attention = _attention(layer)
        dims.append(_head_dims(attention, text))
        per_pair = 0
        if attention is not None and (columns := _value_columns(attention)):
            per_pair = columns // dims[-1][1] * sum(dims[-1])
        elif kind in SOFTMAX:
            per_pair = heads * sum(dims[-1])
        layer_window = window if kind == "sliding_attention" else None
        state = state_cost(layer, CHUNK)
        channels = sum(
            child.out_channels
            for mixer in _mixers(layer)
            for child in mixer.children()
            if isinstance(child, nn.Conv1d)
        )
        numbers = sum(_state_numbers(mixer) for mixer in _mixers(layer))
        if kind in with_state and not numbers:
            raise UnsupportedError(
                f"layer {number} of {text.model_type} ({type(layer).__name__}, {kind}) has no "
                "state whose heads and sizes are known: plans would count it as nothing; install a "
                "version of transformers that docs/families.md lists for the type"
            )
        layer_weights = sum(met.values())
        indexer = getattr(attention, "indexer", None)
        scores = 0 if indexer is None else _index_per_pair(indexer)
        costs.append(
            LayerCost(kind, layer_weights, per_pair, layer_window, state, channels, numbers, scores)
        )
    skipped |= {id(weight) for layer in layers for weight in layer.parameters()}
    outside = sum(weights(_decoder(model), 0).values())
    if element_bytes is None:
        element_bytes = (getattr(config, "dtype", None) or torch.bfloat16).itemsize
    return ModelCost(
        model_type=config.model_type,
        parameters=sum(p.numel() for p in model.parameters()),
        layers=tuple(costs),
        outside_weights=outside,
        lm_head_weights=model.get_output_embeddings().weight.numel(),
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        heads=heads,
        kv_heads=max((_kv_heads(_attention(layer), text) for layer in layers), default=heads),
        head_dim=dims[0][0],
        value_dim=dims[0][1],
        element_bytes=element_bytes,
    )


def _index_per_pair(indexer: Any) -> int:
    """Multiply-adds per pair: of queries and keys, and of the sum over heads if there is one."""
    # an indexer of blocks sums over no heads
    heads = getattr(indexer, "n_heads", None)
    if heads is None:
        return int(indexer.num_heads * indexer.head_dim)
    return int(heads * (indexer.head_dim + 1))


def on_meta(config: Any) -> Any:
    """Builds the language model of a config on the meta device: shapes without numbers."""
    import torch

    with torch.device("meta"):
        return auto_class(config).from_config(config)


def auto_class(config: Any) -> Any:
    """Finds transformers' class of a config's language model, with its vision encoder if any."""
    # modules and parameters then have the names that they have in the model
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    is_text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    # AutoModelForCausalLM makes the text model of some configs that are in both mappings
    sees = config.get_text_config() is not config
    if is_text and not (sees and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        return AutoModelForCausalLM
    return AutoModelForImageTextToText


def _decoder(model: Any) -> Any:
    """Finds the module that holds the layers; ModernBERT's `get_decoder` returns its lm_head."""
    from torch import nn

    decoder = model.get_decoder()
    return model if isinstance(decoder, nn.Linear) else decoder


def _layers(model: Any, text: Any) -> Any:
    from torch import nn

    for module in _decoder(model).modules():
        if isinstance(module, nn.ModuleList) and len(module) == text.num_hidden_layers:
            return module
    raise ValueError(f"{type(model).__name__} has no list of {text.num_hidden_layers} layers")


def state_cost(layer: Any, chunk: int) -> int:
    """Multiply-adds of a token with the states of a layer, in chunks of `chunk` tokens."""
    total = 0
    for mixer in _mixers(layer):
        heads, key, value = _state_dims(mixer)
        if (size := getattr(mixer, "ssm_state_size", None)) is not None:
            total += heads * (2 * value * size + chunk * (value + size))
        elif heads:
            total += heads * (3 * key * value + chunk * (2 * key + value))
    return total


def _state_numbers(mixer: Any) -> int:
    """Counts the numbers of a mixer's state, over all heads."""
    heads, key, value = _state_dims(mixer)
    size = getattr(mixer, "ssm_state_size", None)
    return heads * value * (key if size is None else size)


def state_heads(model: Any) -> set[tuple[int, int]]:
    """Finds (heads with a state, key heads or groups that they share) of a model's recurrences."""
    head_counts = set()
    for mixer in _mixers(model):
        heads, *_ = _state_dims(mixer)
        if heads:
            head_counts.add((heads, _first(mixer, "num_k_heads", "n_groups") or heads))
    return head_counts


def _mixers(layer: Any) -> list[Any]:
    """Finds the modules of a layer that call a recurrence or hold a convolution, served or not."""
    from torch import nn

    return [
        mixer
        for mixer in layer.modules()
        if functions_of(mixer.__class__)
        or any(isinstance(child, nn.Conv1d) for child in mixer.children())
    ]


def _state_dims(mixer: Any) -> tuple[int, int, int]:
    """Heads, K and V of a recurrence; zeros of a mere convolution."""
    heads = _first(mixer, "num_v_heads", "num_heads")
    key, value = (
        _first(mixer, "head_k_dim", "head_dim"),
        _first(mixer, "head_v_dim", "head_dim"),
    )
    return (0, 0, 0) if heads is None or key is None else (heads, key, value)


def _attention(layer: Any) -> Any:
    """Finds the softmax attention of a layer, or None."""
    return next((m for m in layer.modules() if getattr(m, "is_causal", False)), None)


def _value_columns(attention: Any) -> int | None:
    """Query heads x Dv: the columns of the projection back to the hidden size."""
    for name, child in attention.named_children():
        if name in _ATTENTION_END:
            # transformers' Conv1D [in, out] has no in_features
            return getattr(child, "in_features", None) or child.weight.shape[0]
    return None


def _head_dims(attention: Any, text: Any) -> tuple[int, int]:
    """D and Dv of a layer."""
    # the layer's attributes come first: a config may hold one head size per layer
    dim = getattr(attention, "qk_head_dim", None) or getattr(attention, "head_dim", None)
    dim = dim or getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return dim, getattr(attention, "v_head_dim", None) or dim


def _kv_heads(attention: Any, text: Any) -> int:
    """The kv heads of a layer."""
    keys = getattr(attention, "k_proj", None)
    if keys is not None:
        # a config that holds kv heads per layer refuses to tell one number
        return int(keys.weight.shape[0] // _head_dims(attention, text)[0])
    heads = told(text, "num_key_value_heads") or told(text, "num_attention_heads")
    return int(heads or attention.num_heads // attention.num_key_value_groups)


def told(config: Any, name: str) -> Any:
    """A number that all layers share; None where the config holds it per layer."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None


def _of_layer(value: Any, number: int) -> Any:
    """A layer's entry of a config's value, which may be one number for all layers or a list."""
    return value[number] if isinstance(value, (list, tuple)) else value


def _first(config: Any, *names: str) -> Any:
    return next((v for name in names if (v := getattr(config, name, None)) is not None), None)
