"""The code of docs/sampler.md: an unmoved policy has the ratio 1, and gradients of dense logits."""

from __future__ import annotations

import re
from typing import Any

import torch

import prefixtree as pt
from tests.support.models import VOCABULARY, build, gradients, pack_sequences
from tests.support.spawn import ROOT

PAGE = ROOT / "docs" / "sampler.md"
# two answers that begin alike, and another prompt
SEQUENCES = [[3, 4, 5, 6, 7], [3, 4, 5, 6, 8, 9], [10, 11, 12]]
PROMPTS, TEMPERATURE, TOP_P = [2, 2, 1], 0.8, 0.6


def _engine(model: Any) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """Log p [n - 1] as an engine has it that draws with top_p, 0 in prompts; and what it gives."""
    logprobs, rollouts = [], []
    for tokens, prompt in zip(SEQUENCES, PROMPTS, strict=True):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, :-1] / TEMPERATURE
        values, masks = [torch.zeros(())] * (prompt - 1), []
        for row, token in zip(logits[prompt - 1 :], tokens[prompt:], strict=True):
            p, ids = row.detach().softmax(0).sort(descending=True)
            kept = set(ids[: 1 + int((p.cumsum(0) < TOP_P).sum())].tolist()) | {token}
            outside = torch.tensor([v for v in range(VOCABULARY) if v not in kept])
            values.append(row.index_fill(0, outside, -torch.inf).log_softmax(0)[token])
            masks.append(sorted(kept))
        logprobs.append(torch.stack(values))
        rollouts.append({"sampling_mask": masks})
    return logprobs, rollouts


def test_the_page() -> None:
    model, eager = build("qwen3"), build("qwen3", "eager")
    expected, rollouts = _engine(eager)
    names: dict[str, Any] = {
        "pt": pt,
        "torch": torch,
        "model": model,
        "packed": pack_sequences(SEQUENCES),
        "temperature": TEMPERATURE,
        "loss_mask": [
            [0] * p + [1] * (len(s) - p) for s, p in zip(SEQUENCES, PROMPTS, strict=True)
        ],
        "rollouts": rollouts,
        "engine_logprobs": [x.detach() for x in expected],
    }
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(code, PAGE.name, "exec"), names)
    ratio = torch.cat(names["ratio"])
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)
    ratio.sum().backward()
    sum(values.sum() for values in expected).backward()
    found = gradients(model)
    for name, gradient in gradients(eager).items():
        assert (found[name] - gradient).norm() < 1e-5 * gradient.norm(), name
    # without masks it is the mass that was kept
    exec(compile(code.replace("=sampling_masks)", "=None)"), PAGE.name, "exec"), names)
    assert all((r[p - 1 :] < 0.95).all() for r, p in zip(names["ratio"], PROMPTS, strict=True))
