"""The compiled loops that cut work by the costs of tiles: of block tables and of `DecodeWork`.

Legend: NQ query tiles, NK key tiles, B rows.
"""

from __future__ import annotations

import numpy as np
from numba import njit

# cost of a tile in half full tiles: a masked step of flash-attn-4 takes 2.30 us, a full one 1.51
FULL_COST, PARTIAL_COST = 2, 3


@njit(cache=True)
def _cost(run, end):
    """Computes the cost of a backward run's tiles before `end`."""
    total = max(min(end, run[3]) - run[0], 0)
    full = max(min(end, run[2]) - run[1], 0)
    return PARTIAL_COST * total - (PARTIAL_COST - FULL_COST) * full


@njit(cache=True)
def _reach(run, budget):
    """Finds the end at which a run's cost first reaches `budget`, at least one tile on."""
    low, high = run[0] + 1, run[3]
    while low < high:
        middle = (low + high) // 2
        if _cost(run, middle) >= budget:
            high = middle
        else:
            low = middle + 1
    return low


@njit(cache=True)
def cut_pieces(k_ptr, k_runs, piece_tiles):
    """Cuts the key tiles with long query runs into pieces of about equal cost.

    A piece costs at most about `piece_tiles` full tiles (0: nothing is cut).

    Returns k_cost int32 [NK]; the runs after cutting (k_ptr, k_runs); pieces int32 [P, 5] (key
    tile, first run, end run, slot, partial; slot and partial are -1 if the tile is not cut);
    piece_cost int32 [P]; and slots int32 [*, 3] (key tile, first partial, end
    partial).
    """
    num_k = len(k_ptr) - 1
    limit = FULL_COST * piece_tiles
    k_cost = np.zeros(num_k, np.int32)
    num_cuts = 0
    for j in range(num_k):
        for r in range(k_ptr[j], k_ptr[j + 1]):
            k_cost[j] += _cost(k_runs[r], k_runs[r, 3])
        if limit > 0:
            num_cuts += (k_cost[j] + limit - 1) // limit
    new_ptr = np.zeros(num_k + 1, np.int32)
    new_runs = np.empty((len(k_runs) + num_cuts, 4), np.int32)
    pieces = np.empty((num_k + num_cuts, 5), np.int32)
    piece_cost = np.empty(num_k + num_cuts, np.int32)
    slots = np.empty((num_k, 3), np.int32)
    num_runs = num_pieces = num_slots = num_partials = 0
    for j in range(num_k):
        begin_pieces = num_pieces
        share = k_cost[j]
        if limit > 0 and k_cost[j] > limit:
            n = (k_cost[j] + limit - 1) // limit
            share = (k_cost[j] + n - 1) // n
        first_run = num_runs
        spent = 0
        for r in range(k_ptr[j], k_ptr[j + 1]):
            run = k_runs[r].copy()
            while run[0] < run[3]:
                end = _reach(run, share - spent)
                spent += _cost(run, end)
                new_runs[num_runs, 0] = run[0]
                new_runs[num_runs, 1] = min(run[1], end)
                new_runs[num_runs, 2] = min(run[2], end)
                new_runs[num_runs, 3] = end
                num_runs += 1
                run[0] = end
                run[1] = max(run[1], end)
                run[2] = max(run[2], end)
                if spent >= share:
                    pieces[num_pieces, 0] = j
                    pieces[num_pieces, 1] = first_run
                    pieces[num_pieces, 2] = num_runs
                    piece_cost[num_pieces] = spent
                    num_pieces += 1
                    first_run = num_runs
                    spent = 0
        # a tile that nobody sees still has a piece: its gradient is zero and must be written
        if spent > 0 or num_pieces == begin_pieces:
            pieces[num_pieces, 0] = j
            pieces[num_pieces, 1] = first_run
            pieces[num_pieces, 2] = num_runs
            piece_cost[num_pieces] = spent
            num_pieces += 1
        new_ptr[j + 1] = num_runs
        cut = num_pieces - begin_pieces > 1
        for p in range(begin_pieces, num_pieces):
            pieces[p, 3] = num_slots if cut else -1
            pieces[p, 4] = num_partials + p - begin_pieces if cut else -1
        if cut:
            slots[num_slots, 0] = j
            slots[num_slots, 1] = num_partials
            num_partials += num_pieces - begin_pieces
            slots[num_slots, 2] = num_partials
            num_slots += 1
    return (
        k_cost,
        new_ptr,
        new_runs[:num_runs].copy(),
        pieces[:num_pieces],
        piece_cost[:num_pieces],
        slots[:num_slots].copy(),
    )


@njit(cache=True)
def query_costs(q_ptr, q_runs):
    """Computes the cost of each query tile and its full and partial key tiles, int32 [NQ] each."""
    num_q = len(q_ptr) - 1
    cost = np.zeros(num_q, np.int32)
    full = np.zeros(num_q, np.int32)
    partial = np.zeros(num_q, np.int32)
    for i in range(num_q):
        for r in range(q_ptr[i], q_ptr[i + 1]):
            tiles = q_runs[r, 1] - q_runs[r, 0]
            if q_runs[r, 2] == 0:
                full[i] += tiles
            else:
                partial[i] += tiles
        cost[i] = FULL_COST * full[i] + PARTIAL_COST * partial[i]
    return cost, full, partial


@njit(cache=True)
def partial_tiles(q_ptr, q_split, q_runs, k_tiles):
    """Lists partial runs as tiles: ptr int32 [NQ + 1], int32 [*, 2] (key tile, packed start)."""
    num_q = len(q_split)
    ptr = np.zeros(num_q + 1, np.int32)
    for i in range(num_q):
        tiles = 0
        for r in range(q_split[i], q_ptr[i + 1]):
            tiles += q_runs[r, 1] - q_runs[r, 0]
        ptr[i + 1] = ptr[i] + tiles
    rows = np.empty((ptr[num_q], 2), np.int32)
    count = 0
    for i in range(num_q):
        for r in range(q_split[i], q_ptr[i + 1]):
            for tile in range(q_runs[r, 0], q_runs[r, 1]):
                rows[count, 0] = tile
                rows[count, 1] = k_tiles[tile, 0]
                count += 1
    return ptr, rows


@njit(cache=True)
def cheapest_cuts(shared, most, cost):
    """Finds the rows at which blocks of at most `most` rows begin, then B: int64, ascending.

    A cut before row i costs `cost` keys and shared[i], int64 [B + 1], the keys that it reads twice.
    """
    rows = len(shared) - 1
    # the cost of the cheapest way to cut the rows before a row, and its last cut but one
    total = np.zeros(rows + 1, np.int64)
    came_from = np.zeros(rows + 1, np.int64)
    for row in range(1, rows + 1):
        best = max(0, row - most)
        for begin in range(best + 1, row):
            if total[begin] < total[best]:
                best = begin
        total[row] = total[best] + shared[row] + cost
        came_from[row] = best
    count = 1
    row = rows
    while row > 0:
        row = came_from[row]
        count += 1
    cuts = np.empty(count, np.int64)
    row = rows
    for i in range(count - 1, -1, -1):
        cuts[i] = row
        row = came_from[row]
    return cuts
