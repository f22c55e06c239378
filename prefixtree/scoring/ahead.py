"""Masks and edges of layers that predict several tokens ahead; `number` counts layers from 0.

Layer `number` reads, at token j, the embedding of j and what layer `number` - 1 (for 0 the model)
made of the token before j, and predicts the token after j. The first `number` + 1 tokens of a path
have nothing to read, and are hidden as keys.
"""

from __future__ import annotations

import numpy as np

from prefixtree.packing.copies import GatherIndex
from prefixtree.packing.layout import PackedForest
from prefixtree.packing.mask import TreeMask
from prefixtree.scoring.edges import DeviceEdges, ScoredEdges, edges_on_device


def before_each(packed: PackedForest) -> GatherIndex:
    """The gather of the row before each token; roots, which have none, get zeros."""
    return GatherIndex(packed.mask.host.predictor, packed.num_tokens, packed.device)


def mask_ahead(packed: PackedForest, number: int) -> TreeMask:
    """The mask of a forest whose tokens with nothing to read are seen by no other."""
    host, tokens = packed.mask.host, np.arange(packed.num_tokens)
    end = np.where(host.position <= number, tokens + 1, host.subtree_end)
    mask = TreeMask(end).to(packed.device)
    return mask.with_options(packed.mask.backend, packed.mask.deterministic)


def edges_ahead(
    packed: PackedForest, found: ScoredEdges, number: int
) -> tuple[DeviceEdges, GatherIndex]:
    """Finds the edges that a layer scores, and the gather of their scores to sequences."""
    # the predictor must have had something to read
    which = np.flatnonzero(packed.mask.host.position[found.predictor] > number)
    # one entry more: copies that are not scored have the unit -1, and stay so
    row = np.full(found.count + 1, -1, np.int32)
    row[which] = np.arange(len(which))
    to_sequences = GatherIndex(row[found.of_copies], len(which), packed.device)
    return edges_on_device(packed, found, which, found.predictor[which]), to_sequences
