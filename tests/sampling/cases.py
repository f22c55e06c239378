"""Models, random forests and what `generate` says, for the tests of this folder."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from prefixtree import PrefixForest
from prefixtree.sampling import Draws, Samples, TreeSampler
from prefixtree.sampling.step import DecodeStep
from tests.support.family_configs import VOCABULARY
from tests.support.models import build

GREEDY = Draws(temperature=0)


@cache
def models() -> tuple[Any, Any]:
    """A tiny Qwen3 with "prefixtree", and the same with "sdpa"."""
    ours = build("qwen3").eval()
    other = copy.deepcopy(ours)
    other.set_attn_implementation("sdpa")
    return ours, other


def words(rng: np.random.Generator, number: int) -> list[int]:
    """Random tokens."""
    return rng.integers(3, VOCABULARY, number).tolist()


def histories(seed: int) -> list[list[int]]:
    """One to three trees of histories, some the beginning of others, some twice."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(rng.integers(1, 4)):
        tree = [words(rng, rng.integers(1, 40))]
        for _ in range(rng.integers(0, 6)):
            above = tree[rng.integers(len(tree))]
            tree.append(above[: rng.integers(1, len(above) + 1)] + words(rng, rng.integers(0, 12)))
        found += tree
    return [found[i] for i in rng.permutation(len(found))]


def generated(
    model: Any, prompts: list[list[int]], number: int, stop: list[int], padded: bool = True
) -> list[Any]:
    """The tokens of transformers' greedy `generate` on one padded batch (or on each prompt alone),
    up to a stop token."""
    if not padded:
        return [tokens for p in prompts for tokens in generated(model, [p], number, stop)]
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=number,
        do_sample=False,
        eos_token_id=stop or None,
        pad_token_id=0,
    )[:, longest:].tolist()
    ends = [next((i + 1 for i, t in enumerate(row) if t in stop), len(row)) for row in out]
    return [row[:end] for row, end in zip(out, ends, strict=True)]


def check_greedy(seed: int) -> int:
    """Greedy continuations of a random forest equal `generate`, token by token; their number."""
    ours, other = models()
    prompts = histories(seed)
    # of a model that says anything: one word in six stops, so that rows end at different steps
    stop = list(range(3, VOCABULARY, 6)) if seed % 2 else []
    rows = TreeSampler(ours, max_keys=2000).start(PrefixForest.from_sequences(prompts))
    rows.generate(10, GREEDY, stop)
    samples = rows.samples()
    expected = generated(other, prompts, 10, stop)
    for i, (prompt, new) in enumerate(zip(prompts, expected, strict=True)):
        assert samples.sequences[i].tolist() == prompt + new, (seed, i)
        assert rows.new_tokens(i) == new
        assert samples.finished[i] == (new[-1] in stop)
    return len(prompts)


def turns(
    model: Any, draws: Draws, max_keys: int = 5000, stop: tuple[int, ...] = (5, 11, 17, 23)
) -> Samples:
    """Four tasks, three turns with branchings and replies of 0 to 7 tokens, some rows dropped."""
    rng = np.random.default_rng(0)
    tasks = [words(rng, 30) for _ in range(3)]
    rows = TreeSampler(model, max_keys).start(PrefixForest.from_sequences([*tasks, tasks[0][:20]]))
    for count, length in ((3, 6), (2, 5), (2, 7)):
        rows.branch(count)
        rows.generate(length, draws, stop)
        rows.drop(range(4, len(rows), 5))
        rows.append({r: words(rng, rng.integers(0, 8)) for r in range(len(rows))})
    return rows.samples()


def same_samples(one: Samples, two: Samples) -> bool:
    """Whether both have the same tokens in the same rows."""
    pairs = zip(one.sequences, two.sequences, strict=True)
    return one.paths == two.paths and all(np.array_equal(a, b) for a, b in pairs)


def steps_after_the_end(sampler: TreeSampler, vocabulary: int) -> int:
    """Counts the steps of a call whose rows all stop at their first token."""
    rows = sampler.start(PrefixForest.from_sequences([[1, 2, 3], [1, 2, 4, 5]]))
    with patch.object(DecodeStep, "run", autospec=True, side_effect=DecodeStep.run) as run:
        rows.generate(64, Draws(seed=1), range(vocabulary))
    assert [int(mask.sum()) for mask in rows.samples().loss_masks] == [1, 1]
    return run.call_count
