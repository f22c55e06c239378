"""The compiled loops of `plan_micro_batches`: arrays in, arrays out.

Nodes are numbered in preorder, parents before children. So the paths to ascending nodes need no
marks: on the way up from the next node, every ancestor after the last node is new. A set of `ends`,
ends[ptr[i]:ptr[i + 1]], is unique and ascending. Weights are int64 (tokens or rounded cost), so
their sums do not depend on the order.

Legend: N nodes, U units (never cut), P pieces (units together), I items (dealt to ranks).
"""

import numpy as np
from numba import njit

# pieces up to this number are sorted and placed by plain loops
_SMALL = 24


@njit(cache=True)
def path_weights(parent, weight):
    """Sums weights from the root through each node's last token, int64 [N]."""
    total = weight.copy()
    for node in range(len(parent)):
        if parent[node] >= 0:
            total[node] += total[parent[node]]
    return total


@njit(cache=True)
def used_nodes(parent, ends):
    """Lists the nodes on the paths to `ends`, ascending, int64."""
    count = 0
    for fill in range(2):
        if fill == 1:
            nodes = np.empty(count, np.int64)
        count = 0
        last = -1
        for end in ends:
            begin = count
            node = end
            while node > last:
                if fill == 1:
                    nodes[count] = node
                count += 1
                node = parent[node]
            if fill == 1:
                nodes[begin:count] = nodes[begin:count][::-1].copy()
            last = end
    return nodes


@njit(cache=True)
def union_weights(parent, weight, ptr, ends):
    """Sums the weights of all nodes on the paths of each set, int64 [sets]."""
    out = np.zeros(len(ptr) - 1, np.int64)
    for i in range(len(out)):
        last = -1
        for k in range(ptr[i], ptr[i + 1]):
            node = ends[k]
            while node > last:
                out[i] += weight[node]
                node = parent[node]
            last = ends[k]
    return out


@njit(cache=True)
def common_ancestors(parent, ptr, ends):
    """Finds the deepest node on all paths of each set, int64 [sets]; -1 for none."""
    out = np.empty(len(ptr) - 1, np.int64)
    for i in range(len(out)):
        # in preorder, the first and the last of a set have in common what all have
        a, b = ends[ptr[i]], ends[ptr[i + 1] - 1]
        while a != b:
            if a > b:
                a = parent[a]
            else:
                b = parent[b]
        out[i] = a
    return out


# ---- pieces: units of one tree together, up to a capacity ----------------------------------------


@njit(cache=True)
def _first_fit(sizes, order, room):
    """Packs items, taken in `order`, first-fit: the bin [items] of each, and the number of bins."""
    num_items = len(sizes)
    bins = np.empty(num_items, np.int64)
    num_bins = 0
    if num_items <= _SMALL:
        room_left = np.empty(num_items, np.int64)
        for k in range(num_items):
            i = order[k]
            bin_number = 0
            while bin_number < num_bins and room_left[bin_number] < sizes[i]:
                bin_number += 1
            if bin_number == num_bins:
                room_left[bin_number] = room
                num_bins += 1
            room_left[bin_number] -= sizes[i]
            bins[i] = bin_number
        return bins, num_bins
    # a binary tree over the bins, with the greatest room below each vertex, finds the first bin
    leaves = 1
    while leaves < num_items:
        leaves *= 2
    most_room = np.full(2 * leaves, -1, np.int64)
    for k in range(num_items):
        i = order[k]
        if most_room[1] >= sizes[i]:
            v = 1
            while v < leaves:
                v *= 2
                if most_room[v] < sizes[i]:
                    v += 1
        else:
            v = leaves + num_bins
            num_bins += 1
            most_room[v] = room
        bins[i] = v - leaves
        # below 0 the bin is full, also for items of size 0
        most_room[v] = max(-1, most_room[v] - sizes[i])
        while v > 1:
            v //= 2
            most_room[v] = max(most_room[2 * v], most_room[2 * v + 1])
    return bins, num_bins


@njit(cache=True)
def _descending(sizes):
    """Orders by descending size; ties keep their order."""
    num_items = len(sizes)
    if num_items > _SMALL:
        return np.argsort(-sizes, kind="mergesort")
    order = np.arange(num_items)
    for k in range(1, num_items):
        i = order[k]
        j = k - 1
        while j >= 0 and sizes[order[j]] < sizes[i]:
            order[j + 1] = order[j]
            j -= 1
        order[j + 1] = i
    return order


@njit(cache=True)
def join_units(parent, weight, unit_node, unit_size, capacity, join_roots, keep, limit):
    """Joins units to pieces of at most `capacity` with the path above: int64 [U], by first unit.

    unit_node int64 [U] is the deepest node that all of a unit's sequences share (-1 for none),
    unit_size int64 [U] the weight below it. A heavier unit is a piece alone. A piece may also weigh
    `keep` times the path above it, and up to `limit` with the path, so that it stays whole if it
    costs much to cut.
    """
    # it goes from the leaves up: pieces below a node are joined there, first-fit decreasing, before
    # the parent gets them, so units meet as deep as possible, where they share most; a node that
    # does not fit as a whole is repeated in as few pieces as first-fit needs
    num_nodes = len(parent)
    num_units = len(unit_node)
    path = path_weights(parent, weight)
    size = np.empty(2 * num_units, np.int64)
    into = np.full(2 * num_units, -1, np.int64)
    # pieces waiting at each node as a linked list; the last entry is above all roots
    following = np.empty(2 * num_units, np.int64)
    head = np.full(num_nodes + 1, -1, np.int64)
    waiting = np.zeros(num_nodes + 1, np.int64)
    sources = np.zeros(num_nodes + 1, np.int64)
    for unit in range(num_units - 1, -1, -1):
        node = unit_node[unit]
        size[unit] = unit_size[unit]
        following[unit] = head[node]
        head[node] = unit
        waiting[node] += 1
        sources[node] += 1
    count = num_units
    pieces = np.empty(num_units, np.int64)
    for step in range(num_nodes + 1):
        node = num_nodes - 1 - step
        count_here = waiting[node]
        if count_here == 0 or (node < 0 and not join_roots):
            continue
        total = np.int64(0)
        # the sizes of the two smallest
        first = second = np.int64(2**62)
        piece = head[node]
        for k in range(count_here):
            pieces[k] = piece
            total += size[piece]
            if size[piece] < first:
                first, second = size[piece], first
            elif size[piece] < second:
                second = size[piece]
            piece = following[piece]
        above = path[node] if node >= 0 else np.int64(0)
        room = max(capacity - above, min(keep * above, limit - above)) if keep else capacity - above
        # pieces of one child alone did not fit together below either
        if count_here > 1 and sources[node] > 1 and first + second <= room:
            if total <= room:
                bins, num_bins = np.zeros(count_here, np.int64), 1
            else:
                sizes = size[pieces[:count_here]]
                bins, num_bins = _first_fit(sizes, _descending(sizes), room)
            members = np.zeros(num_bins, np.int64)
            for k in range(count_here):
                members[bins[k]] += 1
            joined = np.full(num_bins, -1, np.int64)
            for k in range(count_here):
                bin_number = bins[k]
                if members[bin_number] == 1:
                    joined[bin_number] = pieces[k]
                    continue
                if joined[bin_number] < 0:
                    joined[bin_number] = count
                    size[count] = 0
                    count += 1
                size[joined[bin_number]] += size[pieces[k]]
                into[pieces[k]] = joined[bin_number]
            pieces[:num_bins] = joined
            count_here = num_bins
        if node >= 0:
            up = parent[node] if parent[node] >= 0 else num_nodes
            sources[up] += 1
            waiting[up] += count_here
            for k in range(count_here - 1, -1, -1):
                size[pieces[k]] += weight[node]
                following[pieces[k]] = head[up]
                head[up] = pieces[k]
    for piece in range(count - 1, -1, -1):
        into[piece] = piece if into[piece] < 0 else into[into[piece]]
    number = np.full(count, -1, np.int64)
    label = np.empty(num_units, np.int64)
    num_pieces = 0
    for unit in range(num_units):
        if number[into[unit]] < 0:
            number[into[unit]] = num_pieces
            num_pieces += 1
        label[unit] = number[into[unit]]
    return label


# ---- ranks: items dealt out, where a rank pays once for what its items share ---------------------


@njit(cache=True)
def shared_entries(parent, ptr, ends):
    """Counts the entries of `shared` of `split_weights`."""
    users = np.zeros(len(parent), np.int32)
    entries = 0
    for i in range(len(ptr) - 1):
        last = -1
        for k in range(ptr[i], ptr[i + 1]):
            node = ends[k]
            while node > last:
                users[node] += 1
                entries += 1 if users[node] > 2 else 2 * (users[node] - 1)
                node = parent[node]
            last = ends[k]
    return entries


@njit(cache=True)
def split_weights(parent, weight, ptr, ends):
    """Splits the weight of each item into nodes that it alone has and nodes that it shares.

    Returns own int64 [I], the weight of the nodes that only this item has; shared_ptr and shared,
    the numbers of the item's other nodes; shared_weight, the weight of each of those.
    """
    num_items = len(ptr) - 1
    users = np.zeros(len(parent), np.int32)
    for i in range(num_items):
        last = -1
        for k in range(ptr[i], ptr[i + 1]):
            node = ends[k]
            while node > last:
                users[node] += 1
                node = parent[node]
            last = ends[k]
    number = np.full(len(parent), -1, np.int64)
    count = 0
    entries = 0
    for node in range(len(parent)):
        if users[node] > 1:
            number[node] = count
            count += 1
            entries += users[node]
    shared_weight = np.empty(count, np.int64)
    own = np.zeros(num_items, np.int64)
    shared_ptr = np.zeros(num_items + 1, np.int64)
    shared = np.empty(entries, np.int64)
    entry = 0
    for i in range(num_items):
        last = -1
        for k in range(ptr[i], ptr[i + 1]):
            node = ends[k]
            while node > last:
                if number[node] < 0:
                    own[i] += weight[node]
                else:
                    shared_weight[number[node]] = weight[node]
                    shared[entry] = number[node]
                    entry += 1
                node = parent[node]
            last = ends[k]
        shared_ptr[i + 1] = entry
    return own, shared_ptr, shared, shared_weight


@njit(cache=True)
def deal_in_line(own, shared_ptr, shared, shared_weight, num_ranks):
    """Cuts items, in order, into a run per rank, the heaviest as light as may be: int64 [I]."""
    num_items = len(own)
    rank = np.zeros(num_items, np.int64)
    # the run that last paid for a shared node
    paid = np.empty(len(shared_weight), np.int64)
    high = own.sum() + shared_weight.sum()
    low = high // num_ranks
    # to a thousandth: `even_out` evens out the rest
    while high - low > high >> 10:
        limit = (low + high) // 2
        paid[:] = -1
        runs, load = 0, np.int64(0)
        for i in range(num_items):
            added = own[i]
            for k in range(shared_ptr[i], shared_ptr[i + 1]):
                if paid[shared[k]] != runs:
                    added += shared_weight[shared[k]]
            if load + added > limit:
                runs += 1
                load = np.int64(0)
                added = own[i]
                for k in range(shared_ptr[i], shared_ptr[i + 1]):
                    added += shared_weight[shared[k]]
                if runs == num_ranks or added > limit:
                    runs = num_ranks
                    break
            load += added
            for k in range(shared_ptr[i], shared_ptr[i + 1]):
                paid[shared[k]] = runs
        if runs < num_ranks:
            high = limit
        else:
            low = limit + 1
    paid[:] = -1
    run, load = 0, np.int64(0)
    for i in range(num_items):
        for attempt in range(2):
            added = own[i]
            for k in range(shared_ptr[i], shared_ptr[i + 1]):
                if paid[shared[k]] != run:
                    added += shared_weight[shared[k]]
            if attempt == 0 and load + added > high:
                run += 1
                load = np.int64(0)
            else:
                break
        load += added
        rank[i] = run
        for k in range(shared_ptr[i], shared_ptr[i + 1]):
            paid[shared[k]] = run
    return rank


@njit(cache=True)
def _missing(i, r, shared_ptr, shared, shared_weight, held):
    """Sums the weights of the nodes of item i that no item of rank r holds."""
    more = np.int64(0)
    for k in range(shared_ptr[i], shared_ptr[i + 1]):
        if held[shared[k], r] == 0:
            more += shared_weight[shared[k]]
    return more


@njit(cache=True)
def _hold(i, r, by, shared_ptr, shared, held):
    """Counts item i among those of rank r (by 1), or no longer (by -1)."""
    for k in range(shared_ptr[i], shared_ptr[i + 1]):
        held[shared[k], r] += by


@njit(cache=True)
def deal_heaviest_first(own, shared_ptr, shared, shared_weight, num_ranks):
    """Gives each item, heaviest first, to the rank that it leaves lightest: int64 [I]."""
    num_items = len(own)
    weight = own.copy()
    for i in range(num_items):
        for k in range(shared_ptr[i], shared_ptr[i + 1]):
            weight[i] += shared_weight[shared[k]]
    rank = np.zeros(num_items, np.int64)
    load = np.zeros(num_ranks, np.int64)
    held = np.zeros((len(shared_weight), num_ranks), np.int32)
    for i in np.argsort(-weight, kind="mergesort"):
        best, least = 0, np.int64(-1)
        for r in range(num_ranks):
            # an item adds at least what it alone has, whatever it shares
            if least >= 0 and load[r] + own[i] >= least:
                continue
            after = load[r] + own[i] + _missing(i, r, shared_ptr, shared, shared_weight, held)
            if least < 0 or after < least:
                best, least = r, after
        load[best] = least
        rank[i] = best
        _hold(i, best, 1, shared_ptr, shared, held)
    return rank


@njit(cache=True)
def rank_loads(own, shared_ptr, shared, shared_weight, rank, num_ranks):
    """Sums the weight of each rank, int64 [ranks]."""
    load = np.zeros(num_ranks, np.int64)
    held = np.zeros((len(shared_weight), num_ranks), np.bool_)
    for i in range(len(own)):
        r = rank[i]
        load[r] += own[i]
        for k in range(shared_ptr[i], shared_ptr[i + 1]):
            if not held[shared[k], r]:
                held[shared[k], r] = True
                load[r] += shared_weight[shared[k]]
    return load


@njit(cache=True)
def _pass_on(i, origin, target, own, shared_ptr, shared, shared_weight, held):
    """Moves item i between ranks; returns how much lighter and how much heavier they are then."""
    _hold(i, origin, -1, shared_ptr, shared, held)
    less = own[i] + _missing(i, origin, shared_ptr, shared, shared_weight, held)
    more = own[i] + _missing(i, target, shared_ptr, shared, shared_weight, held)
    _hold(i, target, 1, shared_ptr, shared, held)
    return less, more


@njit(cache=True)
def even_out(own, shared_ptr, shared, shared_weight, rank, num_ranks, work):
    """Moves items off the heaviest rank, or exchanges them for others, in place."""
    # a move is taken if it gives the least sum of the heavier of the two ranks and the mean of all,
    # as long as that sum falls; `work` bounds the moves that are tried, each counted with what its
    # items share
    num_items = len(own)
    load = rank_loads(own, shared_ptr, shared, shared_weight, rank, num_ranks)
    held = np.zeros((len(shared_weight), num_ranks), np.int32)
    for i in range(num_items):
        _hold(i, rank[i], 1, shared_ptr, shared, held)
    tables = (own, shared_ptr, shared, shared_weight, held)
    tried = np.empty(num_ranks, np.bool_)
    while work > 0:
        top, total = 0, np.int64(0)
        for r in range(num_ranks):
            total += load[r]
            if load[r] > load[top]:
                top = r
        # near enough to even that a better deal is not worth the search
        if load[top] * num_ranks <= total * 1.002:
            return
        best, give, take, to = load[top] * num_ranks, -1, -1, -1
        tried[:] = False
        tried[top] = True
        for _ in range(min(8, num_ranks - 1)):
            # the lightest first
            r = -1
            for k in range(num_ranks):
                if not tried[k] and (r < 0 or load[k] < load[r]):
                    r = k
            tried[r] = True
            for i in range(num_items):
                if rank[i] != top or work <= 0:
                    continue
                less, more = _pass_on(i, top, r, *tables)
                # alone, or in exchange for one of theirs
                for j in range(-1, num_items):
                    back, gone = np.int64(0), np.int64(0)
                    if j >= 0:
                        # the rank must end up lighter
                        if rank[j] != r or own[j] >= less:
                            continue
                        gone, back = _pass_on(j, r, top, *tables)
                        _pass_on(j, top, r, *tables)
                        work -= shared_ptr[j + 1] - shared_ptr[j]
                    work -= 1 + shared_ptr[i + 1] - shared_ptr[i]
                    on_top, on_r = load[top] - less + back, load[r] + more - gone
                    heavier = max(on_top, on_r)
                    score = heavier * num_ranks + on_top + on_r - load[top] - load[r]
                    if heavier < load[top] and score < best:
                        best, give, take, to = score, i, j, r
                _pass_on(i, r, top, *tables)
        if give < 0:
            return
        less, more = _pass_on(give, top, to, *tables)
        load[top] -= less
        load[to] += more
        rank[give] = to
        if take >= 0:
            less, more = _pass_on(take, to, top, *tables)
            load[to] -= less
            load[top] += more
            rank[take] = top


@njit(cache=True)
def fill_in_order(lengths, max_tokens):
    """Fills micro-batches in input order up to a budget, as trainers do: int64 [S]."""
    label = np.empty(len(lengths), np.int64)
    current, held = 0, np.int64(0)
    for sequence in range(len(lengths)):
        if sequence > 0 and held + lengths[sequence] > max_tokens:
            current += 1
            held = np.int64(0)
        held += lengths[sequence]
        label[sequence] = current
    return label
