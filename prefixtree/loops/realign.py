"""The compiled loops of near misses: stretches that the branches of a fork run again.

A branch is a *chain* of the forest: a node, its first child, that one's first child, down to a
leaf. In preorder a chain is one run of packed tokens, and each token is in exactly one chain. So a
chain is indexed once and aligned with a few others, in a few passes over T.

Chains are indexed by winnowing (Schleimer, Wilkerson, Aiken, SIGMOD 2003): of the hashes of GRAM
tokens that start in any WINDOW adjacent places, one is kept, chosen by content alone. Two chains
that share a run of GRAM + WINDOW - 1 tokens keep a common hash there. A common hash is an anchor
only: reported runs were compared token by token.

numpy's sorts stay outside of the loops, where numba compiles a second and more for each; so do
array expressions. Legend: T distinct tokens, C chains, F kept hashes.
"""

from __future__ import annotations

import numpy as np
from numba import njit

GRAM = 16
WINDOW = 9
# with more copies than this below the fork only the first is tried: boilerplate, or a stretch that
# repeats itself, which one anchor at its start aligns
_MOST_COPIES = 4
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(31)


def fingerprints(tokens, begins, ends):
    """Keeps the hashes of every chain tokens[begins[c]:ends[c]].

    Returns pointers int64 [C + 1]; per chain sorted by hash and then position, hashes uint64 [F]
    and positions (packed) int64 [F]; and by_position int64 [F], their places by position.
    """
    pointers, hashes, positions = _kept_hashes(tokens, begins, ends)
    chain = np.repeat(np.arange(len(begins)), np.diff(pointers))
    order = np.lexsort((hashes, chain))
    by_position = np.empty_like(order)
    by_position[order] = np.arange(len(order))
    return pointers, hashes[order], positions[order], by_position


@njit(cache=True)
def _kept_hashes(tokens, begins, ends):
    """Finds pointers, hashes and positions of `fingerprints`, in the order of positions."""
    num_chains = len(begins)
    pointers = np.zeros(num_chains + 1, np.int64)
    capacity = 1024 + len(tokens) // 4
    hashes = np.empty(capacity, np.uint64)
    positions = np.empty(capacity, np.int64)
    oldest = np.uint64(1)
    for _ in range(GRAM):
        oldest *= _MULTIPLIER
    recent = np.empty(WINDOW, np.uint64)
    count = 0
    for c in range(num_chains):
        value = np.uint64(0)
        kept_place = -1
        for t in range(begins[c], ends[c]):
            value = value * _MULTIPLIER + np.uint64(tokens[t] + 1)
            gram = t - GRAM + 1
            if gram < begins[c]:
                continue
            if gram > begins[c]:
                value -= np.uint64(tokens[gram - 1] + 1) * oldest
            # the polynomial's own low bits are too regular to choose by
            mixed = (value ^ (value >> _SHIFT)) * _MIX
            recent[gram % WINDOW] = mixed ^ (mixed >> _SHIFT)
            if gram < begins[c] + WINDOW - 1 and t < ends[c] - 1:
                continue
            start = max(begins[c], gram - WINDOW + 1)
            if kept_place >= start:
                # the hash kept last is in this window too, and stays while no hash is below it
                best = kept_place
                if recent[gram % WINDOW] < recent[kept_place % WINDOW]:
                    best = gram
            else:
                # of equal hashes the last, which stays longest
                best = start
                for i in range(start + 1, gram + 1):
                    if recent[i % WINDOW] <= recent[best % WINDOW]:
                        best = i
            if best == kept_place:
                continue
            kept_place = best
            if count == len(hashes):
                hashes, positions = _grown(hashes), _grown(positions)
            hashes[count] = recent[best % WINDOW]
            positions[count] = best
            count += 1
        pointers[c + 1] = count
    return pointers, hashes[:count].copy(), positions[:count].copy()


@njit(cache=True)
def _grown(values):
    out = np.empty(2 * len(values), values.dtype)
    for i in range(len(values)):
        out[i] = values[i]
    return out


@njit(cache=True)
def _first(values, low, high, bound, is_above):
    """Finds the first of values[low:high], ascending, that is `bound` or above, or above alone."""
    while low < high:
        middle = (low + high) // 2
        if values[middle] < bound or (is_above and values[middle] == bound):
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True)
def _anchors(pointers, hashes, positions, by_position, a, a_from, b):
    """Lists the places of common hashes in chains a, at or after a_from, and b."""
    # places ascend in b; at one place of b they descend in a, so an ascending chain takes each
    # place once
    low, high = pointers[a], pointers[a + 1]
    capacity = _MOST_COPIES * (pointers[b + 1] - pointers[b])
    in_a, in_b = np.empty(capacity, np.int64), np.empty(capacity, np.int64)
    count = 0
    for place in range(pointers[b], pointers[b + 1]):
        i = by_position[place]
        # binary searches: a token repeated many times is as many equal hashes
        at = _first(hashes, low, high, hashes[i], False)
        end = _first(hashes, at, high, hashes[i], True)
        at = _first(positions, at, end, a_from, False)
        copies = end - at
        if copies > _MOST_COPIES:
            copies = 1
        for j in range(copies - 1, -1, -1):
            in_a[count], in_b[count] = positions[at + j], positions[i]
            count += 1
    return in_a[:count], in_b[:count]


@njit(cache=True)
def _longest_ascending(values):
    """Finds a longest strictly ascending subsequence (indices); of equal values the first."""
    n = len(values)
    tails = np.empty(n, np.int64)
    before = np.empty(n, np.int64)
    length = 0
    for i in range(n):
        low, high = 0, length
        while low < high:
            middle = (low + high) // 2
            if values[tails[middle]] < values[i]:
                low = middle + 1
            else:
                high = middle
        if low < length and values[tails[low]] == values[i]:
            continue
        before[i] = tails[low - 1] if low > 0 else -1
        tails[low] = i
        if low == length:
            length += 1
    chain = np.empty(length, np.int64)
    if length > 0:
        at = tails[length - 1]
        for i in range(length - 1, -1, -1):
            chain[i] = at
            at = before[at]
    return chain


@njit(cache=True)
def align(tokens, begins, ends, pointers, hashes, positions, by_position, a, a_from, b):
    """Finds runs of equal tokens of chain a from a_from and of chain b, in order in both.

    Returns int64 [blocks, 3]: packed start in a, packed start in b, length (at least GRAM).
    """
    # each run is as long as it can be; if two chains have only one common run of GRAM + WINDOW - 1
    # tokens or more, it is found
    in_a, in_b = _anchors(pointers, hashes, positions, by_position, a, a_from, b)
    chain = _longest_ascending(in_a)
    blocks = np.empty((len(chain), 3), np.int64)
    count = 0
    a_done, b_done = a_from, begins[b]
    for i in chain:
        start_a, start_b = in_a[i], in_b[i]
        # inside the last run, or across it
        if start_a < a_done or start_b < b_done:
            continue
        length = 0
        while (
            start_a + length < ends[a]
            and start_b + length < ends[b]
            and tokens[start_a + length] == tokens[start_b + length]
        ):
            length += 1
        while start_a > a_done and start_b > b_done and tokens[start_a - 1] == tokens[start_b - 1]:
            start_a -= 1
            start_b -= 1
            length += 1
        # different texts with one hash
        if length < GRAM:
            continue
        blocks[count, 0], blocks[count, 1], blocks[count, 2] = start_a, start_b, length
        count += 1
        a_done, b_done = start_a + length, start_b + length
    return blocks[:count]


@njit(cache=True)
def _sampled_in(before, start, end):
    """Whether the policy sampled any of the tokens start:end or, if empty, the next token."""
    if start == end:
        end += 1
    return before[end] > before[start]


@njit(cache=True)
def share_masks(masks, offsets, start, length, position, parent, sequence_node):
    """Marks each token of masks, bool [R], in place if any sequence that holds it marks it."""
    marked = np.zeros(start[-1] + length[-1], np.bool_)
    for is_reading in (True, False):
        for s in range(len(sequence_node)):
            node = sequence_node[s]
            while node >= 0:
                at, first = start[node], offsets[s] + position[node]
                for i in range(length[node]):
                    if is_reading:
                        marked[at + i] |= masks[first + i]
                    else:
                        masks[first + i] = marked[at + i]
                node = parent[node]


# what parts two branches first: what nobody sampled, what the policy sampled, or their questions
GIVEN, SAMPLED, QUESTION = range(3)


@njit(cache=True)
def tokens_to_win(blocks, a_from, b_from, before, is_one_rollout, question):
    """Counts the tokens that the runs of `align` would save.

    A difference is sampled if both of its sides hold tokens that the policy sampled; `before`
    [T + 1] counts these before each packed token. Between turns of one rollout no difference is
    sampled.

    `question` is the number of the difference that is two questions, -1 for none (`_question`).

    Returns int64 (win, alone, again, cause), in tokens. alone: the first run, which would be
    shared without the difference before it. win: also the later runs, up to the first sampled
    difference or the question. again: all runs. cause: of the first difference.
    """
    win, alone, again, cause = 0, 0, 0, GIVEN
    is_open = True
    for i in range(len(blocks)):
        start_a, start_b, length = blocks[i]
        sampled = not is_one_rollout
        sampled = (
            sampled
            and _sampled_in(before, a_from, start_a)
            and _sampled_in(before, b_from, start_b)
        )
        if i == 0:
            alone = length
            cause = QUESTION if question == 0 else SAMPLED if sampled else GIVEN
        elif sampled:
            is_open = False
        is_open = is_open and i != question
        if is_open:
            win += length
        again += length
        a_from, b_from = start_a + length, start_b + length
    return win, alone, again, cause


@njit(cache=True)
def _question(blocks, a_from, b_from, a_prompt, b_prompt):
    """Finds the difference of two prompts that is their questions, and the length of their end."""
    # the first with at least half the tokens of the longest: stamps and ids are short; differences
    # are numbered as the blocks that they stand before; the prompts end at the packed tokens
    # a_prompt and b_prompt; a run of less than GRAM is the end that a template writes
    sizes = np.zeros(len(blocks) + 1, np.int64)
    instruction = 0
    for i in range(len(blocks) + 1):
        a_begin, b_begin, length = a_prompt, b_prompt, 0
        if i < len(blocks) and blocks[i, 0] <= a_prompt and blocks[i, 1] <= b_prompt:
            a_begin, b_begin, length = blocks[i]
        sizes[i] = a_begin - a_from + b_begin - b_from
        if a_begin + length >= a_prompt and b_begin + length >= b_prompt:
            instruction = min(a_prompt - a_begin, b_prompt - b_begin)
            break
        a_from, b_from = a_begin + length, b_begin + length
    largest = 0
    for size in sizes:
        largest = max(largest, int(size))
    question = 0
    while 2 * sizes[question] < largest:
        question += 1
    return question, instruction if instruction >= GRAM else 0


@njit(cache=True)
def _prompt_end(before, start, end):
    """Finds the first sampled token of start:end; its end where there is none."""
    return min(end, _first(before, 0, len(before), before[start], True) - 1)


@njit(cache=True)
def best_partners(
    first,
    last,
    tokens,
    before,
    begins,
    ends,
    rollout,
    question,
    trunk,
    fork,
    previous,
    index,
    tries,
    partner,
    found,
):
    """Finds the sibling that each of the chains first..last - 1 repeats most.

    Siblings tried are the trunk, chain trunk[c] (-1: no trunk and no sibling) from packed token
    fork[c] on, and up to `tries` earlier branches of the fork, linked by previous[c] (-1: no more).
    rollout [C] and question [C] number the rollouts and the questions that the chains are of.
    Writes partner [C] (-1 if nothing is repeated) and found [C, 4], the result of `tokens_to_win`.
    One of the same question is taken before one of another.
    """
    pointers, hashes, positions, by_position = index
    for c in range(first, last):
        partner[c] = -1
        for k in range(4):
            found[c, k] = 0
        candidate, a_from, tries_left = trunk[c], fork[c], tries
        while candidate >= 0:
            blocks = align(
                *(tokens, begins, ends, pointers, hashes, positions, by_position),
                *(candidate, a_from, c),
            )
            is_one = rollout[candidate] == rollout[c]
            asks, instruction = -1, 0
            if question[candidate] != question[c] and before[-1] == 0:
                # nothing tells where prompts end
                asks = 0
            elif question[candidate] != question[c]:
                ends_a = _prompt_end(before, a_from, ends[candidate])
                ends_b = _prompt_end(before, begins[c], ends[c])
                asks, instruction = _question(blocks, a_from, begins[c], ends_a, ends_b)
            gains = tokens_to_win(blocks, a_from, begins[c], before, is_one, asks)
            if gains[3] == QUESTION:
                gains = (instruction, instruction, gains[2], gains[3])
            is_better = gains[0] > found[c, 0]
            if partner[c] >= 0 and (gains[3] == QUESTION) != (found[c, 3] == QUESTION):
                is_better = gains[0] > 0 and gains[3] != QUESTION
            if is_better:
                partner[c] = candidate
                found[c, 0], found[c, 1], found[c, 2], found[c, 3] = gains
            candidate = previous[c] if candidate == trunk[c] else previous[candidate]
            if candidate < 0 or tries_left == 0:
                break
            tries_left -= 1
            a_from = begins[candidate]
