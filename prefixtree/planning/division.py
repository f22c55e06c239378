"""`Division`: a packed forest divided in time (slots) and in space (ranks).

A slot is what the ranks of a group compute at once: a step, a trunk, the own tokens of a
micro-batch, or all. Cell (slot, rank) is a part as any other. The rows that it reads lie in earlier
slots, of any rank, or in its own slot, with another rank. Steps and kept trunks have one rank, and
a group in one forward has one slot.

Legend: T packed tokens, n ranks, S slots.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from prefixtree.errors import ForestError
from prefixtree.packing.copies import rows_of_runs
from prefixtree.planning.part_states import KEYS, PartStates, tokens_read
from prefixtree.planning.parts import Part, Parts

#: Ranks compute the tokens above their own again, for the states of recurrent layers, where these
#: are at most so many per own token. A rule is a tenth of a recurrent layer of Qwen3.5-9B, and the
#: exchange of all tokens for heads took as long.
MOST_ABOVE = 0.5


class Division:
    """The cells of a packed forest. `len(division)` is S.

    Args:
        parts: all cells; part slot * n + rank is cell (slot, rank).
        ranks: n.

    Attributes:
        parts, ranks: as given.
        packed: the packed forest.

    Raises:
        ForestError: a token in an earlier slot than a token above it.
    """

    def __init__(self, parts: Parts, ranks: int = 1) -> None:
        self.parts, self.ranks, self.packed = parts, ranks, parts.packed
        reader, token, _, exporter = parts.read_runs()
        for bad in np.flatnonzero(exporter // ranks > reader // ranks)[:1]:
            raise ForestError(
                f"slot {reader[bad] // ranks} reads packed token {token[bad]} of slot "
                f"{exporter[bad] // ranks}, which comes later; expected every token in the slot of "
                "the tokens above it, or in a later one"
            )
        self._states: dict[int, PartStates] = {}
        self._reads: dict[int, tuple[np.ndarray, ...]] = {}

    def __len__(self) -> int:
        return len(self.parts) // self.ranks

    def cell(self, slot: int, rank: int) -> Part:
        return self.parts[slot * self.ranks + rank]

    def states(self, slot: int, rank: int) -> PartStates:
        """The places where states enter and leave a cell."""
        at = slot * self.ranks + rank
        if at not in self._states:
            self._states[at] = PartStates(self.parts[at])
        return self._states[at]

    @cached_property
    def in_time(self) -> Division:
        """The slots alone: what a rank has of its own heads of all tokens."""
        if self.ranks == 1:
            return self
        return Division(Parts(self.packed, self.parts.owner // self.ranks, len(self)))

    def ranks_of(self, slot: int) -> np.ndarray:
        """int [t], the rank that owns each token of a slot, in packed order."""
        owner = self.parts.owner
        return owner[owner // self.ranks == slot] % self.ranks

    @cached_property
    def computes_above(self) -> bool:
        """Whether ranks compute the tokens above their own again; known to all of them."""
        reader, _, length, _ = self.reads(KEYS)
        above = np.bincount(reader, length, len(self.parts))
        return bool((above <= MOST_ABOVE * self.parts.num_own_tokens).all())

    def reads(self, kind: int) -> tuple[np.ndarray, ...]:
        """The rows of a kind that cells read of others.

        Args:
            kind: KEYS, STATES, or a convolution's inputs by its taps.

        Returns:
            int64 [*] each: the part that reads a run of packed tokens, the run's first token, its
            length, and the part that owns it; by reader, then by token.
        """
        if kind not in self._reads:
            read = None
            if kind != KEYS:
                predictor, owner = self.packed.mask.host.predictor, self.parts.owner
                parts = range(len(self.parts))
                read = [tokens_read(predictor, owner == part, kind) for part in parts]
            self._reads[kind] = self.parts.read_runs(read)
        return self._reads[kind]

    def tokens_read(
        self, kind: int, slot: int, rank: int, exporter: int | None = None
    ) -> np.ndarray:
        """int64, the packed tokens of other cells whose rows of a kind a cell reads, ascending;
        with an exporter those that this rank owns."""
        reader, start, length, owner = self.reads(kind)
        first, stop = np.searchsorted(reader, [of := slot * self.ranks + rank, of + 1])
        start, length, owner = (x[first:stop] for x in (start, length, owner))
        if exporter is not None:
            start, length = (x[owner % self.ranks == exporter] for x in (start, length))
        return rows_of_runs(start, length)

    def travels(self, kind: int, slot: int) -> bool:
        """Whether ranks exchange rows of a kind in a slot; known to all of them."""
        reader, _, _, exporter = self.reads(kind)
        crosses = (reader - exporter) % self.ranks != 0
        return bool((crosses & (reader // self.ranks == slot)).any())

    def exports(self, kind: int, rank: int) -> list[tuple[int, tuple[int, ...], np.ndarray]]:
        """Finds the tokens of a rank that the same later slots read, on any rank.

        Args:
            kind: as in `reads`. rank: the exporter.

        Returns:
            (slot that exports, slots that read, packed tokens int64) by the first, then by first
            token; slots that read and tokens ascending.
        """
        reader, start, length, exporter = self.reads(kind)
        slot, of_slot = reader // self.ranks, exporter // self.ranks
        these = (exporter % self.ranks == rank) & (of_slot < slot)
        slot, start, length, of_slot = (x[these] for x in (slot, start, length, of_slot))
        border = np.unique(np.concatenate([start, start + length]))
        first, stop = np.searchsorted(border, start), np.searchsorted(border, start + length)
        readers: list[list[int]] = [[] for _ in border]
        export_slot = np.zeros(len(border), np.int64)
        export_slot[first] = of_slot
        each = zip(*(x.tolist() for x in (slot, of_slot, first, stop)), strict=True)
        for by, of, low, high in each:
            for run in range(low, high):
                export_slot[run] = of
                if by not in readers[run][-1:]:
                    readers[run].append(by)
        found: dict[tuple[int, tuple[int, ...]], list[np.ndarray]] = {}
        for run in np.flatnonzero([bool(of_run) for of_run in readers]).tolist():
            key = int(export_slot[run]), tuple(readers[run])
            found.setdefault(key, []).append(np.arange(border[run], border[run + 1]))
        exports = [(*key, np.concatenate(tokens)) for key, tokens in found.items()]
        return sorted(exports, key=lambda export: (export[0], export[2][0]))
