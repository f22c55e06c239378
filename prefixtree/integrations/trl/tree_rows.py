"""AsyncGRPO's tree rows on prefixtree's attention: any device, no keys and values copied along
paths.

TRL packs the samples of a micro-batch to a trie and cuts it into segments in depth-first order. Its
attention gets, for every segment, the packed positions of the path from its root down to the
segment's last token. That is a forest in preorder, so it becomes a `TreeMask` and the rows stay
where they are. TRL merges two tokens only if the next ones agree as well. So its trie has one more
token per branch than prefixtree's, and is computed as it is.

Legend: T packed tokens, S segments, K entries of all paths.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface

from prefixtree.errors import ForestError, UnsupportedError, refuse
from prefixtree.integrations.trl.contract import advice, check_tree_attention
from prefixtree.integrations.trl.refusals import (
    ASYNC_GRPO,
    check_arguments,
    check_distribution,
    check_model,
)
from prefixtree.models.attention import prefixtree_attention, prefixtree_mask
from prefixtree.models.checks import transformer_of
from prefixtree.packing.mask import TreeMask

# AsyncGRPO calls the model itself and takes the loss from it


def use_tree_attention(trainer: Any) -> None:
    """Makes an `AsyncGRPOTrainer` run on `tree_attention`; call it after making the trainer.

    The constructor of the trainer registers FlashAttention 3 under a name ("tree_fa3" in TRL 1.16)
    and loads its model with that attention. This function registers `tree_attention` under the same
    name, for every model of the process that uses it.

    Args:
        trainer: the `AsyncGRPOTrainer`, of `trl.experimental.async_grpo` or, from TRL 1.18 on, of
            `trl`.

    Raises:
        UnsupportedError: the trainer's arguments, its model or the installed TRL is not verified,
            with the reason.
    """
    name = transformer_of(trainer.model).config._attn_implementation
    # the function that the trainer registered: TRL may keep it in another module
    registered = AttentionInterface().get(name)
    if registered is not tree_row_attention:
        check_tree_attention(registered, name)
    check_arguments(trainer.args)
    check_distribution(trainer)
    refuse(ASYNC_GRPO, trainer)
    check_model(trainer.model)
    AttentionInterface.register(name, tree_row_attention)
    AttentionMaskInterface.register(name, prefixtree_mask)


def tree_row_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    tree_max_seqlen_q: int,
    tree_max_seqlen_k: int,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention for TRL's keywords: transformers' attention function, rows in TRL's order.

    Args:
        query, key, value: [1, H or Hk, T, D].
        tree_kv_index: integers [K], the packed positions of all paths, one after another.
        tree_cu_seqlens_q: integers [S + 1], the borders of segments among the T tokens.
        tree_cu_seqlens_k: integers [S + 1], the borders of their paths in tree_kv_index.
        tree_max_seqlen_q, tree_max_seqlen_k: the longest segment and path.
        kwargs: what the model passes on: scaling, sliding_window, softcap, position_ids, ...
    """
    if new := [n for n in kwargs if n.startswith("tree_") and kwargs[n] is not None]:
        raise UnsupportedError(f"TRL gives {', '.join(new)}, which is new: {advice()}")
    mask = _mask_of(tree_kv_index, tree_cu_seqlens_q, tree_cu_seqlens_k)
    segment, path = mask.longest
    if tree_max_seqlen_q < segment or tree_max_seqlen_k < path:
        raise ForestError(
            f"tree_max_seqlen_q, tree_max_seqlen_k are {tree_max_seqlen_q}, {tree_max_seqlen_k}; "
            f"the longest segment has {segment} tokens and the longest path {path}"
        )
    tree_mask = mask.tree.to(query.device)
    return prefixtree_attention(
        module, query, key, value, attention_mask, tree_mask=tree_mask, **kwargs
    )


def tree_row_mask(kv_index: Any, cu_seqlens_q: Any, cu_seqlens_k: Any) -> TreeMask:
    """Makes a mask on the CPU from TRL's keywords (see `tree_row_attention`), and checks them."""
    index, rows, paths = (
        x.detach().cpu().numpy().astype(np.int64) if isinstance(x, torch.Tensor) else np.asarray(x)
        for x in (kv_index, cu_seqlens_q, cu_seqlens_k)
    )
    start, length, above = _segments(index, rows, paths)
    # the token before a segment on its path ends the parent segment
    before = np.full(len(start), -1)
    hangs = above > 0
    before[hangs] = index[(paths[:-1] + above - 1)[hangs]]
    _require(~hangs | ((before >= 0) & (before < start)), "its path must come before it")
    parent = np.where(hangs, np.searchsorted(rows, before, side="right") - 1, -1)
    _require(~hangs | (rows[parent + 1] - 1 == before), "it must hang below a segment's last token")
    path = np.diff(paths)
    _require(~hangs | (path[parent] == above), "its path must go on from the path above it")
    segment = np.repeat(np.arange(len(start)), path)
    offset = np.arange(len(index)) - paths[segment]
    own = offset - above[segment]
    inherited = index[(paths[:-1][parent[segment]] + offset).clip(0, len(index) - 1)]
    wrong = index != np.where(own >= 0, start[segment] + own, inherited)
    _require(np.bincount(segment, wrong) == 0, "its path must be its parent's and then its tokens")
    end = rows[1:].copy()
    for child in range(len(end) - 1, 0, -1):
        if parent[child] >= 0:
            end[parent[child]] = max(end[parent[child]], end[child])
    mask = TreeMask(np.repeat(end, length).astype(np.int32))
    # in another order than depth first, a subtree's run holds tokens that are not below it
    _require(mask.host.predictor[start] == before, "segments must stand depth first")
    return mask


def _segments(
    index: np.ndarray, rows: np.ndarray, paths: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Finds the first token, the length and the number of tokens above of every segment."""
    if not (index.ndim == rows.ndim == paths.ndim == 1 and len(rows) == len(paths) > 1):
        raise ForestError(
            "expected tree_kv_index [K] and tree_cu_seqlens_q, tree_cu_seqlens_k [S + 1], got "
            f"shapes {index.shape}, {rows.shape} and {paths.shape}"
        )
    if rows[0] != 0 or paths[0] != 0 or paths[-1] != len(index):
        raise ForestError(
            f"segments and paths must begin at 0 and end with the {len(index)} entries of "
            f"tree_kv_index; got {rows[0]}, {paths[0]} and {paths[-1]}"
        )
    length, above = np.diff(rows), np.diff(paths) - np.diff(rows)
    _require((length > 0) & (above >= 0), "it must have a token, and a path that holds it")
    return rows[:-1], length, above


def _require(holds: np.ndarray, rule: str) -> None:
    for bad in np.flatnonzero(~holds)[:1]:
        raise ForestError(f"segment {bad} of the tree keywords breaks the forest: {rule}")


# ---- once a batch --------------------------------------------------------------------------------
# Every layer, and every recomputation, gets the same tensors. The mask lives as long as they do:
# neither a number that another object may get later nor an address is ever looked up.


class _Mask(NamedTuple):
    """The mask on the CPU, the longest segment and path, and the tensors they were read from."""

    tree: TreeMask
    longest: tuple[int, int]
    others: tuple[weakref.ref[torch.Tensor], ...]
    versions: tuple[int, ...]


_masks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@torch.compiler.disable
def _mask_of(kv_index: torch.Tensor, rows: torch.Tensor, paths: torch.Tensor) -> _Mask:
    tensors = (kv_index, rows, paths)
    # inference tensors count no versions, so that a write would go unseen: nothing is kept
    versions = () if any(x.is_inference() for x in tensors) else tuple(x._version for x in tensors)
    known: _Mask | None = _masks.get(kv_index)
    if (
        known is not None
        and known.versions == versions
        and all(ref() is x for ref, x in zip(known.others, tensors[1:], strict=True))
    ):
        return known
    tree = tree_row_mask(*tensors)
    longest = (int(rows.diff().max()), int(paths.diff().max()))
    mask = _Mask(tree, longest, tuple(weakref.ref(x) for x in tensors[1:]), versions)
    if versions:
        _masks[kv_index] = mask
    return mask
