"""Parts of a model: its decoder, the layers that are checkpointed, the groups it runs in, and the
layers that gradients must pass.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from prefixtree.errors import UnsupportedError


def decoder_of(model: Any) -> nn.Module:
    """The module that holds the layers of a causal language model of transformers."""
    decoder = model.get_decoder()
    # ModernBERT calls its lm_head so
    found: nn.Module = model.base_model if isinstance(decoder, nn.Linear) else decoder
    return found


def layers_of(model: Any) -> list[nn.Module]:
    """Lists the decoder layers that transformers checkpoints, in order; refuses other families."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers, seen = [], set()
    pending: list[nn.Module] = [decoder_of(model)]
    while pending:
        module = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        if isinstance(module, GradientCheckpointingLayer):
            # does not look inside them: Zamba2 has such layers within such layers
            layers.append(module)
        else:
            pending += reversed(list(module.children()))
    if not layers or not model.supports_gradient_checkpointing:
        raise UnsupportedError(
            f"transformers does not checkpoint the layers of {type(model).__name__}, so nothing "
            "can be said of them one by one: leave recompute=None, and compile no layers"
        )
    return layers


def groups_of(model: nn.Module) -> list[Any]:
    """The groups of ranks that run the model in lockstep, in an order that all ranks share."""
    kinds = DistributedDataParallel, FullyShardedDataParallel
    groups = [m.process_group for m in model.modules() if isinstance(m, kinds)]
    meshes = [getattr(parameter, "device_mesh", None) for parameter in model.parameters()]
    # FSDP2 may leave whole parameters in the place of shards between a forward and its backward
    units = (unit for module in model.modules() for unit in fsdp2_units(module))
    meshes += [unit.mesh_info.mesh for unit in units]
    for mesh in dict.fromkeys(meshes):
        groups += [] if mesh is None else mesh.get_all_groups()
    return list(dict.fromkeys(groups))


def fsdp2_units(module: nn.Module) -> list[Any]:
    """The parameters that FSDP2 gathers at a module, one unit per mesh."""
    if not isinstance(module, FSDPModule):
        return []
    state: Any = module._get_fsdp_state()
    # torch 2.13 has a list; asked for one of several, it raises
    units = vars(state).get("_fsdp_param_groups")
    units = [state._fsdp_param_group] if units is None else units
    return [unit for unit in units if unit]


def device_of(model: nn.Module) -> torch.device:
    """The device on which a model computes; FSDP may keep offloaded parameters on the CPU."""
    parameter = next(model.parameters())
    if parameter.device.type not in ("cpu", "meta"):
        return parameter.device
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel) and (at := module.compute_device):
            return at
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or mesh.device_type == parameter.device.type:
        return parameter.device
    mesh_device = torch.device(mesh.device_type)
    # CPUs are "cpu", without a number
    index = torch.get_device_module(mesh_device).current_device()
    return torch.device(mesh_device.type, index) if isinstance(index, int) else mesh_device


def most_of_all_ranks(model: nn.Module, numbers: list[int], device: torch.device) -> list[int]:
    """Computes the largest of each number over the ranks, which all run the model equally often."""
    if not (groups := groups_of(model)):
        return numbers
    most = torch.tensor(numbers, device=device)
    for group in groups:
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return [int(number) for number in most.tolist()]


# ---- through which layers gradients pass ---------------------------------------------------------


class GradientPaths:
    """Tells whether a parameter that trains stands before a layer, in the order of a forward.

    The layers of the decoder run one after another, then the output embedding. Modules within one
    of these count as before one another. The place of anything else is unknown: its parameters
    count as before all layers, and all parameters as before it. What trains, and whether gradients
    are on, is read once.

    Args:
        may_change: whether other parameters may train later: any then stands before a layer.
    """

    def __init__(self, model: nn.Module, *, may_change: bool = False) -> None:
        self._model, self._may_change = model, may_change
        self._enabled = torch.is_grad_enabled()

    def pass_through(self, module: nn.Module) -> bool:
        """Whether a layer's input needs a gradient, for parameters outside the layer."""
        if not self._enabled or not self._trained:
            return False
        if self._may_change:
            return True
        modules_inside = {id(part) for part in module.modules()}
        last = self._places[1].get(id(module))
        if last is None:
            return not modules_inside.issuperset(set().union(*self._trained.values()))
        if min(self._trained) < last:
            return True
        return not modules_inside.issuperset(self._trained.get(last, ()))

    @cached_property
    def _places(self) -> tuple[dict[int, int], dict[int, int]]:
        """The first and the last part that hold a module, by its id: layers may share modules."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for place, part in enumerate(parts_in_order(self._model)):
            for module in part.modules():
                first.setdefault(id(module), place)
                last[id(module)] = place
        return first, last

    @cached_property
    def _trained(self) -> dict[int, set[int]]:
        """Modules with a trained parameter of their own, by their first place; -1 if it is unknown.

        A tied weight counts in the place of each module that has it.
        """
        first, found = self._places[0], dict[int, set[int]]()
        for module in self._model.modules():
            if any(p.requires_grad for p in module.parameters(recurse=False)):
                found.setdefault(first.get(id(module), -1), set()).add(id(module))
        return found


def parts_in_order(model: nn.Module) -> list[nn.Module]:
    """Lists the layers of the decoder and the output embedding; empty where they are not known."""
    from transformers import PreTrainedModel

    transformer = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if transformer is None or (head := transformer.get_output_embeddings()) is None:
        return []
    try:
        return [*layers_of(transformer), head]
    except UnsupportedError:
        return []
