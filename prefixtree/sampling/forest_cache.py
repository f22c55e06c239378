"""`ForestCache`: the keys and values of a growing forest, attention over them, and rows' recurrent
states in slots (`StatePools`).

It reaches the attention function as one more keyword, `forest_cache`. A prefill is a forward over
the packed forest (`tree_mask`), whose keys and values are kept here. In later forwards the new
tokens of all rows stand in ONE row, as those of packed forests do.

A slot holds, per layer, the state after a token and the W - 1 inputs of the convolution up to it.
Rows that branched share a slot until they move on: a forward reads a row's source slot and writes
its target slot (`GrowingForest`). Slot 0 is spare: padding rows of a batch read it.

Legend: B rows of a decode step or new tokens of rows, T packed tokens, C keys of the pool, S slots,
H heads (Hk of keys), D and Dv head dims of attention (in states K and V, and D channels), W taps.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from prefixtree.errors import UnsupportedError
from prefixtree.kernels.decoding.cascade import cascade_attention
from prefixtree.kernels.decoding.work import DecodeWork
from prefixtree.kernels.operators import new_library, register
from prefixtree.kernels.recurrence import tree_conv, tree_delta_rule, tree_ssd
from prefixtree.kernels.recurrence.decode import conv_step, delta_rule_step, ssd_step
from prefixtree.kernels.recurrence.protocol import RowSlots
from prefixtree.packing.copies import move
from prefixtree.packing.host_mask import held_by, make_handle
from prefixtree.packing.mask import TreeMask
from prefixtree.packing.segments import tables_of
from prefixtree.packing.state_borders import StateBorders

# ---- states, in slots ----------------------------------------------------------------------------


def empty(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Makes a new tensor, uninitialised."""
    return like.new_empty(shape)


def roomy(count: int) -> int:
    """Rounds a count up, by an eighth at most, so that few larger ones need new pools."""
    step = 1 << max(0, count.bit_length() - 4)
    return -(-count // step) * step


class _Kind:
    """Pools of one kind, in the order of the calls of a forward."""

    def __init__(self) -> None:
        self.pools: list[torch.Tensor] = []
        self.calls = 0

    def next(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Finds the pool of a call, whose slots have this shape and dtype."""
        pool = self.pools[self.calls] if self.calls < len(self.pools) else None
        if pool is None or pool.shape[1:] != shape:
            raise UnsupportedError(
                f"{name} call {self.calls} of this forward (slots of {list(shape)}) was not made "
                "in the prefill: the model computes other recurrent layers for fewer tokens"
            )
        if pool.dtype != dtype:
            raise UnsupportedError(
                f"the rows' {name} were kept in {pool.dtype}, and this forward has {dtype}: run "
                "all calls within the same torch.autocast, or none"
            )
        self.calls += 1
        return pool


class _Ends:
    """The tokens of a prefill after which rows go on, and their slots."""

    def __init__(self, mask: TreeMask, last: np.ndarray, slots: np.ndarray) -> None:
        tokens, first = np.unique(last, return_index=True)
        self.mask, self.borders = mask, StateBorders(mask, exits=tokens)
        self.slots = move(torch.from_numpy(slots[first]), mask.device)
        self._tokens = move(torch.from_numpy(tokens), mask.device)

    def tails(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """Selects [F, W - 1, D] of x [T, D]; zeros before a root."""
        tables = tables_of(self.mask.host, x.device)
        above = tables.taps(width).ancestors[: width - 1, self._tokens].flip(0).t()
        return x[above.clamp(min=0)].masked_fill((above < 0)[..., None], 0)


class _Chains:
    """Several new tokens of each row: chains that states enter and leave."""

    def __init__(self, counts: np.ndarray, source: np.ndarray, target: np.ndarray, device: Any):
        self._counts, self._device = counts, device
        self.source, self.target = (
            move(torch.from_numpy(slots), device) for slots in (source, target)
        )
        mask, ends = self._mask(counts), np.cumsum(counts)
        self.borders = StateBorders(mask, entries=ends - counts, exits=ends - 1)
        self._widths: dict[int, tuple[TreeMask, torch.Tensor, torch.Tensor]] = {}

    def _mask(self, counts: np.ndarray) -> TreeMask:
        ends = np.repeat(np.cumsum(counts), counts).astype(np.int32)
        return TreeMask(ends).to(self._device)

    def behind_tails(self, width: int) -> tuple[TreeMask, torch.Tensor, torch.Tensor]:
        """Chains rows' tails and new tokens: mask, new tokens [B], next tails [rows, W - 1]."""
        if width not in self._widths:
            counts = self._counts + width - 1
            is_new = np.arange(counts.sum()) >= np.repeat(
                np.cumsum(counts) - counts + width - 1, counts
            )
            tails = np.cumsum(counts)[:, None] - np.arange(width - 1, 0, -1)
            new, tail = (
                move(torch.from_numpy(x), self._device) for x in (is_new.nonzero()[0], tails)
            )
            self._widths[width] = self._mask(counts), new, tail
        return self._widths[width]


class StatePools:
    """A pool of states, or of tails, per call of a recurrent layer, told apart by order."""

    def __init__(self) -> None:
        self._states, self._tails = _Kind(), _Kind()
        self._slots = 1
        # the kind of forward whose calls come
        self._now: _Ends | _Chains | RowSlots | None = None
        self._filling = False

    def begin_prefill(self, mask: TreeMask, last: np.ndarray, slots: np.ndarray) -> None:
        """Announces a forward over a packed forest.

        Args:
            last, slots: int64 [rows], the token after which each row goes on, and its states' slot.
        """
        self._now, self._filling = _Ends(mask, last, slots), True
        self._slots = max(self._slots, int(slots.max(initial=0)) + 1)
        self._states.calls = self._tails.calls = 0

    def read(self, counts: np.ndarray, source: np.ndarray, target: np.ndarray) -> None:
        """Announces a forward of counts[i] new tokens for row i, row after row."""
        device = self._device
        if device is None:
            return
        if (counts == 1).all():
            read, write = (move(torch.from_numpy(x), device) for x in (source, target))
            live = torch.ones_like(read, dtype=torch.bool)
            self.resume(RowSlots(read, write, live))
            return
        self._now = _Chains(counts, source, target, device)

    def resume(self, rows: RowSlots) -> None:
        """Announces forwards of one token for each of these rows."""
        self._now = rows

    def end(self) -> None:
        """Ends a forward: rows that went on next read the slots that they wrote."""
        for name, kind in (("state", self._states), ("convolution", self._tails)):
            calls, kind.calls = kind.calls, 0
            if self._filling:
                del kind.pools[calls:]
            elif calls != len(kind.pools):
                raise UnsupportedError(
                    f"{calls} {name} calls of a forward went on from the rows' slots, and "
                    f"{len(kind.pools)} kept some in the prefill: the other layers mixed rows (a "
                    "replaced module or a patched forward)"
                )
        self._filling = False
        if isinstance(self._now, RowSlots) and self.pools:
            rows = self._now
            rows.source.copy_(torch.where(rows.live, rows.target, rows.source))

    # ---- memory ----------------------------------------------------------------------------------

    @property
    def addresses(self) -> list[int]:
        """Addresses of the pools. More slots make other pools."""
        return [pool.data_ptr() for pool in self.pools]

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, over all layers."""
        return sum(pool[0].nbytes for pool in self.pools if len(pool))

    @property
    def pools(self) -> list[torch.Tensor]:
        """States and convolutions' inputs, of all layers."""
        return self._states.pools + self._tails.pools

    @property
    def _device(self) -> torch.device | None:
        return next((pool.device for pool in self.pools), None)

    def hold(self, slots: int) -> None:
        """Makes room for so many slots, the spare one included, or raises a MemoryError."""
        if slots <= self._slots or not self.pools:
            return
        self._slots = roomy(slots)
        try:
            for kind in (self._states, self._tails):
                for at, pool in enumerate(kind.pools):
                    if len(pool) < self._slots:
                        larger = self._made(pool, tuple(pool.shape[1:]))
                        larger[: len(pool)] = pool
                        # last, so that an interruption loses nothing
                        kind.pools[at] = larger
        except MemoryError:
            self._slots = min(len(pool) for pool in self.pools)
            raise

    def _made(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Makes a new pool in the dtype of `like`."""
        try:
            pool = empty(like, self._slots, *shape)
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and "allocate" not in str(error):
                raise
            of_slot = self.slot_bytes or like.itemsize * math.prod(shape)
            least = "at least " * self._filling
            raise MemoryError(
                f"{self._slots - 1:,} states of rows, {of_slot / 1e6:,.1f} MB each, need {least}"
                f"{self._slots * of_slot / 1e9:,.1f} GB: drop rows, or sample fewer at a time "
                "(generate(rows=))"
            ) from error
        # padding rows of a batch read slot 0
        pool[0] = 0
        return pool

    def _keep(self, kind: _Kind, kept: torch.Tensor) -> None:
        """Keeps the states of one call of a prefill at the rows' ends: [F, ..]."""
        assert isinstance(self._now, _Ends)
        if kind.calls == len(kind.pools):
            kind.pools.append(kept.new_empty(0))
        pool, shape = kind.pools[kind.calls], tuple(kept.shape[1:])
        alike = (pool.dtype, pool.device, pool.shape[1:]) == (kept.dtype, kept.device, shape)
        if not alike or len(pool) < self._slots:
            # the old pool is useless now, and its memory may be needed
            kind.pools[kind.calls] = kept.new_empty(0)
            kind.pools[kind.calls] = pool = self._made(kept, shape)
        pool.index_copy_(0, self._now.slots, kept)
        kind.calls += 1

    # ---- calls of layers -------------------------------------------------------------------------

    # the pool of a call changes from layer to layer, so a compiled layer ends a graph here
    @torch.compiler.disable
    def conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
    ) -> torch.Tensor:
        """Computes `tree_conv` of a prefill, or of rows' new tokens and tails, [T or B, D]."""
        call, width = self._now, weight.shape[1]
        if isinstance(call, _Ends):
            out = tree_conv(x, weight, bias, call.mask, activation)
            self._keep(self._tails, call.tails(x, width))
            return out
        pool = self._tails.next("convolution", (width - 1, x.shape[1]), x.dtype)
        if isinstance(call, RowSlots):
            return conv_step(x, weight, bias, pool, call, activation is not None)
        assert call is not None
        mask, new, tails = call.behind_tails(width)
        together = x.new_empty(mask.num_tokens, x.shape[1])
        is_tail = torch.ones(len(together), dtype=torch.bool, device=x.device)
        is_tail[new] = False
        together[is_tail] = pool[call.source].flatten(0, 1)
        together[new] = x
        pool.index_copy_(0, call.target, together[tails])
        return tree_conv(together, weight, bias, mask, activation)[new]

    @torch.compiler.disable
    def delta_rule(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        """`tree_delta_rule` (query, key, value, g, beta) of a prefill, or of rows' new tokens."""
        _, key, value, *_ = tensors
        shape = value.shape[1], key.shape[2], value.shape[2]
        return self._rule(tree_delta_rule, delta_rule_step, tensors, shape, value.dtype, options)

    @torch.compiler.disable
    def ssd(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        """`tree_ssd` (x, dt, A, B, C) of a prefill, or of rows' new tokens."""
        x, _, _, B, _ = tensors
        shape = x.shape[1], B.shape[2], x.shape[2]
        return self._rule(tree_ssd, ssd_step, tensors, shape, x.dtype, options)

    def _rule(
        self,
        whole: Callable[..., Any],
        step: Callable[..., torch.Tensor],
        tensors: tuple[torch.Tensor, ...],
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        options: dict[str, Any],
    ) -> torch.Tensor:
        call = self._now
        if isinstance(call, _Ends):
            out, final = whole(*tensors, call.borders, **options)
            self._keep(self._states, final)
            return out
        pool = self._states.next("state", shape, torch.promote_types(dtype, torch.float32))
        if isinstance(call, RowSlots):
            return step(*tensors, pool, call, **options)
        assert call is not None
        out, final = whole(*tensors, call.borders, initial=pool[call.source], **options)
        pool.index_copy_(0, call.target, final)
        return out


# ---- keys and values -----------------------------------------------------------------------------

# by sliding window
Works = dict[int | None, DecodeWork]


class ForestCache:
    """A pool of keys and one of values, of `capacity` keys C, per attention call of a forward.

    Calls are told apart by their order: a module that stands in two layers has two pools. Every
    later forward must make as many calls as the prefill, so a layer that attends elsewhere shows.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.states = StatePools()
        self._pools: list[tuple[torch.Tensor, torch.Tensor]] = []
        # None in a prefill
        self._works: Works | None = None
        # (H / Hk, Hk) of the last layer with each window: they only set how the work is cut
        self._heads: dict[int | None, tuple[int, int]] = {}
        self._calls = 0
        # the operator finds this by it; weak, or it would be in a circle that nothing frees
        self.handle = make_handle(weakref.ref(self))

    def begin_prefill(self) -> None:
        """Announces a forward over a packed forest, whose keys and values are kept."""
        self._works, self._calls = None, 0
        self._heads.clear()

    def works(
        self,
        runs: np.ndarray,
        tails: np.ndarray,
        live: torch.Tensor | None = None,
        spare: bool = False,
    ) -> Works:
        """Makes lists of the keys that tokens see, for `resume`; arguments as in `DecodeWork`."""
        options: dict[str, Any] = {"num_keys": self.capacity, "live": live, "spare": spare}
        options["device"] = self._pools[0][0].device
        return {
            window: DecodeWork(runs, tails, window=window, group=g, kv_heads=heads, **options)
            for window, (g, heads) in self._heads.items()
        }

    def resume(self, works: Works) -> None:
        """Announces forwards of the tokens of these lists."""
        self._works, self._calls = works, 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.nbytes for pools in (*self._pools, self.states.pools) for pool in pools)

    @property
    def addresses(self) -> list[int]:
        """Addresses of the pools. A prefill with other shapes or dtypes makes other pools."""
        keys = [pool.data_ptr() for pools in self._pools for pool in pools]
        return keys + self.states.addresses

    def end(self) -> None:
        """Ends a forward; the next one brings one token more per row."""
        self.states.end()
        calls, self._calls = self._calls, 0
        if self._works is None:
            del self._pools[calls:]
            return
        if calls != len(self._pools):
            raise UnsupportedError(
                f"{calls} attention calls of a forward read the forest's keys, and "
                f"{len(self._pools)} layers kept some: the others ran another attention (a "
                "replaced module or a patched forward)"
            )
        for work in self._works.values():
            work.advance()

    def keep(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> None:
        """Keeps k [T, Hk, D] and v [T, Hk, Dv] of one attention call of a prefill; q [T, H, D]."""
        self._heads[window] = q.shape[1] // k.shape[1], k.shape[1]
        if self._calls == len(self._pools):
            self._pools.append((k.new_empty(0), v.new_empty(0)))
        pools = []
        for pool, new in zip(self._pools[self._calls], (k, v), strict=True):
            # the pool of the last prefill serves if the model is still the same
            if (pool.dtype, pool.device, pool.shape[1:]) != (new.dtype, new.device, new.shape[1:]):
                pool = new.new_empty(self.capacity, *new.shape[1:])
            pool[: len(new)] = new
            pools.append(pool)
        self._pools[self._calls] = (pools[0], pools[1])
        self._calls += 1

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        window: int | None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes new keys and values, and attends to all keys that each token sees.

        Args:
            q: [B, H, D]. k: [B, Hk, D]. v: [B, Hk, Dv].

        Returns:
            [B, H, Dv] in q's dtype.
        """
        options = scale, window, softcap
        # the pools of a call change from layer to layer, and a compiled layer has one graph
        if torch.compiler.is_compiling():
            out: torch.Tensor = _ATTEND_TO_CACHE(q, k, v, sinks, self.handle, *options)
            return out
        return self.attend_next(q, k, v, sinks, *options)

    def attend_next(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        scale: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Runs `attend` over the pools of the next call."""
        assert self._works is not None
        if self._calls == len(self._pools) or window not in self._works:
            raise UnsupportedError(
                f"attention call {self._calls} of this forward (window {window}) was not made in "
                "the prefill: the model computes other layers or windows for fewer tokens"
            )
        keys, values = self._pools[self._calls]
        if k.dtype != keys.dtype:
            raise UnsupportedError(
                f"the forest's keys were kept in {keys.dtype}, and this forward computes them in "
                f"{k.dtype}: run all calls within the same torch.autocast, or none"
            )
        self._calls += 1
        work = self._works[window]
        return cascade_attention(
            q, k, v, keys, values, work, scale=scale, window=window, softcap=softcap, sinks=sinks
        )

    def move(self, index: np.ndarray) -> None:
        """Moves keys and values from index[i] to i."""
        for pools in self._pools:
            for pool in pools:
                pool[: len(index)] = pool[torch.from_numpy(index).to(pool.device)]


# Calls of one graph stay in their order, by which pools are told apart, where each needs what the
# one before gave, as the attentions of a layer do. It writes into pools that no graph sees
def _attend_to_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    handle: torch.Tensor,
    *options: Any,
) -> torch.Tensor:
    cache: ForestCache = held_by(handle)()
    return cache.attend_next(q, k, v, sinks, *options)


_cache_library = new_library("_cache_library")
_ATTEND_TO_CACHE = register(
    _cache_library,
    "attend_to_cache",
    "(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor handle, float? scale, SymInt? window, "
    "float? softcap) -> Tensor",
    _attend_to_cache,
    lambda q, k, v, *_: q.new_empty(q.shape[0], q.shape[1], v.shape[2]),
)
