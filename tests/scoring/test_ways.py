"""Every way to run a forest x what users combine with it, against each sequence alone: `ways`."""

from __future__ import annotations

from functools import partial
from itertools import combinations
from typing import Any

import pytest

from tests.scoring.ways import (
    AXES,
    CELLS,
    GROUPS,
    Refused,
    cases,
    cell,
    label,
    pairs,
    pairs_of,
    quick_cases,
    refused_cases,
)
from tests.scoring.ways_runs import alone, check, rows_apart, run, tolerance
from tests.support.full import mostly
from tests.support.hooks import lose_copies, lose_kept, lose_keys, lose_states, lose_tails
from tests.support.spawn import run_ranks

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{words}")
    for words in (
        "`is_gradient_checkpointing` is deprecated:FutureWarning",
        "None of the inputs have requires_grad:UserWarning",
        # Dynamo asks hidden states for it
        "The .grad attribute of a Tensor:UserWarning",
    )
]

ALONE = mostly((case for case in cases() if case["way"] not in GROUPS), quick_cases())
TOGETHER = mostly((case for case in cases() if case["way"] in GROUPS), quick_cases())
REFUSED = refused_cases()


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What rank 0 of two finds, by the name of a case; the tracebacks where one raises. Where one
    alone does, ranks are out of step, and all later cases raise."""
    ranks = run_ranks("tests.scoring.ways_ranks", tmp_path_factory.mktemp("ranks"))
    return {
        name: "\n".join(x for x in both if isinstance(x, str)) or both[0]
        for name, both in ((name, [of[name] for of in ranks]) for name in ranks[0])
    }


def test_every_pair_that_is_held_stands_in_a_case() -> None:
    covered = {pair for case in cases() for pair in pairs_of(case)}
    assert covered == set(pairs())
    assert all(cell(*two) is None for case in cases() for two in combinations(case.values(), 2))
    named = {level for levels in AXES.values() for level in levels}
    assert {level for pair in CELLS for level in pair} <= named


@pytest.mark.parametrize("case", ALONE, ids=label)
def test_in_one_process(case: dict[str, str]) -> None:
    check(case, run(case))


@pytest.mark.parametrize(
    ("lose", "levels"),
    [
        (lose_keys, {"way": "steps"}),
        (lose_keys, {"way": "kept trunks"}),
        (lose_keys, {"way": "kept values"}),
        (lose_keys, {"way": "steps", "layers": "indexers"}),
        (lose_keys, {"way": "steps", "layers": "blocks that choose"}),
        (lose_keys, {"way": "values in steps"}),
        (lose_states, {"way": "steps", "layers": "delta rule"}),
        (lose_states, {"way": "kept trunks", "layers": "Mamba-2"}),
        (lose_tails, {"way": "steps", "layers": "Mamba-2"}),
        (lose_tails, {"way": "kept trunks", "layers": "delta rule"}),
        (lose_tails, {"way": "again", "layers": "convolutions"}),
        (lose_kept, {"way": "kept trunks"}),
        (lose_kept, {"way": "kept values"}),
        (partial(lose_kept, behind=2), {"way": "kept trunks", "returned": "measure"}),
        (partial(lose_copies, behind=1), {"returned": "measure"}),
        (partial(lose_copies, behind=1), {"way": "steps", "returned": "measure"}),
    ],
)
def test_a_gradient_that_is_left_out_is_seen(
    lose: Any, levels: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = {axis: of[0] for axis, of in AXES.items()} | levels
    lose(monkeypatch)
    found = run(case)
    assert rows_apart(found, alone(case)) <= tolerance(case)
    with pytest.raises(AssertionError):
        check(case, found)


@pytest.mark.parametrize("case", TOGETHER, ids=label)
def test_on_two_ranks(case: dict[str, str], of_ranks: Any) -> None:
    found = of_ranks[label(case)]
    assert not isinstance(found, str), found
    check(case, found)


@pytest.mark.parametrize(
    ("case", "refused"), [pytest.param(*of, id=label(of[0])) for of in REFUSED]
)
def test_refused_by_name(case: dict[str, str], refused: Refused, of_ranks: Any) -> None:
    if case["way"] in GROUPS:
        message = of_ranks[label(case)]
        assert isinstance(message, str)
    else:
        with pytest.raises(Exception) as refusal:
            run(case)
        message = str(refusal.value)
    assert refused.words in message
