"""`prefixtree demo`, the depot it plays in and the rollouts it makes."""

from __future__ import annotations

import re
import sys
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pytest
import torch

from prefixtree import PrefixForest
from prefixtree.demo import depot
from tests.support.cli_runs import one_thread, run, run_json
from tests.support.hooks import wrap


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


@contextmanager
def shortened():
    from prefixtree.demo import training as demo

    with patch.multiple(demo, BRANCHING=(2, 2), BATCHES=1, ALONE=2):
        yield


def training_once(found):
    """Within it the first run trains, and others show what it found."""
    from prefixtree.demo import training as demo

    train = demo.train

    def once(*given, **options):
        if not found:
            found.append(train(*given, **options))
        return found[0]

    return patch.object(demo, "train", once)


@pytest.fixture
def short_demo():
    with shortened():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the run of `facts` has saved its rollouts and pictures."""
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def found():
    """What the run of `facts` found."""
    return []


@pytest.fixture(scope="module")
def facts(folder, found):
    with shortened(), training_once(found):
        return run_json("demo", "--save", folder / "depot.jsonl", "--pictures", folder / "new/in")


@pytest.fixture
def no_training(monkeypatch):

    def started(*_):
        raise AssertionError("a model was made before the paths were checked")

    monkeypatch.setattr(depot, "player", started)


# ---- the depot -----------------------------------------------------------------------------------


def test_the_depot_hands_out_the_parcel():
    state = depot.Depot(0)
    assert "robot at row 2 column 2 . battery 5 ." in state.prompt
    state, reply = state.call("where is it ? scan please north")
    assert reply == "the parcel lies to the north . robot at row 2 column 2 . battery 4 . <end>"
    state, reply = state.call("i move north")
    assert reply == "it moved . robot at row 1 column 2 . battery 3 . <end>"
    assert state.reward == pytest.approx(0.4 + 0.1)
    state, reply = state.call("take")
    assert reply.startswith("taken .")
    assert state.reward == 1.0


def test_the_depot_answers_whatever_is_said():
    state, reply = depot.Depot(2).call("kettle kettle")
    assert reply.startswith("no tool was called .") and state.robot == (2, 2)
    assert state.reward == 0.0
    for _ in range(3):
        state, reply = state.call("south")
    assert reply.startswith("a wall stops it .") and state.robot == (4, 2)
    state, reply = state.call("take")
    assert reply.startswith("there is no parcel here .") and not state.taken
    assert 0 < state.reward < 0.5


def test_every_word_of_the_depot_is_a_token():
    for task in range(depot.TASKS):
        prompt = depot.Depot(task).prompt
        assert depot.decode(depot.encode(prompt)) == " ".join(prompt.split())
        for tool in ("north", "south", "west", "east", "scan", "take", "lost"):
            state, reply = depot.Depot(task, robot=(0, 0)).call(tool)
            depot.encode(reply)
            depot.encode(state.prompt)


# ---- rollouts ------------------------------------------------------------------------------------


def test_rollouts_branch_and_are_scored_turn_by_turn():
    from prefixtree.demo import training as demo

    model = depot.player(3)
    model.set_attn_implementation("prefixtree")
    trees = demo.roll_out(model, seed=0)
    assert len(trees) == depot.TASKS
    leaves = int(np.prod(demo.BRANCHING))
    for task, turns in enumerate(trees):
        assert len(turns) == demo.BRANCHING[0]
        assert sum(len(turn.rewards) for turn in turns) == leaves
        for turn in turns:
            prompt = depot.encode(depot.Depot(task).prompt)
            assert turn.tokens[: turn.begin] == prompt
            assert turn.tokens[-1] == depot.END_TOKEN
            assert 1 <= turn.end - turn.begin <= 6
            for child in turn.children:
                # the depot's reply stands between a turn and the next
                assert child.tokens[: len(turn.tokens)] == turn.tokens
                after, reply = depot.Depot(task).call(
                    depot.decode(turn.tokens[turn.begin : turn.end])
                )
                assert after == turn.state
                assert child.tokens[len(turn.tokens) : child.begin] == depot.encode(reply)

    batch = demo.Batch.of(trees)
    assert batch.mean_reward == pytest.approx(
        np.mean([r for turns in trees for turn in turns for r in turn.rewards])
    )
    rows = demo.rollout_rows(trees)
    assert len(rows) == depot.TASKS * leaves
    for row in rows:
        assert len(row["turn_ends"]) == len(demo.BRANCHING)
        assert row["turn_ends"][-1] == len(row["token_ids"]) == len(row["loss_mask"])
    # the turns' sequences are the rollouts cut at their turns' ends
    cuts = {tuple(r["token_ids"][:end]) for r in rows for end in r["turn_ends"]}
    assert {tuple(s.tolist()) for s in batch.sequences} == cuts
    forest = PrefixForest.from_sequences(batch.sequences)
    assert forest.replication_ratio > 5


@pytest.mark.full
def test_a_seed_is_a_set_of_rollouts():
    from prefixtree.demo import training as demo

    model = depot.player(3)
    model.set_attn_implementation("prefixtree")
    one, same, other = (demo.rollout_rows(demo.roll_out(model, seed)) for seed in (0, 0, 1))
    assert one == same != other
    assert len({tuple(row["token_ids"]) for row in one}) > 40


def test_the_loss_is_grpos_clipped_one():
    from prefixtree.demo.training import Batch

    batch = Batch([np.array([1, 2, 3, 4])], [np.array([0, 0, 1, 1], bool)], [2.0], 0.0)
    assert batch.scored == 2
    now = torch.log(torch.tensor([0.9, 0.5, 0.5], requires_grad=True))
    assert float(batch.loss(0, now).detach()) == pytest.approx(-2.0)
    batch.old_logprobs = [torch.log(torch.tensor([0.1, 0.5, 0.25]))]
    # ratios 1 and 2, the second clipped to 1.2
    assert float(batch.loss(0, now).detach()) == pytest.approx(-(1 * 2 + 1.2 * 2) / 2)
    batch.advantages = [-2.0]
    assert float(batch.loss(0, now).detach()) == pytest.approx((1 * 2 + 2 * 2) / 2)


# ---- the command ---------------------------------------------------------------------------------


def test_demo(facts, folder):
    assert facts["passed"] is True
    assert facts["tasks"] == 4 and facts["rollouts"] == 16
    assert len(facts["updates"]) == 2
    for update in facts["updates"]:
        assert update["loss"]["packed"] == pytest.approx(update["loss"]["replicated"], abs=1e-6)
        assert set(update["differences"]) == {"loss", "logprobs", "gradients"}
        assert max(update["differences"].values()) < 5e-5
        norms = update["gradient_norm"]
        assert norms["packed"] == pytest.approx(norms["replicated"], rel=1e-5)
        assert norms["packed"] > 0
    # the second update of a batch is off-policy: its loss is no mean of advantages any more
    first, second = (u["loss"]["packed"] for u in facts["updates"])
    assert abs(second - first) > 1e-4
    assert facts["speedup"] == facts["seconds"]["replicated"] / facts["seconds"]["packed"]

    # what it saves is what it ran on
    report = run_json("report", folder / "depot.jsonl", "--per-turn", "--strict")
    assert report["tokens"]["distinct"] == facts["forest"]["tokens"]["distinct"]


def test_demo_draws_its_pictures(facts, folder):
    files = [folder / "new/in" / name for name in ("forest.png", "mask.png")]
    assert facts["pictures"] == [*map(str, files)]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


@pytest.mark.full
def test_demo_is_the_same_every_time(facts, short_demo):
    again = run_json("demo", "--seed", facts["seed"])
    assert [u["loss"] for u in again["updates"]] == [u["loss"] for u in facts["updates"]]


def test_demo_says_what_was_learnt(facts):
    learnt = facts["learnt"]
    # a batch both ways, one packed alone, and one that is only played
    for name in ("mean_rewards", "parcels_taken", "tool_calls"):
        assert len(learnt[name]) == 3
    assert learnt["rollouts_per_batch"] == facts["rollouts"] == 16
    assert learnt["mean_rewards"][0] == facts["updates"][0]["mean_reward"]
    best = learnt["best"]
    state = depot.Depot(best["task"] - 1)
    assert best["customer"] in state.prompt
    for turn in best["turns"]:
        state, reply = state.call(turn["agent"])
        assert reply == f"{turn['depot']} {depot.END}"
    assert (state.reward, state.taken) == (best["reward"], best["taken"])


def test_the_rollout_in_words_is_one_that_took_its_parcel():
    from prefixtree.demo import training as demo

    def play(words, task=0):
        """A task in which every turn is continued once."""
        state, tokens = depot.Depot(task), depot.encode(depot.Depot(task).prompt)
        turns = above = []
        for said in words:
            begin = len(tokens)
            tokens = [*tokens, *depot.encode(said), depot.END_TOKEN]
            after, reply = state.call(said)
            turn = demo.Turn(tokens, begin, len(tokens), after)
            above.append(turn)
            state, tokens, above = after, tokens + depot.encode(reply), turn.children
        return turns

    lost, won = ["north", "scan", "scan"], ["i move north", "please take", "north"]
    learnt = demo.what_was_learnt([[play(lost)], [play(won), play(lost, 1)], [play(lost)]])
    assert learnt["parcels_taken"] == [0, 1, 0]
    # "kettle" is no tool
    played = demo.what_was_learnt([[play(["kettle", "north"])], [play(lost), play(["kettle"])]])
    assert played["tool_calls"] == [1 / 2, 3 / 4]
    best = learnt["best"]
    assert (best["batch"], best["task"], best["reward"], best["taken"]) == (2, 1, 1.0, True)
    # what comes after the parcel is left out
    assert [turn["agent"] for turn in best["turns"]] == ["i move north", "please take"]
    assert best["turns"][1]["depot"].startswith("taken .")
    # where no parcel was taken, the last batch's best
    best = demo.what_was_learnt([[play(lost)], [play(["kettle"]), play(lost)]])["best"]
    assert (best["batch"], best["taken"], len(best["turns"])) == (2, False, 3)


def test_demo_prints_the_tree_the_verdict_and_what_to_run_next(short_demo, found, tmp_path):
    file = tmp_path / "a.jsonl"
    with training_once(found):
        result = run("demo", "--save", file)
    assert result.exit_code == 0
    assert "task 1" in result.stdout and "16 rollouts" in result.stdout
    words = " ".join(result.stdout.split())
    assert "The same training, " in words and "Mean reward per batch: 0." in words
    # what is learnt first, and parcels in all: a count per batch looks like failure at this size
    assert re.search(r"turns that call a tool: \d+% → \d+% → \d+% of them", words)
    assert re.search(r"In all, \d+ of 48 rollouts took their parcel\.", words)
    assert "agent : " in words and "depot : " in words
    # neither a loss, which is 0 in half the updates, nor peaks that mislead at this size
    assert "0.000000" not in words and "Peak memory" not in words
    commands = [line.split("#")[0].split() for line in result.stdout.splitlines()[-2:]]
    assert commands == [
        ["prefixtree", "report", str(file), "--per-turn"],
        ["prefixtree", "verify", "--model", "MODEL", str(file), "--limit", "16"],
    ]
    assert run(*commands[0][1:]).exit_code == 0
    assert result.stderr == ""


def test_demo_turns_red(short_demo, monkeypatch):
    calls = []

    def damaged(real, model):
        gradients = real(model)
        calls.append(model)
        if len(calls) % 2:  # the packed model's come first
            next(g for g in gradients.values() if g is not None).mul_(1.01)
        return gradients

    wrap(monkeypatch, "gradients in the demo", damaged)
    with training_once([]):
        facts, result = run_json("demo", exit_code=1), run("demo")
    assert facts["passed"] is False and facts["speedup"] is None
    assert facts["updates"][0]["differences"]["gradients"] == pytest.approx(0.01, rel=1e-2)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].startswith("The updates differ")


@pytest.mark.parametrize("place", ["no/where.jsonl", "file/below.jsonl", "."])
def test_demo_finds_out_that_it_cannot_save_before_it_trains(no_training, tmp_path, place):
    (tmp_path / "file").write_text("")
    result = run("demo", "--save", tmp_path / place)
    assert result.exit_code == 2
    assert "cannot be written: " in result.stderr


def test_demo_finds_out_that_it_cannot_draw_before_it_trains(no_training, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    result = run("demo", "--pictures", tmp_path / "file")
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("demo", "--pictures", tmp_path / "new")
    assert result.exit_code == 2
    assert "'prefixtree-attention[plot]'" in result.stderr


def test_the_check_of_a_file_leaves_it_as_it_is(tmp_path):
    from prefixtree.cli.console import check_writable

    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    old.write_text("kept\n")
    check_writable(old)
    check_writable(new)
    assert old.read_text() == "kept\n" and not new.exists()
