"""The tokens of a packed forest that this process computes: all of them, or a part.

Legend: U scored edges, one per temperature; u of them, and t own tokens, of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from prefixtree.models.families import forward_inputs
from prefixtree.packing.copies import GatherIndex
from prefixtree.packing.layout import PackedForest
from prefixtree.packing.mask import TreeMask
from prefixtree.scoring.edges import DeviceEdges, ScoredEdges, edges_on_device
from prefixtree.wings import CallWing

if TYPE_CHECKING:
    from prefixtree.parallel.ledger import Divided
    from prefixtree.recompute.choose import GroupShare, Recompute

#: The rows of a forward: scores [u, columns] of its edges, then [t, ...] per tensor that a wing
#: hands on (`ForwardWing.rows`).
Rows = tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class LocalTokens:
    """The tokens of a packed forest that this process computes.

    Attributes:
        gathered: makes the rows of all ranks from the rows of this rank's forward.
        of_steps: keywords of a forward over the whole forest, for steps.
        share: the part of a rank, for recompute="auto"; None for other modes.
        steps: gives a rank's steps, on which the group agreed. None: one forward, or this process
            divides.
    """

    inputs: dict[str, Any]
    mask: TreeMask
    gathered: Callable[[Rows], Rows]
    of_steps: dict[str, Any]
    wings: Mapping[str, CallWing] = field(default_factory=dict)
    share: GroupShare | None = None
    steps: Callable[[], Divided] | None = None


@dataclass(frozen=True, kw_only=True)
class LocalPart(LocalTokens):
    """The tokens that this process computes, and the edges that it scores.

    Attributes:
        edges: what the lm_head scores here.
        to_sequences: gathers scores of all ranks to every sequence but its first token.
        lengths: n - 1 of each sequence.
        order: gives int64 [U], the row of each scored edge once gathered. None: in edge order.
    """

    edges: DeviceEdges
    to_sequences: GatherIndex
    lengths: list[int]
    order: Callable[[], np.ndarray] | None = None


def inputs_of(
    packed: PackedForest, transformer: Any, wings: Mapping[str, CallWing]
) -> dict[str, Any]:
    """Makes the keywords of a forward over a packed forest."""
    inputs = forward_inputs(packed, transformer)
    for wing in wings.values():
        inputs |= wing.inputs
    return inputs


def whole_tokens(
    packed: PackedForest, transformer: Any, wings: Mapping[str, CallWing] = MappingProxyType({})
) -> LocalTokens:
    """Makes a `LocalTokens` of the whole forest."""
    inputs = inputs_of(packed, transformer, wings)
    same: dict[str, Any] = {"inputs": inputs, "of_steps": inputs, "mask": packed.mask}
    return LocalTokens(**same, wings=wings, gathered=lambda rows: rows)


def whole_forest(
    packed: PackedForest, found: ScoredEdges, transformer: Any, wings: Mapping[str, CallWing]
) -> LocalPart:
    """Makes a `LocalPart` of the whole forest."""
    return LocalPart(
        **vars(whole_tokens(packed, transformer, wings)),
        edges=edges_on_device(packed, found, None, found.predictor),
        to_sequences=GatherIndex(lambda: found.of_copies, found.count, packed.device),
        lengths=found.lengths,
    )


class PartCall(NamedTuple):
    """One forward over a part.

    Attributes:
        mask: the mask of its tokens. inputs: keywords of the model.
        which: int64 [u], the units whose rows it gives.
        rows: int64 [u], the own token that gives each of them.
        own: int64 [t], the packed tokens that it computes.
    """

    mask: TreeMask
    inputs: dict[str, Any]
    which: np.ndarray
    rows: np.ndarray
    own: np.ndarray
    recompute: Recompute
