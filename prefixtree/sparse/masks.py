"""Masks of layers that choose keys, and the attention of these layers.

Legend: T packed tokens, W words of bits, H heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from prefixtree.errors import UnsupportedError
from prefixtree.kernels.attention import tree_attention
from prefixtree.kernels.operators import as_one_call
from prefixtree.models.attention import attend_once, token_rows
from prefixtree.models.prepared import unprepared
from prefixtree.packing.mask import TreeMask
from prefixtree.parallel.attention import PartMask
from prefixtree.sparse import latents
from prefixtree.wings import DividedMask, LayerMask

# keyword by which MiniMax M3 hands blocks of keys to its attention function
BLOCKS = "block_indices"


class UnpreparedMask(LayerMask):
    """A stand-in for the mask of a batch without padding in a model with indexers.

    transformers asks for it before layers run, and does not know the tree. A prepared layer puts
    the forest's mask in its place, or an ordinary causal one; others cannot read it.
    """

    def __init__(self, length: int, config: Any, device: torch.device | None) -> None:
        self._length, self._config, self._device = length, config, device

    def __getitem__(self, index: Any) -> Any:
        raise unprepared(self._config)

    def check(self, config: Any, chosen: dict[str, torch.Tensor]) -> None:
        raise unprepared(config)

    def causal(self) -> torch.Tensor:
        """Makes the mask of an ordinary batch, bool [1, 1, n, n]."""
        shape = 1, 1, self._length, self._length
        return torch.ones(shape, dtype=torch.bool, device=self._device).tril()


class Entries(NamedTuple):
    """The compressed keys that queries attend to: bits int32 [T, W], absent bool [T] for none seen.

    A query that sees none has its own token's bit.
    """

    bits: torch.Tensor
    absent: torch.Tensor


class ForestMask(LayerMask):
    """A forest's mask in the place of the mask or the cache that a layer hands its indexer.

    Attributes:
        mask: of the forest, or of the `part` that a rank or a step computes.
        deepest: tokens of the longest path of the whole forest.
        entries: the compressed keys that each query attends to, if a layer has some.
    """

    entries: Entries | None = None

    def __init__(self, mask: TreeMask, part: PartMask | None = None) -> None:
        self.mask, self.part = mask, part
        self.deepest = (mask if part is None else part.part).host.deepest

    def __getitem__(self, index: Any) -> ForestMask:
        return self

    def check(self, config: Any, chosen: dict[str, torch.Tensor]) -> None:
        if not chosen and self.entries is None:
            # a layer whose indexer made no choice
            raise unprepared(config)

    def num_keys(self, queries: int) -> int:
        return queries * (1 if self.entries is None else 2)

    def attend(
        self,
        module: nn.Module,
        rows: tuple[torch.Tensor, ...],
        mask: TreeMask | DividedMask,
        chosen: dict[str, torch.Tensor],
        **options: Any,
    ) -> torch.Tensor:
        if self.entries is not None:
            assert isinstance(mask, TreeMask)
            q, k, v = token_rows(*rows)
            return _attend_to_entries(q, k, v, mask, self.entries, **options)
        (bits,) = chosen.values()
        # without words, all queries choose all keys
        options["chosen"] = bits[0] if bits.shape[-1] else None
        if (held := latents.held_by(module)) is not None:
            assert isinstance(mask, TreeMask)
            attended = latents.attend(module, token_rows(rows[0])[0], held, mask, **options)
            if attended is not None:
                return attended
            rows = rows[0], *latents.expanded(module, held)
        q, k, v = token_rows(*rows)
        if BLOCKS in chosen and options["chosen"] is not None:
            return _attend_by_group(module, q, k, v, mask, **options)
        return attend_once(module, q, k, v, mask, **options)

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Gives back the layer's keys and values: nothing is kept."""
        return keys, values


def not_kept() -> UnsupportedError:
    """Makes the refusal of samplers."""
    return UnsupportedError("samplers do not keep an indexer's keys yet: sample with an engine")


def not_handed_on() -> UnsupportedError:
    """Makes the refusal of parts of a forest."""
    return UnsupportedError(
        "steps, kept trunks and groups would cut the windows of compressed keys (DeepSeek V4): "
        "score without max_step_tokens=, kept_trunks and group="
    )


def _attend_by_group(
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: TreeMask | DividedMask,
    *,
    chosen: torch.Tensor,
    sinks: torch.Tensor | None,
    **options: Any,
) -> torch.Tensor:
    """Attends with keys chosen per group of heads: chosen int32 [groups, T, W]."""
    assert sinks is None
    count = len(chosen)
    groups = zip(q.chunk(count, 1), k.chunk(count, 1), v.chunk(count, 1), chosen, strict=True)
    attended = mask.attended if isinstance(mask, DividedMask) else mask
    with as_one_call(attended.host, "attention"):
        parts = [
            attend_once((module, i), a, b, c, mask, chosen=bits, **options)
            for i, (a, b, c, bits) in enumerate(groups)
        ]
    return torch.cat(parts, 1)


def _attend_to_entries(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: TreeMask,
    entries: Entries,
    *,
    window: int | None,
    sinks: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """Attends to the keys in a window and to compressed ones, under one softmax.

    k, v are [2 T, Hk, D] and [2 T, Hk, Dv]: of the tokens, then of the windows that they end.
    """
    count = mask.num_tokens
    options["return_lse"] = True
    with as_one_call(mask.host, "attention"):
        near, near_lse = tree_attention(q, k[:count], v[:count], mask, window=window, **options)
        far = k[count:], v[count:], mask
        out, lse = tree_attention(q, *far, chosen=entries.bits, **options)
    lse = lse.masked_fill(entries.absent, -torch.inf)
    sink = sinks.to(lse.dtype)[:, None].expand_as(lse)
    # shares of near and compressed keys in the softmax; the sink has no value
    shares = torch.stack([near_lse, lse, sink]).softmax(0)[:2].transpose(1, 2)[..., None]
    return (shares[0] * near + shares[1] * out).to(q.dtype)


# ---- ordinary batches ----------------------------------------------------------------------------


def plain_mask(
    module: Any,
    attention_mask: torch.Tensor | None,
    chosen: dict[str, torch.Tensor],
    key: torch.Tensor,
    positions: torch.Tensor | None,
) -> torch.Tensor:
    """Makes an ordinary batch's mask, bool [B, 1 or H, n, m], true only for chosen keys.

    Args:
        chosen: indices int [B, n, k], or block_indices int [B, groups of heads, n, k], -1 for none.
        key: [B, Hk, m, D]. positions: int [1 or B, n], of the queries.
    """
    if BLOCKS not in chosen:
        return of_chosen(attention_mask, chosen["indices"])
    # its layers hand positions on, or the first would have refused the call
    assert positions is not None
    blocks = chosen[BLOCKS]
    batch = attention_mask, key.shape[2], key.dtype, key.device, positions.expand(len(blocks), -1)
    bias: torch.Tensor = module.indexer.build_block_mask(blocks, *batch)
    return bias == 0


def of_chosen(attention_mask: torch.Tensor | None, indices: torch.Tensor) -> torch.Tensor:
    """Keeps a mask bool [B, 1, n, m] only at the keys that indices, int [B, n, k], choose."""
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dtype != torch.bool:
        raise UnsupportedError("chosen keys (indices) need a boolean attention mask beside them")
    keep = torch.zeros_like(attention_mask.expand(len(indices), -1, -1, -1))
    return attention_mask & keep.scatter(-1, indices[:, None].long(), True)
