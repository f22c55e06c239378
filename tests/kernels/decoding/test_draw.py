"""The kernel that draws tokens: the tokens and log-probabilities of plain torch."""

from __future__ import annotations

import pytest
import torch

from prefixtree.kernels.decoding import draw as kernel
from prefixtree.sampling import draws as draws_module
from prefixtree.sampling.draws import Draws, row_keys

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("rows, vocabulary", [(5, 97), (3, 4133), (40, 1024)])
def test_it_draws_what_torch_draws(rows, vocabulary, temperature, dtype, monkeypatch):
    generator = torch.Generator().manual_seed(rows)
    logits = (3 * torch.randn(rows, vocabulary, generator=generator)).to(DEVICE, dtype)
    logits[:, 1::7] = -torch.inf
    # a whole block of the kernel, too
    logits[:, 1100:3300] = -torch.inf
    keys = row_keys(3, [(i,) for i in range(rows)]).to(DEVICE)
    positions = torch.arange(rows, device=DEVICE)
    draws = Draws(temperature, seed=3)
    calls: list[None] = []
    right = kernel.draw
    monkeypatch.setattr(kernel, "draw", lambda *a: (calls.append(None), right(*a))[1])
    with torch.no_grad():
        monkeypatch.setattr(draws_module, "in_one_pass", lambda logits: True)
        tokens, logprobs, kept, _ = draws.choose(logits, keys, positions)
        assert calls and kept is None
        monkeypatch.setattr(draws_module, "in_one_pass", lambda logits: False)
        want, scores, *_ = draws.choose(logits, keys, positions)
    assert tokens.dtype == torch.int64 and torch.equal(tokens, want)
    torch.testing.assert_close(logprobs, scores, atol=2e-5, rtol=0)
