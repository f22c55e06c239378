"""The loops that compare the paths of two forests' tokens, compiled by numba.

Legend: T tokens of a forest in packed order, Q tokens of another.
"""

import numpy as np
from numba import njit

_A, _B = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


@njit(cache=True)
def hashes(above, value):
    """uint64 [T]: equal where paths are equal, and hardly ever elsewhere.

    Args:
        above: int64 [T], the token before each on its path, -1 for none.
        value: int64 [T].
    """
    out = np.empty(len(above), np.uint64)
    for t in range(len(above)):
        before = out[above[t]] if above[t] >= 0 else _B
        x = (before + np.uint64(value[t])) * _A
        x = (x ^ (x >> np.uint64(32))) * _B
        out[t] = x ^ (x >> np.uint64(29))
    return out


@njit(cache=True)
def keep_equal(found, above, value, first, other_above, other_value):
    """Sets to -1, in place, what does not have the path of its token.

    Args:
        found: int64 [Q], for each token the first token of the other forest with its hash, or -1.
        above, value: int64 [Q], as in `hashes`.
        first: int64 [T], of the other forest, the first token with the hash of each.
        other_above, other_value: int64 [T], of the other forest.
    """
    is_first_equal = np.empty(len(first), np.bool_)
    for t in range(len(first)):
        a, b = other_above[t], other_above[first[t]]
        is_first_equal[t] = other_value[t] == other_value[first[t]] and (
            (a < 0 and b < 0)
            or (
                a >= 0
                and b >= 0
                and first[a] == first[b]
                and is_first_equal[a]
                and is_first_equal[b]
            )
        )
    for q in range(len(found)):
        at = found[q]
        if at < 0:
            continue
        a, b = above[q], other_above[at]
        is_equal = value[q] == other_value[at] and (
            (a < 0 and b < 0) or (a >= 0 and b >= 0 and found[a] == first[b] and is_first_equal[b])
        )
        if not is_equal:
            found[q] = -1
