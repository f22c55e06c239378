"""What each layer of a transformers model computes again in its backward.

transformers' layers hold a switch and a function each for gradient checkpointing. While a model is
scored, both are set per layer, so a forward may recompute some layers whole, keep the outputs of
attention in others and recompute nothing in the rest. Values and gradients are those of the same
operations on the same numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from prefixtree.errors import UnsupportedError
from prefixtree.kernels.operator import TREE_ATTENTION
from prefixtree.kernels.recurrence.operator import TREE_DELTA_RULE, TREE_SSD

#: What a layer computes again in its backward: all of it, all but attention and recurrences, or
#: nothing.
Mode = Literal["all", "all_but_attention", "nothing"]
MODES: tuple[Mode, ...] = ("all", "all_but_attention", "nothing")

#: Operators whose outputs are kept where attention is.
KEPT = (TREE_ATTENTION, TREE_DELTA_RULE.forward, TREE_SSD.forward)

# nothing that a packed forest allows draws random numbers, so no generator's state is kept
_checkpoint = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
_FUNCTIONS: dict[Mode, Any] = {
    "all": _checkpoint,
    "all_but_attention": partial(
        _checkpoint, context_fn=partial(create_selective_checkpoint_contexts, list(KEPT))
    ),
    "nothing": None,
}
_SWITCH, _FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"


def decoder_of(model: Any) -> nn.Module:
    """What holds the layers of a causal language model of transformers."""
    decoder = model.get_decoder()
    # ModernBERT calls its lm_head so
    found: nn.Module = model.base_model if isinstance(decoder, nn.Linear) else decoder
    return found


def layers_of(model: Any) -> list[nn.Module]:
    """The layers that transformers checkpoints, first to last.

    Args:
        model: a causal language model of transformers; layers of image encoders are not counted.

    Raises:
        UnsupportedError: transformers does not checkpoint this family.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers, seen = [], set()
    left: list[nn.Module] = [decoder_of(model)]
    while left:
        module = left.pop()
        if module in seen:
            continue
        seen.add(module)
        if isinstance(module, GradientCheckpointingLayer):
            # not what is inside: Zamba2 has such layers in such layers
            layers.append(module)
        else:
            left += [m for m in reversed(module._modules.values()) if m is not None]
    if not layers or not model.supports_gradient_checkpointing:
        raise UnsupportedError(
            f"transformers does not checkpoint the layers of {type(model).__name__}, so nothing "
            "can be said of them one by one: leave recompute=None, and compile no layers"
        )
    return layers


@contextmanager
def recomputing(model: Any, modes: Sequence[Mode]) -> Iterator[None]:
    """While open, a forward in training mode recomputes what `modes` says, a mode per layer."""
    layers = layers_of(model)
    inner = [[m for m in x.modules() if _has_switch(m) and m is not x] for x in layers]
    touched = [*layers, *itertools.chain(*inner)]
    before = [
        {name: vars(module)[name] for name in (_SWITCH, _FUNCTION) if name in vars(module)}
        for module in touched
    ]
    try:
        for layer, within, mode in zip(layers, inner, modes, strict=True):
            for module in within:
                vars(module)[_SWITCH] = False
            function = _FUNCTIONS[mode]
            vars(layer)[_SWITCH] = mode != "nothing"
            vars(layer)[_FUNCTION] = partial(_as_one, within, function) if within else function
        yield
    finally:
        for module, attributes in zip(touched, before, strict=True):
            for name in (_SWITCH, _FUNCTION):
                vars(module).pop(name, None)
            vars(module).update(attributes)


def _has_switch(module: nn.Module) -> bool:
    # hasattr of a module that has it not takes ten times as long
    return _SWITCH in vars(module) or hasattr(type(module), _SWITCH)


def _as_one(
    within: Sequence[nn.Module], function: Callable[..., Any], run: Callable[..., Any], *args: Any
) -> Any:
    """A checkpoint in which the layers within have none of their own.

    It is asked for in the backward too, when what was set before is set again.
    """

    def whole(*args: Any) -> Any:
        before = [module.gradient_checkpointing for module in within]
        for module in within:
            vars(module)[_SWITCH] = False
        try:
            return run(*args)
        finally:
            for module, switch in zip(within, before, strict=True):
                vars(module)[_SWITCH] = switch

    return function(whole, *args)
