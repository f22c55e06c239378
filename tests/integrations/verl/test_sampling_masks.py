"""Batches with sampling masks, next to verl's own engine over logits that are masked by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp import transformer_impl

from prefixtree.integrations.verl.batches import SAMPLING_MASKS
from tests.integrations.verl.cases import Settings
from tests.integrations.verl.compare import difference
from tests.integrations.verl.runs import (
    VOCABULARY,
    actor_loss,
    batch_of,
    infer_with,
    jagged,
    make_worker,
    parameters,
    rollouts,
)

# verl's own has all rows in one micro-batch, in their order
SETTINGS = Settings(algorithm="ppo", tokens=None, size=8)
Rows = dict[str, list[Any]]


def _sets(rows: Rows) -> list[Any]:
    """Of each token of a response some ids, itself among them, that differ between rows that share
    the token; none of tools' tokens, and none of the last row."""
    sets: list[Any] = []
    for i, pair in enumerate(zip(rows["responses"], rows["response_mask"], strict=True)):
        rng = np.random.default_rng(i // 2)
        sets.append(
            [
                {int(token), *rng.integers(2, VOCABULARY, 4).tolist()} if sampled else set()
                for token, sampled in zip(*pair, strict=True)
            ]
        )
    return [*([sorted(ids) for ids in of_row] for of_row in sets[:-1]), None]


def _mask_logits(rows: Rows, sets: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves verl's engine the logits of kept tokens."""
    is_kept = []
    for prompt, response, of_row in zip(rows["prompts"], rows["responses"], sets, strict=True):
        kept = torch.ones(len(prompt) + len(response), VOCABULARY, dtype=torch.bool)
        for at, ids in enumerate(of_row or [], len(prompt) - 1):
            kept[at] = torch.isin(torch.arange(VOCABULARY), torch.tensor(ids)) if ids else True
        is_kept.append(kept)

    def logprobs(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        over = logits.masked_fill(~torch.cat(is_kept), -torch.inf).log_softmax(-1)
        return over.gather(1, labels[:, None])[:, 0]

    monkeypatch.setattr(transformer_impl, "logprobs_from_logits", logprobs)


def _update(
    vendor: str, settings: Settings, models: Path, rows: Rows, sets: list[Any] | None
) -> Any:
    """Log-probabilities, and the parameters before and after an update."""
    worker = make_worker(vendor, models / "qwen3", settings)
    worker.set_loss_fn(actor_loss(settings, entropy_coeff=0.0))
    more = {"temperature": 0.7, "global_token_num": None}
    if sets is not None:
        more[SAMPLING_MASKS] = sets
    start, old = [*parameters(worker).values()], infer_with(worker, rows, **more)["log_probs"]
    rng = torch.Generator().manual_seed(1)
    advantages = [torch.randn(len(r), generator=rng) for r in rows["responses"]]
    data = batch_of(rows, old_log_probs=jagged(old), advantages=jagged(advantages), **more)
    steps = {"global_batch_size": 8, "mini_batch_size": 8, "epochs": 1, "seed": 3}
    tu.assign_non_tensor(data, dataloader_kwargs={"shuffle": False}, **steps)
    worker.train_mini_batch(data)
    return old, start, [*parameters(worker).values()]


# all rows in one forward; trunks, or trees that are cut
@pytest.mark.parametrize(
    ("tokens", "optimizer", "lr"), [(None, "SGD", 0.1), (40, "SGD", 0.1), (40, "AdamW", 1e-3)]
)
def test_an_update_is_verls_own_over_masked_logits(
    tokens: int | None, optimizer: str, lr: float, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rollouts(4, groups=2, size=4)
    sets = _sets(rows)
    stock = replace(SETTINGS, optimizer=optimizer, lr=lr)
    settings = replace(stock, tokens=tokens)
    old, start, end = _update("prefixtree", settings, models, rows, sets)
    plain, *_ = _update("prefixtree", settings, models, rows, None)
    _mask_logits(rows, sets, monkeypatch)
    stock_old, _, stock_end = _update("stock", stock, models, rows, None)
    print("DIFF", difference(old, stock_old), difference(end, stock_end), difference(end, start))
    # Adam divides by the gradient's own size: where that is rounding, so is the step
    assert difference(end, stock_end) < (2e-5 if optimizer == "AdamW" else 1e-5)
    assert difference(old, stock_old) < 1e-5
    assert difference(old, plain) > 1 and difference(end, start) > 9e-4
    # rows without sets
    assert difference(old[-1:], plain[-1:]) < 1e-5
