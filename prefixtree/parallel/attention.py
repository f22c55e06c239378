"""`part_attention`: attention of a part's own tokens to these and to the ancestors it imports.

Ranks of a group may exchange tokens for heads before it, and heads for tokens after it
(`parallel.heads`). Exchange and attention are one autograd Function. Between two of them, autograd
would cast the gradients of keys and values to the dtype of the activations before other parts' are
added; here they stay in float32 until all are summed. Legend: t own tokens, K rows of the part (own
and imported), H query heads, Hk kv heads, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import pad

from prefixtree.kernels.attention.api import check_chosen, checked_call
from prefixtree.kernels.attention.operator import TREE_ATTENTION, TREE_ATTENTION_BACKWARD
from prefixtree.kernels.chosen import words
from prefixtree.kernels.operators import as_one_call, uncompiled
from prefixtree.packing.mask import TreeMask
from prefixtree.parallel.heads import TokensForHeads, heads_problem
from prefixtree.planning.parts import Part
from prefixtree.wings import DividedMask


class KeyValueExchange(Protocol):
    """Brings keys and values of one layer from the parts that own them, and gradients back."""

    # `import_rows` is called once per forward of the layer, also when a forward is recomputed;
    # `give_back` once per backward, unless neither keys nor values need gradients

    def import_rows(self, *own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Exports own rows, and joins them with the imported ones: [K, ...] each, as `Part.tokens`.

        own are keys [t, Hk, D] and values [t, Hk, Dv]; or [t, D], those of an indexer, which get no
        gradient back.
        """
        ...

    def give_back(self, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns imported rows' gradients to their owners, and gives the own rows' sums.

        gradients are [K, Hk, D] and [K, Hk, Dv] float32 (float64 for float64 keys), from the part's
        queries; in the dtype of the keys if the part neither exports nor imports. Results are [t,
        ...] in the own rows' dtypes, added in a fixed order.
        """
        ...


class PartMask(DividedMask):
    """The stand-in for a mask in a model's forward over the own tokens of a part with imports.

    exchange_of gives the exchange of an attention layer, or of an indexer, from its module;
    states_of the stand-in in a recurrent layer, or is None if states are not handed on.
    """

    # not a dataclass, for the reason that `TreeMask` is none

    def __init__(
        self,
        part: Part,
        exchange_of: Callable[[Any], KeyValueExchange],
        states_of: Callable[[nn.Module], Any] | None = None,
    ) -> None:
        self.part = part
        self.mask = part.mask
        self.exchange_of, self.states_of = exchange_of, states_of

    @property
    def attended(self) -> TreeMask:
        """The mask over which attention runs."""
        return self.mask

    # Dynamo is kept out: the exchange communicates, or keeps its inputs
    @uncompiled
    def attend(
        self,
        layer: Hashable,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """Attends from the own tokens in one layer; shapes and options as in `part_attention`."""
        exchange = self.exchange_in(layer)
        return part_attention(query, key, value, self.part, exchange, **options)

    def exchange_in(self, layer: Hashable) -> KeyValueExchange | ByHeads:
        """The exchange of an attention layer."""
        return self.exchange_of(layer)

    def index_keys(self, indexer: nn.Module, own: torch.Tensor) -> torch.Tensor:
        """Joins an indexer's own keys [t, D] with imported ones to [K, D], as `Part.tokens`."""
        # they carry no gradient, as transformers trains no indexer, so nothing is given back
        return self.exchange_of(indexer).import_rows(own)[0]

    @uncompiled
    def of_layer(self, layer: nn.Module) -> Any:
        """The stand-in for this mask in a recurrent layer's forward."""
        assert self.states_of is not None
        return self.states_of(layer)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.part!r})"


class Stays:
    """A stand-in for `TokensForHeads`: tokens stay, and every process computes all heads."""

    ranks = 1

    def turns(self, *heads: int) -> int:
        return 1

    def of_turns(self, rows: Sequence[torch.Tensor], turns: int) -> list[list[torch.Tensor]]:
        return [[*rows]]

    def joined(self, of_turns: Sequence[torch.Tensor]) -> torch.Tensor:
        return of_turns[0]

    def of_rank(self, parameter: Any, turn: int, turns: int) -> Any:
        return parameter

    def all_ranks(self, own: torch.Tensor) -> torch.Tensor:
        return own

    def start_to_heads(self, rows: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        return lambda: [*rows]

    start_to_tokens = start_to_heads


@dataclass(frozen=True)
class ByHeads:
    """The exchange by which each rank computes some heads of all tokens of a slot."""

    flight: TokensForHeads
    # all tokens of the slot
    part: Part
    # gives the exchange of this rank's heads of a turn, by its number
    exchange_of: Callable[[int], KeyValueExchange]


@uncompiled
def part_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    part: Part,
    exchange: KeyValueExchange | ByHeads,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Computes attention of every own token of a part to itself and its ancestors in the forest.

    The results, and the gradients of the own rows, are those of `tree_attention` on the whole
    forest. Differentiable once. Other arguments are those of `tree_attention`.

    Args:
        query: [t, H, D], rows in the order of `Part.own_tokens`.
        key, value: [t, Hk, D] and [t, Hk, Dv], of the same tokens.
        exchange: brings the imported rows, and takes their gradients back; or says how ranks
            exchange tokens for heads.
        deterministic, backend: default: those of the part's mask. The flash backend serves parts
            that export or import where query heads share kv heads.

    Returns:
        [t, H, Dv] in the dtype of `query`.
    """
    mask = part.mask
    options = checked_call(
        *(query, key, value, mask, scale, window, softcap, sinks, backend, deterministic),
        own=part.num_tokens,
    )
    if chosen is not None:
        check_chosen(chosen, query, mask)
    flight: Stays | TokensForHeads = Stays()
    if isinstance(exchange, ByHeads):
        flight, part = exchange.flight, exchange.part
        heads, kv_heads = query.shape[1], key.shape[1]
        if (problem := heads_problem(heads, kv_heads, flight.ranks)) is not None:
            raise ValueError(problem)
        turns = flight.turns(heads, max(kv_heads, flight.ranks))
        exchanges = [exchange.exchange_of(turn) for turn in range(turns)]
        if chosen is not None:
            # goes to all ranks, in as many words as the longest path of the slot takes
            chosen = pad(chosen, (0, words(part.mask.host.deepest) - chosen.shape[1]))
            of_ranks = chosen[:, None].expand(-1, flight.ranks, -1)
            chosen = flight.start_to_heads([of_ranks])()[0][:, 0]
    else:
        exchanges = [exchange]
    # a part that shares no row gets no gradient from others; a kv head on several ranks gets its
    # gradient from all of them
    wide = bool(part.num_imported or part.num_exported) or flight.ranks > key.shape[1]
    out: torch.Tensor = _PartAttention.apply(
        query, key, value, sinks, part.mask, exchanges, flight, options._replace(wide=wide), chosen
    )
    return out


class _PartAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        mask: TreeMask,
        exchanges: list[KeyValueExchange],
        flight: Stays | TokensForHeads,
        options: tuple[Any, ...],
        chosen: torch.Tensor | None,
    ) -> torch.Tensor:
        handle, turns = mask.handle, len(exchanges)
        ctx.copies = max(1, flight.ranks // key.shape[1])
        if ctx.copies > 1:
            key, value = (x.repeat_interleave(ctx.copies, 1) for x in (key, value))
        arrivals = [*map(flight.start_to_heads, flight.of_turns([query, key, value], turns))]
        saved: list[Any] = []
        back = []
        with as_one_call(mask.host, "attention"):
            for turn, (arrived, exchange) in enumerate(zip(arrivals, exchanges, strict=True)):
                own_sinks = flight.of_rank(sinks, turn, turns)
                asking, *own_rows = arrived()
                rows = asking, *exchange.import_rows(*own_rows)
                out, lse = TREE_ATTENTION(*rows, own_sinks, handle, *options, False, chosen)
                back.append(flight.start_to_tokens([out]))
                saved += [*rows, own_sinks, out, lse]
        ctx.save_for_backward(handle, chosen, *saved)
        ctx.exchanges, ctx.flight, ctx.options = exchanges, flight, options
        ctx.dtypes = key.dtype, value.dtype, None if sinks is None else sinks.dtype
        return flight.joined([arrived()[0] for arrived in back])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        handle, chosen, *saved = ctx.saved_tensors
        flight, turns = ctx.flight, len(ctx.exchanges)
        *dtypes, sinks_dtype = ctx.dtypes
        back, of_sinks = [], []
        arrivals = [*map(flight.start_to_heads, flight.of_turns([dout], turns))]
        for turn, (arrived, exchange) in enumerate(zip(arrivals, ctx.exchanges, strict=True)):
            *rows, sinks, out, lse = saved[6 * turn : 6 * (turn + 1)]
            dquery, dkey, dvalue, *dsinks = TREE_ATTENTION_BACKWARD(
                *arrived(), None, *rows, sinks, out, lse, handle, *ctx.options, chosen
            )
            of_sinks += dsinks
            own_gradients: tuple[torch.Tensor, ...] = ()
            # the same on all ranks: the model says which tensors need gradients
            if any(ctx.needs_input_grad[1:3]):
                own_gradients = exchange.give_back(dkey, dvalue)
                if ctx.copies == 1:
                    own_gradients = tuple(
                        x.to(dtype) for x, dtype in zip(own_gradients, dtypes, strict=True)
                    )
            back.append(flight.start_to_tokens([dquery, *own_gradients]))
        by_tensor = zip(*(arrived() for arrived in back), strict=True)
        dquery, *kv_gradients = (flight.joined(of_turns) for of_turns in by_tensor)
        if ctx.copies > 1:
            kv_gradients = [
                x.unflatten(1, (-1, ctx.copies)).sum(2).to(dtype)
                for x, dtype in zip(kv_gradients, dtypes, strict=False)
            ]
        dkey, dvalue = kv_gradients or (None, None)
        dsink = flight.all_ranks(torch.cat(of_sinks)).to(sinks_dtype) if of_sinks else None
        return dquery, dkey, dvalue, dsink, *(None,) * 5
