"""Linear layers of low precision: whether they treat every token alone.

A token has other neighbours in a packed forest than in the replicated batch. Quantised weights give
it the same output there; so do activations quantised with a scale per token. One scale for all
tokens of a call gives it another output.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from prefixtree.errors import UnsupportedError
from prefixtree.models.layers import GradientPaths

# rows of a probe: a number that kernels of low precision accept
_ROWS = 32
# torchao's names of one scale for all tokens
_ONE_SCALE = ("TENSORWISE", "PerTensor")
# by module: the kind of weight that was tried, and whether its gradient was tried
_tried: weakref.WeakKeyDictionary[nn.Module, tuple[type, bool]] = weakref.WeakKeyDictionary()


def check_low_precision(name: str, module: nn.Module, paths: GradientPaths | None = None) -> None:
    """Refuses a layer whose output for a token depends on others, or that stops wanted gradients.

    torchao's and bitsandbytes' are known by name. Other linear layers whose class or weight is not
    torch's are tried once, on two batches of a few rows, if their weight is whole and on one
    device.

    Args:
        paths: those of the model, which say whether gradients must pass the layer. Default: none
            must.
    """
    # adapters are judged by their method
    origin = type(module).__module__
    if origin.startswith("peft."):
        return
    if isinstance(module, nn.Linear) and origin.startswith("bitsandbytes."):
        _check_bitsandbytes(name, module)
        return
    # experts keep all their weights in one
    for weight in module.parameters(recurse=False):
        if _one_scale_of(module, _local(weight)):
            raise UnsupportedError(
                f"{name} ({type(module).__name__}) quantises its input with one scale for all "
                "tokens of a call, so a token's output depends on which others stand beside it: "
                f"{_INSTEAD}"
            )
    if not isinstance(module, nn.Linear):
        return
    # a family's own are proven with it
    known = type(module).forward is nn.Linear.forward or origin.startswith("transformers.models.")
    if known and is_plain(module.weight):
        return
    kind = type(module.weight)
    trains = paths is not None and paths.pass_through(module)
    done = _tried.get(module) in ((kind, trains), (kind, True))
    if done or _local(module.weight) is not module.weight:
        return
    if (tried := _try(module, module.weight, trains)) is None:
        return
    alone, passes = tried
    if not alone:
        raise UnsupportedError(
            f"{name} ({type(module).__name__}) gives a token another output when other tokens "
            f"stand beside it, which a packed forest changes: {_INSTEAD}"
        )
    if not passes:
        raise UnsupportedError(
            f"{name} ({type(module).__name__} with {kind.__name__}) gives its input no gradient, "
            "so that what stands before it would not be trained: load it with quantised weights "
            "alone, or freeze all but later decoder layers and the output embedding "
            "(requires_grad_(False))"
        )
    _tried[module] = kind, trains


def is_plain(weight: torch.Tensor) -> bool:
    """Whether a weight, or this rank's part of it, is torch's own tensor class."""
    return type(_local(weight)) in (nn.Parameter, torch.Tensor)


def check_quantizer(transformer: nn.Module) -> None:
    """Refuses a model that transformers loaded quantised by anything but bitsandbytes and torchao.

    The layers of these two are judged one by one.
    """
    if not is_quantised(transformer):
        return
    quantizer: Any = transformer.hf_quantizer
    method = quantizer.quantization_config.quant_method
    # a name, or a member of an enumeration
    method = getattr(method, "value", method)
    if method not in ("bitsandbytes", "torchao"):
        raise UnsupportedError(
            f"models that transformers loads quantised (quantization_config) by {method} are "
            "not verified: load it unquantised, or by bitsandbytes or torchao"
        )


def is_quantised(transformer: nn.Module) -> bool:
    """Whether transformers loaded a model quantised."""
    return vars(transformer).get("hf_quantizer") is not None


def check_repacked(model: nn.Module) -> None:
    """Refuses 4-bit layers that give their input no gradient where it needs one.

    On a CPU with AVX512-BF16, bitsandbytes (0.50) stores a weight anew, for good, in the first
    forward in evaluation mode whose input wants no gradient: that of a probe, or of old scores.
    """
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if type(module).__module__.startswith("bitsandbytes.nn")
    ]
    # every call of every model comes here
    if not layers:
        return
    paths = GradientPaths(model)
    for name, module in layers:
        weight: Any = getattr(module, "weight", None)
        state = getattr(weight, "quant_state", None)
        was = getattr(state, "packing_format_for_cpu", False)
        may_be = vars(module).get("support_avx512bf16_for_cpu") and weight.device.type == "cpu"
        if (was or (may_be and not module.training)) and paths.pass_through(module):
            raise UnsupportedError(
                f"{name} ({type(module).__name__} of bitsandbytes) gives its input no gradient "
                "after a forward in evaluation mode on this CPU: call model.train() before the "
                "first forward, and load a model anew that has run in evaluation mode"
            )


def _check_bitsandbytes(name: str, module: Any) -> None:
    """Refuses unknown layers, 8-bit ones that keep large columns apart, and trained weights."""
    kind = type(module).__name__
    if kind not in ("Linear4bit", "Linear8bitLt", "LinearNF4", "LinearFP4"):
        raise UnsupportedError(f"{name} ({kind} of bitsandbytes) is not verified")
    if kind == "Linear8bitLt" and module.state.threshold > 0:
        raise UnsupportedError(
            f"{name} ({kind}) keeps columns apart in which any token of a call is above a "
            f"threshold ({module.state.threshold}), so a token's output depends on which others "
            "stand beside it: load the model with llm_int8_threshold=0.0"
        )
    if module.weight.requires_grad:
        raise UnsupportedError(
            f"{name} ({kind}) has a quantised weight that wants a gradient: train adapters alone"
        )


_INSTEAD = (
    'take a scale per token (torchao: the recipe "rowwise", or granularity=PerRow()) or weights '
    "alone"
)


def _one_scale_of(module: Any, weight: Any) -> bool:
    """Whether torchao quantises a layer's input with one scale (`Float8Linear`, tensor classes)."""
    granularities = []
    cast: Any = getattr(vars(module).get("config"), "cast_config_input", None)
    if getattr(getattr(cast, "scaling_type", None), "name", None) == "DYNAMIC":
        granularities.append(cast.scaling_granularity.name)
    if (options := getattr(weight, "act_quant_kwargs", None)) is not None:
        granularities.append(type(getattr(options, "granularity", None)).__name__)
        # NVFP4 has this scale above those of blocks
        if getattr(options, "use_dynamic_per_tensor_scale", False):
            return True
    return any(name in _ONE_SCALE for name in granularities)


def _local(weight: Any) -> Any:
    """The part of a sharded weight that this rank holds."""
    return getattr(weight, "_local_tensor", weight)


def _try(module: nn.Linear, weight: torch.Tensor, trains: bool) -> tuple[bool, bool] | None:
    """Tries whether a layer treats a row alone, and whether gradients pass it if it `trains`.

    It gives None where it cannot be tried: on the wrong device, or partitioned.
    """
    if weight.is_meta or weight.numel() == 0:
        return None
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(1, 1, module.in_features, generator=generator).to(weight.device, weight.dtype)
    # much larger rows, which raise a scale that all rows share
    among_others = torch.cat([row, row.flip(-1) * 1000] * (_ROWS // 2), 1)
    rows = row.repeat(1, _ROWS, 1)
    try:
        with torch.no_grad():
            expected, among = module.forward(rows)[:, 0], module.forward(among_others)[:, 0]
    except Exception:
        return None
    # far above the rounding of kernels that take rows in another order
    alone = not bool((among - expected).abs().max() > 0.01 * expected.abs().max())
    return alone, not trains or _passes_gradients(module, rows)


def _passes_gradients(module: nn.Linear, rows: torch.Tensor) -> bool:
    """Whether a gradient reaches the input, not the bias alone; True where it cannot be tried."""
    try:
        with torch.enable_grad():
            rows.requires_grad_()
            # cloned as in a model: the input is no leaf, and its gradient has memory of its own
            output = module.forward(rows.clone())
            if not output.requires_grad:
                return False
            (gradient,) = torch.autograd.grad(
                output, rows, torch.ones_like(output), allow_unused=True
            )
    except Exception:
        return True
    return gradient is not None
