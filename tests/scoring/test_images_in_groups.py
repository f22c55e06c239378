"""Images that the ranks of a group divide: as each sequence alone, each encoded on one rank, and
red where gradients of features do not come back, or come twice."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from prefixtree.images.exchange import holders_of
from tests.support.float64 import Float64
from tests.support.full import mostly
from tests.support.image_cases import (
    Errors,
    Run,
    build,
    errors,
    images_of,
    run_alone,
    tolerance,
)
from tests.support.image_group_ranks import CASES, QUICK, Case, batch_of
from tests.support.spawn import run_ranks

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Of each of two ranks."""
    return run_ranks("tests.support.image_group_ranks", tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def of_three(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_ranks("tests.support.image_group_ranks", tmp_path_factory.mktemp("three"), 3)


@cache
def _alone(model_type: str, kind: str, double: bool) -> Run:
    """Each sequence alone, in eager."""
    made = batch_of(Case(model_type, kind))
    if not double:
        return run_alone(build(model_type, "eager"), made)
    with Float64():
        return run_alone(build(model_type, "eager", torch.float64), made)


def _worst(results: Results, name: str, case: Case) -> Errors:
    """Of all ranks, each of which has all scores and the whole gradients."""
    if not case.served:
        pytest.skip("refused")
    for result in results:
        assert isinstance(result[name], dict), result[name]
    expected = _alone(case.model_type, case.kind, case.double)
    found = [errors(Run(r[name]["logprobs"], r[name]["gradients"]), expected) for r in results]
    print(f"{name}: {found[0]}")
    return max(found, key=lambda each: each.largest)


def _check(results: Results, name: str, case: Case) -> None:
    bound = 1e-12 if case.double else tolerance(case.model_type)
    assert _worst(results, name, case).largest < bound
    # a call per modality on each rank; each image on one of them, and blanks of 4 patches
    calls = [result[name]["patches"] for result in results]
    made = batch_of(case)
    shown = images_of(build(case.model_type), made).distinct
    modalities = {image.modality for image in shown}
    assert [len(of_rank) for of_rank in calls] == [len(modalities)] * len(results)
    most = max(len(image.pixels) for image in shown)
    for at, modality in enumerate(sorted(modalities)):
        sizes = [len(image.pixels) for image in shown if image.modality == modality]
        blanks = max(0, len(results) - len(sizes))
        assert sum(of_rank[at] for of_rank in calls) == sum(sizes) + 4 * blanks
        assert max(of_rank[at] for of_rank in calls) <= sum(sizes) / len(results) + most


def _is_a_mistake(name: str) -> bool:
    return bool(CASES[2][name].mistake)


@pytest.mark.parametrize("name", mostly((n for n in CASES[2] if not _is_a_mistake(n)), QUICK))
def test_two_ranks(results, name):
    _check(results, name, CASES[2][name])


@pytest.mark.full
@pytest.mark.parametrize("name", CASES[3])
def test_three_ranks(of_three, name):
    _check(of_three, name, CASES[3][name])


@pytest.mark.parametrize("name", [n for n in CASES[2] if _is_a_mistake(n)])
def test_a_wrong_gradient_of_features_is_seen(results, name):
    wrong = _worst(results, name, CASES[2][name])
    assert max(wrong.logprob, wrong.text) < 1e-12 and wrong.encoder > 0.2


def test_images_go_to_the_rank_with_the_fewest_patches():
    assert holders_of([4, 16, 4, 8, 4], 2).tolist() == [1, 0, 1, 1, 0]
    assert holders_of([4], 3).tolist() == [0]
