"""How the backward's work is shared out: which blocks of threads do which tiles.

flash-attn-4 starts one block of threads per key tile and query head. A block costs as much as two
tiles of 128 x 128 before and after its tiles (k and v come in, dk and dv go out), so that short
lists, of which each leaf has some, cost more to begin than to do. And the longest list, a prompt's,
is a block that others wait for. So one item here is a key tile with as many query heads of a kv
head, or with such a part of its list, as makes its length even.

Legend: R key tiles, V items.
"""

from __future__ import annotations

import numpy as np

# numbers of an item: see `work_items`
FIELDS = 8
# items are at most a multiprocessor's part of all tiles over this: what the last of them can leave
# idle is about half of that
PARTS = 24
# visits of query tiles that no item needs be shorter than: they take 16 times as long as its start
LEAST = 64


def work_items(
    partial: np.ndarray, full: np.ndarray, group: int, kv_heads: int, processors: int
) -> tuple[np.ndarray, np.ndarray]:
    """The items of one kv head, long ones first, and the key tiles that more than one item adds to.

    An item does, for each of its heads, the same entries of the list of its key tile.

    Args:
        partial, full: int64 [R], the lengths of both lists of each key tile; one of them above 0.
        group: query heads per kv head. A group of one has no parts of lists: dk and dv are stored
            there, and not added up.
        kv_heads: kv heads, which each have these items.
        processors: multiprocessors of the device.

    Returns:
        int32 [V, FIELDS]: the key tile, the first head within the group, the number of heads, the
        first and the number of entries of the partial list, the same of the full list, and the
        place of the key tile in the second result, or -1.
        int64 [S]: the key tiles of which several items do a part, ascending.
    """
    visits = partial + full
    most = max(LEAST, int(visits.sum()) * group * kv_heads // (processors * PARTS))
    heads = np.clip(most // np.maximum(visits, 1), 1, group)
    parts = -(-visits // most) if group > 1 else np.ones_like(visits)
    parts[heads > 1] = 1
    # rows of the result, in the order of tiles, then heads, then parts
    turns = -(-group // heads)
    count = turns * parts
    tile = np.repeat(np.arange(len(visits)), count)
    at = np.arange(len(tile)) - np.repeat(np.cumsum(count) - count, count)
    turn, part = at // parts[tile], at % parts[tile]
    first_head = turn * heads[tile]
    begin, end = (visits[tile] * (part + more) // parts[tile] for more in (0, 1))
    begins, ends = (
        np.clip(x[None] - np.stack([np.zeros_like(tile), partial[tile]]), 0, limit)
        for limit in [np.stack([partial, full])[:, tile]]
        for x in (begin, end)
    )
    items = np.zeros((len(tile), FIELDS), np.int64)
    items[:, 0], items[:, 1] = tile, first_head
    items[:, 2] = np.minimum(heads[tile], group - first_head)
    items[:, 3:7] = np.stack([begins[0], ends[0] - begins[0], begins[1], ends[1] - begins[1]], 1)
    split = np.flatnonzero(count > 1)
    slot = np.full(len(visits), -1)
    slot[split] = np.arange(len(split))
    items[:, 7] = slot[tile]
    length = items[:, 2] * (end - begin)
    # by powers of two: neighbours in a class keep their places, and read the same queries
    order = np.argsort(-np.floor(np.log2(np.maximum(length, 1))), kind="stable")
    return items[order].astype(np.int32), split
