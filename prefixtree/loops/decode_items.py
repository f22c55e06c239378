"""The loop behind `DecodeWork`: streams of keys cut into items."""

from numba import njit


@njit(cache=True)
def fill(spans, start, size, most, narrow_block, slot_ptr, slots, wide, narrow, pieces):
    """Writes the items of streams, their pieces and the slots of each row.

    Args:
        spans: int64 [E, 5], (first row, stop row, first key, keys, depth of the first key).
        start: int64 [S + 1]; spans start[s] .. start[s + 1] - 1 have the same rows: a stream.
        size, most: int64 [S], keys and rows of an item of each stream; the last have what is left.
        narrow_block: an item of more rows is wide.
        slot_ptr, slots: int32, the first slot of each row in `slots`, which is written.
        wide, narrow, pieces: int32, as in `DecodeTables`, written.
    """
    next_of = slot_ptr.copy()
    num_wide, num_narrow, num_pieces, slot = 0, 0, 0, 0
    for s in range(len(start) - 1):
        span, used = start[s], 0
        first, stop = spans[span, 0], spans[span, 1]
        while span < start[s + 1]:
            first_piece, left = num_pieces, size[s]
            while left > 0 and span < start[s + 1]:
                keys = min(left, spans[span, 3] - used)
                pieces[num_pieces, 0] = spans[span, 2] + used
                pieces[num_pieces, 1] = keys
                pieces[num_pieces, 2] = spans[span, 4] + used
                num_pieces += 1
                used += keys
                left -= keys
                if used == spans[span, 3]:
                    span, used = span + 1, 0
            for begin in range(first, stop, most[s]):
                rows = min(most[s], stop - begin)
                if rows > narrow_block:
                    item = wide[num_wide]
                    num_wide += 1
                else:
                    item = narrow[num_narrow]
                    num_narrow += 1
                item[0], item[1], item[2] = begin, rows, first_piece
                item[3], item[4] = num_pieces, slot
                for row in range(begin, begin + rows):
                    slots[next_of[row]] = slot
                    next_of[row] += 1
                    slot += 1
