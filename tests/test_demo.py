"""`prefixtree demo` and the rollouts it makes."""

import numpy as np
import pytest
from cli_runs import one_thread, run, run_json


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


@pytest.fixture
def short_demo(monkeypatch):
    from prefixtree.cli import demo, desk

    monkeypatch.setattr(desk, "_ORDERS", desk._ORDERS[:2])
    monkeypatch.setattr(desk, "TRIALS", 2)
    monkeypatch.setattr(demo, "_REPEATS", 1)


def test_the_desk_makes_the_same_rollouts_every_time():
    from prefixtree.cli.desk import TURN_END, VOCABULARY, make_rollouts

    rows = make_rollouts(7)
    assert rows == make_rollouts(7)
    assert rows != make_rollouts(8)
    for row in rows:
        tokens, mask = np.array(row["token_ids"]), np.array(row["loss_mask"])
        assert tokens.max() < VOCABULARY and len(tokens) == len(mask)
        assert (tokens[np.array(row["turn_ends"]) - 1] == TURN_END).all()
        agent = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        assert len(agent) == len(row["turn_ends"])
        spoken = bytes(tokens[(mask == 1) & (tokens < 256)].tolist()).decode()
        assert spoken == "".join(agent)
    # every task is won and lost, so that every advantage counts
    for task in {row["group"] for row in rows}:
        assert {row["reward"] for row in rows if row["group"] == task} == {0.0, 1.0}


def test_the_demo_scores_each_turn_once():
    from prefixtree.cli.demo import Batch
    from prefixtree.cli.desk import make_rollouts

    rows = make_rollouts(7)
    batch = Batch(rows)
    assert len(batch.sequences) == sum(len(row["turn_ends"]) for row in rows)
    first, mask = rows[0], np.array(rows[0]["loss_mask"], bool)
    total = np.zeros(len(mask), int)
    for own in batch.loss_masks[: len(first["turn_ends"])]:
        total[: len(own)] += own
    assert (total == mask).all()
    # a turn has one advantage, on its own tokens alone
    for weights, scored in zip(
        batch.objective.logprob_weights, batch.objective.scored, strict=True
    ):
        assert (weights[~scored] == 0).all() and len(weights[scored].unique()) == 1


def test_demo(short_demo, tmp_path):
    saved = tmp_path / "desk.jsonl"
    facts = run_json("demo", "--save", saved)
    assert facts["passed"] is True
    assert facts["tasks"] == 2 and facts["rollouts"] == 4
    assert facts["loss"]["packed"] == pytest.approx(facts["loss"]["replicated"], rel=1e-5)
    assert facts["gradient_norm"]["replicated"] > 1e-2
    assert set(facts["differences"]) == {"loss", "logprobs", "entropy", "gradients"}
    assert max(facts["differences"].values()) < 2e-5
    assert facts["forest"]["tokens"]["ratio"] > 5
    assert facts["speedup"] == facts["seconds"]["replicated"] / facts["seconds"]["packed"]

    # what it saves is what it ran on
    report = run_json("report", saved, "--per-turn", "--strict")
    assert report["tokens"] == facts["forest"]["tokens"]


def test_demo_prints_the_forest_and_the_verdict(short_demo):
    result = run("demo")
    assert result.exit_code == 0
    assert "task0: 2 trials" in result.stdout
    assert "reward" in result.stdout and "tokens computed" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("The same update")
    assert result.stderr == ""


def test_demo_turns_red(short_demo, monkeypatch):
    from prefixtree.cli import demo

    original = demo.run_packed

    def damaged(*arguments):
        run = original(*arguments)
        next(g for g in run.gradients.values() if g is not None).mul_(1.01)
        return run

    monkeypatch.setattr(demo, "run_packed", damaged)
    facts = run_json("demo", exit_code=1)
    assert facts["passed"] is False and facts["speedup"] is None
    assert facts["differences"]["gradients"] == pytest.approx(0.01, rel=1e-3)
    result = run("demo")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].startswith("The updates differ")


def test_demo_cannot_save_nowhere(tmp_path):
    result = run("demo", "--save", tmp_path / "no" / "where.jsonl")
    assert result.exit_code == 2
    assert "cannot be written: No such file or directory" in result.stderr
