"""`verify` of a model whose indexers choose keys: their choice is judged, and all runs take one."""

import io
import json
import math

import numpy as np
import pytest
import torch
from rich.console import Console

from prefixtree.cli.checks import show_verdict
from prefixtree.kernels import best_keys as kernels
from prefixtree.testing.reference import Margins
from tests.support.cli_runs import estimate_nothing, one_thread, run_json
from tests.support.full import mostly
from tests.support.models import build


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    estimate_nothing(monkeypatch)
    with one_thread():
        yield


@pytest.fixture
def verify(tmp_path):
    """Without experts, whose routers choose too."""
    config = build("deepseek_v32").config.to_dict()
    config |= {"num_hidden_layers": 2, "mlp_layer_types": ["dense"] * 2}
    config["layer_types"] = config["layer_types"][:2]
    (tmp_path / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    turn = rng.integers(3, 97, 30).tolist()
    rows = [{"token_ids": turn + rng.integers(3, 97, 12).tolist()} for _ in range(4)]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def call(dtype, exit_code=0):
        files = "--model", tmp_path / "config.json", tmp_path / "rollouts.jsonl"
        options = "--dtype", dtype, "--device", "cpu"
        return run_json("verify", *files, *options, exit_code=exit_code)

    return call


def test_in_float32_all_choose_alike(verify):
    facts = verify("float32")
    assert facts["checks"]["chosen keys"]["difference"] < 1e-5
    assert facts["checks"]["logprobs"]["difference"] < 1e-5
    chosen = facts["indexers"]
    # queries of all sequences, by layers
    assert chosen["choices"] == 4 * 42 * 2 and chosen["differ"] == 0
    assert chosen["logprobs_with_the_same"] < 1e-5 and chosen["logprobs_of_others"] == 0


@pytest.mark.full
def test_in_half_precision_most_of_the_difference_is_the_choice(verify):
    facts = verify("bfloat16")
    chosen = facts["indexers"]
    assert 0 < chosen["differ"] < chosen["choices"] / 4
    assert 0 < chosen["logprobs_with_the_same"] < chosen["logprobs_of_others"] / 4
    # which has no limit of rounding there
    assert "chosen keys" not in facts["checks"]
    console = Console(record=True, width=1000, file=io.StringIO())
    show_verdict(facts, console)
    said = console.export_text()
    assert f"packed chose other keys than float32 in {chosen['differ']:,} of 336 choices" in said
    assert f"up to {chosen['logprobs_of_others']:.1e}; with the same" in said


@pytest.mark.parametrize("damage", mostly(["worst", "fewer", "later"], ["worst"]))
def test_another_choice_is_red(monkeypatch, verify, damage):
    """The runs alone take it, so nothing else would show it."""
    best = kernels.best_keys

    def damaged(scores, count, position):
        if damage == "worst":
            scores = -scores
        return best(scores, count - (damage == "fewer"), position + 5 * (damage == "later"))

    monkeypatch.setattr(kernels, "best_keys", damaged)
    checks = verify("float32", exit_code=1)["checks"]
    assert not checks["chosen keys"]["passed"]


def test_margins():
    scores = torch.tensor([[1.0, 9, 9, 9], [3, 2, 9, 9], [2, -4, 2, 9], [4, 3, 2, 1]])
    best = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 0]]).bool()

    def margins(row, keys, instead=best, scores=scores):
        taken, found = best.clone(), Margins()
        taken[row] = torch.tensor(keys).bool()
        found.note((0, 0), taken, instead, scores)
        return found

    same = margins(0, [1, 0, 0, 0])
    assert (same.count, same.differ, same.largest) == (4, 0, 0)
    # the worst taken is 2, the best left out 3, the largest 4
    other = margins(3, [1, 0, 1, 0])
    assert (other.differ, other.largest) == (1, 0.25)
    # equal scores: either may be taken
    one = best.clone()
    one[2] = torch.tensor([0, 0, 1, 0]).bool()
    tied = margins(2, [1, 0, 0, 0], one)
    assert (tied.differ, tied.largest) == (1, 0)
    for wrong in ((2, [1, 0, 0, 0]), (0, [0, 1, 0, 0]), (3, [1, 1, 1, 0])):
        assert margins(*wrong).largest == math.inf
    assert math.isnan(margins(0, [1, 0, 0, 0], scores=scores * math.nan).largest)
