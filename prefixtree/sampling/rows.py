"""`Rows`: the growing ends of a forest, which branch, generate, hear replies and end. `Samples`:
their contents, as training takes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from prefixtree._forest_inputs import flatten
from prefixtree._numbers import entries, integer
from prefixtree.errors import ForestError, with_hints
from prefixtree.forest import PrefixForest
from prefixtree.packing.arguments import at_least_one
from prefixtree.packing.copies import lasting
from prefixtree.sampling.draws import Draws, row_keys
from prefixtree.sampling.forward import CachedForward
from prefixtree.sampling.growing_forest import GrowingForest
from prefixtree.sampling.step import DecodeStep, Steps

# ---- contents of rows ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Samples:
    """The sequences of all rows, in the rows' order.

    Attributes:
        forest: their PrefixForest, for `pack`; its sequences are in this order.
        sequences: int64 token ids, [n] each: the history, sampled tokens and replies.
        loss_masks: bool [n] each, true where the token was sampled.
        turns: int64 [n] each, the number of the turn that sampled the token, -1 where none did. A
            turn is what one call of `generate` sampled for one row; rows that branch later hold it
            together. `MicroBatchPlan.token_weights` takes them.
        logprobs: float32 [n - 1] per sequence on the CPU, of tokens 1 .. n - 1 as in
            `sequence_logprobs`. They are over the full vocabulary at the temperature of the draw,
            before truncation; 0 where the token was not sampled.
        log_kept_mass: float32 [n - 1] per sequence: the log of the probability that truncation
            (top_k, top_p, min_p) left; 0 where the token was not sampled, or without truncation.
        sampling_masks: the token ids that truncation left, int64, as a list per sequence with an
            entry per token, for `sequence_logprobs`; None for a token without truncation. None
            where a token was drawn with truncation and without `Draws.return_sampling_mask`.
        source: int64 [S], the sequence of the starting forest that each one continues.
        parents: int64 [S]: sequences with the same number branched from the same row (the last
            branching above them); -1 where a row never branched.
        paths: the place of each sequence in the tree of branchings: its source, then its number
            among the rows of each branching above it.
        finished: bool [S], whether the last token is a sampled stop token.
    """

    forest: PrefixForest
    sequences: list[np.ndarray]
    loss_masks: list[np.ndarray]
    turns: list[np.ndarray]
    logprobs: list[torch.Tensor]
    log_kept_mass: list[torch.Tensor]
    sampling_masks: list[list[np.ndarray | None]] | None
    source: np.ndarray
    parents: np.ndarray
    paths: list[tuple[int, ...]]
    finished: np.ndarray


class Piece(NamedTuple):
    """n tokens that came to a row at once, as `Samples` has them."""

    tokens: np.ndarray
    sampled: np.ndarray
    logprobs: np.ndarray
    kept: np.ndarray
    sets: np.ndarray

    @classmethod
    def said(cls, tokens: Sequence[int] | np.ndarray) -> Piece:
        """Makes a piece of tokens that were not sampled."""
        zeros = np.zeros(len(tokens), np.float32)
        nothing = np.full(len(tokens), None)
        return cls(np.array(tokens, np.int64), zeros.astype(bool), zeros, zeros, nothing)


@dataclass(frozen=True)
class Row:
    """The contents of one row, without its keys.

    Attributes:
        path: as `Samples.paths` has it.
        pieces: the history, then sampled and appended tokens.
        pending: the last tokens, if the model has not read them yet.
        logits: [V], of the token that comes next; None if tokens are pending.
        new: tokens sampled by the last `generate`.
    """

    path: tuple[int, ...]
    pieces: tuple[Piece, ...]
    pending: tuple[int, ...] = ()
    logits: torch.Tensor | None = field(default=None, repr=False)
    stopped: bool = False
    new: tuple[int, ...] = ()

    def with_sampled(self, piece: Piece, stop: frozenset[int]) -> Row:
        """Adds sampled tokens, of which the model has read all but the last."""
        tokens = tuple(piece.tokens.tolist())
        if not tokens:
            return self
        pieces = self.pieces
        if self.new:
            # of the same call of `generate`: one turn is one piece
            piece = Piece(*map(np.concatenate, zip(pieces[-1], piece, strict=True)))
            pieces = pieces[:-1]
        return replace(
            self,
            pieces=(*pieces, piece),
            pending=tokens[-1:],
            logits=None,
            stopped=tokens[-1] in stop,
            new=self.new + tokens,
        )

    def with_reply(self, tokens: Sequence[int]) -> Row:
        """Adds tokens that others said."""
        return replace(
            self,
            pieces=(*self.pieces, Piece.said(tokens)),
            pending=self.pending + tuple(tokens),
            logits=None if tokens else self.logits,
            stopped=False,
        )


def samples_of(rows: Sequence[Row]) -> Samples:
    """Gathers the contents of rows."""
    # rows that branched after a turn hold the same piece
    sampled = (piece for row in rows for piece in row.pieces if piece.sampled.any())
    turn = {at: number for number, at in enumerate(dict.fromkeys(map(id, sampled)))}
    columns = [[np.concatenate(parts) for parts in zip(*row.pieces, strict=True)] for row in rows]
    sequences = [tokens for tokens, *_ in columns]
    has_sets = all(ids is not None for *_, kept, sets in columns for ids in sets[kept < 0])
    branchings: dict[tuple[int, ...], int] = {}
    parents = [
        branchings.setdefault(row.path[:-1], len(branchings)) if len(row.path) > 1 else -1
        for row in rows
    ]
    return Samples(
        forest=PrefixForest.from_sequences(sequences),
        sequences=sequences,
        loss_masks=[sampled for _, sampled, *_ in columns],
        turns=[
            np.concatenate([np.full(len(p.tokens), turn.get(id(p), -1)) for p in row.pieces])
            for row in rows
        ],
        logprobs=[torch.from_numpy(logprobs[1:]) for _, _, logprobs, *_ in columns],
        log_kept_mass=[torch.from_numpy(kept[1:]) for *_, kept, _ in columns],
        sampling_masks=[sets.tolist() for *_, sets in columns] if has_sets else None,
        source=np.array([row.path[0] for row in rows]),
        parents=np.array(parents),
        paths=[row.path for row in rows],
        finished=np.array([row.stopped for row in rows]),
    )


# ---- rows ----------------------------------------------------------------------------------------

# steps between looks of the host which rows stopped: on a GPU it waits for all steps at each look
_LOOK_EVERY = {"cpu": 1}
_LOOK_EVERY_ON_GPUS = 16
# share of a batch's rows; when no more than it still go on, the others leave
_STILL_FULL = 0.75
# pending tokens of a forward: a GPU keeps partial results of all of them while a layer attends
_READ_AT_ONCE = 2048


def stop_tokens(stop: Any) -> frozenset[int]:
    """Reads the token ids at which rows end; TypeError for anything else."""
    try:
        return frozenset(
            integer("stop", token, 0) for token in entries("stop", stop, "", ordered=False)
        )
    except ValueError:
        raise TypeError(f"stop takes a list of token ids, got {stop!r}") from None


class Rows:
    """Rows that grow below the sequences of a forest. Made by `TreeSampler.start`.

    Rows are numbered from 0. At the start row i continues sequence i. `branch` and `drop` number
    the rows anew: rows that branched from one row stand side by side in its place. A row's draws
    do not depend on its number.
    """

    # only `start` calls it, so its types are no part of the interface
    def __init__(
        self, forward: Any, steps: Any, growing: Any, rows: list[Any], max_rows: int
    ) -> None:
        self._forward: CachedForward = forward
        self._steps: Steps = steps
        self._growing: GrowingForest = growing
        self._max_rows = max_rows
        self._set(rows)
        forward.own(self)

    def _set(self, rows: list[Row]) -> None:
        """Takes rows in the growing forest's order, which is depth first."""
        # row i is the one at _order[i] there
        order = sorted(range(len(rows)), key=lambda at: rows[at].path)
        # in one line, so that an interruption leaves all or nothing
        self._rows, self._order = rows, order

    def __len__(self) -> int:
        return len(self._rows)

    # ---- changes of rows -------------------------------------------------------------------------

    @lasting
    def branch(self, counts: int | Sequence[int] | Mapping[int, int]) -> None:
        """Makes several rows of one, side by side. Nothing is copied.

        Args:
            counts: how many rows every row becomes: one number for all, one per row, or a mapping
                from rows (the others stay as they are). 1 leaves a row as it is, 0 drops it.

        Raises:
            ValueError: a number below 0, or a number of counts that is not the number of rows.
            IndexError: a row that does not exist.
            MemoryError: no room for tokens that the model has not read yet, or for states after
                them; nothing was changed.
            RuntimeError, UnsupportedError: as `generate`, if the model reads such tokens.
        """
        self._forward.check_owner(self)
        by_row = self._counts(counts)
        per_row = [1] * len(self)
        for at, count in zip(self._places(by_row.keys()), by_row.values(), strict=True):
            per_row[at] = count
        reading = [at for at, count in enumerate(per_row) if count > 1]
        try:
            self._read(reading)
        finally:
            self._growing.trim(reading)
        branched = [
            replace(row, path=(*row.path, number)) if count > 1 else row
            for row, count in zip(self._rows, per_row, strict=True)
            for number in range(count)
        ]
        # an interruption would leave rows with keys of others
        self._forward.own(None)
        self._growing.branch(per_row)
        self._set(branched)
        self._forward.own(self)

    def drop(self, rows: Iterable[int]) -> None:
        """Drops rows: they leave the samples, and their keys make room.

        Raises:
            ValueError: rows that are no integers.
            IndexError: a row that does not exist.
        """
        self.branch(dict.fromkeys(self._numbers(rows), 0))

    def append(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """Appends tokens that were not sampled: replies of tools or users.

        The next `branch` or `generate` that goes on from them has the model read them, once for all
        rows that share them. A row that had stopped goes on.

        Args:
            tokens: from rows to token ids, perhaps none.

        Raises:
            TypeError: tokens that are no mapping.
            IndexError: a row that does not exist.
            ForestError: tokens that are negative or not integers.
            ValueError: a token id beyond the model's vocabulary.
        """
        self._forward.check_owner(self)
        if not isinstance(tokens, Mapping):
            raise TypeError(f"tokens must be a mapping from rows to token ids, got {tokens!r}")
        places = self._places(tokens.keys())
        replies = [entries(f"tokens[{row}]", ids, "token ids") for row, ids in tokens.items()]
        if filled := [reply for reply in replies if reply]:
            self._forward.check_tokens(flatten(filled, "tokens")[0])
        for at, reply in zip(places, replies, strict=True):
            self._rows[at] = self._rows[at].with_reply([int(t) for t in reply])

    @lasting
    @with_hints
    def generate(
        self,
        max_new_tokens: int,
        draws: Draws | None = None,
        stop: Iterable[int] = (),
        rows: Iterable[int] | None = None,
    ) -> None:
        """Samples up to `max_new_tokens` tokens for each row that goes on.

        A row ends at its first stop token, which it keeps. If the call is interrupted
        (KeyboardInterrupt, an error of the model), the rows keep the sampled tokens and go on from
        there. With recurrent layers they do not: their states may have seen more.

        Args:
            max_new_tokens: the most tokens per row, >= 1.
            draws: how tokens are drawn. Default: `Draws()`.
            stop: token ids. Default: none, so every row gets `max_new_tokens` tokens.
            rows: which rows go on. Default: those whose last token is no sampled stop token.

        Raises:
            IndexError: a row that does not exist.
            ValueError: max_new_tokens below 1.
            MemoryError: more rows than `max_rows`, or no room for so many tokens, or no memory for
                the rows' states; nothing was sampled.
            RuntimeError: the model's weights or active adapters changed since the start, so the
                kept keys are of other weights; or the sampler started anew; or logits are NaN.
            TypeError: stop is no list of integers.
            UnsupportedError: dropout has become active since the start.
        """
        self._forward.check_owner(self)
        room = at_least_one("max_new_tokens", max_new_tokens)
        ends = stop_tokens(stop)
        if rows is None:
            going = [at for at, row in enumerate(self._rows) if not row.stopped]
        else:
            going = sorted(set(self._places(rows)))
        if len(going) > self._max_rows:
            raise MemoryError(
                f"{len(going):,} rows are to go on, and the sampler was made for "
                f"{self._max_rows:,} (max_rows): make it larger, or name some of the rows (rows=)"
            )
        if not going:
            return
        try:
            self._read(going, room)
            for at in going:
                self._rows[at] = replace(self._rows[at], new=())
            self._decode(going, room, draws or Draws(), ends)
        finally:
            self._growing.trim(going)
        if wrong := sum(bool(np.isnan(self._rows[at].pieces[-1].logprobs).any()) for at in going):
            raise RuntimeError(
                f"the model gave NaN or infinite logits in {wrong} rows, so their tokens mean "
                "nothing: look whether its weights are finite (isfinite)"
            )

    # ---- reading rows ----------------------------------------------------------------------------

    def stopped(self) -> list[int]:
        """Lists the rows whose last token is a stop token that they sampled."""
        return [number for number, at in enumerate(self._order) if self._rows[at].stopped]

    def new_tokens(self, row: int) -> list[int]:
        """Lists the tokens that a row sampled in the last `generate` that it took part in.

        Raises:
            IndexError: a row that does not exist.
        """
        return list(self._rows[self._places([row])[0]].new)

    @lasting
    def samples(self) -> Samples:
        """Gathers the sequences of all rows, also while they grow.

        Raises:
            ForestError: all rows were dropped.
        """
        if not self._rows:
            raise ForestError("all rows were dropped, so there are no samples")
        return samples_of([self._rows[at] for at in self._order])

    # ---- the model -------------------------------------------------------------------------------

    def _read(self, rows: Sequence[int], room: int = 0) -> None:
        """Has the model read pending tokens of rows, and gives rows room for tokens after them."""
        reading = [at for at in rows if self._rows[at].pending]
        if reading or room:
            self._forward.check_model()
        for row, length in ((self._rows[at], self._growing.length(at)) for at in rows):
            if length + len(row.pending) != sum(len(piece.tokens) for piece in row.pieces):
                raise RuntimeError(
                    "an interruption left the keys of some rows behind their tokens: call "
                    "sampler.start again; rows.samples() has what was sampled"
                )
            self._forward.check_length(length + len(row.pending) + room)
        writing = rows if room else reading
        # an interruption while keys move would leave them nowhere
        self._forward.own(None)
        try:
            rooms = [len(self._rows[at].pending) + room for at in writing]
            moved = self._growing.reserve(writing, rooms)
        except MemoryError:
            self._forward.own(self)
            raise
        if moved is not None:
            self._forward.cache.move(moved)
        self._forward.own(self)
        self._forward.cache.states.hold(self._growing.num_slots)
        while reading:
            self._read_some(reading)
            reading = [at for at in reading if self._rows[at].pending]

    def _read_some(self, rows: Sequence[int]) -> None:
        """Runs one forward over pending tokens of these rows."""
        left, chosen, tokens = _READ_AT_ONCE, [], []
        for at in rows:
            if left:
                chosen.append(at)
                tokens.append(self._rows[at].pending[:left])
                left -= len(tokens[-1])
        counts = [len(part) for part in tokens]
        if self._forward.has_states:
            # an interruption would leave some rows after tokens that others have not read
            self._forward.own(None)
        seen, slots = self._growing.runs_and_tails(chosen, counts), self._growing.slots(chosen)
        logits = self._forward.read(*seen, slots, tokens)
        self._growing.extend(chosen, counts)
        for at, count, last in zip(chosen, counts, logits, strict=True):
            rest = self._rows[at].pending[count:]
            self._rows[at] = replace(self._rows[at], pending=rest, logits=None if rest else last)
        self._forward.own(self)

    def _decode(self, rows: list[int], room: int, draws: Draws, stop: frozenset[int]) -> None:
        """Samples for rows that have logits and room."""
        device = self._forward.device
        look_every = _LOOK_EVERY.get(device.type, _LOOK_EVERY_ON_GPUS)
        logits: list[Any] = [self._rows[at].logits for at in rows]
        last = [self._growing.length(at) - 1 for at in rows]
        options = draws, sorted(stop)
        # once per call: only its own forwards run until its end
        self._steps.look()
        step = self._steps.step(len(rows), *options)
        keys = row_keys(draws.seed, [self._rows[at].path for at in rows])
        step.start(keys, torch.tensor(last))
        if self._forward.has_states:
            # until rows have the tokens that their states have seen
            self._forward.own(None)
        try:
            step.draw(torch.stack(logits))
            del logits
            if room > 1:
                step.begin(*self._growing.runs_and_tails(rows), self._growing.slots(rows))
            for drawn in range(1, room):
                if step.is_over():
                    break
                if drawn % look_every == 0:
                    live = step.live.nonzero()[:, 0].tolist()
                    if live and step.size_for(len(live)) <= _STILL_FULL * step.size:
                        following = self._steps.step(len(live), *options)
                        step.hand_over(live, following)
                        self._collect(step, rows, stop)
                        rows, step = [rows[number] for number in live], following
                        step.begin(*self._growing.runs_and_tails(rows), self._growing.slots(rows))
                step.run()
        finally:
            self._collect(step, rows, stop)
            if not (step.torn and self._forward.has_states):
                self._forward.own(self)

    def _collect(self, step: DecodeStep, rows: list[int], stop: frozenset[int]) -> None:
        """Hands a step's draws to its rows, each up to its first stop token."""
        drawn = step.take()
        ends = np.isin(drawn.tokens, list(stop))
        for number, at in enumerate(rows):
            row, end = self._rows[at], ends[number]
            count = int(end.argmax()) + 1 if end.any() else len(end)
            tokens, *more = (part[number, :count] for part in drawn)
            # the keys of all tokens but the last are written
            written = len(row.pending) + count - 1 if count else 0
            self._growing.extend([at], [written])
            self._rows[at] = row.with_sampled(Piece(tokens, np.ones(count, bool), *more), stop)

    def _counts(self, counts: Any) -> dict[int, int]:
        """The counts given to `branch`, by row."""
        by_row = counts
        if not isinstance(counts, Mapping):
            is_number = getattr(counts, "ndim", None) == 0 or not hasattr(counts, "__iter__")
            by_row = dict(enumerate([counts] * len(self) if is_number else counts))
        try:
            if by_row is counts or len(by_row) == len(self):
                return {row: integer("counts", count, 0) for row, count in by_row.items()}
        except ValueError:
            pass
        raise ValueError(
            f"branch takes one number >= 0 for each of {len(self)} rows (counts: how many rows it "
            f"becomes), got {counts}"
        )

    @staticmethod
    def _numbers(rows: Any) -> list[int]:
        """Reads rows as integers."""
        return [
            integer("rows", row) for row in entries("rows", rows, "a list of rows", ordered=False)
        ]

    def _places(self, rows: Iterable[int]) -> list[int]:
        """The places of these rows in the growing forest."""
        numbers = self._numbers(rows)
        for bad in (row for row in numbers if not 0 <= row < len(self)):
            raise IndexError(f"row {bad} does not exist; expected 0 to {len(self) - 1}")
        return [self._order[number] for number in numbers]
