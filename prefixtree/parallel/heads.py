"""Attention of a forest whose tokens are divided among ranks, each of which computes some heads.

Ranks exchange tokens for heads before the attention, and heads for tokens after it (DeepSpeed
Ulysses, arXiv 2309.14509). Every query moves, where the exchange of `parallel.ranks` moves borrowed
keys alone. Attention is balanced whatever the forest. Legend: T packed tokens, t own tokens, n
ranks, H query heads, Hk kv heads, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from prefixtree.kernels.attention.api import check_chosen, checked_call
from prefixtree.kernels.attention.operator import TREE_ATTENTION, TREE_ATTENTION_BACKWARD
from prefixtree.kernels.chosen import words
from prefixtree.kernels.operators import as_one_call, uncompiled
from prefixtree.packing.mask import TreeMask
from prefixtree.parallel.attention import DividedMask
from prefixtree.parallel.ranks import RankExchange, TokensForHeads, divides
from prefixtree.planning.parts import Parts


def heads_problem(heads: int, kv_heads: int, ranks: int) -> str | None:
    """Says why heads cannot be divided among ranks; None where they can.

    A kv head goes to several ranks where there are more ranks than kv heads.
    """
    if divides(heads, kv_heads, ranks):
        return None
    return (
        f"{heads} query heads and {kv_heads} kv heads do not divide among {ranks} ranks: expected "
        "a number of ranks that divides the query heads, and divides or is a multiple of the kv "
        'heads; take another size of the group, or group_mode="parts"'
    )


class HeadsMask(DividedMask):
    """Every rank computes some heads of all tokens.

    Args:
        parts: the forest divided among the ranks of the group.
        exchange: of tokens for heads.
        states_of: as in `DividedMask`.
    """

    def __init__(
        self,
        parts: Parts,
        exchange: TokensForHeads,
        states_of: Callable[[nn.Module], Any] | None = None,
    ) -> None:
        super().__init__(parts[exchange.index], states_of)
        self.whole = parts.packed.mask
        self.exchange = exchange
        self._rows = RankExchange(parts, exchange.index, exchange.group)

    @property
    def attended(self) -> TreeMask:
        return self.whole

    def index_keys(self, indexer: nn.Module, own: torch.Tensor) -> torch.Tensor:
        # every rank chooses for its own tokens, as heads of one query choose alike
        return self._rows.borrow(own)[0]

    @uncompiled
    def attend(
        self,
        layer: Hashable,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        return _attend(self, query, key, value, **options)


def _attend(
    mask: HeadsMask,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
) -> torch.Tensor:
    ranks, heads, kv_heads = mask.exchange.ranks, query.shape[1], key.shape[1]
    options = checked_call(
        query, key, value, mask.mask, scale, window, softcap, sinks, None, None, part=True
    )
    if (problem := heads_problem(heads, kv_heads, ranks)) is not None:
        raise ValueError(problem)
    if chosen is not None:
        check_chosen(chosen, query, mask.mask)
        # to all ranks, in as many words as the longest path of the forest takes
        chosen = pad(chosen, (0, words(mask.whole.host.deepest) - chosen.shape[1]))
        (chosen,) = mask.exchange.start_to_heads([chosen[:, None].expand(-1, ranks, -1)])()
        chosen = chosen[:, 0]
    # a kv head that several ranks have gets its gradient from all of them
    wide = ranks > kv_heads
    out: torch.Tensor = _HeadsAttention.apply(
        query, key, value, sinks, mask, options._replace(wide=wide), chosen
    )
    return out


class _HeadsAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        mask: HeadsMask,
        options: tuple[Any, ...],
        chosen: torch.Tensor | None,
    ) -> torch.Tensor:
        exchange, handle = mask.exchange, mask.whole.handle
        ctx.copies = max(1, exchange.ranks // key.shape[1])
        if ctx.copies > 1:
            key, value = (x.repeat_interleave(ctx.copies, 1) for x in (key, value))
        turns = exchange.turns(query.shape[1], key.shape[1])
        of_turns = exchange.of_turns([query, key, value], turns)
        own_sinks: list[Any] = [None] * turns
        if sinks is not None:
            own_sinks = [*sinks.chunk(exchange.ranks)[exchange.index].chunk(turns)]
        saved: list[Any] = []
        back = []
        arrivals = [exchange.start_to_heads(rows) for rows in of_turns]
        with as_one_call(mask.whole.host, "attention"):
            for arrived, its_sinks in zip(arrivals, own_sinks, strict=True):
                rows = arrived()
                out, lse = TREE_ATTENTION(*rows, its_sinks, handle, *options, False, chosen)
                back.append(exchange.start_to_tokens([out]))
                saved += [*rows, its_sinks, out, lse]
        ctx.save_for_backward(handle, chosen, *saved)
        ctx.exchange, ctx.options, ctx.turns = exchange, options, turns
        ctx.sinks_dtype = None if sinks is None else sinks.dtype
        return exchange.joined([arrived()[0] for arrived in back])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        handle, chosen, *saved = ctx.saved_tensors
        exchange, turns, dtype = ctx.exchange, ctx.turns, dout.dtype
        back, of_sinks = [], []
        arrivals = [exchange.start_to_heads(rows) for rows in exchange.of_turns([dout], turns)]
        for turn, arrived in enumerate(arrivals):
            *rows, sinks, out, lse = saved[6 * turn : 6 * (turn + 1)]
            dq, dk, dv, *dsinks = TREE_ATTENTION_BACKWARD(
                *arrived(), None, *rows, sinks, out, lse, handle, *ctx.options, chosen
            )
            back.append(exchange.start_to_tokens([dq, dk, dv]))
            of_sinks += dsinks
        each = zip(*(arrived() for arrived in back), strict=True)
        dq, dk, dv = (exchange.joined(of_turns) for of_turns in each)
        if ctx.copies > 1:
            dk, dv = (x.unflatten(1, (-1, ctx.copies)).sum(2).to(dtype) for x in (dk, dv))
        dsink = None
        if of_sinks:
            own = torch.cat(of_sinks)
            dsink = own.new_zeros(exchange.ranks, len(own))
            dsink[exchange.index] = own
            dsink = dsink.flatten().to(ctx.sinks_dtype)
        return dq, dk, dv, dsink, None, None, None
