"""`GrowingForest`: which keys of a pool belong to which node, and which slot to which row.

Keys and values of a growing forest stand in a pool. A node holds one run of it. A row is the end of
a path: branching makes several rows of one, and a row that gets room grows a node of its own. Rows
stand depth first, so the rows below any node are neighbours, and every operation keeps that order.
A node without rows below it gives its run back. New runs stand after all others; at the end of the
pool, nodes move together.

A row's slot holds the recurrent states of its path. Rows that branch share one. A row that gets
room gets a slot to write: its own if no other row reads it, otherwise a free one. It reads that
slot once keys were written.

Legend: B rows of a forward (one per token), N runs.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prefixtree.forest import PrefixForest


@dataclass(eq=False)
class _Node:
    """A run of the pool, in keys.

    Attributes:
        length: keys written. room: keys that it may hold.
        position: that of its first key in its sequences.
        users: the number of rows that end here, and of child nodes.
    """

    parent: _Node | None
    start: int
    length: int
    room: int
    position: int
    users: int = 0


class GrowingForest:
    """The nodes and rows of a forest whose sequences go on: one row per sequence, depth first.

    The forest's own tokens stand at 0 .. T - 1 of the pool, in packed order. If the pool has fewer
    keys, a MemoryError says so. `sources` has the sequence that each row continues.
    """

    def __init__(self, forest: PrefixForest, capacity: int) -> None:
        if forest.num_tokens > capacity:
            raise MemoryError(
                f"the forest has {forest.num_tokens:,} distinct tokens, the pool room for "
                f"{capacity:,} keys (max_keys)"
            )
        self.capacity = capacity
        nodes: list[_Node] = []
        columns = forest.node_parent, forest.node_start, forest.node_length, forest.node_position
        for parent, start, length, position in zip(*(c.tolist() for c in columns), strict=True):
            above = nodes[parent] if parent >= 0 else None
            nodes.append(_Node(above, start, length, length, position))
            if above is not None:
                above.users += 1
        # nodes are in preorder, so this order is depth first
        self.sources = np.argsort(forest.sequence_node, kind="stable").tolist()
        self._rows = [nodes[forest.sequence_node[s]] for s in self.sources]
        for node in self._rows:
            node.users += 1
        # each row's slot to read and slot to write; how many rows read or
        # are to write a slot, and those below the highest that nobody does
        numbers: dict[_Node, int] = {}
        self._slots = [numbers.setdefault(node, len(numbers) + 1) for node in self._rows]
        self._targets = list(self._slots)
        self._readers, self._free = Counter(self._slots), list[int]()
        # number of keys that nodes hold, and the first key after all of them and freed ones
        self._held = self._used = forest.num_tokens

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self._rows)

    @property
    def num_free(self) -> int:
        """The number of keys of the pool that no node holds."""
        return self.capacity - self._held

    @property
    def num_slots(self) -> int:
        """The number of slots: from 0, which no row has, to the highest that some row has."""
        return max(self._readers, default=0) + 1

    def slots(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The slots that rows read, and those that they write; int64 [rows] each."""
        pairs = [(self._slots[row], self._targets[row]) for row in rows]
        source, target = np.array(pairs, np.int64).reshape(-1, 2).T.copy()
        return source, target

    def length(self, row: int) -> int:
        """The number of keys written on the path of a row."""
        node = self._rows[row]
        return node.position + node.length

    def branch(self, counts: Sequence[int]) -> None:
        """Makes counts[i] rows of row i, side by side; 0 drops it."""
        assert len(counts) == self.num_rows
        before = self._rows
        self._rows = [n for n, count in zip(before, counts, strict=True) for _ in range(count)]
        for node, count in zip(before, counts, strict=True):
            node.users += count - 1
            self._let_go(node)
        for slot, count in zip(self._slots, counts, strict=True):
            self._readers[slot] += count - 1
            self._free_if_unread(slot)
        self._slots = [
            s for s, count in zip(self._slots, counts, strict=True) for _ in range(count)
        ]
        self._targets = list(self._slots)

    def reserve(self, rows: Sequence[int], rooms: Sequence[int]) -> np.ndarray | None:
        """Gives ascending rows room for so many keys each, >= 1: all of them, or a MemoryError.

        Returns None, or int64 [kept keys] if the room was scattered and so all nodes moved
        together: key i stood at the i-th number before.
        """
        needed, moved = sum(rooms), None
        if needed > self.num_free:
            raise MemoryError(
                f"{len(rows):,} rows need room for {needed:,} keys, and {self.num_free:,} of the "
                f"pool's {self.capacity:,} are free: drop rows, ask for fewer tokens, or make the "
                "pool larger (max_keys)"
            )
        if self._used + needed > self.capacity:
            moved = self._move_together()
        for row, room in zip(rows, rooms, strict=True):
            # the row uses the new node, which uses the node above in the row's place
            above = self._rows[row]
            position = above.position + above.length
            self._rows[row] = _Node(above, self._used, 0, room, position, users=1)
            self._used += room
            if self._readers[self._slots[row]] > 1:
                self._targets[row] = self._free_slot()
        self._held += needed
        return moved

    def extend(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Notes that counts[i] more keys of rows[i] were written."""
        for row, count in zip(rows, counts, strict=True):
            node = self._rows[row]
            node.length += count
            assert node.length <= node.room, "more keys than room"
            if count:
                read, self._slots[row] = self._slots[row], self._targets[row]
                self._leave(read, self._slots[row])

    def trim(self, rows: Sequence[int]) -> None:
        """Takes back the room that rows got and did not fill."""
        for row in rows:
            node = self._rows[row]
            self._held -= node.room - node.length
            node.room = node.length
            if node.length == 0 and node.parent is not None:
                self._rows[row] = node.parent
            target, self._targets[row] = self._targets[row], self._slots[row]
            self._leave(target, self._slots[row])

    def runs_and_tails(
        self, rows: Sequence[int], counts: Sequence[int] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Lists the keys that a forward's tokens see; `counts`: tokens of each row. Default: one.

        Args:
            rows: ascending, each with room for its tokens.

        Returns:
            Runs, int64 [N, 5]: first key, stop key, first token of the forward that sees them, stop
                token, position of the first key. And tails, int64 [B, 4], one per token: first key
                of the row's own run, its room, keys written before this token, position of the
                first key.
        """
        tails: list[tuple[int, int, int, int]] = []
        # the first token below each node, and the one after its last
        below: dict[_Node, list[int]] = {}
        for row, count in zip(rows, counts or [1] * len(rows), strict=True):
            end, at = self._rows[row], len(tails)
            for node in _path(end.parent):
                below.setdefault(node, [at, 0])[1] = at + count
            for token in range(count):
                tails.append((end.start, end.room, end.length + token, end.position))
        runs = [
            (node.start, node.start + node.length, first, stop, node.position)
            for node, (first, stop) in below.items()
            if node.length
        ]
        return (
            np.array(runs, np.int64).reshape(-1, 5),
            np.array(tails, np.int64).reshape(-1, 4),
        )

    # ---- slots -----------------------------------------------------------------------------------

    def _free_slot(self) -> int:
        """Takes the lowest free slot."""
        slot = heapq.heappop(self._free) if self._free else len(self._readers) + 1
        self._readers[slot] = 1
        return slot

    def _leave(self, slot: int, other: int) -> None:
        """Counts one row less for a slot, if the row has another one."""
        if slot != other:
            self._readers[slot] -= 1
            self._free_if_unread(slot)

    def _free_if_unread(self, slot: int) -> None:
        if self._readers[slot] == 0:
            del self._readers[slot]
            heapq.heappush(self._free, slot)

    # ---- the pool --------------------------------------------------------------------------------

    def _move_together(self) -> np.ndarray:
        """Moves all nodes to the beginning of the pool; returns an index as `reserve` does."""
        nodes = {node for row in self._rows for node in _path(row)}
        parts, self._used = [np.empty(0, np.int64)], 0
        for node in sorted(nodes, key=lambda node: node.start):
            parts.append(np.arange(node.start, node.start + node.room))
            node.start = self._used
            self._used += node.room
        return np.concatenate(parts)

    def _let_go(self, node: _Node | None) -> None:
        """Gives back the run of a node that nobody uses, and so up its path."""
        while node is not None and node.users == 0:
            self._held -= node.room
            node = node.parent
            if node is not None:
                node.users -= 1


def _path(node: _Node | None) -> list[_Node]:
    """Lists the nodes from the root down to this one."""
    path = []
    while node is not None:
        path.append(node)
        node = node.parent
    return path[::-1]
