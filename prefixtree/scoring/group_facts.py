"""Facts that the ranks of a group must have alike before they compute a forest together."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from torch import nn

from prefixtree.models.families import seed_of
from prefixtree.packing.layout import PackedForest
from prefixtree.parallel.agreement import Parts
from prefixtree.planning.costs import CostModel, ImportCost, cost_model_of, import_cost_of
from prefixtree.planning.model_cost import model_cost
from prefixtree.scoring.edges import ScoredEdges

#: The facts of wings, by their names.
WINGS = {
    "images": (
        "the ranks of a group must pass the same images, of equal image_keys and video_keys"
    ),
    "experts": "the ranks of a group must ask the same of routers",
    "mtp": "the ranks of a group must give mtp of equal layers, and the same mtp_detach",
}
#: Fact that ranks must have alike -> beginning of the message where they differ.
FACTS = {
    "forest": (
        "the ranks of a group must pass the same forest, its sequences in the same order (ranks "
        "with other data belong to other groups)"
    ),
    "loss_mask": "the ranks of a group must score the same tokens",
    "sampling_masks": "the ranks of a group must pass the same sampling masks",
    "temperature": "the ranks of a group must score the same tokens at the same temperatures",
    **WINGS,
    "model": "the ranks of a group must have the same model",
    "options": "the ranks of a group must make the same call, of models in the same state",
    # it follows from all of these
    "division": "the ranks of a group must divide the tokens alike, in the same versions of all",
}


# cached by model: reading a configuration takes longer than dividing a forest
_known_costs: weakref.WeakKeyDictionary[nn.Module, tuple[CostModel, ImportCost]] = (
    weakref.WeakKeyDictionary()
)


def costs_of(model: Any) -> tuple[CostModel, ImportCost]:
    if model not in _known_costs:
        cost = model_cost(model.config)
        _known_costs[model] = cost_model_of(cost), import_cost_of(cost)
    return _known_costs[model]


def parts_of_forest(packed: PackedForest) -> Parts:
    """Lists the parts of a forest that ranks of a group must have alike."""
    forest = packed.forest
    return {
        "its number of packed tokens": packed.num_tokens,
        "its token ids": forest.tokens,
        "its nodes' parents": forest.node_parent,
        "its nodes' lengths": forest.node_start,
        "the order of its sequences": forest.sequence_node,
        "its recorded routes": forest.routes,
    }


def parts_of_scores(found: ScoredEdges | None) -> dict[str, Parts]:
    """Lists the parts of the scored edges that ranks of a group must have alike, by fact."""
    if found is None:
        return {"loss_mask": {}, "sampling_masks": {}, "temperature": {}}
    is_scored = np.zeros(int(found.token.max(initial=-1)) + 1, bool)
    is_scored[found.token] = True
    temperature = found.temperature
    first = np.flatnonzero(temperature != np.append(np.nan, temperature[:-1]))
    # by temperature; with one, the loss mask says which edges
    edges = found.token.astype(np.int32) if len(first) > 1 else None
    return {
        "loss_mask": {"loss_mask": np.packbits(is_scored)},
        "sampling_masks": {
            f"{name} of sampling_masks": value
            for name, value in ({} if found.sets is None else vars(found.sets)).items()
        },
        "temperature": {
            "temperature": temperature[first],
            "the edges of each": edges,
            "where each begins": first,
        },
    }


def parts_of_model(model: Any) -> Parts:
    costs = {name: value for cost in costs_of(model) for name, value in vars(cost).items()}
    return {f"{name} by its configuration": value for name, value in costs.items()} | {
        f"dtype of {name}": p.dtype for name, p in model.named_parameters()
    }


def parts_of_state(model: Any, packed: PackedForest) -> Parts:
    """Lists the state that decides which collectives run, forward and backward, and their dtype."""
    kind, mask = packed.device.type, packed.mask
    config = model.config.get_text_config()
    parts = {
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "autocast": torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
        "model.training": model.training,
        "the seed of share_dropout": seed_of(model),
        "config.output_router_logits": getattr(config, "output_router_logits", None),
        "backend of the packed forest": mask.backend,
        "deterministic of the packed forest": mask.deterministic,
    }
    switch = "gradient_checkpointing"
    for name, module in model.named_modules():
        # looks in the instance and its class: getattr of an attribute that is missing takes longer
        found = vars(module).get(switch, getattr(type(module), switch, None))
        parts[f"{switch} of {name or 'the model'}"] = found
    for name, parameter in model.named_parameters():
        parts[f"requires_grad of {name}"] = parameter.requires_grad
    return parts
