"""Sets what each layer of a transformers model computes again in its backward.

transformers' layers hold a switch and a function each for gradient checkpointing. While a model is
scored, both are set per layer. So in one forward some layers recompute all, others keep the outputs
of attention, and the rest recompute nothing. Values and gradients are those of the same operations
on the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from prefixtree.kernels.attention.operator import TREE_ATTENTION
from prefixtree.kernels.recurrence.operator import TREE_DELTA_RULE, TREE_SSD
from prefixtree.models.changes import changing
from prefixtree.models.layers import layers_of

#: What a layer computes again in its backward: all of it, all but attention and recurrences, or
#: nothing; from most to least recomputed. Plans [a, b] (`plan`), `Learnt._all_modes`
#: (`measured`) and `GroupShare.agreed` (`choose`) know exactly these three, in this order.
Mode = Literal["all", "all_but_attention", "nothing"]
MODES: tuple[Mode, ...] = ("all", "all_but_attention", "nothing")

#: Operators whose outputs are kept where attention is.
KEPT_OPERATORS = (TREE_ATTENTION, TREE_DELTA_RULE.forward, TREE_SSD.forward)

# nothing that a packed forest allows draws random numbers, so no generator's state is kept
_checkpoint = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def _keeping(run: Callable[..., Any], *args: Any, operators: Sequence[Any]) -> Any:
    """Runs a checkpoint that keeps the outputs of operators."""
    contexts: Callable[[], Any]
    if torch.compiler.is_compiling():
        # the compiler knows torch's contexts, and keeps the named outputs in its graph
        contexts = partial(create_selective_checkpoint_contexts, list(operators))
    else:
        from prefixtree.recompute.kept_outputs import KeptOutputs

        contexts = KeptOutputs(operators).contexts
    return _checkpoint(run, *args, context_fn=contexts)


def _keeping_attention(run: Callable[..., Any], *args: Any, use_reentrant: bool) -> Any:
    """Runs a checkpoint that keeps attention, with the keyword of transformers' functions."""
    return _keeping(run, *args, operators=KEPT_OPERATORS)


_FUNCTIONS: dict[Mode, Any] = {
    "all": _checkpoint,
    "all_but_attention": partial(_keeping_attention, use_reentrant=False),
    "nothing": None,
}
#: The operators of torch's attention in vision encoders.
IN_ENCODERS = [
    operator.default
    for name in (
        "flash_attention",
        "flash_attention_for_cpu",
        "efficient_attention",
        "cudnn_attention",
    )
    if (operator := getattr(torch.ops.aten, f"_scaled_dot_product_{name}", None)) is not None
]
_SWITCH, _FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"


@contextmanager
def recomputing(model: Any, modes: Sequence[Mode]) -> Iterator[None]:
    """Has a forward in training mode recompute as `modes` say, one per layer, while open."""
    layers = layers_of(model)
    inner = [[m for m in outer.modules() if _has_switch(m) and m is not outer] for outer in layers]
    with changing(model) as changes:
        for layer, within, mode in zip(layers, inner, modes, strict=True):
            for module in within:
                changes.set(module, **{_SWITCH: False})
            function = _FUNCTIONS[mode]
            function = partial(_as_one, within, function) if within else function
            changes.set(layer, **{_SWITCH: mode != "nothing", _FUNCTION: function})
        yield


def checkpoint_of_encoder(encoder: nn.Module, mode: Mode) -> Callable[..., Any] | None:
    """A checkpoint around a whole vision encoder, in which its layers have none of their own.

    It is (function, *tensors) -> what the function returns; None for "nothing". "all_but_attention"
    keeps the outputs of torch's attention, except under FSDP2, where it is "all".
    """
    if mode == "nothing":
        return None
    assert mode in ("all", "all_but_attention"), f"no checkpoint of a vision encoder: {mode!r}"
    function: Callable[..., Any] = _checkpoint
    # FSDP2's hooks within the vision encoder run in the backward too, under which this is not
    # verified
    is_sharded = any(isinstance(module, FSDPModule) for module in encoder.modules())
    if mode == "all_but_attention" and not is_sharded:
        function = partial(_keeping, operators=IN_ENCODERS)
    within = [m for m in encoder.modules() if _has_switch(m)]
    return partial(_as_one, within, function) if within else function


def keeping_in_encoder(encoder: nn.Module) -> Callable[..., Any]:
    """Runs a vision encoder that keeps its activations: its layers have no checkpoints."""
    within = [m for m in encoder.modules() if _has_switch(m)]
    return partial(_as_one, within, _direct) if within else _direct


def _direct(run: Callable[..., Any], *args: Any) -> Any:
    return run(*args)


def checkpoints_itself(encoder: nn.Module) -> bool:
    """Whether transformers recomputes the layers of a vision encoder in the backward."""
    return encoder.training and any(getattr(m, _SWITCH, False) for m in encoder.modules())


def _has_switch(module: nn.Module) -> bool:
    # hasattr takes ten times as long for a module without the attribute
    return _SWITCH in vars(module) or hasattr(type(module), _SWITCH)


def _as_one(
    within: Sequence[nn.Module], function: Callable[..., Any], run: Callable[..., Any], *args: Any
) -> Any:
    """Runs a checkpoint in which the layers within have none of their own."""
    # the backward opens it too, and then restores the earlier settings

    def whole(*args: Any) -> Any:
        with changing(within[0]) as changes:
            for module in within:
                changes.set(module, **{_SWITCH: False})
            return run(*args)

    return function(whole, *args)
