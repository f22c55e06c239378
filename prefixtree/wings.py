"""Wings: what a model may have, or a call may ask for, beside attention over a packed forest.

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
    # of ways to run a call
    "groups": "prefixtree.scoring.in_groups",
    "steps": "prefixtree.scoring.in_steps",
    "recompute": "prefixtree.recompute.choose",
}


def load(wing: str) -> Any:
    """The module of a wing."""
    return import_module(MODULES[wing])


# ---- of layers ---------------------------------------------------------------------------------


class OfLayers(Protocol):
    """The module of a wing that gives some layers of a model another forward along the tree."""

    def prepare_layers(self, transformer: Any, config: Any) -> None:
        """Gives layers their forward, once.

        Args:
            transformer: the transformers model. config: of its text.

        Raises:
            UnsupportedError: a layer that is not as the family's proof had it.
        """


class LayerMask:
    """Stands in the place of an attention mask in layers that attend in a way of their own."""

    def check(self, config: Any, chosen: dict[str, torch.Tensor]) -> None:
        """Refuses a layer that would attend to what the tree did not choose.

        Args:
            config: of the model's text. chosen: what the layer hands on to say what it attends to.
        """
        raise NotImplementedError

    def num_keys(self, queries: int) -> int:
        """The number of rows of keys that a layer with so many own tokens hands on."""
        return queries

    def attend(
        self,
        module: Any,
        rows: tuple[torch.Tensor, ...],
        mask: TreeMask | DividedMask,
        chosen: dict[str, torch.Tensor],
        **options: Any,
    ) -> torch.Tensor:
        """Attention of the own tokens, [t, H, Dv].

        Args:
            module: the attention. rows: query, key and value, [1, heads, rows, dim] each.
            mask: of the own tokens. chosen: as for `check`.
            options: scale, window, softcap and sinks, as in `tree_attention`.
        """
        raise NotImplementedError


class DividedMask:
    """In the place of a mask among the keywords of a forward that computes a part of a forest.

    Attributes:
        mask: of the own tokens.
        attended: over which attention runs.
    """

    mask: TreeMask

    @property
    def attended(self) -> TreeMask:
        raise NotImplementedError

    def attend(
        self,
        layer: Hashable,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """As `tree_attention`, of own tokens, in one layer."""
        raise NotImplementedError

    def of_layer(self, layer: Any) -> DividedStates:
        """Gives a layer that carries a state what stands in the place of this mask."""
        raise NotImplementedError


class DividedStates:
    """States of a part's layer that come from other parts, and go to them: a `KeepsStates`.

    Attributes:
        num_tokens: own tokens.
    """

    query_tokens = None
    num_tokens: int


# ---- of calls ----------------------------------------------------------------------------------


class ForwardWing:
    """A wing in one forward, over a forest or a part of one. By itself it does nothing.

    Attributes:
        inputs: keywords of the model's forward.
        held_bytes: what is held until the backward.
    """

    inputs: Mapping[str, Any] = MappingProxyType({})
    held_bytes: int = 0

    def around(self, recompute: Any) -> AbstractContextManager[Any]:
        """A context for the forward.

        Args:
            recompute: what layers compute again: a Mode, a RecomputePlan, or None, as the model is
                set.
        """
        return nullcontext()

    def rows(self, output: Any, tokens: int) -> tuple[torch.Tensor, ...]:
        """Reads from a model's output what parts and ranks hand on, in one wing of a call: [t, ...]
        each."""
        return ()


class CallWing:
    """A wing in a call over a packed forest. By itself it does nothing.

    Attributes:
        inputs: keywords of a forward over all of the forest; a part gets those of its tokens.
        held_bytes: what a forward over all of it holds until its backward.
    """

    inputs: Mapping[str, Any] = MappingProxyType({})
    held_bytes: int = 0

    def forward(self, own: np.ndarray | None) -> ForwardWing:
        """One forward.

        Args:
            own: int64 [t], the packed tokens that it computes, ascending. None: all.
        """
        return ForwardWing()

    def of_rank(self, parts: Any, rank: int, group: ProcessGroup) -> CallWing:
        """The wing on a rank of a group, whose ranks divide the forest.

        Args:
            parts: of the ranks. rank: the place of this one in the group.
        """
        return self

    def facts(self) -> dict[str, Any]:
        """Names what ranks of a group must have alike, numbers or arrays."""
        return {}

    def read(self) -> dict[str, torch.Tensor]:
        """Names, for messages, the tensors that a backward reads which runs forwards again."""
        return {}

    def in_lockstep(self, owns: Iterable[np.ndarray], modes: Iterable[Any]) -> None:
        """Ranks that share the model agree on what all forwards of a block do alike.

        Args:
            owns: int64 [t], own tokens of each forward. modes: what each computes again.
        """

    def result(
        self, scores: SequenceScores, of_tokens: tuple[torch.Tensor, ...], packed: PackedForest
    ) -> SequenceScores:
        """Adds to the scores of a forest what `ForwardWing.rows` gave of its tokens, [T, ...]
        each."""
        return scores
