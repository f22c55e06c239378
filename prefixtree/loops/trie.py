"""The compiled loops of `PrefixForest`: cached on disk, arrays in, arrays out.

Legend: S sequences, N nodes, T distinct tokens, R replicated tokens.
"""

import numpy as np
from numba import njit

# groups up to this size are ordered by insertion, larger ones by a merge sort
_SMALL = 24


@njit(cache=True)
def _stable_order(keys):
    """Sorts 0, 1, .. by key, ties in order, int64; numba compiles its own sort for seconds."""
    num_keys = len(keys)
    order = np.empty(num_keys, np.int64)
    merged = np.empty(num_keys, np.int64)
    for i in range(num_keys):
        order[i] = i
    width = 1
    while width < num_keys:
        for low in range(0, num_keys, 2 * width):
            i, i_end = low, min(low + width, num_keys)
            j, j_end = i_end, min(low + 2 * width, num_keys)
            for to in range(low, j_end):
                if j == j_end or (i < i_end and keys[order[i]] <= keys[order[j]]):
                    merged[to] = order[i]
                    i += 1
                else:
                    merged[to] = order[j]
                    j += 1
        order, merged = merged, order
        width *= 2
    return order


@njit(cache=True)
def _stable_by_token(flat, offsets, position, perm, lo, hi):
    """Reorders perm[lo:hi] by each sequence's token at `position`; ties keep their order."""
    num_sequences = hi - lo
    if num_sequences <= _SMALL:
        for i in range(lo + 1, hi):
            sequence = perm[i]
            token = flat[offsets[sequence] + position]
            j = i - 1
            while j >= lo and flat[offsets[perm[j]] + position] > token:
                perm[j + 1] = perm[j]
                j -= 1
            perm[j + 1] = sequence
        return
    tokens = np.empty(num_sequences, flat.dtype)
    for i in range(num_sequences):
        tokens[i] = flat[offsets[perm[lo + i]] + position]
    order = _stable_order(tokens)
    for i in range(num_sequences):
        order[i] = perm[lo + order[i]]
    for i in range(num_sequences):
        perm[lo + i] = order[i]


@njit(cache=True)
def find_prefixes(flat, offsets, perm, namespace_of):
    """Builds a path-compressed trie of sequences flat[offsets[s]:offsets[s + 1]], per namespace.

    `perm`, reordered in place, lists the sequences grouped by namespace, in input order within one.
    Returns parent, length, source (where in `flat` the node's tokens stand) and first (the smallest
    sequence index below the node), each [N], and sequence_node [S]; parents come before children.
    """
    num_sequences = len(perm)
    capacity = 2 * num_sequences + 1
    parent = np.empty(capacity, np.int32)
    length = np.empty(capacity, np.int64)
    source = np.empty(capacity, np.int64)
    first = np.empty(capacity, np.int64)
    sequence_node = np.empty(num_sequences, np.int32)
    # a pending group shares its first `position` tokens and hangs below `above`, not yet split
    stack = np.empty((capacity + num_sequences, 4), np.int64)
    top = 0
    lo = 0
    while lo < num_sequences:
        hi = lo
        while hi < num_sequences and namespace_of[perm[hi]] == namespace_of[perm[lo]]:
            hi += 1
        stack[top, 0], stack[top, 1], stack[top, 2], stack[top, 3] = lo, hi, 0, -1
        top += 1
        lo = hi
    num_nodes = 0
    while top > 0:
        top -= 1
        lo, hi, position, above = stack[top]
        _stable_by_token(flat, offsets, position, perm, lo, hi)
        while lo < hi:
            # one child: the run of sequences with the same next token
            head = perm[lo]
            token = flat[offsets[head] + position]
            end = lo + 1
            while end < hi and flat[offsets[perm[end]] + position] == token:
                end += 1
            head_begin = offsets[head] + position
            shared = offsets[head + 1] - head_begin
            for i in range(lo + 1, end):
                other_begin = offsets[perm[i]] + position
                longest = min(shared, offsets[perm[i] + 1] - other_begin)
                j = 1
                while j < longest and flat[head_begin + j] == flat[other_begin + j]:
                    j += 1
                shared = j
            node = num_nodes
            num_nodes += 1
            parent[node] = above
            length[node] = shared
            source[node] = head_begin
            first[node] = head
            # sequences that end here step out, the others stay in order at the end
            after = position + shared
            kept_from = end
            for i in range(end - 1, lo - 1, -1):
                sequence = perm[i]
                if offsets[sequence + 1] - offsets[sequence] == after:
                    sequence_node[sequence] = node
                else:
                    kept_from -= 1
                    perm[kept_from] = sequence
            if kept_from < end:
                stack[top, 0], stack[top, 1] = kept_from, end
                stack[top, 2], stack[top, 3] = after, node
                top += 1
            lo = end
    return (
        parent[:num_nodes],
        length[:num_nodes],
        source[:num_nodes],
        first[:num_nodes],
        sequence_node,
    )


@njit(cache=True)
def parents_first(parent):
    """Orders nodes [N] so that parents precede children; shorter than N if there is a cycle."""
    num_nodes = len(parent)
    children = np.zeros(num_nodes + 1, np.int64)
    num_roots = 0
    for node in range(num_nodes):
        if parent[node] >= 0:
            children[parent[node] + 1] += 1
        else:
            num_roots += 1
    pointer = children
    for node in range(num_nodes):
        pointer[node + 1] += pointer[node]
    below = np.empty(num_nodes - num_roots, np.int64)
    fill = pointer[:-1].copy()
    order = np.empty(num_nodes, np.int64)
    count = 0
    for node in range(num_nodes):
        if parent[node] >= 0:
            below[fill[parent[node]]] = node
            fill[parent[node]] += 1
        else:
            order[count] = node
            count += 1
    visited = 0
    while visited < count:
        node = order[visited]
        visited += 1
        for i in range(pointer[node], pointer[node + 1]):
            order[count] = below[i]
            count += 1
    return order[:count]


@njit(cache=True)
def subtree_weights(parent, length):
    """Counts the tokens in each node's subtree [N]; parents before children."""
    weight = length.copy()
    for node in range(len(parent) - 1, -1, -1):
        if parent[node] >= 0:
            weight[parent[node]] += weight[node]
    return weight


@njit(cache=True)
def levels(parent):
    """Counts the ancestors of each node, int32 [N]; parents before children."""
    level = np.zeros(len(parent), np.int32)
    for node in range(len(parent)):
        if parent[node] >= 0:
            level[node] = level[parent[node]] + 1
    return level


@njit(cache=True)
def preorder(parent, length, siblings):
    """Renumbers nodes depth first; `siblings` lists one parent's adjacent, in order, roots first.

    Returns new_id [N] (old -> new) and, in the new numbering, parent, start, length, position
    (tokens above the node) and subtree_end (packed token), each int32 [N].
    """
    num_nodes = len(parent)
    child_begin = np.zeros(num_nodes, np.int64)
    child_end = np.zeros(num_nodes, np.int64)
    stack = np.empty(num_nodes, np.int64)
    top = 0
    i = 0
    while i < num_nodes:
        j = i
        while j < num_nodes and parent[siblings[j]] == parent[siblings[i]]:
            j += 1
        above = parent[siblings[i]]
        if above < 0:
            for k in range(j - 1, i - 1, -1):
                stack[top] = siblings[k]
                top += 1
        else:
            child_begin[above] = i
            child_end[above] = j
        i = j
    new_id = np.empty(num_nodes, np.int32)
    new_parent = np.empty(num_nodes, np.int32)
    start = np.empty(num_nodes, np.int32)
    new_length = np.empty(num_nodes, np.int32)
    position = np.empty(num_nodes, np.int32)
    next_start = 0
    count = 0
    while top > 0:
        top -= 1
        node = stack[top]
        new_id[node] = count
        above = parent[node]
        if above < 0:
            new_parent[count] = -1
            position[count] = 0
        else:
            new_parent[count] = new_id[above]
            position[count] = position[new_id[above]] + length[above]
        start[count] = next_start
        new_length[count] = length[node]
        next_start += length[node]
        count += 1
        for k in range(child_end[node] - 1, child_begin[node] - 1, -1):
            stack[top] = siblings[k]
            top += 1
    subtree_end = np.empty(num_nodes, np.int32)
    for node in range(num_nodes):
        subtree_end[node] = start[node] + new_length[node]
    for node in range(num_nodes - 1, -1, -1):
        above = new_parent[node]
        if above >= 0 and subtree_end[node] > subtree_end[above]:
            subtree_end[above] = subtree_end[node]
    return new_id, new_parent, start, new_length, position, subtree_end


@njit(cache=True)
def gather_tokens(flat, source, new_id, start, length, tokens):
    """Fills the packed tokens [T]: node n's are at flat[source[n]:] in the old numbering."""
    for old in range(len(source)):
        node = new_id[old]
        at = source[old]
        to = start[node]
        for i in range(length[node]):
            tokens[to + i] = flat[at + i]
