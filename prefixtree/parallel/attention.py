"""`part_attention`: attention of a part's own tokens to these and to the ancestors it borrows.

Exchange and attention are one autograd Function. Between two of them, autograd would cast the
gradients of keys and values to the dtype of the activations before other parts' are added; here
they stay in float32 until all are summed. Legend: t own tokens, K rows of the part (own and
borrowed), H query heads, Hk kv heads, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
from torch import nn

from prefixtree.kernels.attention.api import check_chosen, checked_call
from prefixtree.kernels.attention.operator import TREE_ATTENTION, TREE_ATTENTION_BACKWARD
from prefixtree.kernels.operators import uncompiled
from prefixtree.packing.mask import TreeMask
from prefixtree.planning.parts import Part


class KeyValueExchange(Protocol):
    """Brings keys and values of one layer from the parts that own them, and gradients back.

    `borrow` is called once per forward of the layer, also when a forward is recomputed;
    `give_back` once per backward, unless neither keys nor values need gradients.
    """

    def borrow(self, *own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Lends own rows to other parts and joins the own rows with the borrowed ones.

        Args:
            own: [t, Hk, D] and [t, Hk, Dv], keys and values; or [t, D], those of an indexer, which
                are not given back.

        Returns:
            [K, ...] each in the dtypes given, rows in the order of `Part.tokens`.
        """
        ...

    def give_back(
        self, dkey: torch.Tensor, dvalue: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the gradients of borrowed rows to their owners, and adds up those of own rows.

        Args:
            dkey: [K, Hk, D] float32 (float64 for float64 keys), what the part's queries give. In
                the dtype of the keys if the part neither lends nor borrows.
            dvalue: [K, Hk, Dv] likewise.

        Returns:
            [t, Hk, D] and [t, Hk, Dv] in the dtypes given: the gradients of the own rows, with
            those that borrowers returned added in a fixed order.
        """
        ...


class DividedMask:
    """In the place of a mask among the keywords of a model's forward, whose inputs are the own
    tokens of a part.

    It is not a dataclass, for the reason that `TreeMask` is none.

    Attributes:
        part: the part.
        mask: `part.mask`.
        states_of: gives what stands in the place of this mask in a recurrent layer. It gets the
            layer. None where states are not handed on.
    """

    def __init__(self, part: Part, states_of: Callable[[nn.Module], Any] | None = None) -> None:
        self.part = part
        self.mask = part.mask
        self.states_of = states_of

    @property
    def attended(self) -> TreeMask:
        """The mask over which attention runs."""
        return self.mask

    def attend(
        self,
        layer: Hashable,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """Attention of the own tokens in one layer.

        Args:
            layer: the attention module, or what stands for it.
            query: [t, H, D], as for `part_attention`.
            key: [t, Hk, D].
            value: [t, Hk, Dv].
            options: scale, window, softcap, sinks and chosen, as for `part_attention`.

        Returns:
            [t, H, Dv] in the dtype of `query`.
        """
        raise NotImplementedError

    def index_keys(self, indexer: nn.Module, own: torch.Tensor) -> torch.Tensor:
        """An indexer's keys of all rows of the part. They carry no gradient, as transformers
        trains no indexer, so nothing is given back.

        Args:
            indexer: the module.
            own: [t, D], those of the own tokens.

        Returns:
            [K, D], rows in the order of `Part.tokens`.
        """
        raise NotImplementedError

    @uncompiled
    def of_layer(self, layer: nn.Module) -> Any:
        """The keyword that a recurrent layer's forward gets in the place of this mask.

        Args:
            layer: the module.
        """
        assert self.states_of is not None
        return self.states_of(layer)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.part!r})"


class PartMask(DividedMask):
    """The part borrows keys and values.

    Attributes:
        exchange_of: gives the exchange of an attention layer, or of an indexer. It gets the module.
    """

    def __init__(
        self,
        part: Part,
        exchange_of: Callable[[Any], KeyValueExchange],
        states_of: Callable[[nn.Module], Any] | None = None,
    ) -> None:
        super().__init__(part, states_of)
        self.exchange_of = exchange_of

    # Dynamo is kept out: the exchange talks to other processes, or keeps what it gets
    @uncompiled
    def attend(
        self,
        layer: Hashable,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        exchange = self.exchange_of(layer)
        return part_attention(query, key, value, self.part, exchange, **options)

    def index_keys(self, indexer: nn.Module, own: torch.Tensor) -> torch.Tensor:
        return self.exchange_of(indexer).borrow(own)[0]


@uncompiled
def part_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    part: Part,
    exchange: KeyValueExchange,
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
    forest. Differentiable once.

    Args:
        query: [t, H, D], rows in the order of `Part.own_tokens`.
        key: [t, Hk, D], the keys of the same tokens.
        value: [t, Hk, Dv], their values.
        part: the part.
        exchange: brings the borrowed rows, and takes their gradients back.
        scale, window, softcap, sinks, chosen, deterministic, backend: as in `tree_attention`. The
            part's mask has the defaults of the last two. The flash backend serves parts that lend
            or borrow where query heads share kv heads.

    Returns:
        [t, H, Dv] in the dtype of `query`.

    Raises:
        ValueError: arguments that do not fit together, with what was expected.
        UnsupportedError: a backend that does not exist or cannot serve this call, with the reason.
    """
    mask = part.mask
    options = checked_call(
        query, key, value, mask, scale, window, softcap, sinks, backend, deterministic, part=True
    )
    if chosen is not None:
        check_chosen(chosen, query, mask)
    # whoever shares no row adds nothing to a gradient
    wide = bool(part.num_borrowed or len(part.exchange.send_runs))
    out: torch.Tensor = _PartAttention.apply(
        query, key, value, sinks, mask.handle, exchange, options._replace(wide=wide), chosen
    )
    return out


class _PartAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        own_key: torch.Tensor,
        own_value: torch.Tensor,
        sinks: torch.Tensor | None,
        handle: torch.Tensor,
        exchange: KeyValueExchange,
        options: tuple[Any, ...],
        chosen: torch.Tensor | None,
    ) -> torch.Tensor:
        key, value = exchange.borrow(own_key, own_value)
        out, lse = TREE_ATTENTION(query, key, value, sinks, handle, *options, False, chosen)
        ctx.save_for_backward(query, key, value, sinks, out, lse, handle, chosen)
        ctx.exchange, ctx.options = exchange, options
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, sinks, out, lse, handle, chosen = ctx.saved_tensors
        dquery, dkey, dvalue, *dsinks = TREE_ATTENTION_BACKWARD(
            dout, None, query, key, value, sinks, out, lse, handle, *ctx.options, chosen
        )
        # the same on all ranks: which tensors need gradients is a matter of the model
        if any(ctx.needs_input_grad[1:3]):
            dkey, dvalue = ctx.exchange.give_back(dkey, dvalue)
            dkey, dvalue = dkey.to(key.dtype), dvalue.to(value.dtype)
        else:
            dkey = dvalue = None
        return dquery, dkey, dvalue, dsinks[0] if dsinks else None, None, None, None, None
