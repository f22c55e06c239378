"""`ForestCache`: the keys and values of a growing forest, attention over them, and rows' states.

It reaches the attention function as one more keyword, `forest_cache`. A prefill is a forward over
the packed forest (`tree_mask`), whose keys and values are kept here. In later forwards the new
tokens of all rows stand in ONE row, as those of packed forests do.

Legend: B new tokens, T packed tokens, C keys of the pool, H query heads (Hk of keys), D and Dv head
dims.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from prefixtree.errors import UnsupportedError
from prefixtree.kernels.decoding.cascade import cascade_attention
from prefixtree.kernels.decoding.work import DecodeWork
from prefixtree.sampling.state_pools import StatePools

# by sliding window
Works = dict[int | None, DecodeWork]


class ForestCache:
    """A pool of keys and one of values per attention call of a forward.

    Calls are told apart by their order, which is that of the layers: a module that stands in two
    layers has two pools. Every later forward must make as many calls as the prefill, so a layer
    that attends elsewhere shows.

    Args:
        capacity: C, the keys of every pool.

    Attributes:
        capacity: as given.
        states: what rows keep of recurrent layers.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.states = StatePools()
        self._pools: list[tuple[torch.Tensor, torch.Tensor]] = []
        # None: of a prefill
        self._works: Works | None = None
        # (H / Hk, Hk) of the last layer with each window: they only set how the work is cut
        self._heads: dict[int | None, tuple[int, int]] = {}
        self._calls = 0

    def begin_prefill(self) -> None:
        """The next forward is over a packed forest, whose keys and values are kept."""
        self._works, self._calls = None, 0
        self._heads.clear()

    def works(
        self,
        runs: np.ndarray,
        tails: np.ndarray,
        live: torch.Tensor | None = None,
        spare: bool = False,
    ) -> Works:
        """Lists of what tokens see, for `resume`. All arguments as `DecodeWork` takes them."""
        options: dict[str, Any] = {"num_keys": self.capacity, "live": live, "spare": spare}
        options["device"] = self._pools[0][0].device
        return {
            window: DecodeWork(runs, tails, window=window, group=g, kv_heads=heads, **options)
            for window, (g, heads) in self._heads.items()
        }

    def resume(self, works: Works) -> None:
        """The next forwards are of the tokens of these lists."""
        self._works, self._calls = works, 0

    @property
    def addresses(self) -> list[int]:
        """Of the pools. Other ones are made where a prefill brings other shapes or dtypes."""
        keys = [pool.data_ptr() for pools in self._pools for pool in pools]
        return keys + self.states.addresses

    def end(self) -> None:
        """Ends a forward; the next one brings one token more per row.

        Raises:
            UnsupportedError: layers of this forward attended elsewhere.
        """
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
            # of the last prefill, if the model is still the same
            if (pool.dtype, pool.device, pool.shape[1:]) != (new.dtype, new.device, new.shape[1:]):
                pool = new.new_empty(self.capacity, *new.shape[1:])
            pool[: len(new)] = new
            pools.append(pool)
        self._pools[self._calls] = (pools[0], pools[1])
        self._calls += 1

    # which pools are its own changes from layer to layer, so a compiled layer ends a graph here
    @torch.compiler.disable
    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        window: int | None,
        **options: Any,
    ) -> torch.Tensor:
        """Writes the new keys and values, and attends to all that each token sees.

        Args:
            q: [B, H, D]. k: [B, Hk, D]. v: [B, Hk, Dv].
            window, options: as `cascade_attention` takes them.

        Returns:
            [B, H, Dv] in q's dtype.

        Raises:
            UnsupportedError: more attention calls than in the prefill, or another window or dtype.
        """
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
        return cascade_attention(q, k, v, keys, values, work, window=window, **options)

    def move(self, index: np.ndarray) -> None:
        """Moves keys and values: those at index[i] go to i."""
        for pools in self._pools:
            for pool in pools:
                pool[: len(index)] = pool[torch.from_numpy(index).to(pool.device)]
