"""Finds the language model inside a model, and checks that all of it runs along the tree.

A listed model type (`models.families`) is not enough: layers may keep another configuration, and
classes, patches and hooks may change logits, or see parts of a gradient.
"""

from __future__ import annotations

import functools
import gc
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from prefixtree.errors import UnsupportedError, kind_of
from prefixtree.kernels.operators import counted_calls
from prefixtree.models.adapters import check_adapters
from prefixtree.models.families import (
    check_checkpointing,
    check_config,
    check_modules,
    check_tokens,
    family_of,
)
from prefixtree.models.family_table import ATTENDING_TYPES, layer_types_of
from prefixtree.models.layers import device_of
from prefixtree.models.low_precision import check_repacked
from prefixtree.models.rope import check_rope
from prefixtree.packing.layout import PackedForest
from prefixtree.packing.mask import TreeMask

_NAME = "prefixtree"
# packages whose wrappers and hooks hand on a forward's output; Liger Kernel's forwards are
# verified, and TRL's fused head is for calls that ask for it
KNOWN_PACKAGES = (
    "transformers",
    "torch",
    "accelerate",
    "peft",
    "trl",
    "liger_kernel",
    "prefixtree",
    "functools",
)
# packages whose hooks gather and release parameters around a forward, and hand on its output
_KNOWN_HOOKS = (
    *KNOWN_PACKAGES,
    "deepspeed.runtime.engine",
    "deepspeed.runtime.zero.parameter_offload",
    "deepspeed.utils.nvtx",
)


def find_causal_lm(model: nn.Module) -> Any:
    """Finds the transformers model with a language-model head inside wrappers and adapters."""
    causal_lm = _outermost(model)
    if causal_lm is None or causal_lm.get_output_embeddings() is None:
        raise UnsupportedError(
            f"sequence_logprobs needs a transformers model with a language-model head, such as "
            f"AutoModelForCausalLM gives; {type(model).__name__} has none"
        )
    return causal_lm


def check_model(
    model: nn.Module,
    causal_lm: Any,
    packed: PackedForest,
    divided: str | None = None,
    known: np.ndarray | None = None,
) -> None:
    """Refuses what would not give the scores of the replicated batch.

    Args:
        divided: words for what cuts the forest into several forwards. Default: one forward.
        known: int64 [T], the token ids that the model gets. Default: the forest's.
    """
    check_forest(model, causal_lm, packed, divided, known)
    _check_treatment_of_logits(causal_lm)
    device = device_of(causal_lm)
    # hooks may move parameters from the CPU: if they do not, the forward will tell
    if device.type not in ("cpu", "meta") and device != packed.device:
        raise ValueError(
            f"the packed forest is on {packed.device}, the model on {device}: "
            "call packed = packed.to(model.device)"
        )


def check_forest(
    model: nn.Module,
    transformer: Any,
    packed: PackedForest,
    divided: str | None,
    known: np.ndarray | None = None,
    sees: bool = True,
) -> None:
    """Refuses a forest that a model cannot run exactly; `check_model` without the checks of logits.

    Args:
        sees: whether the caller takes images.
    """
    check_loaded(transformer)
    check_parts(model, transformer)
    check_rope(transformer, packed.mask.host, divided)
    if torch.is_grad_enabled():
        check_repacked(model)
        if transformer.training:
            check_checkpointing(transformer, transformer.config.get_text_config())
    if (tokens := packed.forest.tokens) is not None:
        check_tokens(transformer.config, tokens, sees)
        check_vocabulary(transformer, tokens if known is None else known)
    check_positions(transformer, packed.mask.host.deepest)


def check_parts(model: nn.Module, causal_lm: Any) -> None:
    """Refuses a configuration, layers, noise or adapters that are not exact."""
    config, text = causal_lm.config, causal_lm.config.get_text_config()
    check_config(config, causal_lm.training)
    if text is not config:
        check_config(text, causal_lm.training)
    check_modules(model)
    check_adapters(model)


def runs_deepspeed(model: nn.Module) -> bool:
    """Whether DeepSpeed wraps a model, or its ZeRO-3 owns the parameters."""
    return any(type(m).__module__.startswith("deepspeed.") for m in model.modules()) or any(
        "ds_id" in vars(parameter) for parameter in model.parameters()
    )


def has_deepspeed_hooks(module: nn.Module) -> bool:
    """Whether DeepSpeed's ZeRO-3 gathers the parameters of a module for its forward."""
    # it gives all modules their hooks at once, so one module tells
    hooks = module._forward_pre_hooks.values()
    return any((foreign_module(hook) or "").startswith("deepspeed.") for hook in hooks)


def check_loaded(causal_lm: nn.Module) -> None:
    """Refuses parameters on the meta device (ValueError), or partitioned and not gathered."""
    meta = next((name for name, p in causal_lm.named_parameters() if p.is_meta), None)
    # accelerate's hooks load what they offload
    if meta is not None and not any("_hf_hook" in vars(m) for m in causal_lm.modules()):
        raise ValueError(
            f"{meta} is on the meta device, which holds no numbers: load the model with "
            "from_pretrained, or call model.to_empty(device=...) and load_state_dict first"
        )
    partitioned = next(
        (
            name
            for name, p in causal_lm.named_parameters()
            if getattr(getattr(p, "ds_status", None), "name", None) == "NOT_AVAILABLE"
        ),
        None,
    )
    if partitioned is None or has_deepspeed_hooks(causal_lm):
        return
    raise UnsupportedError(
        f"{partitioned} is partitioned by DeepSpeed ZeRO-3 (its shape is [0] here), and "
        f"{type(causal_lm).__name__} has no hooks that would gather it: give the model to "
        "deepspeed.initialize or Accelerator.prepare before it is scored, or score within "
        "deepspeed.zero.GatheredParameters(model.parameters())"
    )


@contextmanager
def every_layer_attends(model: nn.Module, mask: TreeMask) -> Iterator[None]:
    """A context for one forward over a packed forest that every attention layer must follow.

    Before the forward, every causal attention module must be set to "prefixtree". After it, as many
    calls must have reached `tree_attention` as there are layers: modules that compute attention
    elsewhere ignore the mask without an error.
    """
    transformer = transformer_of(model)
    expected = _attention_layers(transformer)
    with counted_calls(mask.host) as calls:
        yield
        count, recurrent = calls()
    _check_states(transformer, recurrent)
    # compiled code does not count the calls of the dense backend, which is for checks
    if count == expected or (mask.backend == "reference" and count == 0):
        return
    raise UnsupportedError(
        f"{count} attention calls followed the tree in a forward of {type(transformer).__name__}, "
        f"which has {expected} attention layers: the others ran another attention (a replaced "
        "module or a patched forward), whose results are those of another batch. Make them call "
        'transformers\' attention interface with attn_implementation="prefixtree"'
    )


def _check_states(transformer: Any, calls: int) -> None:
    """Refuses a model whose recurrent layers did not all call their functions along the tree."""
    config = transformer.config.get_text_config()
    family = family_of(config)
    layers = sum(kind in family.recurrent_types for kind in layer_types_of(config))
    if calls < layers * (expected := len(family.called_functions)):
        raise UnsupportedError(
            f"{calls} recurrent calls followed the tree in a forward of "
            f"{type(transformer).__name__}, which has {layers} recurrent layers of {expected} "
            "each: the others mixed tokens by packed order. They were replaced, or this version of "
            "transformers does not hand them the tree mask"
        )


def transformer_of(model: nn.Module) -> Any:
    """Finds the transformers model inside wrappers and adapters."""
    transformer = _outermost(model)
    if transformer is None:
        raise UnsupportedError(f"{type(model).__name__} holds no transformers model")
    return transformer


def check_module(model: Any) -> None:
    """Raises a TypeError for anything but a torch module."""
    if isinstance(model, nn.Module):
        return
    mend = "AutoModelForCausalLM.from_pretrained(path) makes one"
    if model is None:
        mend += "; compile_layers changes a model in place and returns nothing"
    raise TypeError(f"model must be a torch module, got {kind_of(model, nn.Module)}; {mend}")


def _outermost(model: nn.Module) -> Any:
    from transformers import PreTrainedModel

    check_module(model)
    return next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)


def set_attention(transformer: Any) -> None:
    """Gives the text model attn_implementation="prefixtree"; a vision encoder keeps its own."""
    config = transformer.config
    vision = getattr(config, "vision_config", None)
    encoder = getattr(vision, "_attn_implementation", None) or "sdpa"
    if config.get_text_config()._attn_implementation == _NAME != encoder:
        return
    if vision is None:
        transformer.set_attn_implementation(_NAME)
        return
    encoder = "sdpa" if encoder == _NAME else encoder
    transformer.set_attn_implementation({"": _NAME, "text_config": _NAME, "vision_config": encoder})


def _attends(module: Any) -> bool:
    """Whether a module is a causal attention."""
    # getattr of an attribute that most modules lack would take most of the time
    known = "is_causal" in vars(module) or hasattr(type(module), "is_causal")
    return known and module.is_causal is True and hasattr(module, "config")


def attentions_in(layer: nn.Module) -> list[nn.Module]:
    """Lists the causal attentions of a layer."""
    return [module for module in layer.modules() if _attends(module)]


def attention_modules(transformer: Any) -> list[tuple[str, nn.Module]]:
    """Lists name and module of every causal attention, once per place; refuses other kinds."""
    # a module that stands in two layers runs twice
    named = transformer.named_modules(remove_duplicate=False)
    modules = [(name, module) for name, module in named if _attends(module)]
    others = {n: i for n, m in modules if (i := m.config._attn_implementation) != _NAME}
    if not others:
        return modules
    name, implementation = next(iter(others.items()))
    fix = "call prefixtree.prepare(model) once, before the first forward"
    text = transformer.config.get_text_config()
    if text._attn_implementation == _NAME:
        fix = (
            "its configuration is a copy, which model.set_attn_implementation does not reach: "
            'load the model with attn_implementation="prefixtree" before layers are copied, or '
            "set .config of these modules to the model's config"
        )
    raise UnsupportedError(
        f"{len(others)} of {len(modules)} attention modules run another attention, which "
        f"ignores the tree ({name}: attn_implementation={implementation!r}); {fix}"
    )


def _attention_layers(transformer: Any) -> int:
    """The number of layers that attend, each of which must be set to "prefixtree"."""
    modules = attention_modules(transformer)
    config = transformer.config.get_text_config()
    if not modules or not (family := family_of(config)).is_tested:
        return len(modules)
    attending = config.num_hidden_layers
    if family.functions:
        attending = sum(kind in ATTENDING_TYPES for kind in config.layer_types)
    return max(len(modules), attending)


# ---- code that works on logits -------------------------------------------------------------------


def _check_treatment_of_logits(causal_lm: Any) -> None:
    """Refuses unknown code that works on logits, as scores take their place."""
    kind, model_type = type(causal_lm).__name__, causal_lm.config.model_type
    forward = causal_lm.forward
    if family_of(causal_lm.config).is_tested and (origin := foreign_module(forward)) is not None:
        raise UnsupportedError(
            f"{kind}.forward is not the one transformers has for model type {model_type!r} but "
            f"comes from {origin}: what it does to logits would be lost, as scores take their "
            "place; use transformers' class, or verify yours and call "
            f"allow_model_type({model_type!r})"
        )
    for hook in causal_lm._forward_hooks.values():
        check_hook(hook, f"{kind}, the language model,")


def check_hook(hook: Callable[..., Any], owner: str) -> None:
    """Refuses a forward hook that would see scores where it expects logits."""
    if foreign_module(hook, _KNOWN_HOOKS) is not None:
        raise UnsupportedError(
            f"{owner} has a forward hook ({hook!r}): it would see scores, never logits; remove it "
            "while scoring"
        )


def foreign_module(function: Any, known: Sequence[str] = KNOWN_PACKAGES) -> str | None:
    """Finds the module, outside of `known`, of a function or of one that it wraps; None without."""
    functions, seen = [function], set()
    while functions:
        function = functions.pop()
        if isinstance(function, functools.partial):
            functions.append(function.func)
        function = getattr(function, "__func__", function)
        if id(function) in seen:
            continue
        seen.add(id(function))
        # not __module__, which a wrapper takes over from what it wraps
        names = getattr(function, "__globals__", None)
        module = type(function).__module__ if names is None else names.get("__name__", "?")
        if not any(f"{module}.".startswith(f"{name}.") for name in known):
            return str(module)
        functions.append(getattr(function, "__wrapped__", None))
        # a wrapper need not call what it says it wraps
        if isinstance(function, FunctionType):
            functions += inspect.getclosurevars(function).nonlocals.values()
        functions = [f for f in functions if isinstance(f, _FUNCTIONS) or hasattr(f, "__wrapped__")]
    return None


_FUNCTIONS = (FunctionType, MethodType, functools.partial)


def check_vocabulary(causal_lm: Any, tokens: np.ndarray) -> None:
    """Refuses token ids that the model does not have."""
    vocabulary = causal_lm.config.get_text_config().vocab_size
    if len(tokens) == 0 or int(tokens.max()) < vocabulary:
        return
    or_images = ""
    if getattr(causal_lm.config, "image_token_id", None) is not None:
        or_images = "; ids of Images.sequences need sequence_logprobs(images=)"
    raise ValueError(
        f"token id {int(tokens.max())} is beyond the model's vocabulary of {vocabulary}: the "
        "sequences were tokenised for another model, or tokens were added without "
        f"model.resize_token_embeddings{or_images}"
    )


def check_positions(causal_lm: Any, longest: int, counted: str = "") -> None:
    """Refuses sequences of more tokens than a model has learned positions.

    Args:
        longest: the length of the longest sequence. counted: words for what of it is still to come.
    """
    config = causal_lm.config.get_text_config()
    if not family_of(config).learns_positions or longest <= config.max_position_embeddings:
        return
    raise ValueError(
        f"a sequence has {longest} tokens{counted and f', {counted}'}, and {config.model_type} has "
        f"learned positions for {config.max_position_embeddings} (config.max_position_embeddings): "
        "cut or leave out longer ones"
    )


# ---- a classifier that is called over a packed forest by itself ----------------------------------


def refuse_pooled(classifier: nn.Module) -> None:
    """Makes the classifier refuse to give one row for a forest of several paths."""
    hooks = classifier._forward_hooks.values()
    if isinstance(getattr(classifier, "score", None), nn.Module) and _check_rows not in hooks:
        classifier.register_forward_hook(_check_rows, with_kwargs=True)


def _check_rows(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Refuses one row for several paths: a hook that copies and pickles of the model have too."""
    mask = kwargs.get("tree_mask")
    logits = getattr(output, "logits", None)
    if mask is None or not isinstance(logits, torch.Tensor) or logits.ndim != 2:
        return
    # a forest of a single path pools to its last token
    if (mask.host.subtree_end == mask.host.num_tokens).all():
        return
    raise UnsupportedError(
        f"{type(module).__name__} reads its values at the last token of a row, and a packed forest "
        f"is one row: it gave {list(logits.shape)} for all sequences. Call "
        "prefixtree.sequence_values(model, packed), whose last row [-1] is a sequence's value"
    )


# ---- warnings, once each, of gradients that would differ from the loss's -------------------------

# packages whose hooks may run in several backwards: they mask gradients (PEFT), average them over
# ranks, where twice is as once (transformers' Trainer), or are the machinery of wrappers. Hooks of
# transformers' tensor parallelism sum `.grad` over ranks, so they sum an earlier sum again
_OF_PARTS = "torch", "accelerate", "peft", "transformers.trainer", "prefixtree"
_WRAPPERS = DistributedDataParallel, FullyShardedDataParallel, FSDPModule

_told_of_hooks: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_looked_for_ddp: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def warn_of_hooks(model: nn.Module, backwards: str) -> None:
    """Warns of hooks on gradients of parameters where one update has several backwards.

    It is called after a forward, as some hooks are set in it. `backwards` names them, for example
    "each step of max_step_tokens=".
    """
    if model in _told_of_hooks:
        return
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            for hook in (getattr(parameter, kind, None) or {}).values():
                if foreign_module(hook, _OF_PARTS) is None:
                    continue
                _told_of_hooks.add(model)
                warnings.warn(
                    f"{name} has a hook on its gradient ({hook!r}), which runs in the backward of "
                    f"{backwards}, each time on a part of the sum. That is right if what it makes "
                    "of a sum is the sum of what it makes of the parts (a mask, a factor). "
                    "Clamping and normalising are not so: do them to .grad, after all backwards",
                    stacklevel=5,
                )
                return


def warn_past_ddp(model: nn.Module) -> None:
    """Warns of a model that trains and is called past its DistributedDataParallel.

    It searches all objects of this process, once per model.
    """
    if not torch.is_grad_enabled() or not torch.distributed.is_available():
        return
    if not torch.distributed.is_initialized() or model in _looked_for_ddp:
        return
    _looked_for_ddp.add(model)
    if any(isinstance(module, _WRAPPERS) for module in model.modules()):
        return
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    for candidate in gc.get_objects():
        # isinstance asks proxies for their class, and issubclass is slow where one is an ABC
        if DistributedDataParallel not in type(candidate).__mro__:
            continue
        ranks = candidate.process_group.size()
        if ranks > 1 and any(id(p) in trained for p in candidate.module.parameters()):
            warnings.warn(
                "the model is called without the DistributedDataParallel around it, so its "
                f"gradients stay on this rank and are not averaged over {ranks}: pass the wrapper "
                "itself, not its .module; that is right only for gradients of which a later "
                "backward, through the wrapper, averages the sum",
                stacklevel=5,
            )
            return
