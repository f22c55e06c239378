"""The compiled loops of `planning.parts`, `split` and `steps`: arrays in, arrays out.

Tokens are in packed order (preorder), and a run is a range of them. Two facts let these loops walk
nodes instead of tokens. The ancestors that a run imports from before it are those of its first
token. An ancestor that stands before the end of the run before is owned or imported already: it
lies in that run, or above it too.

Legend: N nodes, Q runs of tokens with one owner, P pieces, K rows of a part, T packed tokens.
"""

import numpy as np
from numba import njit


@njit(cache=True)
def _grown(rows):
    out = np.empty((2 * len(rows), rows.shape[1]), rows.dtype)
    out[: len(rows)] = rows
    return out


@njit(cache=True)
def find_pieces(node_parent, node_start, node_end, run_start, run_part, num_parts):
    """Finds every part's pieces: its runs and the ancestors it imports, cut where owners change.

    run_start int64 [Q + 1] are runs of one owner from 0 to T, run_part int64 [Q] their owners.
    Returns ptr int64 [num_parts + 1] and pieces int64 [P, 3] (packed start, length, owner), part
    after part and ascending within a part. No piece spans two runs.
    """
    # nodes are in preorder; tokens after the last node are padding, which has no ancestors
    num_runs = len(run_part)
    num_packed = node_end[-1]
    # the runs of each part, ascending
    first = np.zeros(num_parts + 1, np.int64)
    for j in range(num_runs):
        first[run_part[j] + 1] += 1
    for part in range(num_parts):
        first[part + 1] += first[part]
    runs = np.empty(num_runs, np.int64)
    fill = first[:-1].copy()
    for j in range(num_runs):
        runs[fill[run_part[j]]] = j
        fill[run_part[j]] += 1

    ptr = np.zeros(num_parts + 1, np.int64)
    pieces = np.empty((2 * num_runs + 16, 3), np.int64)
    count = 0
    for part in range(num_parts):
        stop = np.int64(0)
        for r in range(first[part], first[part + 1]):
            start, end = run_start[runs[r]], run_start[runs[r] + 1]
            begin = count
            # the way up ends at the root, or at tokens before `stop`
            node = np.searchsorted(node_start, start, side="right") - 1
            high = start
            if start >= num_packed:
                node = -1
            owner_run = runs[r]
            while node >= 0 and high > stop:
                low = max(np.int64(node_start[node]), stop)
                while high > low:
                    if run_start[owner_run] >= high:
                        owner_run = np.searchsorted(run_start, high - 1, side="right") - 1
                    cut = max(low, run_start[owner_run])
                    # a node that follows its parent at once continues the parent's piece
                    last = count - 1
                    if (
                        count > begin
                        and pieces[last, 0] == high
                        and run_start[owner_run + 1] > high
                    ):
                        pieces[last, 0] = cut
                        pieces[last, 1] += high - cut
                    else:
                        if count == len(pieces):
                            pieces = _grown(pieces)
                        pieces[count, 0] = cut
                        pieces[count, 1] = high - cut
                        pieces[count, 2] = run_part[owner_run]
                        count += 1
                    high = cut
                node = node_parent[node]
                if node >= 0:
                    high = np.int64(node_end[node])
            pieces[begin:count] = pieces[begin:count][::-1].copy()
            if count == len(pieces):
                pieces = _grown(pieces)
            pieces[count, 0] = start
            pieces[count, 1] = end - start
            pieces[count, 2] = part
            count += 1
            stop = end
        ptr[part + 1] = count
    return ptr, pieces[:count].copy()


@njit(cache=True)
def lay_out(subtree_end, starts, lengths):
    """Lists the packed tokens of a part's pieces and, in rows, their subtree ends, int32 [K]."""
    num_rows = np.int64(0)
    for length in lengths:
        num_rows += length
    keys = np.empty(num_rows, np.int32)
    ends = np.empty(num_rows, np.int32)
    # the rows of the path above the current one
    path = np.empty(num_rows, np.int32)
    top = 0
    row = np.int64(0)
    for i in range(len(starts)):
        for token in range(starts[i], starts[i] + lengths[i]):
            while top > 0 and subtree_end[keys[path[top - 1]]] <= token:
                top -= 1
                ends[path[top]] = row
            keys[row] = token
            path[top] = row
            top += 1
            row += 1
    while top > 0:
        top -= 1
        ends[path[top]] = row
    return keys, ends


@njit(cache=True)
def _room(above, max_step_tokens, weight):
    """Counts the own tokens of a step that imports `above` tokens; below 1 if there is no room."""
    return np.int64(np.floor(max_step_tokens - weight * above))


@njit(cache=True)
def cut_steps(position, predictor, max_step_tokens, weight, slack):
    """Cuts packed tokens into steps: their starts, int64, and a token that no step reaches, or -1.

    A step that starts at token t imports all position[t] tokens above t, and each counts `weight`.
    It ends early at the end of a branch, within the last `slack` of its room, if this saves the
    next step at least as many imported tokens as the step leaves unused.
    """
    # it never ends where further steps cannot reach the last token; there are such ends only above
    # a weight of 1, where a step that starts deep in a branch may have no room to finish the branch
    num_tokens = len(position)
    starts = np.empty(16, np.int64)
    # whether further steps from a token reach the last one: all do, if every token has room
    anywhere = weight * position.max() <= max_step_tokens - 1
    reaches = np.ones(1 if anywhere else num_tokens + 1, np.bool_)
    if not anywhere:
        furthest = np.int64(0)
        for token in range(num_tokens):
            if token <= furthest:
                furthest = max(furthest, token + _room(position[token], max_step_tokens, weight))
        if furthest < num_tokens:
            return starts[:0].copy(), furthest
        next_one = np.int64(num_tokens)
        for token in range(num_tokens - 1, -1, -1):
            reaches[token] = token + _room(position[token], max_step_tokens, weight) >= next_one
            if reaches[token]:
                next_one = np.int64(token)
    count = 0
    begin = np.int64(0)
    while begin < num_tokens:
        if count == len(starts):
            starts = np.concatenate((starts, np.empty_like(starts)))
        starts[count] = begin
        count += 1
        room = _room(position[begin], max_step_tokens, weight)
        if begin + room >= num_tokens:
            break
        best = begin + room
        while not (anywhere or reaches[best]):
            best -= 1
        least = max(begin, best - np.int64(slack * room))
        for end in range(best - 1, least, -1):
            gain = position[best] - position[end]
            wins = predictor[end] != end - 1 and gain > 0 and gain >= best - end
            if wins and (anywhere or reaches[end]):
                best = np.int64(end)
        begin = best
    return starts[:count].copy(), np.int64(-1)


@njit(cache=True)
def deal(seconds, order, is_long, num_parts, each):
    """Deals chunks of work `seconds`, float64 [C], in `order`; the part of each, int64 [C]."""
    # to the part with the least work so far; a part takes `each` chunks, and its share of the long
    # ones (one tile longer) while another part has room
    share = (is_long.sum() + num_parts - 1) // num_parts
    short_share = each - is_long.sum() // num_parts
    part = np.empty(len(seconds), np.int64)
    work = np.zeros(num_parts)
    counts = np.zeros((num_parts, 2), np.int64)
    for chunk in order:
        kind = 1 if is_long[chunk] else 0
        room = share if is_long[chunk] else short_share
        best = -1
        best_fits = False
        for p in range(num_parts):
            if counts[p, 0] + counts[p, 1] == each:
                continue
            fits = counts[p, kind] < room
            if best < 0 or (fits and not best_fits) or (fits == best_fits and work[p] < work[best]):
                best = p
                best_fits = fits
        part[chunk] = best
        work[best] += seconds[chunk]
        counts[best, kind] += 1
    return part
