"""verl's distillation losses on packed forests beside verl's own engine: metrics and parameters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import prefixtree as pt
from prefixtree.errors import UnsupportedError
from prefixtree.integrations.verl import distillation, engine
from prefixtree.integrations.verl.refusals import check_batch
from tests.integrations.verl.cases import CASES
from tests.integrations.verl.distillation_runs import (
    BESIDE_REWARDS,
    K3,
    RANK_CASES,
    TOP_K,
    Distillation,
    differences,
    run_distillation,
)
from tests.integrations.verl.runs import batch_of, jagged, rollouts, run_ranks
from tests.integrations.verl.vision_cases import VISION_CASES
from tests.support.hooks import lose_copies, lose_kept


def check(models: Path, case: Distillation) -> None:
    expected = run_distillation(case.beside, models, case)
    found = differences(expected, run_distillation("prefixtree", models, case), case.settings)
    print(found)
    assert max(found) < 1e-5


@pytest.mark.parametrize("own", [False, True], ids=["one teacher's row", "rows of copies"])
def test_top_k(models: Path, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red where the gradient of one copy of an edge stands for the sum over all."""
    case = Distillation(options=TOP_K, own=own)
    check(models, case)
    expected = run_distillation("stock", models, case)
    lose_copies(monkeypatch)
    wrong = differences(expected, run_distillation("prefixtree", models, case), case.settings)
    print("RED", wrong)
    assert wrong[1] > 1e-3


def test_top_k_beside_rewards_in_kept_trunks(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red where trunks get no gradient from the loss of their micro-batches."""
    case = Distillation(replace(CASES["grpo, lora"], lr=0.5, epochs=2), BESIDE_REWARDS)
    expected = run_distillation("stock", models, case)
    with patch.object(engine, "kept_trunks", wraps=engine.kept_trunks) as kept:
        found = differences(expected, run_distillation("prefixtree", models, case), case.settings)
    print(found)
    assert kept.call_count == 4 and max(found) < 1e-5
    # behind log p and the entropy
    lose_kept(monkeypatch, behind=2)
    wrong = differences(expected, run_distillation("prefixtree", models, case), case.settings)
    print("RED", wrong)
    assert wrong[1] > 1e-3


@pytest.mark.parametrize(
    "options",
    [K3, {"loss_mode": "k1", "use_task_rewards": False}],
    ids=["k3", "k1 as a reward"],
)
def test_estimators(models: Path, options: dict[str, Any]) -> None:
    check(models, Distillation(options=options))


@pytest.mark.parametrize("name", ["qwen3_vl, text, decay", "qwen3_vl, images"])
def test_checkpoints_with_an_encoder(sees: Path, name: str) -> None:
    check(sees, Distillation(VISION_CASES[name], TOP_K))


@pytest.fixture(scope="module")
def two_ranks(models: Path) -> list[dict[Any, Any]]:
    """The results of two ranks, all cases with both engines."""
    return run_ranks(models, [*RANK_CASES])


@pytest.mark.parametrize("name", RANK_CASES)
def test_two_ranks(name: str, two_ranks: list[dict[Any, Any]]) -> None:
    """FSDP2, and ranks that compute each forest together (red where one's edges lose theirs)."""
    case = RANK_CASES[name]
    for results in two_ranks:
        found = differences(results[name, case.beside], results[name, "prefixtree"], case.settings)
        print(name, found)
        assert max(found) < 1e-5
        if case.red:
            wrong = differences(results[name, case.beside], results[name, "lost"], case.settings)
            print("RED", name, wrong)
            assert wrong[1] > 1e-3


def test_distinct_rows() -> None:
    """Edges 0 .. 2 with two, one and three copies' rows; equal hashes do not make rows equal."""
    edge = torch.tensor([2, 0, 1, 2, 0, 2, 0])
    row = torch.tensor([9, 1, 3, 0, 5, 7, 6])
    ids = torch.arange(10)[:, None].expand(10, 2).clone()
    ids[5], ids[7] = ids[1], ids[9]
    of_copies, rows = distillation._distinct(edge, row, ids, torch.zeros(10, 2))
    assert rows.shape == (3, 2) and (rows >= 0).sum(1).tolist() == [2, 1, 2]
    same = ids[rows[edge, of_copies]] == ids[row]
    assert bool(same.all())


def test_ids_beyond_the_actors_vocabulary() -> None:
    """Of a teacher whose lm_head is padded further; not where nothing is scored."""
    packed = pt.pack(pt.PrefixForest.from_sequences([[1, 2, 3]]))
    ids = torch.tensor([[9, 9], [1, 2], [0, 4]])
    logits, masks = torch.zeros(1, 5), [np.array([0, 0, 1], bool)]

    def measured(ids: torch.Tensor) -> torch.Tensor:
        data = {"teacher_ids": jagged([ids]), "teacher_logprobs": jagged([-ids.float()])}
        loss = lambda student_logits, data: {"loss": data["teacher_ids"].values()[None, :, 0]}  # noqa: E731
        top_k = distillation.TopK(loss, data, packed, masks)
        return top_k.measure(logits, SimpleNamespace(edge=torch.tensor([0])))

    assert measured(ids).tolist() == [[1]]
    with pytest.raises(ValueError, match=r"names token 5, and the actor has 5: .*padded further"):
        measured(ids + torch.tensor([[0, 0], [0, 3], [0, 0]]))


def test_engines_without_whole_logits_refuse() -> None:
    data = batch_of(rollouts(0, groups=1, size=2), distillation_use_topk=True)
    check_batch(data, serves_topk=True)
    with pytest.raises(UnsupportedError, match="or an estimator"):
        check_batch(data)
