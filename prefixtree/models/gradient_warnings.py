"""Warnings, once each, of gradients that would not be those of the loss: hooks that see parts of a
sum, and a model that is called past its DistributedDataParallel."""

from __future__ import annotations

import gc
import warnings
import weakref

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from prefixtree.models.checks import foreign_module

# whose hooks mask gradients (PEFT), average them over ranks, which twice is once (transformers'
# Trainer), or are the machinery of wrappers. Those of transformers' tensor parallelism sum `.grad`
# over ranks, and so sum the sum of an earlier backward again
_OF_PARTS = "torch", "accelerate", "peft", "transformers.trainer", "prefixtree"
_WRAPPERS = DistributedDataParallel, FullyShardedDataParallel, FSDPModule

_told_of_hooks: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_looked_for_ddp: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def warn_of_hooks(model: nn.Module, backwards: str) -> None:
    """Warns of hooks on gradients of parameters where one update has several backwards.

    Called behind a forward: some hooks are set in it.

    Args:
        model: wrapped or not.
        backwards: what they are, as "each step of max_tokens=".
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
                    "Clamping and normalising are not so: do them to .grad, behind all backwards",
                    stacklevel=5,
                )
                return


def warn_past_ddp(model: nn.Module) -> None:
    """Warns where a model that trains is called without the DistributedDataParallel around it.

    Once per model it looks for one among all objects of this process.
    """
    if not torch.is_grad_enabled() or not torch.distributed.is_available():
        return
    if not torch.distributed.is_initialized() or model in _looked_for_ddp:
        return
    _looked_for_ddp.add(model)
    if any(isinstance(module, _WRAPPERS) for module in model.modules()):
        return
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    for found in gc.get_objects():
        # not isinstance, which asks proxies for their class
        if not issubclass(type(found), DistributedDataParallel):
            continue
        ranks = found.process_group.size()
        if ranks > 1 and any(id(p) in trained for p in found.module.parameters()):
            warnings.warn(
                "the model is called without the DistributedDataParallel around it, so its "
                f"gradients stay on this rank and are not averaged over {ranks}: pass the wrapper "
                "itself, not its .module; that is right only for gradients of which a later "
                "backward, through the wrapper, averages the sum",
                stacklevel=5,
            )
            return
