"""`TreeMask`: which tokens see which in a packed forest.

Legend: T packed tokens, Tq query rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from prefixtree._numbers import entries, integer, integers
from prefixtree.errors import ForestError, kind_of
from prefixtree.packing.block_tables import BlockTables, MaskStats, TileShape, visited_tiles
from prefixtree.packing.copies import check_device
from prefixtree.packing.host_mask import HostMask, make_handle


class TreeMask:
    """The attention mask of a packed forest.

    Query q sees key k exactly when k <= q < subtree_end[k], in packed (preorder) order. A mask is
    immutable: `with_options`, `for_queries` and `to` return new masks that share the block tables.
    It is no dataclass, because wrappers such as FSDP1 take dataclasses among keyword arguments
    apart.

    Args:
        subtree_end: [T] integers (a list, an array or a tensor), one past the last packed token
            below each token. They must nest.

    Attributes:
        subtree_end: int32 [T] on the mask's device.
        position_ids: int32 [T], each token's position on its path, in which windows are measured.
        query_tokens: None if q holds every packed token, else int32 [Tq], the packed index of each
            row of q.
        backend: the backend that `tree_attention` uses if its `backend` is None. "auto" until
            `with_options` changes it.
        deterministic: the value that `tree_attention` uses if its `deterministic` is None. False
            until `with_options` changes it.
        handle: int64 [1] on the CPU; stands for the mask in the registered operator.
        device: the device of `subtree_end`.

    Raises:
        ForestError: a subtree_end that is not 1-D integers, is out of range or does not nest.
    """

    def __init__(self, subtree_end: Any) -> None:
        try:
            array = integers("subtree_end", subtree_end)
        except ForestError as problem:
            raise ForestError(
                f"{problem}; pack(PrefixForest.from_sequences(sequences)).mask is the mask of "
                "sequences"
            ) from None
        for bad in np.flatnonzero(array > len(array))[:1]:
            raise ForestError(
                f"subtree_end[{bad}] is {array[bad]}, beyond the {len(array)} tokens there are"
            )
        # a copy: the caller may write into the array later
        self._init(HostMask(array.astype(np.int32), None), torch.device("cpu"), "auto", False)

    def _init(
        self,
        host: HostMask,
        device: torch.device,
        backend: str,
        deterministic: bool,
        handle: torch.Tensor | None = None,
    ) -> TreeMask:
        self.host = host
        arrays = host.on(device)
        self.subtree_end = arrays["subtree_end"]
        # an attribute, for which compiled code looks at no tensor
        self.device = self.subtree_end.device
        self.position_ids = arrays["position_ids"]
        self.query_tokens = arrays.get("query_tokens")
        self.backend = backend
        self.deterministic = deterministic
        self.handle = make_handle(host) if handle is None else handle
        self._given: tuple[torch.Tensor, int] | None = None
        return self

    def given_with(self, position_ids: torch.Tensor) -> TreeMask:
        """Copies the mask, which then knows the positions, int64 [Tq], that a model gets."""
        mask = self.with_options()
        if not position_ids.is_inference():
            mask._given = position_ids, position_ids._version
        return mask

    def is_given(self, position_ids: torch.Tensor) -> bool:
        """Whether these are the known positions: the same memory, not written to since.

        False says nothing about the values. No value is read, so the host does not wait for a GPU.
        """
        if self._given is None:
            return False
        known, version = self._given
        return (
            position_ids.device == known.device
            and position_ids.dtype == known.dtype
            and position_ids.shape == known.shape
            and position_ids.stride() == known.stride()
            and position_ids.data_ptr() == known.data_ptr()
            and known._version == version
        )

    @property
    def num_tokens(self) -> int:
        """T, the number of packed tokens: the rows of k and v."""
        return self.subtree_end.shape[0]

    @property
    def num_queries(self) -> int:
        """Tq, the number of rows of q: T unless the mask is `for_queries`."""
        rows = self.subtree_end if self.query_tokens is None else self.query_tokens
        return rows.shape[0]

    def to(self, device: torch.device | str) -> TreeMask:
        """Copies the mask to a device, in one asynchronous copy; the host tables are shared."""
        check_device(device)
        # a tensor knows the index of a bare "cuda"
        device = torch.empty(0, device=device).device
        mask = TreeMask.__new__(TreeMask)
        return mask._init(self.host, device, self.backend, self.deterministic, self.handle)

    def adopt(self, subtree_end: torch.Tensor, position_ids: torch.Tensor) -> TreeMask:
        """Makes the mask of the device where these copies of its arrays are, int32 [T] each."""
        self.host.adopt(subtree_end, position_ids)
        return self.to(subtree_end.device)

    def with_options(
        self, backend: str | None = None, deterministic: bool | None = None
    ) -> TreeMask:
        """Changes the options, which the mask carries through a model to `tree_attention`.

        The new mask shares its tables with this one. None leaves an option unchanged.

        Args:
            backend: as in `tree_attention`.
            deterministic: whether gradients are bitwise repeatable.
        """
        mask = TreeMask.__new__(TreeMask)
        return mask._init(
            self.host,
            self.device,
            self.backend if backend is None else backend,
            self.deterministic if deterministic is None else deterministic,
            self.handle,
        )

    def for_queries(self, ranges: Iterable[tuple[int, int]]) -> TreeMask:
        """Makes the mask for a q that holds only some runs of the packed tokens.

        Args:
            ranges: (start, end) in packed tokens, ascending, not empty, not overlapping. Row r of q
                is the r-th token that they name.

        Returns:
            A TreeMask with the same T keys and Tq queries.

        Raises:
            ForestError: ranges that are no pairs of integers, out of order or out of bounds, or a
                mask that is a subset already.
        """
        if self.query_tokens is not None:
            raise ForestError("for_queries takes the whole mask; this one holds a subset already")
        runs, row, last = [], 0, 0
        for start, end in map(_pair, entries("ranges", ranges, "a list of (start, end)")):
            if not last <= start < end <= self.num_tokens:
                raise ForestError(
                    f"for_queries expects ascending, separate, non-empty ranges within 0 and "
                    f"{self.num_tokens}, got ({start}, {end}) behind {last}"
                )
            runs.append((start, row, end - start))
            row, last = row + end - start, end
        query_runs = np.array(runs, np.int64).reshape(-1, 3)
        host = HostMask(self.host.subtree_end, query_runs, self.host)
        mask = TreeMask.__new__(TreeMask)
        return mask._init(host, self.device, self.backend, self.deterministic)

    def tables(self, shape: TileShape, window: int | None = None) -> BlockTables:
        """Makes the block tables for a tile shape; each is built once and kept.

        Args:
            shape: the tiles of the kernel.
            window: the sliding window, in tokens. Default: none.

        Returns:
            The tables on the mask's device.

        Raises:
            ValueError: a window that is neither None nor an integer >= 1.
        """
        return self.host.tables(shape, check_window(window), self.device)

    def stats(self, shape: TileShape, window: int | None = None) -> MaskStats:
        """Measures how well tiles of a shape fit the mask, per head.

        Args:
            shape: the tiles of the kernel.
            window: the sliding window, in tokens. Default: none.

        Returns:
            The counts and the useful share.

        Raises:
            ValueError: a window that is neither None nor an integer >= 1.
        """
        window = check_window(window)
        tables = self.host.tables(shape, window, torch.device("cpu"))
        full, partial = visited_tiles(tables)
        visible_pairs = self.host.visible_pairs(window)
        computed = (full + partial) * shape.tile_q * shape.tile_k
        return MaskStats(
            visible_pairs=visible_pairs,
            tile_pairs=full + partial,
            partial_tiles=partial,
            useful_share=visible_pairs / max(1, computed),
            key_tiles=len(tables.k_tiles),
            cut_tiles=len(tables.slots),
            pieces=len(tables.pieces),
        )

    def dense(self, window: int | None = None) -> torch.Tensor:
        """Makes the dense mask, for tests and the reference backend; it takes T x T memory.

        Args:
            window: the sliding window, in tokens. Default: none.

        Returns:
            bool [Tq, T] on the mask's device, true where a query sees a key.

        Raises:
            ValueError: a window that is neither None nor an integer >= 1.
        """
        return dense_mask(self.host, self.device, check_window(window))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in ("ndim", "shape", "dtype", "cuda"):
                raise AttributeError(
                    f"a TreeMask is no tensor, and has no {name}: a model takes it as tree_mask=, "
                    'never as attention_mask=; .to("cuda") moves it'
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __copy__(self) -> TreeMask:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TreeMask:
        # a mask is immutable; a deep copy of its PackedForest must find the same device again
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        host = self.host
        runs = host.query_runs if host.is_subset else None
        return _rebuild, (host.subtree_end, runs, self.backend, self.deterministic)

    def __repr__(self) -> str:
        queries = "" if self.query_tokens is None else f", {self.num_queries} queries"
        return f"TreeMask({self.num_tokens} tokens{queries}, {self.device}, {self.backend})"


def make_mask(
    subtree_end: np.ndarray,
    query_runs: np.ndarray | None,
    backend: str,
    deterministic: bool,
    device: torch.device,
) -> TreeMask:
    """Makes a mask of arrays as `HostMask` takes them; it keeps them."""
    mask = TreeMask.__new__(TreeMask)
    return mask._init(HostMask(subtree_end, query_runs), device, backend, deterministic)


def _rebuild(
    subtree_end: np.ndarray, runs: np.ndarray | None, backend: str, deterministic: bool
) -> TreeMask:
    """Unpickles a mask, on the CPU: another process has other caches and devices."""
    return make_mask(subtree_end, runs, backend, deterministic, torch.device("cpu"))


def check_mask(mask: Any, name: str = "mask") -> None:
    """Raises a TypeError that says how to make a TreeMask, unless this is one."""
    if not isinstance(mask, TreeMask):
        raise TypeError(
            f"{name} must be a TreeMask, got {kind_of(mask, TreeMask)}; pack makes one: "
            "packed = pack(PrefixForest.from_sequences(sequences)), and then packed.mask"
        )


def check_window(window: int | None) -> int:
    """Reads a window, in tokens, as an integer; 0 for None."""
    if window is None:
        return 0
    return integer("window", window, 1, or_none=True, note=" (it counts the token itself)")


def _pair(given: Any) -> tuple[int, int]:
    """Reads one range of `for_queries`."""
    pair = entries("ranges", given, "a list of (start, end)")
    if len(pair) != 2:
        raise ForestError(f"ranges must be a list of (start, end), got {given!r} in it")
    return integer("a start in ranges", pair[0]), integer("an end in ranges", pair[1])


def dense_mask(host: HostMask, device: torch.device, window: int) -> torch.Tensor:
    """Computes the definition pair by pair, bool [Tq, T]; window 0 for none."""
    arrays = host.on(device)
    end, position = arrays["subtree_end"], arrays["position_ids"]
    key = torch.arange(host.num_tokens, device=device)
    query = arrays["query_tokens"].long() if host.is_subset else key
    visible = (key[None] <= query[:, None]) & (query[:, None] < end[None])
    if window:
        visible &= position[query][:, None] - position[None] < window
    return visible
