"""The code of docs/images.md runs in order, and gives what the page says."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch

from prefixtree.images.vision import alone_inputs
from tests.support.hooks import inner
from tests.support.spawn import ROOT

PAGE = ROOT / "docs" / "images.md"


def test_the_page() -> None:
    first, attention, _ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(first, names)
    model, images, packed = (names[name] for name in ("model", "images", "packed"))
    said = "has {} distinct images of {}, and `packed` {} tokens of {}"
    counts = len(images), images.num_given, packed.num_tokens
    said = said.format(*counts, packed.forest.num_replicated_tokens)
    assert said in " ".join(PAGE.read_text().split())
    eager = copy.deepcopy(model)
    eager.zero_grad()
    eager.set_attn_implementation("eager")
    for i, found in enumerate(names["scores"].logprobs):
        inputs = alone_inputs(images, images.sequences[i], images.of_sequences[i])
        ids = inputs["input_ids"][0]
        logits = eager(**inputs, use_cache=False).logits[0, :-1]
        wanted = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        torch.testing.assert_close(found, wanted)
        wanted.sum().backward()
    for found, wanted in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, atol=5e-6, rtol=1e-4)
    exec(attention, names)
    assert model.config.vision_config._attn_implementation == "sdpa"


def test_the_families_named_are_those_that_are_served() -> None:
    cells = re.findall(r"^\| (`[^|]+) \| images", PAGE.read_text(), re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    served = (*inner("families with grids"), *inner("families with positions"))
    assert sorted(named) == sorted(served)
