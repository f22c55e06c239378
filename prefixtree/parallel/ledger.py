"""The ledger of one rank: rows that cells of a forest hand to others, and their gradients.

Keys and values, the keys of indexers, states of recurrent layers and the inputs of convolutions are
rows alike. A cell exports own rows in its first forward, and cells of later slots read them
whenever they run. Gradients from readers' backwards wait for the exporter's backward. They are
summed in float32 (float64 of a model in float64), in the order of the backwards. Rows are known by
the module and the number of its call, as checkpointing runs layers again in another order. Rows
wait at the rank that made them. Rows that other ranks read, of earlier slots or of this one, travel
in `parallel.transport`: with one rank nothing travels, with one slot nothing waits.

The schedule says when rows are read. After the last run that reads them they are freed. Rows that
steps read lie on one path, the one above the first token of the next step. So they are a stack: a
step adds to its top, and rows that its successor no longer sees leave it. Only the stack is on the
device. Rows that left it wait on the host for the backward. Rows of kept trunks stay on the device
between their readers. Where rows do not fit there at all, they wait on the host, and each layer
fetches its own.

Legend: t own tokens of a cell, K rows of it (own and imported), Hk kv heads, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from prefixtree.errors import UnsupportedError
from prefixtree.packing.copies import RowRuns, move, to_pinned
from prefixtree.parallel.heads import TokensForHeads
from prefixtree.parallel.transport import Transport
from prefixtree.planning import schedule
from prefixtree.planning.division import Division
from prefixtree.planning.part_states import KEYS, STATES, PartStates
from prefixtree.planning.parts import Part, Parts
from prefixtree.planning.schedule import BACKWARD, KEEP, Life, Lives, Schedule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Rows = tuple[torch.Tensor, ...]
#: A layer, and the number of the call in its forward.
Key = tuple[Hashable, int]


@dataclass(eq=False)
class Export:
    """Rows that one cell exports, all of which the same slots read."""

    # the slot of the cell
    exporter: int
    # the slots that read them, ascending
    readers: tuple[int, ...]
    # int64 [r], their packed tokens, ascending
    tokens: np.ndarray
    # [r], their places among the rows that the exporter makes, ascending
    rows: RowRuns
    life: Life
    # by layer and call, [r, ...] each; on the host while no slot needs them
    values: dict[Key, Rows] = field(default_factory=dict)
    # by layer and call, the sums of the gradients that readers returned so far
    gradients: dict[Key, Rows] = field(default_factory=dict)


class Exports:
    """The exports of one kind of rows.

    Attributes:
        of_exporter: exports of each slot's cell, ascending in packed order.
        of_reader: exports that each slot reads, by exporter.
        ending: by place in the schedule, the exports that nobody reads after it.
        parking, fetching: by place, exports that wait on the host from then on, or until it.
    """

    def __init__(self, slots: int, exports: list[Export]) -> None:
        self.of_exporter: list[list[Export]] = [[] for _ in range(slots)]
        self.of_reader: list[list[Export]] = [[] for _ in range(slots)]
        self.ending: dict[int, list[Export]] = {}
        self.parking: dict[int, list[Export]] = {}
        self.fetching: dict[int, list[Export]] = {}
        for export in exports:
            self.of_exporter[export.exporter].append(export)
            for slot in export.readers:
                self.of_reader[slot].append(export)
            self.ending.setdefault(export.life.last, []).append(export)
            if export.life.pause is not None:
                behind, until = export.life.pause
                self.parking.setdefault(behind, []).append(export)
                self.fetching.setdefault(until, []).append(export)

    def __iter__(self) -> Iterator[Export]:
        return (export for exports in self.of_exporter for export in exports)


class Ledger:
    """The rows that cells of a rank export over a schedule, and the gradients that come back.

    Args:
        events: the order in which the slots run.
        parks: whether rows wait on the host between the last forward and the first backward that
            read them, as steps need it. Otherwise they stay.
        on_host: whether rows wait on the host until a layer reads them.
    """

    # it holds nothing until a layer asks

    def __init__(
        self,
        division: Division,
        events: Schedule,
        parks: bool,
        on_host: bool = False,
        rank: int = 0,
        group: ProcessGroup | None = None,
    ) -> None:
        self.division, self.rank, self.group = division, rank, group
        self.schedule = events
        self._lives = Lives(events, len(division))
        self._parks, self._on_host = parks and not on_host, on_host
        self._device = division.packed.device
        self._exports: dict[int, Exports] = {}
        self._transports: dict[tuple[int, int], Transport | None] = {}

    @cached_property
    def of_heads(self) -> Ledger:
        """The ledger of this rank's own heads of all tokens of the slots."""
        arguments = self.division.in_time, self.schedule, self._parks, self._on_host
        return Ledger(*arguments)

    @property
    def _by_kind(self) -> list[tuple[int, Exports]]:
        """The exports of this ledger and, if it was used, of `of_heads`."""
        found = [*self._exports.items()]
        if "of_heads" in self.__dict__:
            found += self.of_heads._exports.items()
        return found

    @property
    def _every(self) -> Iterator[Export]:
        return (export for _, exports in self._by_kind for export in exports)

    def exports(self, kind: int) -> Exports:
        """The exports of a kind of rows: KEYS, STATES, or the taps of a convolution."""
        if kind not in self._exports:
            exports = []
            for slot, readers, tokens in self.division.exports(kind, self.rank):
                # states are of own tokens that others continue, other rows of all own tokens
                made_tokens = self.division.cell(slot, self.rank).own_tokens
                if kind == STATES:
                    made_tokens = self.division.states(slot, self.rank).left
                rows = RowRuns.of(np.searchsorted(made_tokens, tokens), self._device)
                exports.append(Export(slot, readers, tokens, rows, self._lives.of(readers)))
            self._exports[kind] = Exports(len(self.division), exports)
        return self._exports[kind]

    def transport(self, kind: int, slot: int) -> Transport | None:
        """The transport of a kind of rows in a slot; None if none travel on any rank."""
        key = kind, slot
        if key not in self._transports:
            self._transports[key] = None
            if self.group is not None and self.division.travels(kind, slot):
                held = [export.tokens for export in self.exports(kind).of_reader[slot]]
                tokens = np.concatenate([np.empty(0, np.int64), *held])
                where = self.division, kind, slot, self.rank
                self._transports[key] = Transport(*where, tokens, self.group)
        return self._transports[key]

    @contextmanager
    def running(self, event: int) -> Iterator[CellExchanges]:
        """Runs the forward at place `event` of the schedule; its exchanges serve the backward."""
        slot = self.schedule[event].at
        if self._parks:
            for export in self._at("fetching", event):
                export.values = {key: self.fetch(rows) for key, rows in export.values.items()}
        # a second forward computes again the rows that the first one exported
        exchanges = CellExchanges(self, slot, exports=self._lives.first[slot] == event)
        yield exchanges
        # recomputed layers export no second time
        exchanges.end()
        self._after(event)

    def end_backward(self, event: int) -> None:
        """Ends a slot's backward, in which layers must have taken the returned gradients."""
        self.close(self.schedule[event].at)
        self._after(event)

    def _after(self, event: int) -> None:
        for export in self._at("ending", event):
            export.values = {}
        if self._parks:
            for export in self._at("parking", event):
                export.values = {key: to_host(rows) for key, rows in export.values.items()}

    def close(self, slot: int) -> None:
        """Raises a RuntimeError if gradients were returned to a cell and not taken."""
        lost = [
            (kind, key)
            for kind, exports in self._by_kind
            for export in exports.of_exporter[slot]
            for key in export.gradients
        ]
        what = None
        if layers := dict.fromkeys(_module_of(layer) for kind, (layer, _) in lost if kind == KEYS):
            what = f"the attention of {len(layers)} layers ({next(iter(layers))}), whose keys"
        elif calls := [f"{type(_module_of(layer)).__name__}, call {n}" for _, (layer, n) in lost]:
            what = f"{len(calls)} calls of recurrent layers ({calls[0]}), whose states"
        if what is not None:
            raise RuntimeError(
                f"the backward of step {slot} did not reach {what} later steps imported: their "
                "gradients are lost. A hook or a checkpoint of the model stops gradients there; "
                "score without max_step_tokens, or without kept_trunks"
            )

    def clear(self) -> None:
        """Frees everything, also exports that a graph knows."""
        for export in self._every:
            export.values, export.gradients = {}, {}

    def park(self, rows: Rows) -> Rows:
        """Moves rows to where they wait for the next slot that needs them."""
        return to_host(rows) if self._on_host else rows

    def fetch(self, rows: Rows) -> Rows:
        """Moves rows to the device, wherever they waited."""
        return to_device(rows, self._device)

    def most_waiting(self, kind: int) -> np.ndarray:
        """Most rows, and rows of gradients, that wait on the device per slot, int64 [slots, 2]."""
        # while the slot has a graph
        backward = {at: place for place, (what, at) in enumerate(self.schedule) if what == BACKWARD}
        change = np.zeros((len(self.schedule) + 1, 2), np.int64)
        most_rows = np.zeros((len(self.division), 2), np.int64)
        if self._on_host or not backward:
            return most_rows
        for export in self.exports(kind):
            count = len(export.tokens)
            change[self._lives.first[export.exporter], 0] += count
            change[export.life.last + 1, 0] -= count
            if self._parks and export.life.pause is not None:
                after, until = export.life.pause
                change[after + 1, 0] -= count
                change[until, 0] += count
            change[min(backward[slot] for slot in export.readers), 1] += count
            change[backward[export.exporter] + 1, 1] -= count
        waiting = np.cumsum(change, 0)
        for place, (what, slot) in enumerate(self.schedule):
            if what in (KEEP, BACKWARD) and 0 <= slot < len(most_rows):
                most_rows[slot] = np.maximum(most_rows[slot], waiting[place])
        return most_rows

    @property
    def kinds(self) -> set[int]:
        """The kinds of rows that layers asked for."""
        return set(self._exports)

    def held_bytes(self) -> tuple[int, int]:
        """Bytes of exported rows, and bytes of gradients, wherever they are."""
        every = list(self._every)
        return (
            sum(x.nbytes for export in every for rows in export.values.values() for x in rows),
            sum(x.nbytes for export in every for rows in export.gradients.values() for x in rows),
        )

    def order_of(self, slot: int, kind: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The packed order of rows that a cell reads of this rank and of its own rows, int64.

        Returns the place of each row and the reverse; None if both orders are one, as for keys of
        steps. Rows come export after export, own rows last; states have no own rows.
        """
        tokens = [export.tokens for export in self.exports(kind).of_reader[slot]]
        if kind != STATES:
            tokens.append(self.division.cell(slot, self.rank).own_tokens)
        joined = np.concatenate([np.empty(0, np.int64), *tokens])
        if (np.diff(joined) > 0).all():
            return None
        order = np.argsort(joined)
        both = move(torch.from_numpy(np.stack([order, np.argsort(order)])), self._device)
        return both[0], both[1]

    def _at(self, what: str, event: int) -> Iterator[Export]:
        return (
            export
            for _, exports in self._by_kind
            for export in getattr(exports, what).get(event, [])
        )


@dataclass(frozen=True)
class Divided:
    """A divided forest, of which this process computes its own cells."""

    division: Division
    # whether imports of slots wait on the host
    on_host: bool = False
    # this rank's place in the group
    rank: int = 0
    # None without several ranks
    group: ProcessGroup | None = None
    # whether ranks exchange tokens for heads in attention too
    by_heads: bool = False

    @property
    def cells(self) -> list[Part]:
        """The cells of this rank, slot by slot."""
        return [self.division.cell(slot, self.rank) for slot in range(len(self.division))]

    @classmethod
    def of_group(cls, parts: Parts, rank: int, group: ProcessGroup) -> Divided:
        """Divides among ranks alone: one slot, a part per rank."""
        return cls(Division(parts, len(parts)), rank=rank, group=group)

    def ledger(self, events: Schedule, parks: bool) -> Ledger:
        """Makes a new ledger over a schedule; `parks` as in `Ledger`."""
        return Ledger(self.division, events, parks, self.on_host, self.rank, self.group)

    def at_once(self) -> CellExchanges:
        """The exchanges of one forward over the only slot, where nothing waits."""
        ledger = self.ledger(schedule.steps(1, trains=True), parks=False)
        return CellExchanges(ledger, 0, exports=False)


class CellExchanges:
    """The exchanges of one cell's layers; `exports`: whether forwards export rows."""

    def __init__(self, ledger: Ledger, slot: int, exports: bool) -> None:
        self.ledger, self.slot = ledger, slot
        self.part = ledger.division.cell(slot, ledger.rank)
        # a cell without exports may run a layer any number of times
        self.exports = exports and self.part.num_exported > 0
        self._exports_heads = exports
        self._seen: set[Hashable] = set()
        self._orders: dict[int, tuple[torch.Tensor, torch.Tensor] | None] = {}
        self._exported: dict[int, tuple[torch.Tensor, dict[RowRuns, torch.Tensor]]] = {}

    @property
    def states(self) -> PartStates:
        """The places where states enter and leave the cell."""
        return self.ledger.division.states(self.slot, self.ledger.rank)

    @cached_property
    def flight(self) -> TokensForHeads | None:
        """The exchange of tokens for heads in the slot; None without a group."""
        ledger = self.ledger
        if ledger.group is None:
            return None
        owner, device = ledger.division.ranks_of(self.slot), ledger.division.packed.device
        return TokensForHeads(owner, ledger.rank, ledger.group, device)

    @cached_property
    def of_heads(self) -> CellExchanges:
        """The exchanges of this rank's own heads of all tokens of the slot."""
        return CellExchanges(self.ledger.of_heads, self.slot, self._exports_heads)

    def end(self) -> None:
        """Ends exports: layers that run from now on export nothing."""
        self.exports = self._exports_heads = False
        if "of_heads" in self.__dict__:
            self.of_heads.exports = False

    def __call__(self, layer: Hashable) -> Exchange:
        """The exchange of the keys of an attention layer, or an indexer, known by its module."""
        # a module that attends twice in a cell's first forward is refused
        self.note(layer, "attends", "keys")
        return self.exchange(KEYS, (layer, 1), in_place=True)

    def exchange(self, kind: int, key: Key, in_place: bool = False) -> Exchange:
        """The exchange of one call; `in_place`: it may overwrite the gradients that come."""
        # they are in float32 if the cell shares rows, as those of attention are
        if kind not in self._orders:
            self._orders[kind] = self.ledger.order_of(self.slot, kind)
        return Exchange(self, kind, key, self._orders[kind], in_place)

    def exported_rows(self, kind: int) -> tuple[torch.Tensor, dict[RowRuns, torch.Tensor]]:
        """Own rows that others read, int64 [r] each once, and each reader's places among them."""
        if kind not in self._exported:
            transport = self.ledger.transport(kind, self.slot)
            every = [export.rows for export in self.ledger.exports(kind).of_exporter[self.slot]]
            every += [] if transport is None else transport.exported
            of_all = np.concatenate([rows.rows for rows in every])
            exported, place = np.unique(of_all, return_inverse=True)
            both = np.concatenate([exported, place.reshape(-1)])
            on_device = move(torch.from_numpy(both), self.part.mask.device)
            first, *places = on_device.split([len(exported), *(rows.count for rows in every)])
            self._exported[kind] = first, dict(zip(every, places, strict=True))
        return self._exported[kind]

    def note(self, layer: Hashable, does: str, rows: str) -> None:
        """Notes that a layer runs, and refuses it the second time in a forward that exports."""
        if self.exports and layer in self._seen:
            raise UnsupportedError(
                f"{type(_module_of(layer)).__name__} {does} twice in one forward: the {rows} of "
                "both would be one, so it cannot export them from step to step; score without "
                "max_step_tokens, in micro-batches (plan_micro_batches)"
            )
        self._seen.add(layer)


class Exchange:
    """One call of one layer in one cell, for one kind of rows: a `KeyValueExchange`.

    `exported` go to later slots; `read` are this rank's exports that the slot reads.
    """

    def __init__(
        self,
        of_cell: CellExchanges,
        kind: int,
        key: Key,
        order: tuple[torch.Tensor, torch.Tensor] | None,
        in_place: bool,
    ) -> None:
        exports = of_cell.ledger.exports(kind)
        self.exported, self.read = (
            exports.of_exporter[of_cell.slot],
            exports.of_reader[of_cell.slot],
        )
        self.ledger, self.kind, self.key = of_cell.ledger, kind, key
        self._of_cell, self._order, self._in_place = of_cell, order, in_place
        self._transport = self.ledger.transport(kind, of_cell.slot)

    @property
    def reads(self) -> bool:
        """Whether `import_rows` gives more than own rows, on any rank of the group."""
        return bool(self.read) or self._transport is not None

    def export(self, *made: torch.Tensor) -> None:
        """Exports some of all rows that the cell makes, [m, ...] each."""
        if not self._of_cell.exports:
            return
        for export in self.exported:
            # copies have memory of their own, which is free again when the export ends
            count = export.rows.count
            rows = (export.rows.take(x.detach(), x.new_empty(count, *x.shape[1:])) for x in made)
            export.values[self.key] = self.ledger.park(tuple(rows))

    def import_rows(self, *own: torch.Tensor) -> Rows:
        """Exports own rows [t, ...] each and joins them with those that the cell reads to [K, ...].

        Rows are in packed order. States are exported apart, and only those that the cell reads come
        back.
        """
        own = tuple(x.detach() for x in own)
        self.export(*own)
        if not self.reads:
            return own
        pieces = [self.ledger.fetch(export.values[self.key]) for export in self.read]
        if self._transport is not None:
            return self._transport.there(_joined(pieces), own)
        joined = _joined([*pieces, own] if own else pieces)
        if self._order is None:
            return joined
        return tuple(x.index_select(0, self._order[0]) for x in joined)

    def give_back(self, *gradients: torch.Tensor) -> Rows:
        """Takes gradients [K, ...] of imported rows, and gives those of the own rows [t, ...]."""
        # they include what others returned; for states there are none; readers add up in the order
        # of their backwards
        own_gradients, of_ranks = gradients, list[Rows]()
        if self._transport is not None:
            held, own_gradients, of_ranks = self._transport.back(gradients, self._in_place)
            self._return(held)
        elif self.read:
            if self._order is not None:
                gradients = tuple(x.index_select(0, self._order[1]) for x in gradients)
            count = sum(export.rows.count for export in self.read)
            self._return(tuple(x[:count] for x in gradients))
            own_gradients = tuple(x[count:] for x in gradients)
        if self.kind == STATES:
            return ()
        lanes = [] if self._transport is None else self._transport.exported
        return self._added(own_gradients, [*zip(lanes, of_ranks, strict=True), *self.take()])

    def take(self) -> list[tuple[RowRuns, Rows]]:
        """Takes gradients [r, ...] that later slots returned, with the places of their rows."""
        # places are among the rows that the cell makes, each once
        returned = []
        for export in self.exported:
            # there are none in layers whose readers need no gradients
            if (waiting := export.gradients.pop(self.key, None)) is not None:
                returned.append((export.rows, self.ledger.fetch(waiting)))
        return returned

    def _return(self, gradients: Rows) -> None:
        """Returns gradients [H, ...] of rows that the slot reads, export after export."""
        first = 0
        for export in self.read:
            returned = tuple(x[first : first + export.rows.count] for x in gradients)
            first += export.rows.count
            if self.key in export.gradients:
                before = self.ledger.fetch(export.gradients[self.key])
                total = tuple(x.add_(y) for x, y in zip(before, returned, strict=True))
            else:
                total = tuple(
                    x.to(torch.promote_types(x.dtype, torch.float32), copy=True) for x in returned
                )
            export.gradients[self.key] = self.ledger.park(total)

    def _added(self, own: Rows, returned: list[tuple[RowRuns, Rows]]) -> Rows:
        """Adds returned gradients to own ones [t, ...], in float32 or wider; keeps their dtypes."""
        if not returned:
            return own
        out = []
        for number, gradient in enumerate(own):
            wide = torch.promote_types(gradient.dtype, torch.float32)
            if self._in_place and gradient.dtype == wide:
                for rows, pieces in returned:
                    rows.add(gradient, pieces[number])
                out.append(gradient)
                continue
            exported, places = self._of_cell.exported_rows(self.kind)
            total = gradient.index_select(0, exported).to(wide)
            for rows, pieces in returned:
                # each row comes once, so the sum is deterministic
                total.index_add_(0, places[rows], pieces[number].to(wide))
            out.append(gradient.index_copy(0, exported, total.to(gradient.dtype)))
        return tuple(out)


def _joined(pieces: list[Rows]) -> Rows:
    return tuple(map(torch.cat, zip(*pieces, strict=True)))


def _module_of(layer: Hashable) -> Hashable:
    """The attention module of a layer key; groups of heads of a module may be numbered."""
    return layer[0] if isinstance(layer, tuple) else layer


def to_host(rows: Rows) -> Rows:
    """Copies rows to pinned memory, without waiting; rows on the CPU stay."""
    return tuple(map(to_pinned, rows))


def to_device(rows: Rows, device: torch.device) -> Rows:
    """Copies rows to the device, without waiting; rows that are there stay."""
    return tuple(move(x, device) for x in rows)
