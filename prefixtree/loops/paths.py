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
def are_equal(first, above, value):
    """bool [T]: whether a token and the first one with its hash have one path.

    Args:
        first: int64 [T], the first token with the hash of each.
        above, value: int64 [T], as in `hashes`.
    """
    out = np.empty(len(first), np.bool_)
    for t in range(len(first)):
        a, b = above[t], above[first[t]]
        if a < 0 or b < 0:
            is_above_equal = a < 0 and b < 0
        else:
            is_above_equal = first[a] == first[b] and out[a] and out[b]
        out[t] = is_above_equal and value[t] == value[first[t]]
    return out


@njit(cache=True)
def keep_equal(found, above, value, first, is_equal, other_above, other_value):
    """Sets to -1, in place, what does not have the path of its token.

    Args:
        found: int64 [Q], for each token the first token of the other forest with its hash, or -1.
        above, value: int64 [Q], as in `hashes`.
        first, is_equal, other_above, other_value: of the other forest, as in `are_equal`.
    """
    for q in range(len(found)):
        at = found[q]
        if at < 0:
            continue
        a, b = above[q], other_above[at]
        if a < 0 or b < 0:
            is_above_equal = a < 0 and b < 0
        else:
            is_above_equal = found[a] == first[b] and is_equal[b]
        if not is_above_equal or value[q] != other_value[at]:
            found[q] = -1
