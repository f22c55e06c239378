"""The ledger of one rank: what parts of a forest hand to later ones, and what comes back for it.

Keys and values, the keys of indexers, states of recurrent layers and the tails of convolutions are
rows alike. A part lends rows of its own in its first forward, later parts read them whenever they
run, and what their backwards give waits for the lender's backward. It is summed in float32 (float64
of a model in float64), in the order of the backwards. Rows are known by the module and the number
of its call: checkpointing runs layers again in another order.

When rows are read follows from the schedule. Behind the last run that reads them they are freed.
What steps lend lies on one path, the one above the first token of the next step. So what they read
is a stack: a step adds to its top, and what its successor does not see any more leaves it. Only the
stack is on the device, and what left it waits on the host for the backward. Rows of kept trunks
stay on the device between their readers. Where rows do not fit there at all, they wait on the host,
and each layer fetches its own.

Legend: t own tokens of a part, K rows of it (own and borrowed), Hk kv heads, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from prefixtree.errors import UnsupportedError
from prefixtree.packing.copies import move, to_pinned
from prefixtree.planning.part_states import KEYS, STATES, PartStates
from prefixtree.planning.schedule import BACKWARD, KEEP, Life, Lives, Schedule
from prefixtree.planning.steps import Steps

Rows = tuple[torch.Tensor, ...]
#: A layer, and the number of the call in its forward.
Key = tuple[Hashable, int]


@dataclass(eq=False)
class Loan:
    """Rows that one part lends, all of which the same parts read.

    Attributes:
        lender: the part that owns the rows.
        readers: the parts that read them, ascending.
        tokens: int64 [r], their packed tokens, ascending.
        rows: int64 [r] on the device, their places among the rows that the lender makes, ascending.
        life: when they are read.
        values: by layer and call, [r, ...] each; on the host while no part needs them.
        gradients: by layer and call, the sums of what readers returned so far.
    """

    lender: int
    readers: tuple[int, ...]
    tokens: np.ndarray
    rows: torch.Tensor
    life: Life
    values: dict[Key, Rows] = field(default_factory=dict)
    gradients: dict[Key, Rows] = field(default_factory=dict)


class Loans:
    """All loans of one kind of rows.

    Attributes:
        of_lender: per part, what it lends, ascending in packed order.
        of_reader: per part, what it reads, by lender.
        ending: by place in the schedule, the loans that nobody reads behind it.
        parking, fetching: by place, those that wait on the host from behind it, or until it.
    """

    def __init__(self, parts: int, loans: list[Loan]) -> None:
        self.of_lender: list[list[Loan]] = [[] for _ in range(parts)]
        self.of_reader: list[list[Loan]] = [[] for _ in range(parts)]
        self.ending: dict[int, list[Loan]] = {}
        self.parking: dict[int, list[Loan]] = {}
        self.fetching: dict[int, list[Loan]] = {}
        for loan in loans:
            self.of_lender[loan.lender].append(loan)
            for part in loan.readers:
                self.of_reader[part].append(loan)
            self.ending.setdefault(loan.life.last, []).append(loan)
            if loan.life.pause is not None:
                behind, until = loan.life.pause
                self.parking.setdefault(behind, []).append(loan)
                self.fetching.setdefault(until, []).append(loan)

    def __iter__(self) -> Iterator[Loan]:
        return (loan for loans in self.of_lender for loan in loans)


class Ledger:
    """The rows that parts lend to later ones over a schedule, and the gradients that come back.

    It holds nothing until a layer asks.

    Args:
        steps: parts that read from earlier ones.
        schedule: in what order they run.
        parks: whether rows wait on the host between the last forward and the first backward that
            read them, as steps need it. Else they stay.
        on_host: whether rows wait on the host until a layer reads them.
    """

    def __init__(
        self, steps: Steps, schedule: Schedule, parks: bool, on_host: bool = False
    ) -> None:
        self.steps = steps
        self.schedule = schedule
        self._lives = Lives(schedule, len(steps))
        self._parks, self._on_host = parks and not on_host, on_host
        self._device = steps.packed.device
        self._states: dict[int, PartStates] = {}
        self._loans: dict[int, Loans] = {}

    def states_of(self, part: int) -> PartStates:
        """Where states enter and leave a part."""
        if part not in self._states:
            self._states[part] = PartStates(self.steps[part])
        return self._states[part]

    def loans(self, kind: int) -> Loans:
        """The loans of a kind of rows: KEYS, STATES, or a convolution's inputs by its taps."""
        if kind not in self._loans:
            parts = range(len(self.steps))
            read = None if kind == KEYS else [self.states_of(part).read(kind) for part in parts]
            found = []
            for lender, readers, tokens in self.steps.loans(read):
                # one state behind each own token that others continue; else a row of each own token
                made = self.steps[lender].own_tokens
                made = self.states_of(lender).left if kind == STATES else made
                rows = self._on_device(np.searchsorted(made, tokens))
                found.append(Loan(lender, readers, tokens, rows, self._lives.of(readers)))
            self._loans[kind] = Loans(len(self.steps), found)
        return self._loans[kind]

    @contextmanager
    def running(self, event: int) -> Iterator[PartExchanges]:
        """A forward of a part. What it gives serves the part's backward too.

        Args:
            event: its place in the schedule.
        """
        part = self.schedule[event].at
        if self._parks:
            for loan in self._at("fetching", event):
                loan.values = {key: self.fetch(rows) for key, rows in loan.values.items()}
        # a second forward computes again what the first one lent
        exchanges = PartExchanges(self, part, lends=self._lives.first[part] == event)
        yield exchanges
        # layers that are recomputed lend no second time
        exchanges.lends = False
        self._behind(event)

    def end_backward(self, event: int) -> None:
        """Behind the backward of a part.

        Raises:
            RuntimeError: a layer's backward did not take what readers returned for its rows.
        """
        self.close(self.schedule[event].at)
        self._behind(event)

    def _behind(self, event: int) -> None:
        for loan in self._at("ending", event):
            loan.values = {}
        if self._parks:
            for loan in self._at("parking", event):
                loan.values = {key: to_host(rows) for key, rows in loan.values.items()}

    def close(self, part: int) -> None:
        """Raises a RuntimeError where gradients were returned to a part and not taken."""
        left = [
            (kind, key)
            for kind, loans in self._loans.items()
            for loan in loans.of_lender[part]
            for key in loan.gradients
        ]
        what = None
        if layers := dict.fromkeys(_module_of(layer) for kind, (layer, _) in left if kind == KEYS):
            what = f"the attention of {len(layers)} layers ({next(iter(layers))}), whose keys"
        elif calls := [f"{type(layer).__name__}, call {n}" for _, (layer, n) in left]:
            what = f"{len(calls)} calls of recurrent layers ({calls[0]}), whose states"
        if what is not None:
            raise RuntimeError(
                f"the backward of step {part} did not reach {what} later steps borrowed: their "
                "gradients are lost. A hook or a checkpoint of the model stops gradients there; "
                "score without max_tokens, or without kept_trunks"
            )

    def clear(self) -> None:
        """Lets go of everything, also where a graph knows the loans."""
        for loans in self._loans.values():
            for loan in loans:
                loan.values, loan.gradients = {}, {}

    def park(self, rows: Rows) -> Rows:
        """Where rows wait for the next part that needs them."""
        return to_host(rows) if self._on_host else rows

    def fetch(self, rows: Rows) -> Rows:
        """Rows on the device, wherever they waited."""
        return to_device(rows, self._device)

    def most_waiting(self, kind: int) -> np.ndarray:
        """The most rows, and rows of gradients, that are on the device beside a part's runs with a
        graph: int64 [parts, 2]."""
        backward = {at: place for place, (what, at) in enumerate(self.schedule) if what == BACKWARD}
        change = np.zeros((len(self.schedule) + 1, 2), np.int64)
        found = np.zeros((len(self.steps), 2), np.int64)
        if self._on_host or not backward:
            return found
        for loan in self.loans(kind):
            count = len(loan.tokens)
            change[self._lives.first[loan.lender], 0] += count
            change[loan.life.last + 1, 0] -= count
            if self._parks and loan.life.pause is not None:
                behind, until = loan.life.pause
                change[behind + 1, 0] -= count
                change[until, 0] += count
            change[min(backward[part] for part in loan.readers), 1] += count
            change[backward[loan.lender] + 1, 1] -= count
        waiting = np.cumsum(change, 0)
        for place, (what, part) in enumerate(self.schedule):
            if what in (KEEP, BACKWARD) and 0 <= part < len(found):
                found[part] = np.maximum(found[part], waiting[place])
        return found

    @property
    def kinds(self) -> set[int]:
        """The kinds of rows that layers asked for."""
        return set(self._loans)

    def held_bytes(self) -> tuple[int, int]:
        """Bytes of lent rows, and bytes of gradients, wherever they are."""
        every = [loan for loans in self._loans.values() for loan in loans]
        return (
            sum(x.nbytes for loan in every for rows in loan.values.values() for x in rows),
            sum(x.nbytes for loan in every for rows in loan.gradients.values() for x in rows),
        )

    def order_of(self, part: int, kind: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """How rows that a part reads, loan after loan, come to stand in packed order; of keys the
        own rows stand behind them.

        Returns:
            int64, the place of each row in that order, and the reverse; None where the two orders
            are one, as keys of steps.
        """
        tokens = [loan.tokens for loan in self.loans(kind).of_reader[part]]
        if kind == KEYS:
            tokens.append(self.steps[part].own_tokens)
        joined = np.concatenate([np.empty(0, np.int64), *tokens])
        if (np.diff(joined) > 0).all():
            return None
        order = np.argsort(joined)
        both = self._on_device(np.stack([order, np.argsort(order)]))
        return both[0], both[1]

    def _at(self, what: str, event: int) -> Iterator[Loan]:
        return (
            loan for loans in self._loans.values() for loan in getattr(loans, what).get(event, [])
        )

    def _on_device(self, index: np.ndarray) -> torch.Tensor:
        return move(torch.from_numpy(index.astype(np.int64)), self._device)


class PartExchanges:
    """The exchanges of one part's layers: `PartMask.exchange_of`.

    Attributes:
        ledger: what it reads and lends.
        part: the part.
        lends: whether forwards lend rows.
    """

    def __init__(self, ledger: Ledger, part: int, lends: bool) -> None:
        self.ledger, self.part = ledger, part
        # a part that lends nothing may run a layer as often as it likes
        self.lends = lends and len(ledger.steps[part].exchange.send_runs) > 0
        self._seen: set[Hashable] = set()
        self._orders: dict[int, tuple[torch.Tensor, torch.Tensor] | None] = {}

    def __call__(self, layer: Hashable) -> KeyExchange:
        """The exchange of a layer, known by its attention module.

        Raises:
            UnsupportedError: a module that attends twice per forward, in a part's first forward.
        """
        self.note(layer, "attends", "keys")
        return KeyExchange(self.exchange(KEYS, (layer, 1)))

    def exchange(self, kind: int, key: Key) -> Exchange:
        """That of one call of a layer."""
        if kind not in self._orders:
            self._orders[kind] = self.ledger.order_of(self.part, kind)
        return Exchange(self, kind, key, self._orders[kind])

    def note(self, layer: Hashable, does: str, rows: str) -> None:
        """That a layer runs.

        Raises:
            UnsupportedError: for the second time in a forward that lends.
        """
        if self.lends and layer in self._seen:
            raise UnsupportedError(
                f"{type(_module_of(layer)).__name__} {does} twice in one forward: the {rows} of "
                "both would be one, so it cannot lend them from step to step; score without "
                "max_tokens, in micro-batches (plan_micro_batches)"
            )
        self._seen.add(layer)


class Exchange:
    """One call of one layer in one part, for one kind of rows.

    Attributes:
        ledger: that it reads and writes.
        kind: of the rows.
        key: the call.
        lent: what the part lends.
        read: what it reads.
    """

    def __init__(
        self,
        of_part: PartExchanges,
        kind: int,
        key: Key,
        order: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        loans = of_part.ledger.loans(kind)
        self.lent, self.read = loans.of_lender[of_part.part], loans.of_reader[of_part.part]
        self.ledger, self.kind, self.key = of_part.ledger, kind, key
        self._of_part, self._order = of_part, order

    def lend(self, *made: torch.Tensor) -> None:
        """made [m, ...]: of all rows that the part makes, later parts read some."""
        if not self._of_part.lends:
            return
        for loan in self.lent:
            # copies of their own memory, which is free again when the loan ends
            rows = tuple(x.detach().index_select(0, loan.rows) for x in made)
            loan.values[self.key] = self.ledger.park(rows)

    def borrow(self, *own: torch.Tensor) -> Rows:
        """[I, ...] each: all that the part reads, and own rows behind it if there are any, in
        packed order."""
        pieces = [self.ledger.fetch(loan.values[self.key]) for loan in self.read]
        joined = tuple(map(torch.cat, zip(*pieces, *([own] if own else []), strict=True)))
        if self._order is None:
            return joined
        return tuple(x.index_select(0, self._order[0]) for x in joined)

    def give_back(self, *gradients: torch.Tensor) -> Rows:
        """gradients [I, ...] of what `borrow` gave -> those of the own rows. Readers add up in the
        order of their backwards."""
        if self._order is not None:
            gradients = tuple(x.index_select(0, self._order[1]) for x in gradients)
        first = 0
        for loan in self.read:
            returned = tuple(x[first : first + len(loan.rows)] for x in gradients)
            first += len(loan.rows)
            if self.key in loan.gradients:
                before = self.ledger.fetch(loan.gradients[self.key])
                total = tuple(x.add_(y) for x, y in zip(before, returned, strict=True))
            else:
                total = tuple(x.clone() for x in returned)
            loan.gradients[self.key] = self.ledger.park(total)
        return tuple(x[first:] for x in gradients)

    def take(self) -> list[tuple[torch.Tensor, Rows]]:
        """The gradients [r, ...] that readers returned for rows that the part lends, with the
        places of these among the rows that it makes, each once."""
        found = []
        for loan in self.lent:
            # none in layers whose readers need no gradients
            if (waiting := loan.gradients.pop(self.key, None)) is not None:
                found.append((loan.rows, self.ledger.fetch(waiting)))
        return found


class KeyExchange:
    """The exchange of the keys and values of one layer in one part: a `KeyValueExchange`.

    Attributes:
        exchange: that of their rows.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def borrow(self, *own: torch.Tensor) -> Rows:
        """See `KeyValueExchange`."""
        own = tuple(x.detach() for x in own)
        self.exchange.lend(*own)
        return self.exchange.borrow(*own) if self.exchange.read else own

    def give_back(
        self, dkey: torch.Tensor, dvalue: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KeyValueExchange`."""
        own = self.exchange.give_back(dkey, dvalue)
        for rows, returned in self.exchange.take():
            for x, more in zip(own, returned, strict=True):
                x.index_add_(0, rows, more)
        return own[0], own[1]


def _module_of(layer: Hashable) -> Hashable:
    """The attention module by which a layer is known, of which groups of heads may be numbered."""
    return layer[0] if isinstance(layer, tuple) else layer


def to_host(rows: Rows) -> Rows:
    """Copies in pinned memory, without waiting; what is on the CPU stays where it is."""
    return tuple(map(to_pinned, rows))


def to_device(rows: Rows, device: torch.device) -> Rows:
    """Copies on the device, without waiting; what is there already stays."""
    return tuple(move(x, device) for x in rows)
