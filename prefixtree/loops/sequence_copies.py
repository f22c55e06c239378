"""The compiled loops between packed tokens and their copies, in sequences or in another forest.

A sequence's tokens are found from its last node upwards: node n holds its tokens from position[n]
to position[n] + length[n].

Legend: S sequences, N nodes, T packed tokens, R replicated tokens, Q tokens of another forest.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True)
def copy_index(parent, start, length, position, sequence_node, sequences, offsets, selected):
    """Lists the packed index of each token of `sequences`, one sequence after another.

    selected uint8 [R] is nonzero for the tokens to list, or empty for all; sequence s begins at
    offsets[s]. Returns index int32 [r] and counts int64 [s], the listed tokens per sequence.
    """
    everything = len(selected) == 0
    counts = np.empty(len(sequences), np.int64)
    longest = 0
    for i in range(len(sequences)):
        s = sequences[i]
        count = offsets[s + 1] - offsets[s]
        longest = max(longest, count)
        if not everything:
            listed = 0
            for r in range(offsets[s], offsets[s + 1]):
                listed += selected[r] != 0
            count = listed
        counts[i] = count
    index = np.empty(counts.sum(), np.int32)
    line = np.empty(longest, np.int32)
    filled = 0
    for i in range(len(sequences)):
        s = sequences[i]
        if counts[i] == 0:
            continue
        node = sequence_node[s]
        while node >= 0:
            for j in range(length[node]):
                line[position[node] + j] = start[node] + j
            node = parent[node]
        for j in range(offsets[s + 1] - offsets[s]):
            if everything or selected[offsets[s] + j] != 0:
                index[filled] = line[j]
                filled += 1
    return index, counts


@njit(cache=True)
def any_copy(
    parent, start, length, position, sequence_node, sequences, offsets, selected, num_tokens
):
    """Finds tokens that `selected`, uint8 [R], names in any of `sequences`: bool [T]."""
    out = np.zeros(num_tokens, np.bool_)
    for s in sequences:
        node = sequence_node[s]
        while node >= 0:
            base = offsets[s] + position[node]
            for j in range(length[node]):
                if selected[base + j] != 0:
                    out[start[node] + j] = True
            node = parent[node]
    return out


@njit(cache=True)
def first_copy(index, num_tokens):
    """Finds the first place of each packed token in `index`, int64 [T]; -1 for none."""
    out = np.full(num_tokens, -1, np.int64)
    for i in range(len(index) - 1, -1, -1):
        out[index[i]] = i
    return out


@njit(cache=True)
def counting_sort(index, num_values):
    """Sorts places by value, ties in order, without -1, int64; counts each value, int64."""
    counts = np.zeros(num_values, np.int64)
    for value in index:
        if value >= 0:
            counts[value] += 1
    fill = np.empty(num_values, np.int64)
    total = 0
    for value in range(num_values):
        fill[value] = total
        total += counts[value]
    order = np.empty(total, np.int64)
    for i in range(len(index)):
        value = index[i]
        if value >= 0:
            order[fill[value]] = i
            fill[value] += 1
    return order, counts


@njit(cache=True)
def distinct_pairs(index, number, num_tokens, num_numbers):
    """Finds the distinct pairs of packed token and number among copies, by number, then by token.

    Returns token and number, int64 [U], of each pair, and the pair of each copy, int32 [r].
    """
    # a radix sort by two digits
    order, _ = counting_sort(index, num_tokens)
    if num_numbers > 1:
        by_number, _ = counting_sort(number[order], num_numbers)
        order = order[by_number]
    pair = np.empty(len(index), np.int32)
    tokens = np.empty(len(index), np.int64)
    numbers = np.empty(len(index), np.int64)
    last = -1
    for copy in order:
        token, its_number = index[copy], number[copy]
        if last < 0 or tokens[last] != token or numbers[last] != its_number:
            last += 1
            tokens[last], numbers[last] = token, its_number
        pair[copy] = last
    return tokens[: last + 1].copy(), numbers[: last + 1].copy(), pair


@njit(cache=True)
def distinct(values):
    """Computes np.unique(values, return_inverse=True) of small integers >= 0 without a sort."""
    size = 0
    for value in values:
        size = max(size, value + 1)
    place = np.zeros(size, np.int64)
    for value in values:
        place[value] = 1
    distinct_values = np.empty(place.sum(), np.int64)
    count = 0
    for value in range(size):
        if place[value]:
            distinct_values[count] = value
            place[value] = count
            count += 1
    inverse = np.empty(len(values), np.int64)
    for i in range(len(values)):
        inverse[i] = place[values[i]]
    return distinct_values, inverse


_A, _B = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


@njit(cache=True)
def hashes(above, value):
    """Hashes each token's path, uint64 [T], of the token above (-1: none) and value, int64 [T]."""
    out = np.empty(len(above), np.uint64)
    for t in range(len(above)):
        before = out[above[t]] if above[t] >= 0 else _B
        x = (before + np.uint64(value[t])) * _A
        x = (x ^ (x >> np.uint64(32))) * _B
        out[t] = x ^ (x >> np.uint64(29))
    return out


@njit(cache=True)
def are_equal(first, above, value):
    """Whether a token and `first`, int64 [T], the first with its hash, have one path: bool [T]."""
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
    """Sets `found`, int64 [Q], the first token elsewhere with a hash, to -1 if paths differ."""
    for q in range(len(found)):
        other_token = found[q]
        if other_token < 0:
            continue
        a, b = above[q], other_above[other_token]
        if a < 0 or b < 0:
            is_above_equal = a < 0 and b < 0
        else:
            is_above_equal = found[a] == first[b] and is_equal[b]
        if not is_above_equal or value[q] != other_value[other_token]:
            found[q] = -1
