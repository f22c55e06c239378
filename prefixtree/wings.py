"""Wings: what a model may have, or a call may ask for, in addition to attention over a forest.

The core (forest, packing, attention, lm_head, one forward's scores) imports none of them. Each is
loaded by its name, where a model or a call has it. Ways of running (`scoring.kept_runs`,
`scoring.in_steps`) import those that they use. A wing of layers is a module that follows
`OfLayers`. What a wing does in a call is a `CallWing`, and in one forward of a call a
`ForwardWing`.

The core names a wing where it must see, before it loads any, that there is one: in the layers of a
model (`models.prepared`), the keywords of a call (`scoring.forward`, `scoring.batches`), a vision
encoder in a configuration (`models.compiled`, `planning.costs`), and indexers, in masks
(`models.attention`, `models.plain_batches`).

What the attention function reads or refuses of a wing's layers is in `models.families`: their
keywords, and what a call without the wing gets wrong.

Legend: T packed tokens, t own tokens of a part.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from prefixtree.packing.layout import PackedForest
    from prefixtree.packing.mask import TreeMask
    from prefixtree.scoring.edges import SequenceScores

#: The face of each wing.
MODULES = {
    # of layers; experts also of calls
    "states": "prefixtree.states.wing",
    "sparse": "prefixtree.sparse.wing",
    "experts": "prefixtree.experts.wing",
    # of calls
    "images": "prefixtree.images.wing",
    "mtp": "prefixtree.scoring.mtp",
    # of ways to run a call
    "groups": "prefixtree.scoring.in_groups",
    "steps": "prefixtree.scoring.in_steps",
    "recompute": "prefixtree.recompute.choose",
}


def load(wing: str) -> Any:
    """Imports the module of a wing."""
    return import_module(MODULES[wing])


# ---- of layers -----------------------------------------------------------------------------------


class OfLayers(Protocol):
    """The module of a wing that gives some layers of a model another forward along the tree."""

    def prepare_layers(self, transformer: Any, config: Any) -> None:
        """Gives the layers of a transformers model their forward, once; `config` is of the text."""


class LayerMask:
    """Stands in for the attention mask in layers that attend in their own way."""

    def check(self, config: Any, chosen: dict[str, torch.Tensor]) -> None:
        """Refuses a layer whose `chosen` tensors would attend to what the tree did not choose."""
        raise NotImplementedError

    def num_keys(self, queries: int) -> int:
        """Counts the rows of keys of a layer with so many own tokens."""
        return queries

    def attend(
        self,
        module: Any,
        rows: tuple[torch.Tensor, ...],
        mask: TreeMask | DividedMask,
        chosen: dict[str, torch.Tensor],
        **options: Any,
    ) -> torch.Tensor:
        """Attends for own tokens, [t, H, Dv]; rows are query, key, value, [1, heads, rows, dim]."""
        raise NotImplementedError


class DividedMask:
    """Stands in for the mask, of the own tokens, in a forward that computes a part of a forest."""

    mask: TreeMask

    @property
    def attended(self) -> TreeMask:
        """The mask over which attention runs, imported keys included."""
        raise NotImplementedError

    def attend(
        self,
        layer: Hashable,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """Runs `tree_attention` for the own tokens in one layer."""
        raise NotImplementedError

    def in_compiled(self, attention: Any) -> DividedMask:
        """Makes the stand-in for one call of a compiled layer, which has this attention alone."""
        return self

    def of_layer(self, layer: Any) -> DividedStates:
        """Makes the `DividedStates` of a layer that carries a state."""
        raise NotImplementedError


class DividedStates:
    """States of a layer of a part, which come from other parts and go to them: a `KeepsStates`."""

    query_tokens = None
    # own tokens
    num_tokens: int


# ---- of calls ------------------------------------------------------------------------------------


class ForwardWing:
    """A wing in one forward, over a forest or a part of one. The base class does nothing."""

    # keywords of the model's forward
    inputs: Mapping[str, Any] = MappingProxyType({})
    # until the backward
    held_bytes: int = 0

    def around(self, recompute: Any) -> AbstractContextManager[Any]:
        """Makes a context for the forward; `recompute` is a Mode, a RecomputePlan or None."""
        return nullcontext()

    def rows(self, output: Any, tokens: int) -> tuple[torch.Tensor, ...]:
        """Reads what parts and ranks hand on from a model's output: [t, ...] each."""
        return ()


class CallWing:
    """A wing in a call over a packed forest. The base class does nothing."""

    # keywords of a forward over all of the forest; a part gets those of its tokens
    inputs: Mapping[str, Any] = MappingProxyType({})
    # by a forward over all of the forest, until its backward
    held_bytes: int = 0

    def forward(self, own: np.ndarray | None) -> ForwardWing:
        """Makes the wing of one forward over packed tokens, int64 [t], ascending; None for all."""
        return ForwardWing()

    def of_rank(self, parts: Any, rank: int, group: ProcessGroup) -> CallWing:
        """Gives the wing on one rank of a group whose ranks divide the forest into `parts`."""
        return self

    def facts(self) -> dict[str, Any]:
        """Names the numbers and arrays that all ranks of a group must have alike."""
        return {}

    def read(self) -> dict[str, torch.Tensor]:
        """Names the tensors that a backward reads when it runs forwards again."""
        return {}

    def in_lockstep(self, owns: Iterable[np.ndarray], modes: Iterable[Any]) -> None:
        """Lets ranks that share the model agree on what all forwards of a block do alike."""

    def result(
        self, scores: SequenceScores, of_tokens: tuple[torch.Tensor, ...], packed: PackedForest
    ) -> SequenceScores:
        """Adds to a forest's scores what `ForwardWing.rows` gave of its tokens, [T, ...] each."""
        return scores
