"""Through which layers of a model gradients must pass, judged by what trains before them."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import nn

from prefixtree.errors import UnsupportedError
from prefixtree.models.layers import layers_of


class GradientPaths:
    """Whether a parameter that trains stands before a layer, in the order of a forward.

    The layers of the decoder run one after another, and the output embedding behind them. What
    stands within one of these counts as before one another. Of everything else the place is not
    known: its parameters count as before all layers, and all parameters as before it.

    Args:
        model: the model, wrapped or not. What trains, and whether gradients are on, is read once.
        may_change: whether other parameters may train later: any then stands before a layer.
    """

    def __init__(self, model: nn.Module, *, may_change: bool = False) -> None:
        self._model, self._may_change = model, may_change
        self._enabled = torch.is_grad_enabled()

    def pass_through(self, module: nn.Module) -> bool:
        """Whether a layer's input needs a gradient, for parameters that are not the layer's."""
        if not self._enabled or not self._trained:
            return False
        if self._may_change:
            return True
        own = {id(part) for part in module.modules()}
        last = self._places[1].get(id(module))
        if last is None:
            return not own.issuperset(set().union(*self._trained.values()))
        if min(self._trained) < last:
            return True
        return not own.issuperset(self._trained.get(last, ()))

    @cached_property
    def _places(self) -> tuple[dict[int, int], dict[int, int]]:
        """By the id of a module, the first and the last of the parts in order that hold it: layers
        may share modules."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for place, part in enumerate(_parts_in_order(self._model)):
            for module in part.modules():
                first.setdefault(id(module), place)
                last[id(module)] = place
        return first, last

    @cached_property
    def _trained(self) -> dict[int, set[int]]:
        """By the first place, -1 where it is not known, the modules with a parameter of their own
        that trains. A tied weight counts where each of them stands."""
        first, found = self._places[0], dict[int, set[int]]()
        for module in self._model.modules():
            if any(p.requires_grad for p in module.parameters(recurse=False)):
                found.setdefault(first.get(id(module), -1), set()).add(id(module))
        return found


def _parts_in_order(model: nn.Module) -> list[nn.Module]:
    """The layers of the decoder and the output embedding; nothing where they are not known."""
    from transformers import PreTrainedModel

    transformer = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if transformer is None or (head := transformer.get_output_embeddings()) is None:
        return []
    try:
        return [*layers_of(transformer), head]
    except UnsupportedError:
        return []
