"""Near misses of rows, and rows that are easy to tell apart."""

import json

import pytest

from prefixtree.forest import PrefixForest
from prefixtree.loops import realign
from prefixtree.rollouts import read_rollouts
from prefixtree.sharing.near_misses import find_near_misses, tokens_to_win

# the shortest run of equal tokens that is promised to be found
RUN = realign.GRAM + realign.WINDOW - 1


@pytest.fixture
def find(tmp_path):
    def _find(*rows, **options):
        path = tmp_path / "rollouts.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        rollouts = read_rollouts(path, strict=True)
        forest = PrefixForest.from_sequences(rollouts.sequences)
        found = find_near_misses(forest, rollouts, **options)
        sampled = any(sampled is not None for sampled in rollouts.sampled)
        if rollouts.groups is None and not sampled and not found.move:
            assert tokens_to_win(forest, rollouts.loss_masks) == found.win
        return found

    return _find


class Tokens:
    """Runs of tokens that occur nowhere else."""

    def __init__(self):
        self.next = 0

    def __call__(self, count):
        self.next += count
        return list(range(self.next - count, self.next))


class Words:
    """A tokenizer whose text is the token ids', three of them in two writings."""

    def decode(self, ids):
        words = {1001: "one", 1002: "one", 1003: "</think>", 1004: "<think>"}
        return " ".join(words.get(i, str(i)) for i in ids)


def chat(system, question, answer):
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
