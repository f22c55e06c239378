"""The loops behind `DecodeWork`: which rows read which keys together, cut into items.

A stream is what the same rows read: spans of keys in the pool. Neighbouring rows that write into
one tail are a leaf: one row in a decode step, the tokens of an append otherwise.

Legend: N runs, B rows, S streams, E spans, a span = (first key, keys, depth of the first key).
"""

import numpy as np
from numba import njit


@njit(cache=True)
def leaves_of(tails):
    """The leaf of each row, int64 [B], and the leaves' first rows and B, int64 [leaves + 1]."""
    num_rows = len(tails)
    leaf = np.empty(num_rows, np.int64)
    start = np.empty(num_rows + 1, np.int64)
    count = 0
    for r in range(num_rows):
        same = r > 0 and tails[r, 0] == tails[r - 1, 0] and tails[r, 3] == tails[r - 1, 3]
        # a tail without room may begin where another one does
        if not same or tails[r, 1] == 0 or tails[r - 1, 1] == 0:
            start[count] = r
            count += 1
        leaf[r] = count - 1
    start[count] = num_rows
    return leaf, start[: count + 1]


@njit(cache=True)
def first_bad_run(runs, tails, leaf):
    """The first run that does not fit its rows, and why, or (-1, 0).

    1: it ends at a row between two tokens of one tail; 2: it is deeper than the tail of the row.
    """
    num_rows = len(tails)
    for n in range(len(runs)):
        first, stop = runs[n, 2], runs[n, 3]
        if first > 0 and leaf[first - 1] == leaf[first]:
            return n, 1
        if stop < num_rows and leaf[stop - 1] == leaf[stop]:
            return n, 1
        for r in range(first, stop):
            if runs[n, 4] + runs[n, 1] - runs[n, 0] > tails[r, 3]:
                return n, 2
    return -1, 0


@njit(cache=True)
def _needed_from(tails, first, stop, window):
    """The least depth of a key that rows first .. stop - 1 see now or later."""
    least = np.int64(1) << 60
    for r in range(first, stop):
        least = min(least, tails[r, 3] + tails[r, 2] - window + 1)
    return least if window else np.int64(0)


@njit(cache=True)
def streams(runs, tails, leaf, leaf_start, window, share_from):
    """Keys by the rows that read them together.

    Runs of the same rows are one stream. It is read once for all of them if this saves more than
    `share_from` reads of a key; otherwise each leaf below reads it with its own tail.

    Args:
        runs: int64 [N, 5], sorted by first row and stop row.
        tails: int64 [B, 4].
        leaf, leaf_start: of `leaves_of`.
        window: 0 for none.

    Returns rows int64 [S, 2] (first, stop), start int64 [S + 1] into the spans, and the spans
    int64 [E, 3]; no stream is without keys.
    """
    num_runs, num_leaves = len(runs), len(leaf_start) - 1
    spans = np.empty((num_runs, 3), np.int64)
    is_shared = np.zeros(num_runs, np.bool_)
    extra = np.zeros(num_leaves + 1, np.int64)
    num_shared, num_spans = 0, 0
    n = 0
    while n < num_runs:
        first, stop = runs[n, 2], runs[n, 3]
        needed = _needed_from(tails, first, stop, window)
        end, total = n, 0
        while end < num_runs and runs[end, 2] == first and runs[end, 3] == stop:
            cut = min(max(needed - runs[end, 4], 0), runs[end, 1] - runs[end, 0])
            spans[end, 0] = runs[end, 0] + cut
            spans[end, 1] = runs[end, 1] - runs[end, 0] - cut
            spans[end, 2] = runs[end, 4] + cut
            total += spans[end, 1]
            end += 1
        leaves = leaf[stop - 1] - leaf[first] + 1
        shared = total * (leaves - 1) > share_from
        num_shared += shared
        for m in range(n, end):
            if spans[m, 1] == 0:
                continue
            is_shared[m] = shared
            num_spans += 1 if shared else leaves
            if not shared:
                for below in range(leaf[first], leaf[stop - 1] + 1):
                    extra[below + 1] += 1
        n = end

    most = num_shared + num_leaves
    rows = np.empty((most, 2), np.int64)
    start = np.zeros(most + 1, np.int64)
    out = np.empty((num_spans + num_leaves, 3), np.int64)
    count, at = 0, 0
    for n in range(num_runs):
        if not is_shared[n]:
            continue
        same = count > 0 and rows[count - 1, 0] == runs[n, 2] and rows[count - 1, 1] == runs[n, 3]
        if not same:
            rows[count, 0], rows[count, 1] = runs[n, 2], runs[n, 3]
            start[count] = at
            count += 1
        out[at] = spans[n]
        at += 1

    # what each leaf reads besides its tail
    for below in range(num_leaves):
        extra[below + 1] += extra[below]
    own = np.empty(extra[num_leaves], np.int64)
    fill = extra[:-1].copy()
    for n in range(num_runs):
        if spans[n, 1] > 0 and not is_shared[n]:
            for below in range(leaf[runs[n, 2]], leaf[runs[n, 3] - 1] + 1):
                own[fill[below]] = n
                fill[below] += 1
    for below in range(num_leaves):
        first, stop = leaf_start[below], leaf_start[below + 1]
        before = at
        for i in range(extra[below], extra[below + 1]):
            out[at] = spans[own[i]]
            at += 1
        needed = _needed_from(tails, first, stop, window)
        cut = min(max(needed - tails[first, 3], 0), tails[first, 1])
        if tails[first, 1] > cut:
            out[at, 0] = tails[first, 0] + cut
            out[at, 1] = tails[first, 1] - cut
            out[at, 2] = tails[first, 3] + cut
            at += 1
        if at > before:
            rows[count, 0], rows[count, 1] = first, stop
            start[count] = before
            count += 1
    start[count] = at
    return rows[:count], start[: count + 1], out[:at]


@njit(cache=True)
def blocks_of(rows, block):
    """-> (blocks of at most `block` rows that hold so many rows, rows of each but the last)."""
    count = (rows + block - 1) // block
    return count, (rows + count - 1) // count


@njit(cache=True)
def reads(rows, start, spans, block):
    """Keys that all streams read, each once per block of rows."""
    total = 0
    for s in range(len(rows)):
        count, _ = blocks_of(rows[s, 1] - rows[s, 0], block)
        for e in range(start[s], start[s + 1]):
            total += count * spans[e, 1]
    return total


@njit(cache=True)
def items(
    rows, start, spans, block, narrow_block, chunk, step, fill, wide, narrow, pieces, ptr, slots
):
    """Cuts streams into items of about equally many keys, at most `chunk`.

    An item is (first row, rows, first piece, stop piece, first slot): its rows read its pieces
    together, and row i of them leaves its partial result in slot first slot + i.

    Args:
        rows, start, spans: of `streams`.
        block: most rows of an item.
        narrow_block: an item of more rows is wide.
        chunk, step: most keys of an item; all but the last of a stream are a multiple of `step`.
        fill: False: only count, and leave the arrays alone.
        wide, narrow: int32 [.., 5], items.
        pieces: int32 [.., 3], (first key, keys, depth of the first key).
        ptr, slots: int32 [B + 1] and [..], the slots of each row. ptr must hold the rows' counts
            of slots from ptr[1] on; with fill=False they are added there.

    Returns the numbers of wide items, narrow items, pieces and slots.
    """
    if fill:
        for r in range(1, len(ptr)):
            ptr[r] += ptr[r - 1]
        at_row = ptr[:-1].copy()
    else:
        at_row = ptr[:-1]
    num_wide, num_narrow, num_pieces, num_slots = 0, 0, 0, 0
    for s in range(len(rows)):
        first, stop = rows[s, 0], rows[s, 1]
        num_blocks, most = blocks_of(stop - first, block)
        total = 0
        for e in range(start[s], start[s + 1]):
            total += spans[e, 1]
        parts = (total + chunk - 1) // chunk
        size = ((total + parts - 1) // parts + step - 1) // step * step
        e, used = start[s], 0
        while e < start[s + 1]:
            first_piece, left = num_pieces, size
            while left > 0 and e < start[s + 1]:
                keys = min(left, spans[e, 1] - used)
                if fill:
                    pieces[num_pieces, 0] = spans[e, 0] + used
                    pieces[num_pieces, 1] = keys
                    pieces[num_pieces, 2] = spans[e, 2] + used
                num_pieces += 1
                used += keys
                left -= keys
                if used == spans[e, 1]:
                    e, used = e + 1, 0
            for b in range(num_blocks):
                begin = first + b * most
                count = min(most, stop - begin)
                is_wide = count > narrow_block
                if fill:
                    item = wide[num_wide] if is_wide else narrow[num_narrow]
                    item[0], item[1] = begin, count
                    item[2], item[3] = first_piece, num_pieces
                    item[4] = num_slots
                    for i in range(count):
                        slots[at_row[begin + i]] = num_slots + i
                        at_row[begin + i] += 1
                else:
                    for i in range(count):
                        ptr[begin + i + 1] += 1
                num_slots += count
                num_wide += is_wide
                num_narrow += not is_wide
    return num_wide, num_narrow, num_pieces, num_slots
