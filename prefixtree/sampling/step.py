"""`DecodeStep`: one token more for every row of a batch, on tensors that stay where they are.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from prefixtree.kernels.recurrence.protocol import RowSlots
from prefixtree.packing.copies import move
from prefixtree.sampling.draws import Draws
from prefixtree.sampling.forest_cache import Works
from prefixtree.sampling.forward import CachedForward, StepGraphs

# most drawn tokens per row on the device
_KEPT = 16
# most kept steps, each of a size and a way to draw
_MOST = 64
# steps that a GPU has still to do when the host learns whether rows go on: it never runs dry
_AHEAD = 2


class Drawn(NamedTuple):
    """Draws of n steps on the host, [B, n] each: tokens int64, logprobs float32, kept and sets.

    `kept` are float32 logs of the kept probability; `sets` the kept token ids or None, objects.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    kept: np.ndarray
    sets: np.ndarray


class DecodeStep:
    """Model call, draw, stop and advance for batches of up to `size` rows, one after another.

    All that differs from batch to batch, and from step to step, is in tensors that are filled in
    place. So a step may be captured in a CUDA graph, which then serves all batches. Rows after
    those of a batch are not live.

    Attributes:
        ids, positions: int64 [size], of the last tokens drawn.
        live: bool [size], whether no stop token was drawn.
        torn: whether a step was interrupted, so that states of some layers may have moved.
    """

    def __init__(
        self,
        forward: CachedForward,
        draws: Draws,
        stop: Sequence[int],
        size: int,
        graphs: StepGraphs,
    ) -> None:
        self._forward, self._draws, self._graphs, self.size = forward, draws, graphs, size
        self._stop = torch.tensor(stop, dtype=torch.int64, device=forward.device)
        self.ids, self.positions, self._keys = (self._stop.new_zeros(size) for _ in range(3))
        self.live = torch.zeros_like(self.ids, dtype=torch.bool)
        zeros = torch.zeros_like(self.ids)
        self._slots = RowSlots(zeros, zeros.clone(), self.live)
        self._tokens = self.ids.new_zeros(_KEPT, size)
        # log-probabilities, and logs of the kept probability
        self._scores = self.ids.new_zeros(_KEPT, 2, size, dtype=torch.float32)
        # of sets, made with the first draw, which knows the vocabulary
        self._bits: torch.Tensor | None = None
        self._column = self.ids.new_zeros(1)
        self._works: Works | None = None
        self._runner: Callable[[Callable[[], None]], None] | None = None
        # `live` after the last steps, on the host once the event of each has come
        self._seen: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        if self.live.is_cuda:
            hosts = torch.zeros(_AHEAD + 1, size, dtype=torch.bool, pin_memory=True)
            self._seen = [(host, torch.cuda.Event()) for host in hosts]
        self._begin(0)

    def _begin(self, rows: int) -> None:
        """Begins a batch of so many rows without draws."""
        self._rows, self._count, self._num_seen, self.torn = rows, 0, 0, False
        self._taken: list[Drawn] = []
        for tensor in (self.ids, self.positions, *self._slots, self._column):
            tensor.zero_()
        self.live[:rows] = True

    def start(self, keys: torch.Tensor, positions: torch.Tensor) -> None:
        """Begins a batch of draws by keys int64 [B] at the rows' last positions int64 [B]."""
        self._begin(len(keys))
        self._keys[: len(keys)] = move(keys, self._keys.device)
        self.positions[: len(keys)] = move(positions, self._keys.device)

    def hand_over(self, rows: list[int], other: DecodeStep) -> None:
        """Begins a batch of `other` with some of these rows, after their draws."""
        index = move(torch.tensor(rows), self.ids.device)
        other.start(self._keys[index], self.positions[index])
        other.ids[: len(rows)] = self.ids[index]

    def size_for(self, rows: int) -> int:
        """The size of the step for so many rows."""
        return self._graphs.size_of(rows)

    def begin(
        self, runs: np.ndarray, tails: np.ndarray, slots: tuple[np.ndarray, np.ndarray]
    ) -> None:
        """Sets the next `run`'s tokens, one per row, and slots, as `GrowingForest` gives them."""
        for into, of_rows in zip(self._slots, slots, strict=False):
            into[: len(of_rows)] = move(torch.from_numpy(of_rows), into.device)
        # a captured graph reads the old lists, so it goes if others are made
        runner, self._runner = self._runner, None
        fit = [work.refill(runs, tails) for work in (self._works or {}).values()]
        if self._works is None:
            spare = self._graphs.reason is None
            self._works = self._forward.cache.works(runs, tails, self.live, spare)
        self._runner = runner if runner and all(fit) else self._graphs.captured()

    def draw(self, logits: torch.Tensor) -> None:
        """Draws from logits [B, V] of the last tokens."""
        self._draw(logits)
        self._note()

    def run(self) -> None:
        """Runs one step: reads the last tokens and draws the next ones."""
        assert self._works is not None and self._runner is not None
        if self._count == _KEPT:
            self._unload()
        self._forward.cache.resume(self._works)
        self._forward.cache.states.resume(self._slots)
        self.torn = True
        self._runner(self._advance)
        self._note()
        self.torn = False

    # a graph captures this: nothing here reads a tensor on the host
    def _advance(self) -> None:
        self._draw(self._forward.step(self.ids, self.positions))

    def _draw(self, logits: torch.Tensor) -> None:
        rows = len(logits)
        ids, positions, live = (x[:rows] for x in (self.ids, self.positions, self.live))
        # rows that stopped stay where they are: positions have an end
        positions += live
        tokens, logprobs, kept, bits = self._draws.choose(logits, self._keys[:rows], positions)
        scores = logprobs[None] if kept is None else torch.stack([logprobs, kept])
        ids.copy_(tokens)
        self._tokens[:, :rows].index_copy_(0, self._column, tokens[None])
        self._scores[:, : len(scores), :rows].index_copy_(0, self._column, scores[None])
        if bits is not None:
            if self._bits is None:
                self._bits = bits.new_zeros(_KEPT, self.size, bits.shape[1])
            self._bits[:, :rows].index_copy_(0, self._column, bits[None])
        live &= ~(tokens[:, None] == self._stop).any(1)
        self._column += 1

    def _note(self) -> None:
        """Counts a draw, and has a GPU copy to the host which rows go on after it."""
        self._count += 1
        self._num_seen += 1
        if self._seen:
            host, event = self._seen[self._num_seen % len(self._seen)]
            host.copy_(self.live, non_blocking=True)
            # the stream of this device, which need not be the current one
            event.record(torch.cuda.current_stream(self.live.device))

    def is_over(self) -> bool:
        """Whether all rows had stopped, on a GPU two steps ago; the host waits for those alone."""
        if not self._seen:
            return not bool(self.live.any())
        if self._num_seen <= _AHEAD:
            return False
        host, event = self._seen[(self._num_seen - _AHEAD) % len(self._seen)]
        event.synchronize()
        return not bool(host.any())

    # ---- draws -----------------------------------------------------------------------------------

    def _unload(self) -> None:
        """Moves draws from the device to the host."""
        count, self._count = self._count, 0
        # copies, on a CPU too: these tensors are written again
        tokens = self._tokens[:count, : self._rows].t().cpu().numpy().copy()
        scores = self._scores[:count, :, : self._rows].permute(1, 2, 0).cpu().numpy().copy()
        sets = np.full(tokens.shape, None)
        if self._bits is not None:
            bits = self._bits[:count, : self._rows].cpu().numpy()
            for row, at in np.ndindex(*sets.shape):
                sets[row, at] = np.flatnonzero(np.unpackbits(bits[at, row], bitorder="little"))
        self._taken.append(Drawn(tokens, scores[0], scores[1], sets))
        self._column.zero_()

    def take(self) -> Drawn:
        """Reads the draws once: after an interruption nothing is handed out twice."""
        self._unload()
        taken, self._taken = self._taken, []
        return Drawn(*(np.concatenate(parts, 1) for parts in zip(*taken, strict=True)))


class Steps:
    """The steps of a model, kept if `graphs` captures them; it is None before the first `look`."""

    def __init__(self, forward: CachedForward, captured: bool) -> None:
        self._forward, self._captured = forward, captured
        self.graphs: StepGraphs | None = None
        # the state of the model that the steps are of
        self._state: int | None = None
        self._kept: dict[Any, DecodeStep] = {}

    def look(self) -> None:
        """Drops the kept steps if the model is no longer in the state that they are of."""
        state = self._forward.state if self._captured else None
        if self.graphs is None or state != self._state:
            self._kept.clear()
            self._state = state
            self.graphs = StepGraphs(self._forward.device, self._captured)

    def step(self, rows: int, draws: Draws, stop: Sequence[int]) -> DecodeStep:
        """A step for batches of so many rows, after `look`; an earlier batch's if captured."""
        assert self.graphs is not None
        size = self.graphs.size_of(rows)
        if self.graphs.reason is not None:
            return DecodeStep(self._forward, draws, stop, size, self.graphs)
        key = replace(draws, seed=0), tuple(stop), size
        if key not in self._kept:
            if len(self._kept) == _MOST:
                self._kept.clear()
            self._kept[key] = DecodeStep(self._forward, draws, stop, size, self.graphs)
        return self._kept[key]
