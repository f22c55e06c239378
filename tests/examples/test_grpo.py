"""`examples/grpo.py`: packed equals replicated, and what it asserts can fail."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from prefixtree import PrefixForest, pack
from prefixtree.demo import depot
from prefixtree.sampling import Draws
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.support.cli_runs import one_thread
from tests.support.full import mostly

PATH = Path(__file__).parents[2] / "examples" / "grpo.py"
# forks at the prompt and behind the first turn; several micro-batches
SMALL = {"iterations": 2, "branches": (2, 2), "max_tokens": 450}


def _load(*mutations: tuple[str, str]) -> ModuleType:
    """The example, with pieces of its text replaced by others."""
    source = PATH.read_text()
    for before, after in mutations:
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    module = ModuleType("grpo_example")
    # dataclasses look their module up
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, str(PATH), "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]
    return module


grpo = _load()


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def _train(module: ModuleType = grpo, **settings: Any) -> tuple[list[dict[str, Any]], Any]:
    run = module.Settings(**{**SMALL, **settings})
    model = module.make_model(run)
    return list(module.train(model, run)), model


# runs that several tests look at
_train_once = cache(_train)


def _losses(history: list[dict[str, Any]]) -> list[float]:
    return [loss for facts in history for loss in facts["losses"]]


def _worst_weight(one: Any, other: Any) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


# ---- the training --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("branches", "dr_grpo"),
    [
        pytest.param((2, 2), False, id="forks-GRPO"),
        pytest.param((4, 1), True, id="DualKV-Dr.GRPO", marks=pytest.mark.full),
    ],
)
def test_packed_equals_replicated(branches, dr_grpo):
    packed, model = _train_once(branches=branches, dr_grpo=dr_grpo)
    replicated, other = _train(branches=branches, dr_grpo=dr_grpo, replicated=True)
    assert model.config._attn_implementation == "prefixtree"
    assert other.config._attn_implementation == "sdpa"
    assert _losses(packed) == pytest.approx(_losses(replicated), abs=1e-5)
    assert _worst_weight(model, other) < 1e-5
    for one, two in zip(packed, replicated, strict=True):
        assert one["reward"] == two["reward"] and one["tokens"] == two["tokens"]
        assert one["tokens"][0] > 2 * one["tokens"][1]
    # there is something to agree on
    start = grpo.make_model(grpo.Settings())
    assert _worst_weight(model, start) > 1e-3
    assert max(map(abs, _losses(packed))) > 1e-3


def test_however_it_is_cut():
    cut, model = _train_once(branches=(2, 2), dr_grpo=False)
    whole, other = _train(max_tokens=100_000)
    for one, two in zip(cut, whole, strict=True):
        # ancestors are computed again in every micro-batch
        assert one["tokens"][0] == two["tokens"][0] and one["tokens"][1] > two["tokens"][1]
    assert _losses(cut) == pytest.approx(_losses(whole), abs=1e-5)
    assert _worst_weight(model, other) < 1e-5


@pytest.mark.full
def test_a_seed_is_a_run():
    one, model = _train_once(branches=(2, 2), dr_grpo=False)
    again, same = _train()
    assert _losses(one) == _losses(again)
    assert [facts["reward"] for facts in one] == [facts["reward"] for facts in again]
    assert _worst_weight(model, same) == 0
    other, _ = _train(seed=1)
    assert _losses(one) != _losses(other)


@pytest.mark.full
def test_the_reward_rises():
    history, _ = _train(iterations=6, branches=(4, 2), max_tokens=4096)
    rewards = [facts["reward"] for facts in history]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.05


@pytest.mark.full
def test_the_command(tmp_path):
    app = typer.Typer()
    app.command()(grpo.main)
    small = ["--iterations", "1", "--branches", "2,2"]
    lines = []
    for extra in ([], ["--replicated"]):
        result = CliRunner().invoke(app, [*small, *extra])
        assert result.exit_code == 0, result.output
        lines.append(result.stdout.split(" s ")[0][:-5])
    assert lines[0] == lines[1] and "reward 0." in lines[0]
    image = tmp_path / "curves.png"
    result = CliRunner().invoke(app, [*small, "--plot", str(image)])
    assert result.exit_code == 0, result.output
    assert image.read_bytes().startswith(b"\x89PNG")
    # the battery is for five turns
    for branches in ("2,0", "2,1,1,1,1,1"):
        result = CliRunner().invoke(app, ["--branches", branches])
        assert result.exit_code == 2 and "one to five numbers" in result.output


# ---- rollouts ------------------------------------------------------------------------------------


def test_rollouts_are_what_the_model_says_and_the_depot_answers(monkeypatch):
    """The likeliest words, so that a forward over the whole rollout can tell."""
    monkeypatch.setattr(grpo, "TURN_WORDS", 6)
    # with the weights of seed 2, greedy turns end early in some rows and not in others
    model = grpo.make_model(grpo.Settings(seed=2))
    with torch.no_grad():
        model.lm_head.weight[depot.END_TOKEN] *= 2
    rollouts = grpo.roll_out(model, (1, 2, 1), Draws(temperature=0))
    assert [r.state.task for r in rollouts] == [0, 0, 1, 1, 2, 2, 3, 3]
    model.set_attn_implementation("sdpa")
    lengths = set()
    for rollout in rollouts:
        tokens, mask = torch.from_numpy(rollout.tokens), rollout.mask
        with torch.no_grad():
            said = model(tokens[None], use_cache=False).logits[0].argmax(-1)
        said_before = np.flatnonzero(mask) - 1
        assert mask[-1]
        assert torch.equal(said[said_before], tokens[said_before + 1])
        # the depot, played again with the runs of the mask
        edges = np.flatnonzero(np.diff([0, *mask.astype(int), 0]))
        turns = list(zip(edges[::2], edges[1::2], strict=True))
        state, rebuilt = depot.Depot(rollout.state.task), []
        rebuilt += depot.encode(state.prompt)
        for start, end in turns:
            words = rollout.tokens[start:end].tolist()
            lengths.add(len(words))
            state, reply = state.call(depot.decode(words))
            missing = [depot.END_TOKEN] * (words[-1] != depot.END_TOKEN)
            rebuilt += words + missing + depot.encode(reply)
        # all but what the model does not hear any more
        heard = rollout.tokens.tolist()
        assert rebuilt[: len(heard)] == heard and state == rollout.state and len(turns) == 3
    assert len(lengths) > 1


def test_turns_are_drawn_from_the_model():
    """Forks share all that stands before them, and differ behind."""
    rollouts = grpo.roll_out(grpo.make_model(grpo.Settings()), (3, 2), Draws())
    first = [depot.encode(depot.Depot(r.state.task).prompt) for r in rollouts]
    assert all(r.tokens[: len(p)].tolist() == p for r, p in zip(rollouts, first, strict=True))
    assert len({tuple(r.tokens) for r in rollouts}) == len(rollouts) == 24
    for one, two in zip(rollouts[::2], rollouts[1::2], strict=True):
        second_turn = np.flatnonzero(np.diff(one.mask.astype(int)) == 1)[1] + 1
        assert np.array_equal(one.tokens[:second_turn], two.tokens[:second_turn])


def test_one_prompt_with_responses_is_dualkvs_case():
    model = grpo.make_model(grpo.Settings())
    rollouts = grpo.roll_out(model, (4, 1), Draws())
    prompts = [depot.encode(depot.Depot(task).prompt) for task in range(depot.TASKS)]
    responses = [
        [r.tokens[len(prompt) :] for r in rollouts if r.state.task == task]
        for task, prompt in enumerate(prompts)
    ]
    dualkv = PrefixForest.from_groups(prompts, responses)
    found = PrefixForest.from_sequences([r.tokens for r in rollouts])
    assert found.num_tokens <= dualkv.num_tokens
    with torch.no_grad():
        one, two = (sequence_logprobs(model, pack(f)).logprobs for f in (dualkv, found))
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


# ---- the method ----------------------------------------------------------------------------------


def test_token_losses():
    settings = grpo.Settings(clip=0.2, kl=0.5)
    new = torch.log(torch.tensor([0.4, 0.4, 0.1, 0.1, 0.3]))
    old = torch.log(torch.tensor([0.2, 0.2, 0.2, 0.2, 0.3]))
    ref = torch.log(torch.tensor([0.4, 0.2, 0.1, 0.2, 0.3]))
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, 3.0])
    losses = grpo.token_losses(new, old, ref, torch.ones(5), advantage, settings)
    half, twice = 0.5 - np.log(0.5) - 1, 2 - np.log(2) - 1
    # ratios 2, 2, 1/2, 1/2, 1: only what would gain too much is clipped
    expected = [-1.2, 2 + 0.5 * half, -0.5, 0.8 + 0.5 * twice, -3.0]
    assert losses.tolist() == pytest.approx(expected, abs=1e-6)
    mask = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0])
    masked = grpo.token_losses(new, old, ref, mask, advantage, settings)
    assert masked.tolist() == pytest.approx([-1.2, 0.0, -0.5, 0.0, 0.0], abs=1e-6)


def test_group_advantages():
    rewards, groups = np.array([1.0, 3.0, 5.0, 0.0, 1.0]), np.array([0, 1, 1, 0, 2])
    assert grpo.group_advantages(rewards, groups, True).tolist() == [0.5, -1, 1, -0.5, 0]
    assert grpo.group_advantages(rewards, groups, False) == pytest.approx([1, -1, 1, -1, 0], 1e-5)


@pytest.mark.parametrize("dr_grpo", mostly([False, True], [False]))
def test_a_group_of_one_has_no_loss(dr_grpo):
    """One rollout a task: nothing to compare it with, and the weights stay."""
    history, model = _train(branches=(1, 1), dr_grpo=dr_grpo, kl=0.0)
    assert not any(_losses(history))
    assert any(facts["reward"] > 0 for facts in history)
    assert _worst_weight(model, grpo.make_model(grpo.Settings())) == 0


# ---- the assertions can fail ---------------------------------------------------------------------


@pytest.mark.parametrize("replicated", mostly([False, True], [False]))
@pytest.mark.parametrize(
    ("mutation", "seen"),
    [
        # a step between the micro-batches of an epoch
        (("loss.backward()", "loss.backward(), optimizer.step()"), "the first ratios are 1, not"),
        # the first policy's log-probabilities, not those of the one that played
        (
            ("score_all(policy), score_all(reference)", "score_all(reference), score_all(policy)"),
            "the policy is not the one that played: off by",
        ),
    ],
)
def test_another_policy_than_the_one_that_played_is_seen(mutation, seen, replicated):
    with pytest.raises(AssertionError, match=seen):
        _train(_load(mutation), replicated=replicated)


@pytest.mark.parametrize(
    "mutations",
    [
        [("torch.exp(new - old)", "torch.exp((new - old) * mask)"), ("* k3) * mask", "* k3)")],
        [("torch.exp(new - old)", "torch.exp(new - old) * mask"), ("* k3) * mask", "* k3)")],
        [("* k3) * mask", "* k3 * mask)")],
    ],
)
def test_a_mask_on_the_ratio_is_seen(mutations):
    with pytest.raises(AssertionError, match="did not say has a loss"):
        _train(_load(*mutations), iterations=1)


@pytest.mark.parametrize(
    "mutation",
    [
        ("rewards[own] - rewards[own].mean()", "rewards[own]"),
        ("rewards[own] - rewards[own].mean()", "rewards[own] - rewards.mean()"),
    ],
)
def test_a_loss_of_a_group_of_one_is_seen(mutation):
    with pytest.raises(AssertionError, match="a group of one"):
        _train(_load(mutation), branches=(1, 1))
