"""The code of docs/experts.md runs in order, and gives what the page says."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch

from prefixtree.experts.routers import REPLAYED_ROUTERS
from tests.support.models import padded_balancing_loss
from tests.support.replay import recorded_choice
from tests.support.spawn import ROOT
from tests.support.variant_configs import WITH_ROUTER_LOSS

PAGE = ROOT / "docs" / "experts.md"


def test_the_page() -> None:
    first, z_loss, replay = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(first, names)
    model, sequences = names["model"], [torch.tensor(s).numpy() for s in names["sequences"]]
    eager = copy.deepcopy(model)
    eager.zero_grad()
    eager.set_attn_implementation("eager")
    alone = [_alone(eager, s) for s in sequences]
    balance = padded_balancing_loss(eager, sequences)
    loss = -torch.cat(alone).mean() + eager.config.router_aux_loss_coef * balance
    loss.backward()
    torch.testing.assert_close(names["loss"], loss)
    assert float(balance.detach()) == pytest.approx(float(names["scores"].aux_loss.detach()))
    _assert_same_gradients(model, eager)

    exec(z_loss, names)
    logits = [
        x
        for s in sequences
        for x in eager(torch.from_numpy(s)[None], output_router_logits=True).router_logits
    ]
    total = sum((x.logsumexp(-1) ** 2).sum() for x in logits) / sum(map(len, sequences))
    torch.testing.assert_close(names["z_loss"], total)

    model.zero_grad()
    exec(replay, names)
    assert names["forest"].num_tokens > 9
    eager.zero_grad()
    for sequence, route, found in zip(
        sequences, names["routes"], names["scores"].logprobs, strict=True
    ):
        with recorded_choice(eager, route.numpy()):
            wanted = _alone(eager, sequence)
        torch.testing.assert_close(found, wanted)
        wanted.sum().backward()
    _assert_same_gradients(model, eager)


def _alone(model: Any, sequence: Any) -> torch.Tensor:
    ids = torch.from_numpy(sequence)[None]
    logits = model(ids, use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def _assert_same_gradients(model: Any, eager: Any) -> None:
    for found, wanted in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, atol=1e-6, rtol=1e-4)


def test_the_families_named_are_the_families_verified() -> None:
    text = PAGE.read_text()
    listed = re.search(r"Model types: (.*?), from transformers", text, re.DOTALL)
    assert listed is not None
    named = re.findall(r"`(\w+)`", listed[1])
    assert named == sorted(name.removesuffix("_text") for name in REPLAYED_ROUTERS)
    families = re.search(r"Families: (.*?)\. In the others", text, re.DOTALL)
    assert families is not None
    # Granite's four are named once
    assert len(re.split(r",\s+| and\s+", families[1])) == len(WITH_ROUTER_LOSS) - 3
