"""The code of docs/rollouts.md runs in order, and what the page says of it is true."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch

from tests.sampling.cases import models, words
from tests.support.spawn import ROOT

PAGE = ROOT / "docs" / "rollouts.md"


def test_the_code_of_the_page():
    ours, _ = models()
    rng = np.random.default_rng(0)
    base = words(rng, 12)
    names: dict[str, Any] = {
        "model": ours,
        "prompts": [base, base[:5]],
        "histories": [base, base[:7] + words(rng, 4)],
        "end": 11,
        "is_hopeless": lambda said: said[0] % 3 == 0,
        "is_uncertain": lambda said: said[0] % 2 == 0,
        "reply": lambda said: words(rng, len(said) % 4),
    }
    one_call, turns, training = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(one_call, names)
    first = names["samples"]
    assert first.source.tolist() == [0] * 8 + [1] * 8
    assert all(s[:5].tolist() == base[:5] for s in first.sequences)
    exec(turns, names)
    samples = names["samples"]
    # rows were dropped and others branched, at least once each
    first_turn = {path[:2] for path in samples.paths}
    assert len(first_turn) < 8 and max(map(len, samples.paths)) == 4
    assert len(samples.sequences) == len(names["rows"])
    exec(training, names)
    compared = 0
    for batch in names["plan"][0]:
        names["batch"] = batch
        exec(training.partition("batch in plan[0]:\n")[2].replace("    ", ""), names)
        for new, old in zip(names["scores"].logprobs, names["old"], strict=True):
            torch.testing.assert_close(new.detach(), old, atol=2e-5, rtol=0)
            compared += int((old != 0).sum())
    assert compared == sum(int(m.sum()) for m in samples.loss_masks) > 100
