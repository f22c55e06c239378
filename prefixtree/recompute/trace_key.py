"""What the memory of a model depends on: its config, the adapters on it, and what of it trains."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from prefixtree.models.experts import traced_as


@dataclass(frozen=True)
class Adapters:
    """The adapters that PEFT adds to a model.

    Attributes:
        configs: PEFT's configurations by the adapters' names, all of them on the model.
        in_float32: whether their weights are in float32 whatever the model's dtype is.
    """

    configs: dict[str, Any]
    in_float32: bool

    def on(self, model: nn.Module) -> None:
        """Puts them on a model, in place."""
        import peft

        configs = copy.deepcopy(self.configs)
        first, *others = configs
        # what it warns of, it said when the model got them
        with warnings.catch_warnings(action="ignore"):
            adapted = peft.get_peft_model(
                model, configs[first], first, autocast_adapter_dtype=self.in_float32
            )
            for name in others:
                adapted.add_adapter(name, configs[name])

    def __str__(self) -> str:
        said = {name: config.to_dict() for name, config in self.configs.items()}
        return f"{said} {self.in_float32}"


@dataclass(frozen=True)
class Trains:
    """What of a model gets gradients.

    Attributes:
        parameters: whether each trains, by its name in the transformers model. Others, as those
            that FSDP1 made one, train as in a model just made. Default: none is known.
        inputs: whether hidden states before the first layer get a gradient whatever the embedding
            does: by a hook, or by pictures. Default: False.
    """

    parameters: Mapping[str, bool] = field(default_factory=dict)
    inputs: bool = False

    def set_on(self, model: nn.Module) -> None:
        """Has the same parameters of a model train."""
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self.parameters.get(name, parameter.requires_grad))


# fields that trainers set and no memory depends on
_NO_MEMORY = re.compile(r'"(use_cache|_name_or_path|\w+_token_id)": [^\n]*')


class TraceKey:
    """A config, adapters and what trains, which are compared by what they say of memory.

    Attributes:
        experts: how the trace runs experts.
    """

    def __init__(self, config: Any, adapters: Adapters | None, trains: Trains) -> None:
        self.config, self.adapters, self.trains = config, adapters, trains
        self.experts = traced_as(config)
        said = _NO_MEMORY.sub("", config.to_json_string(use_diff=False))
        # without adapters, all parameters of a model just made train
        known = [x for x in trains.parameters.items() if adapters is not None or not x[1]]
        self._said = f"{said} {adapters} {self.experts} {known} {trains.inputs}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TraceKey) and self._said == other._said

    def __hash__(self) -> int:
        return hash(self._said)
