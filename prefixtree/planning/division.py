"""`Division`: a packed forest divided in time (slots) and in space (ranks).

A slot is what the ranks of a group compute at once: a step, a trunk, the own tokens of a
micro-batch, or everything. Cell (slot, rank) is a part like any other. The rows that it reads lie
in earlier slots, on any rank, or in its own slot on another rank. Steps and kept trunks have one
rank. A group in one forward has one slot.

Legend: T packed tokens, n ranks, S slots.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from prefixtree.errors import ForestError
from prefixtree.packing.copies import rows_of_runs
from prefixtree.planning.part_states import KEYS, PartStates, tokens_read
from prefixtree.planning.parts import Part, Parts

#: Most tokens above its own, per own token, that each rank computes again for recurrent states. A
#: rule is a tenth of a recurrent layer of Qwen3.5-9B, and the exchange of all tokens for heads took
#: as long.
MOST_ABOVE = 0.5


class Division:
    """The cells of a packed forest, in `len(division)` slots; part slot * n + rank is one."""

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
        cell = slot * self.ranks + rank
        if cell not in self._states:
            self._states[cell] = PartStates(self.parts[cell])
        return self._states[cell]

    @cached_property
    def in_time(self) -> Division:
        """The slots alone, as a rank sees them that computes some heads of all tokens."""
        if self.ranks == 1:
            return self
        return Division(Parts(self.packed, self.parts.owner // self.ranks, len(self)))

    def ranks_of(self, slot: int) -> np.ndarray:
        """int [t], the rank that owns each token of a slot, in packed order."""
        owner = self.parts.owner
        return owner[owner // self.ranks == slot] % self.ranks

    @cached_property
    def computes_above(self) -> bool:
        """Whether ranks compute the tokens above their own again; the same on all ranks."""
        reader, _, length, _ = self.reads(KEYS)
        above = np.bincount(reader, length, len(self.parts))
        return bool((above <= MOST_ABOVE * self.parts.num_own_tokens).all())

    def reads(self, kind: int) -> tuple[np.ndarray, ...]:
        """Finds the rows of a kind (KEYS, STATES, a convolution's taps) that cells read of others.

        Returns int64 [*] each, by reader, then by token: the part that reads a run of packed
        tokens, the run's first token, its length, and the part that owns it.
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
        """Packed tokens, int64 ascending, that a cell reads of others, or of one exporter."""
        reader, start, length, owner = self.reads(kind)
        first, stop = np.searchsorted(reader, [cell := slot * self.ranks + rank, cell + 1])
        start, length, owner = (x[first:stop] for x in (start, length, owner))
        if exporter is not None:
            start, length = (x[owner % self.ranks == exporter] for x in (start, length))
        return rows_of_runs(start, length)

    def travels(self, kind: int, slot: int) -> bool:
        """Whether ranks exchange rows of a kind in a slot; the same on all ranks."""
        reader, _, _, exporter = self.reads(kind)
        crosses = (reader - exporter) % self.ranks != 0
        return bool((crosses & (reader // self.ranks == slot)).any())

    def exports(self, kind: int, rank: int) -> list[tuple[int, tuple[int, ...], np.ndarray]]:
        """Finds the tokens of a rank, the exporter, that the same later slots read, on any rank.

        Returns (slot that exports, slots that read ascending, packed tokens int64 ascending) each,
        by the slot that exports, then by first token.
        """
        reader, start, length, exporter = self.reads(kind)
        slot, from_slot = reader // self.ranks, exporter // self.ranks
        is_export = (exporter % self.ranks == rank) & (from_slot < slot)
        slot, start, length, from_slot = (x[is_export] for x in (slot, start, length, from_slot))
        border = np.unique(np.concatenate([start, start + length]))
        first, stop = np.searchsorted(border, start), np.searchsorted(border, start + length)
        readers: list[list[int]] = [[] for _ in border]
        export_slot = np.zeros(len(border), np.int64)
        export_slot[first] = from_slot
        runs = zip(*(x.tolist() for x in (slot, from_slot, first, stop)), strict=True)
        for reading_slot, exporting_slot, low, high in runs:
            for run in range(low, high):
                export_slot[run] = exporting_slot
                if reading_slot not in readers[run][-1:]:
                    readers[run].append(reading_slot)
        tokens_of: dict[tuple[int, tuple[int, ...]], list[np.ndarray]] = {}
        for run in np.flatnonzero([bool(slots) for slots in readers]).tolist():
            key = int(export_slot[run]), tuple(readers[run])
            tokens_of.setdefault(key, []).append(np.arange(border[run], border[run + 1]))
        exports = [(*key, np.concatenate(tokens)) for key, tokens in tokens_of.items()]
        return sorted(exports, key=lambda export: (export[0], export[2][0]))
