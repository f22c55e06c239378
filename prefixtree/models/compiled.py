"""Compiled layers: one graph per kind of layer, for forests of every size."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from prefixtree.models.checks import attentions_in, transformer_of
from prefixtree.models.layers import layers_of
from prefixtree.models.prepared import prepare_layers
from prefixtree.wings import DividedMask, load

# the number of graphs that torch keeps for one kind of code: layers of every kind, in every mode of
# recomputation, with gradients and without
_GRAPHS = 64
# the options of layers that are compiled
_OPTIONS: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()


def compile_layers(model: nn.Module, **options: Any) -> None:
    """Compiles every decoder layer of a model, and its vision encoder's blocks, in place.

    torch.compile turns norms, activations and rotary embeddings into few kernels, so an update
    takes less time and less memory. Layers of one kind share a graph, and a new forest compiles
    nothing anew. The first forward and the first backward compile; so does the first use of each
    mode of `recompute`, which works in compiled layers too. `fully_shard` may be called before or
    after.

    A vision encoder's blocks are compiled in parts, around attention, for calls with `images=`;
    Gemma 4's are not. They run uncompiled where transformers recomputes each block, and under
    attention other than "prefixtree" and "sdpa". The layers of LongCat-Flash are compiled in parts,
    because its experts look at numbers. Layers with indexers are compiled without their attention,
    because an indexer loops over paths.

    torch keeps 8 graphs of one kind of code and then runs eagerly; this raises the limit
    (`torch._dynamo.config.recompile_limit`) to 64.

    torch does not see hooks that are set inside a layer after its first forward, or inside one
    layer of a kind alone: set them before, on all.

    Args:
        model: as in `sequence_logprobs` or `sequence_values`.
        options: keywords of torch.compile. Default: dynamic=True, so that one graph serves forests
            of every size.

    Raises:
        TypeError: not a module.
        UnsupportedError: a family without layers that transformers checkpoints.
    """
    transformer = transformer_of(model)
    layers = layers_of(transformer)
    # prepares first: it replaces functions that would otherwise be compiled
    prepare_layers(transformer)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS)
    options = {"dynamic": True, **options}
    if getattr(transformer.config, "vision_config", None) is not None:
        load("images").compile_blocks(model, **{**options, "fullgraph": False})
    for layer in layers:
        # sets it on the layer and not on its class, as `recompute` does: so a forward whose plan
        # recomputes nothing finds the graph of one without a plan
        layer.gradient_checkpointing = layer.gradient_checkpointing
        _compile(layer, options)


def compile_alike(model: nn.Module, copied: nn.Module) -> None:
    """Compiles the decoder layers of a copy where `compile_layers` compiled those of the model."""
    for layer, other in zip(model.modules(), copied.modules(), strict=True):
        if (options := _OPTIONS.get(layer)) is not None:
            _compile(other, options)


def _compile(layer: nn.Module, options: dict[str, Any]) -> None:
    layer.compile(**options)
    held = vars(layer)
    # what is done at the border is no part of the graph; a torch that compiles otherwise has more
    # graphs
    if (run := held.get("_compiled_call_impl")) is not None:
        held["_compiled_call_impl"] = partial(_at_border, run, attentions_in(layer))
    _OPTIONS[layer] = options


def _at_border(
    run: Callable[..., Any], attentions: Sequence[nn.Module], *args: Any, **kwargs: Any
) -> Any:
    """Calls a compiled layer with inputs for which layers of one kind have one graph."""
    mask = kwargs.get("tree_mask")
    if isinstance(mask, DividedMask) and len(attentions) == 1:
        kwargs["tree_mask"] = mask.in_compiled(attentions[0])
    if not torch.is_grad_enabled():
        # the embedding's output may ask for a gradient (`enable_input_require_grads`), and the
        # outputs of layers do not
        args = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in args)
    return run(*args, **kwargs)
