"""The compiled loops of `TreeMask`: paths and block tables from `subtree_end` alone.

One fact of the preorder layout gives everything here: query q sees key k exactly when k <= q <
subtree_end[k]. Legend: T tokens, NQ query tiles, NK key tiles.
"""

from __future__ import annotations

import numpy as np
from numba import njit

CAUSAL, END, WINDOW = 1, 2, 4


@njit(cache=True)
def walk(subtree_end):
    """Finds predecessors (-1 at roots), positions, int32 [T], and a token not nested, or -1."""
    num_tokens = len(subtree_end)
    predictor = np.empty(num_tokens, np.int32)
    position = np.empty(num_tokens, np.int32)
    for t in range(num_tokens):
        p = t - 1
        # a token leaves the path once, so all these steps together are at most T
        while p >= 0 and subtree_end[p] <= t:
            p = predictor[p]
        limit = num_tokens if p < 0 else subtree_end[p]
        if subtree_end[t] <= t or subtree_end[t] > limit:
            return predictor, position, t
        predictor[t] = p
        position[t] = 0 if p < 0 else position[p] + 1
    return predictor, position, -1


@njit(cache=True)
def paths(predictor, query_runs):
    """Cuts queries into blocks along one unbroken path, and lists the runs of keys above each.

    Returns blocks int64 [B, 3] (packed start, row in q, length), prefix_ptr int64 [B + 1] and
    prefix_runs int64 [*, 2] (packed start, end), root first.
    """
    # a query of a block sees all keys of its runs; within the block attention is plain causal
    num_tokens = len(predictor)
    chain_start = np.empty(num_tokens, np.int64)
    for t in range(num_tokens):
        chain_start[t] = chain_start[t - 1] if t > 0 and predictor[t] == t - 1 else t
    num_blocks = 0
    num_runs = 0
    for fill in range(2):
        if fill == 1:
            blocks = np.empty((num_blocks, 3), np.int64)
            prefix_ptr = np.zeros(num_blocks + 1, np.int64)
            prefix_runs = np.empty((num_runs, 2), np.int64)
        num_blocks = 0
        num_runs = 0
        for r in range(len(query_runs)):
            t = query_runs[r, 0]
            stop = t + query_runs[r, 2]
            while t < stop:
                end = t + 1
                while end < stop and predictor[end] == end - 1:
                    end += 1
                begin = num_runs
                p = predictor[t]
                while p >= 0:
                    if fill == 1:
                        prefix_runs[num_runs, 0] = chain_start[p]
                        prefix_runs[num_runs, 1] = p + 1
                    num_runs += 1
                    p = predictor[chain_start[p]]
                if fill == 1:
                    # root first
                    i, j = begin, num_runs - 1
                    while i < j:
                        for end_of in range(2):
                            last = prefix_runs[j, end_of]
                            prefix_runs[j, end_of] = prefix_runs[i, end_of]
                            prefix_runs[i, end_of] = last
                        i, j = i + 1, j - 1
                    blocks[num_blocks, 0] = t
                    blocks[num_blocks, 1] = query_runs[r, 1] + t - query_runs[r, 0]
                    blocks[num_blocks, 2] = end - t
                    prefix_ptr[num_blocks + 1] = num_runs
                num_blocks += 1
                t = end
    return blocks, prefix_ptr, prefix_runs


@njit(cache=True)
def query_tiles(query_runs, tile_q):
    """Cuts queries into tiles int32 [NQ, 3] (packed start, row in q, length), each in one run."""
    count = 0
    for r in range(len(query_runs)):
        count += (query_runs[r, 2] + tile_q - 1) // tile_q
    tiles = np.empty((count, 3), np.int32)
    count = 0
    for r in range(len(query_runs)):
        for at in range(0, query_runs[r, 2], tile_q):
            tiles[count, 0] = query_runs[r, 0] + at
            tiles[count, 1] = query_runs[r, 1] + at
            tiles[count, 2] = min(tile_q, query_runs[r, 2] - at)
            count += 1
    return tiles


@njit(cache=True)
def grid_key_tiles(num_tokens, tile_k):
    """Lists the aligned grid of key tiles, int32 [NK, 2] (start, length)."""
    count = (num_tokens + tile_k - 1) // tile_k
    tiles = np.empty((count, 2), np.int32)
    for j in range(count):
        tiles[j, 0] = j * tile_k
        tiles[j, 1] = min(tile_k, num_tokens - j * tile_k)
    return tiles


@njit(cache=True)
def key_spans(subtree_end, k_tiles, tile_k):
    """Computes subtree_end[k] - k per lane of each key tile, int32 [NK, tile_k], 0 if dead."""
    spans = np.zeros((len(k_tiles), tile_k), np.int32)
    for j in range(len(k_tiles)):
        start = k_tiles[j, 0]
        for lane in range(k_tiles[j, 1]):
            spans[j, lane] = subtree_end[start + lane] - (start + lane)
    return spans


@njit(cache=True)
def cut_key_tiles(subtree_end, q_tiles, tile_k):
    """Cuts keys at node borders so that the tiles' query runs sum to the least, int32 [NK, 2]."""
    num_tokens = len(subtree_end)
    num_q = len(q_tiles)
    # numbers of query tiles that end before a token, and of query tiles that start before it
    ended = np.empty(num_tokens + 1, np.int64)
    started = np.empty(num_tokens + 1, np.int64)
    i = 0
    j = 0
    for t in range(num_tokens + 1):
        while i < num_q and q_tiles[i, 0] + q_tiles[i, 2] <= t:
            i += 1
        while j < num_q and q_tiles[j, 0] < t:
            j += 1
        ended[t] = i
        started[t] = j
    # the next node border after each token; between keys with equal ends no border is needed
    border = np.empty(num_tokens + 1, np.int64)
    border[num_tokens] = num_tokens
    for t in range(num_tokens - 1, -1, -1):
        if t + 1 == num_tokens or subtree_end[t + 1] != subtree_end[t]:
            border[t] = t + 1
        else:
            border[t] = border[t + 1]
    # a dynamic programme over the places where a tile may start
    unreached = np.int64(2) ** 62
    cost = np.full(num_tokens + 1, unreached, np.int64)
    come_from = np.empty(num_tokens + 1, np.int64)
    cost[0] = 0
    for begin in range(num_tokens):
        if cost[begin] == unreached:
            continue
        limit = min(begin + tile_k, num_tokens)
        last = np.int64(subtree_end[begin])
        end = begin
        while end < limit:
            last = max(last, np.int64(subtree_end[end]))
            end = min(border[end], limit)
            # of equal query runs take the fewest tiles
            step = (max(started[last] - ended[begin], 0) << 20) + 1
            if cost[begin] + step < cost[end]:
                cost[end] = cost[begin] + step
                come_from[end] = begin
    count = 0
    end = num_tokens
    while end > 0:
        end = come_from[end]
        count += 1
    tiles = np.empty((count, 2), np.int32)
    end = num_tokens
    for j in range(count - 1, -1, -1):
        tiles[j, 0] = come_from[end]
        tiles[j, 1] = end - come_from[end]
        end = come_from[end]
    return tiles


@njit(cache=True)
def tile_ranges(values, starts, lengths):
    """Finds the least and the greatest of `values` in each tile, int32 [n, 2]."""
    out = np.empty((len(starts), 2), np.int32)
    for j in range(len(starts)):
        low = high = values[starts[j]]
        for t in range(starts[j] + 1, starts[j] + lengths[j]):
            low = min(low, values[t])
            high = max(high, values[t])
        out[j, 0] = low
        out[j, 1] = high
    return out


@njit(cache=True)
def _grown(rows):
    out = np.empty((2 * len(rows), rows.shape[1]), rows.dtype)
    # a loop: for an assigned slice numba compiles a second more
    for i in range(len(rows)):
        for j in range(rows.shape[1]):
            out[i, j] = rows[i, j]
    return out


@njit(cache=True)
def _emit(runs, count, since, first, end, kind):
    """Appends a run of key tiles, or extends the run before it if alike and not before `since`."""
    if first >= end:
        return runs, count
    if count > since and runs[count - 1, 1] == first and runs[count - 1, 2] == kind:
        runs[count - 1, 1] = end
        return runs, count
    if count == len(runs):
        runs = _grown(runs)
    runs[count, 0] = first
    runs[count, 1] = end
    runs[count, 2] = kind
    return runs, count + 1


@njit(cache=True)
def _first_above(values, column, first, end, bound):
    """Finds the first tile of [first, end) with values[tile, column] > bound; values ascend."""
    while first < end:
        middle = (first + end) // 2
        if values[middle, column] > bound:
            end = middle
        else:
            first = middle + 1
    return first


@njit(cache=True)
def forward_runs(q_tiles, k_tiles, tile_k, k_ends, k_positions, q_positions, window):
    """Finds the runs of key tiles that each query tile sees.

    k_ends, k_positions and q_positions, int32 [n, 2], are the least and greatest of a tile's
    tokens. Returns q_ptr int32 [NQ + 1], q_split int32 [NQ] (full runs stand before it, partial
    ones after) and q_runs int32 [*, 3] (first key tile, end key tile, compares needed).
    """
    # the key tiles before a query tile that it still sees form a stack, because tokens leave the
    # path in the reverse of the order in which they joined it; a tile is `whole` if all its keys
    # were on the path when it joined; along neighbouring whole tiles the least end falls, so those
    # full for a query tile are the lower part of a run, and a query tile costs its number of runs,
    # not of tiles
    # constants of one type, int64: a function is compiled for each combination of types
    none, of_most = np.int64(0), np.int64(1)
    at_end, at_window = np.int64(END), np.int64(WINDOW)
    num_q = len(q_tiles)
    num_k = len(k_tiles)
    q_ptr = np.zeros(num_q + 1, np.int32)
    q_split = np.zeros(num_q, np.int32)
    runs = np.empty((max(16, 4 * num_q), 3), np.int32)
    count = none
    # the stack as runs of neighbouring tiles: first, end, whether joined whole and of full length
    stack = np.empty((num_k + 2, 3), np.int64)
    top = 0
    pending = 0
    for i in range(num_q):
        q0 = np.int64(q_tiles[i, 0])
        q1 = q0 + q_tiles[i, 2]
        while top > 0:
            j = stack[top - 1, 1] - 1
            if k_ends[j, 1] > q0:
                break
            # no query from here on sees it
            stack[top - 1, 1] = j
            if stack[top - 1, 0] == j:
                top -= 1
        while pending < num_k and k_tiles[pending, 0] + k_tiles[pending, 1] <= q0:
            j = pending
            pending += 1
            if k_ends[j, 1] <= q0:
                continue
            is_whole = 1 if k_ends[j, 0] > q0 and k_tiles[j, 1] == tile_k else 0
            if top > 0 and stack[top - 1, 1] == j and stack[top - 1, 2] == is_whole:
                stack[top - 1, 1] = j + 1
            else:
                stack[top, 0], stack[top, 1], stack[top, 2] = j, j + 1, is_whole
                top += 1
        low, high = q_positions[i, 0], q_positions[i, 1]
        for partial in range(2):
            since = count
            for r in range(top):
                first, end = stack[r, 0], stack[r, 1]
                split = first
                if stack[r, 2] == 1:
                    split = end
                    while split > first and k_ends[split - 1, 0] < q1:
                        split -= 1
                if window == 0:
                    if partial == 0:
                        runs, count = _emit(runs, count, since, first, split, none)
                    else:
                        runs, count = _emit(runs, count, since, split, end, at_end)
                    continue
                near = _first_above(k_positions, of_most, first, split, low - window)
                full = _first_above(k_positions, none, near, split, high - window)
                if partial == 0:
                    runs, count = _emit(runs, count, since, full, split, none)
                    continue
                runs, count = _emit(runs, count, since, near, full, at_window)
                for j in range(split, end):
                    if low - k_positions[j, 1] < window:
                        far = high - k_positions[j, 0] >= window
                        kind = at_end | at_window if far else at_end
                        runs, count = _emit(runs, count, since, j, j + 1, kind)
            j = pending
            while j < num_k and k_tiles[j, 0] < q1:
                kind = none
                if k_tiles[j, 0] + k_tiles[j, 1] - 1 > q0:
                    kind |= CAUSAL
                if k_ends[j, 0] < q1 or k_tiles[j, 1] < tile_k:
                    kind |= END
                if window > 0 and high - k_positions[j, 0] >= window:
                    kind |= WINDOW
                if (kind == 0) == (partial == 0):
                    runs, count = _emit(runs, count, since, j, j + 1, kind)
                j += 1
            if partial == 0:
                q_split[i] = count
        q_ptr[i + 1] = count
    return q_ptr, q_split, runs[:count].copy()


@njit(cache=True)
def backward_runs(q_tiles, k_tiles, k_ends):
    """Finds the one run of query tiles that sees each key tile, without a window.

    Returns k_ptr int32 [NK + 1] and k_runs int32 [*, 4] (first query tile, full begin, full end,
    end). Tiles before `full begin` need the causal and the end compare, those from `full end` on
    the end compare alone. A key tile that no query sees has no run.
    """
    num_k = len(k_tiles)
    k_ptr = np.zeros(num_k + 1, np.int32)
    runs = np.empty((num_k, 4), np.int32)
    # the start and the end of each query tile
    borders = np.empty((len(q_tiles), 2), np.int32)
    for i in range(len(q_tiles)):
        borders[i, 0] = q_tiles[i, 0]
        borders[i, 1] = q_tiles[i, 0] + q_tiles[i, 2]
    none, of_end, every = np.int64(0), np.int64(1), np.int64(len(q_tiles))
    count = 0
    for j in range(num_k):
        k0 = np.int64(k_tiles[j, 0])
        k1 = k0 + k_tiles[j, 1]
        first = _first_above(borders, of_end, none, every, k0)
        end = _first_above(borders, none, none, every, np.int64(k_ends[j, 1]) - 1)
        if first < end:
            begin = min(max(_first_above(borders, none, none, every, k1 - 2), first), end)
            stop = _first_above(borders, of_end, none, every, np.int64(k_ends[j, 0]))
            stop = min(max(stop, begin), end)
            runs[count, 0] = first
            runs[count, 1] = begin
            runs[count, 2] = stop
            runs[count, 3] = end
            count += 1
        k_ptr[j + 1] = count
    return k_ptr, runs[:count].copy()


@njit(cache=True)
def transposed_runs(q_ptr, q_runs, num_k):
    """Transposes the forward table: with a window a key tile may have several runs."""
    # the format is that of `backward_runs`, but tiles outside the full part may also need the
    # window compare
    num_q = len(q_ptr) - 1
    pointer = np.zeros(num_k + 1, np.int64)
    for r in range(len(q_runs)):
        for j in range(q_runs[r, 0], q_runs[r, 1]):
            pointer[j + 1] += 1
    for j in range(num_k):
        pointer[j + 1] += pointer[j]
    queries = np.empty(pointer[-1], np.int32)
    kinds = np.empty(pointer[-1], np.int8)
    fill = pointer[:-1].copy()
    for i in range(num_q):
        for r in range(q_ptr[i], q_ptr[i + 1]):
            for j in range(q_runs[r, 0], q_runs[r, 1]):
                queries[fill[j]] = i
                kinds[fill[j]] = q_runs[r, 2]
                fill[j] += 1
    k_ptr = np.zeros(num_k + 1, np.int32)
    runs = np.empty((max(16, 2 * num_k), 4), np.int32)
    count = 0
    for j in range(num_k):
        at = pointer[j]
        stop = pointer[j + 1]
        while at < stop:
            first = at
            # partial tiles, then full ones, then partial ones without the causal compare
            while at < stop and queries[at] - queries[first] == at - first and kinds[at] != 0:
                at += 1
            begin = at
            while at < stop and queries[at] - queries[first] == at - first and kinds[at] == 0:
                at += 1
            full = at
            if full > begin:
                # the causal ones overlap the key tile and so came first
                while at < stop and queries[at] - queries[first] == at - first and kinds[at] != 0:
                    at += 1
            else:
                # none is full: the part after the last causal one needs no causal compare
                while begin > first and not kinds[begin - 1] & CAUSAL:
                    begin -= 1
                full = begin
            if count == len(runs):
                runs = _grown(runs)
            base = queries[first]
            runs[count, 0] = base
            runs[count, 1] = base + begin - first
            runs[count, 2] = base + full - first
            runs[count, 3] = base + at - first
            count += 1
        k_ptr[j + 1] = count
    return k_ptr, runs[:count].copy()
