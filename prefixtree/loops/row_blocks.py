"""The loop behind `DecodeWork`: where to cut rows into blocks. Compiled by numba.

Legend: B rows.
"""

import numpy as np
from numba import njit


@njit(cache=True)
def cheapest_cuts(shared, most, cost):
    """Rows at which blocks begin, and B behind the last one, int64, ascending.

    Args:
        shared: int64 [B + 1], keys that rows i - 1 and i have in common, which a cut before row i
            reads twice.
        most: rows of a block, at most.
        cost: of a cut, in keys.
    """
    rows = len(shared) - 1
    # of the cheapest way to cut what is before a row, and the cut before its last
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
