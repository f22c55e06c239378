"""What `verify` says of real weights and real text: of right runs, and of the smallest mistakes.

`python -m tests.support.verdicts MODEL ROLLOUTS` writes verdicts.json and the table of
docs/exactness.md. MODEL is a folder of weights with a chat template, ROLLOUTS a .jsonl.gz with the
fields `group` and `messages`, three rollouts or more per group.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prefixtree.testing.compare import (
    Run,
    run_packed,
    run_replicated,
    whole_gradient_difference,
    worst_difference,
)
from prefixtree.testing.judge import FLOAT32, judge
from prefixtree.testing.models import Setting, build
from prefixtree.testing.reference import EAGER_BY_ROWS, FaithfulSums
from prefixtree.testing.verify import random_objective
from tests.support.mistakes import MISTAKES, Spot
from tests.support.models import pack_sequences

RESULTS = Path(__file__).with_name("verdicts.json")
LINES = ("logprobs", "entropy", "gradients", "whole gradient")
# characters of a message, tokens of a sequence
MESSAGE, LENGTH = 300, 180
# the slice in which mistakes are made: in the first, two chats begin with the same 180 tokens
MISTAKEN = 2


class Judged:
    """Sequences as all sides run them: packed, and alone in float32 and in float64."""

    def __init__(self, model: str, sequences: Sequence[np.ndarray]) -> None:
        self.sequences, self.packed = sequences, pack_sequences(sequences)
        self._objective = random_objective(sequences, None, 0)
        setting = Setting(model, device="cpu")
        with FaithfulSums():
            alone = build(setting, EAGER_BY_ROWS)
            self._replicated = run_replicated(alone, sequences, self._objective)
            self._exact = run_replicated(alone.double(), sequences, self._objective)
        del alone
        self._model = build(setting, "prefixtree")

    def judged(self) -> dict[str, Any]:
        """Runs packed: how far it is from both, and the lines that turn red."""
        with FaithfulSums():
            found = run_packed(self._model, self.packed, self._objective, None)
        checks, longer = judge(
            found, self._replicated, self._replicated, FLOAT32, lambda: self._exact
        )
        return {
            "tokens": [sum(map(len, self.sequences)), self.packed.num_tokens],
            "packed": far(found, self._exact),
            "replicated": far(self._replicated, self._exact),
            "between": far(found, self._replicated),
            "reference": "replicated" if longer is None else "float64",
            "red": [check.name for check in checks if not check.passed],
        }

    def mistaken(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The same with each mistake."""
        spot = Spot.of(self.sequences, self._replicated.logprobs[-1])
        for name, make in MISTAKES.items():
            with pytest.MonkeyPatch.context() as patches:
                make(patches, spot)
                yield name, self.judged()


def far(run: Run, reference: Run) -> dict[str, float]:
    """The worst difference, by line of the verdict."""
    whole, gradients = whole_gradient_difference(run.gradients, reference.gradients)
    values = (
        worst_difference(run.logprobs, reference.logprobs),
        worst_difference(run.entropy, reference.entropy),
        max(gradients.values()),
        whole,
    )
    return {line: float(f"{value:.3g}") for line, value in zip(LINES, values, strict=True)}


def slices(model: str, rollouts: str) -> Iterator[list[np.ndarray]]:
    """Two slices per group, of three sequences: where its chats begin, and from the middle on."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    with gzip.open(rollouts, "rt") as file:
        rows = sorted((json.loads(line) for line in file), key=lambda row: str(row["group"]))

    def ids(messages: list[dict[str, Any]]) -> np.ndarray:
        plain = [
            {
                "role": m["role"] if m["role"] in ("system", "assistant") else "user",
                "content": ((m.get("content") or "") + json.dumps(m.get("tool_calls") or ""))[
                    :MESSAGE
                ],
            }
            for m in messages
        ]
        return np.array(tokenizer.apply_chat_template(plain, return_dict=False)[:LENGTH])

    for _, group in groupby(rows, key=lambda row: row["group"]):
        chats = [row["messages"] for row in group]
        yield [ids(chat) for chat in chats[:3]]
        yield [ids([chat[0], *chat[len(chat) // 2 :]]) for chat in chats[-3:]]


def table(results: dict[str, Any]) -> str:
    """The rows of docs/exactness.md: of all slices the worst, and each mistake."""
    right = results["slices"]
    rows = {side: [found[side] for found in right] for side in ("replicated", "packed")}
    rows |= {found["mistake"]: [found["packed"]] for found in results["mistakes"]}

    def worst(cells: list[dict[str, float]]) -> list[str]:
        values = [max(cell[line] for cell in cells) for line in LINES if line != "entropy"]
        return [f"{value:.1e}".replace("e-0", "e-").replace("e+00", "") for value in values]

    return "\n".join(f"| {' | '.join([name, *worst(cells)])} |" for name, cells in rows.items())


def main(model: str, rollouts: str) -> None:
    results: dict[str, list[Any]] = {"slices": [], "mistakes": []}
    for number, sequences in enumerate(slices(model, rollouts)):
        side = Judged(model, sequences)
        results["slices"].append(side.judged())
        if number == MISTAKEN:
            results["mistakes"] = [{"mistake": name} | found for name, found in side.mistaken()]
        # a run per line
        RESULTS.write_text(json.dumps(results).replace("}, {", "},\n{") + "\n")
        print(number, results["slices"][-1], flush=True)
        del side
    print(table(results))


if __name__ == "__main__":
    torch.manual_seed(0)
    main(*sys.argv[1:])
