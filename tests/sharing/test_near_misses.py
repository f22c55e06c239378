"""Near misses: what is found behind a fork, how much it is said to save, and what parts it."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from prefixtree.loops import realign
from tests.sharing.conftest import RUN, Tokens, chat
from tests.support.cli_runs import run, run_json

AIRLINE = Path(__file__).parents[3] / "shared" / "data" / "airline_rollouts.jsonl.gz"


# ---- tokens to win -------------------------------------------------------------------------------


def test_a_timestamp_hides_what_follows(find):
    new = Tokens()
    system, stamps, rest = new(30), [new(3), new(3), new(2)], new(100)
    tails = [new(10), new(20), new(30)]
    found = find(
        *({"token_ids": [*system, *s, *rest, *t]} for s, t in zip(stamps, tails, strict=True))
    )
    assert (found.num_forks, found.win, found.win_sampled) == (1, 200, 0)
    (miss,) = found.shown
    assert (miss.win, miss.alone, miss.again, miss.branches) == (200, 200, 200, 2)
    assert miss.difference.position == 30
    assert miss.difference.kind == "unknown"
    assert sorted(miss.difference.lengths) in ([3, 3], [2, 3])
    before = " ".join(map(str, system[-16:]))
    assert (miss.difference.is_text, miss.difference.before) == (False, before)
    heaviest = " ".join(map(str, stamps[2]))
    assert heaviest in miss.difference.texts


def test_without_rerun_there_is_none(find):
    new = Tokens()
    system = new(50)
    found = find(*({"token_ids": [*system, *new(200)]} for _ in range(5)))
    assert found.shown == [] and found.num_forks == found.win == 0


def test_the_shortest_run_that_is_promised_is_found_wherever_it_stands(find):
    for before in range(realign.WINDOW):
        new = Tokens()
        system, run_ = new(7), new(RUN)
        one = [*system, *new(5), *run_, *new(40)]
        other = [*system, *new(5 + before), *run_, *new(30)]
        assert find({"token_ids": one}, {"token_ids": other}).win == RUN


def test_a_run_is_extended_to_its_last_token_on_both_sides(find):
    new = Tokens()
    system, run_ = new(3), new(77)
    found = find({"token_ids": [*system, 900, *run_]}, {"token_ids": [*system, 901, 902, *run_]})
    (miss,) = found.shown
    assert miss.win == 77 and sorted(miss.difference.lengths) == [1, 2]


def test_an_insertion_has_no_token_on_the_other_side(find):
    new = Tokens()
    system, rest = new(20), new(60)
    found = find({"token_ids": [*system, *rest]}, {"token_ids": [*system, 999, *rest]})
    (miss,) = found.shown
    assert miss.win == 60 and sorted(miss.difference.lengths) == [0, 1]


def test_every_turn_with_a_stamp_of_its_own(find):
    new = Tokens()
    turns = [new(50) for _ in range(4)]
    rows = []
    for _ in range(2):
        rows.append({"token_ids": list(itertools.chain(*([*turn, *new(2)] for turn in turns)))})
    (miss,) = find(*rows).shown
    assert (miss.win, miss.alone, miss.again) == (150, 50, 150)


def test_after_a_sampled_difference_nothing_more_is_to_win(find):
    new = Tokens()
    system, first, second = new(20), new(50), new(60)
    rows = []
    for _ in range(2):
        stamp, answer = new(2), new(8)
        tokens = [*system, *stamp, *first, *answer, *second]
        mask = [0] * 22 + [0] * 50 + [1] * 8 + [0] * 60
        rows.append({"token_ids": tokens, "loss_mask": mask})
    found = find(*rows)
    (miss,) = found.shown
    assert (miss.win, miss.alone, miss.again) == (50, 50, 110)
    assert miss.difference.kind == "given"
    assert (found.win, found.win_sampled) == (50, 0)


@pytest.mark.parametrize(
    "own, kind", [((0, 0, 0), "given"), ((0, 1, 1), "mixed"), ((1, 1, 1), "sampled")]
)
def test_who_wrote_the_difference(find, own, kind):
    new = Tokens()
    system, rest = new(20), new(50)
    rows = [
        {"token_ids": [*system, *new(3), *rest], "loss_mask": [0] * 20 + [*own] + [0] * 50}
        for _ in range(2)
    ]
    found = find(*rows)
    assert found.shown[0].difference.kind == kind
    assert (found.win, found.win_sampled) == ((50, 0) if kind == "given" else (0, 50))


def test_forks_that_the_policy_did_not_sample_come_first(find):
    new = Tokens()
    rows = []
    for length, scored in ((300, 1), (40, 0), (60, 0)):
        prompt, rest = new(10), new(length)
        for _ in range(2):
            mask = [0] * 10 + [scored] * 3 + [0] * length
            rows.append({"token_ids": [*prompt, *new(3), *rest], "loss_mask": mask})
    found = find(*rows)
    assert [miss.win for miss in found.shown] == [60, 40, 300]
    assert found.num_forks == 3
    assert [miss.win for miss in find(*rows, most=1).shown] == [60]


def test_the_pair_that_repeats_most_stands_for_its_fork(find):
    new = Tokens()
    system, rest = new(10), new(200)
    tails = [rest, [*rest[:40], *new(100)], [*rest[:150], *new(5)], [*rest[:60], *new(70)]]
    (miss,) = find(*({"token_ids": [*system, *new(2), *tail]} for tail in tails)).shown
    assert (miss.win, miss.branches, set(miss.sequences)) == (250, 3, {0, 2})


def test_first_tokens_may_differ_within_a_group(find):
    new = Tokens()
    rest, elsewhere = new(100), new(120)
    rows = [{"token_ids": [*new(1), *rest], "group": "a"} for _ in range(3)]
    rows.append({"token_ids": elsewhere, "group": "b"})
    found = find(*rows)
    (miss,) = found.shown
    assert (miss.win, miss.branches, miss.difference.position) == (200, 2, 0)
    assert all(i < 3 for i in miss.sequences)


def test_a_branch_is_compared_with_its_group_and_not_only_the_heaviest(find):
    new = Tokens()
    system = new(20)
    tasks = [new(100) for _ in range(6)]
    rows = [
        {"token_ids": [*system, *new(2), *task], "group": t}
        for _ in range(2)
        for t, task in enumerate(tasks)
    ]
    rows.append({"token_ids": [*system, *new(500)], "group": 9})
    found = find(*rows)
    assert found.win == 600 and found.shown[0].branches == 6


def test_repeated_boilerplate_does_not_hide_the_alignment(find):
    new = Tokens()
    system, boilerplate, turns = new(5), new(30), [new(40) for _ in range(8)]
    body = list(itertools.chain(*([*boilerplate, *turn] for turn in turns)))
    found = find({"token_ids": [*system, 900, *body]}, {"token_ids": [*system, 901, *body]})
    assert found.win == len(body)


@pytest.mark.parametrize("period", [1, 7, 40])
def test_a_stretch_that_repeats_itself_is_aligned(find, period):
    body = [*range(period)] * (2000 // period)
    found = find({"token_ids": [500, 900, *body]}, {"token_ids": [500, 901, *body]})
    assert found.win == len(body)


def test_many_repeats_take_no_longer_than_few():
    # every place of the one fits every place of the other: pairs of places would be 10^10
    rows = [np.concatenate([[500, 900 + i], np.ones(100_000, np.int64)]) for i in range(2)]
    tokens = np.concatenate(rows)
    begins, ends = np.array([0, len(rows[0])]), np.array([len(rows[0]), len(tokens)])
    index = realign.fingerprints(tokens, begins, ends)
    assert len(index[1]) <= 2.3 * 100_000 / realign.WINDOW
    blocks = realign.align(tokens, begins, ends, *index, 0, 2, 1)
    assert blocks.tolist() == [[2, 100_004, 100_000]]


@pytest.mark.parametrize("seed", range(10))
def test_alignments_are_equal_tokens_in_order(seed):
    # small vocabularies and copied stretches: many repeats, many wrong ways to align
    rng = np.random.default_rng(seed)
    one = rng.integers(0, 2 + 3 * seed, 400)
    pieces = [one[i : i + rng.integers(5, 90)] for i in np.sort(rng.integers(0, 400, 6))]
    other = np.concatenate([np.append(piece, rng.integers(0, 99, 3)) for piece in pieces])
    tokens = np.concatenate([one, other])
    begins, ends = np.array([0, len(one)]), np.array([len(one), len(tokens)])
    start = int(rng.integers(0, 30))
    index = realign.fingerprints(tokens, begins, ends)
    blocks = realign.align(tokens, begins, ends, *index, 0, start, 1)
    done = (start, len(one))
    for x, y, length in blocks.tolist():
        assert x >= done[0] and y >= done[1] and length >= realign.GRAM
        assert x + length <= len(one) and y + length <= len(tokens)
        assert tokens[x : x + length].tolist() == tokens[y : y + length].tolist()
        done = (x + length, y + length)


@pytest.mark.parametrize("seed", range(5))
def test_every_long_run_between_differences_is_aligned(seed):
    rng = np.random.default_rng(seed)
    shared = [rng.permutation(100_000)[: rng.integers(2, 90)] for _ in range(8)]
    sides = [[np.append(run_, rng.integers(0, 10**6, 3)) for run_ in shared] for _ in range(2)]
    one, other = (np.concatenate(side) for side in sides)
    begins, ends = np.array([0, len(one)]), np.array([len(one), len(one) + len(other)])
    tokens = np.concatenate([one, other])
    index = realign.fingerprints(tokens, begins, ends)
    blocks = realign.align(tokens, begins, ends, *index, 0, 0, 1)
    expected = [len(run_) for run_ in shared if len(run_) >= RUN]
    found = blocks[:, 2].tolist()
    assert [length for length in found if length >= RUN] == expected


def test_kept_hashes_cover_every_window():
    tokens = np.random.default_rng(0).integers(0, 9, 5000)
    begins, ends = np.array([0, 10, 40, 41]), np.array([10, 40, 41, 5000])
    pointers, hashes, positions, _ = realign.fingerprints(tokens, begins, ends)
    assert pointers.tolist()[:2] == [0, 0] and pointers[2] == pointers[3]
    for c in (1, 3):
        mine = slice(pointers[c], pointers[c + 1])
        assert (np.diff(hashes[mine].astype(float)) >= 0).all()
        kept = np.sort(positions[mine])
        assert kept[0] < begins[c] + realign.WINDOW
        assert kept[-1] > ends[c] - realign.GRAM - realign.WINDOW
        assert np.diff(kept).max(initial=0) <= realign.WINDOW
    # equal content has equal hashes, wherever it stands
    twice = np.concatenate([tokens[:100], [77], tokens[:100]])
    pointers, hashes, positions, _ = realign.fingerprints(
        twice, np.array([0, 101]), np.array([100, 201])
    )
    assert hashes[: pointers[1]].tolist() == hashes[pointers[1] :].tolist()


# ---- another question ----------------------------------------------------------------------------


def asked(*prompts, samples=2, answer=lambda: []):
    """Samples of some prompts, a group each; their answers begin with `answer()`."""
    new = Tokens()
    new.next = 10_000
    return [
        {"prompt_ids": prompt, "response_ids": [*answer(), *new(20)], "group": f"q{number}"}
        for number, prompt in enumerate(prompts)
        for _ in range(samples)
    ]


def test_an_instruction_behind_questions_is_to_be_moved_and_not_to_win(find):
    new = Tokens()
    system, instruction = new(20), new(60)
    rows = asked(*([*system, *new(30 + n), *instruction] for n in range(3)))
    found = find(*rows)
    assert (found.num_forks, found.win, found.win_sampled, found.move) == (1, 0, 0, 120)
    (miss,) = found.shown
    assert (miss.win, miss.branches, miss.difference.kind) == (120, 2, "question")
    assert not miss.difference.can_be_won
    assert miss.difference.remedy == "move this instruction before the question"
    # where it stands before, nothing runs again
    assert find(*asked(*([*system, *instruction, *new(30)] for _ in range(3)))).shown == []


def test_what_two_questions_have_in_common_by_chance_is_nobodys(find):
    new = Tokens()
    system, words = new(20), new(40)
    found = find(*asked(*([*system, *new(30), *words, *new(50)] for _ in range(3))))
    assert found.shown == [] and (found.win, found.move) == (0, 0)


def test_the_end_that_a_template_writes_is_no_instruction(find):
    new = Tokens()
    system, end, start = new(20), new(realign.GRAM - 1), new(40)
    found = find(*asked(*([*system, *new(30), *end] for _ in range(3)), answer=lambda: start))
    assert found.shown == [] and found.move == 0
    end = new(realign.GRAM)
    found = find(*asked(*([*system, *new(30), *end] for _ in range(3)), answer=lambda: start))
    assert found.move == 2 * len(end)


def test_a_stamp_before_the_questions_is_to_win_up_to_them(find):
    new = Tokens()
    system, rest, instruction = new(10), new(80), new(50)
    questions = [new(30) for _ in range(2)]
    rows = asked(
        *([*system, *rest, *question, *instruction] for question in questions),
    )
    for row in rows:
        row["prompt_ids"] = [*system, *new(2), *row["prompt_ids"][10:]]
    found = find(*rows)
    # twice the whole prompt behind the stamp, and once up to the question
    assert (found.win, found.move) == (2 * (80 + 30 + 50) + 80, 0)
    (miss,) = found.shown
    assert (miss.difference.kind, miss.difference.position) == ("given", 10)
    assert miss.difference.remedy == "write it alike in all of them, or behind what they share"


def test_a_branch_of_the_same_question_goes_before_one_of_another(find):
    new = Tokens()
    system, instruction = new(10), new(100)
    one, other = new(40), new(45)
    rows = asked([*system, *one, *instruction], [*system, *other, *instruction], samples=1)
    # the second question again, with a stamp before it: less runs again than of the first one's
    rows.append({**rows[1], "prompt_ids": [*system, *new(1), *other, *new(60)]})
    found = find(*rows)
    assert (found.win, found.move, found.num_forks) == (45, 100, 1)
    assert [miss.difference.kind for miss in found.shown] == ["given", "question"]


def test_without_a_mask_nothing_behind_another_question_is_told(find):
    new = Tokens()
    system, rest = new(10), new(100)
    rows = [{"token_ids": [*system, *new(30), *rest], "group": n} for n in range(2)]
    assert find(*rows).shown == []


@pytest.mark.parametrize(
    "questions, kinds",
    [
        (("Where is it?", "Who has it?"), ["question"]),
        (("It is 9:00. Where?", "It is 17:30. Where?"), ["given"]),
    ],
)
def test_without_groups_the_first_user_messages_tell(find, questions, kinds):
    new = Tokens()
    system, instruction = new(10), new(50)
    rows = []
    for question in questions:
        prompt = [*system, *new(6), *instruction]
        said = chat("be kind", question, "ok")
        rows.append({"prompt_ids": prompt, "response_ids": new(9), "messages": said})
    found = find(*rows)
    assert [miss.difference.kind for miss in found.shown] == kinds
    assert (found.win, found.move) == ((0, 50) if kinds == ["question"] else (50, 0))


# ---- the command ---------------------------------------------------------------------------------


def test_report_describes_near_misses(tmp_path):
    new = Tokens()
    system, rest = new(20), new(50)
    path = tmp_path / "rollouts.jsonl"
    rows = [{"token_ids": [*system, *new(2), *rest], "group": "g", "id": n} for n in ("x", "y")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    facts = run_json("report", path)["near_misses"]
    assert (facts["forks"], facts["tokens_to_win"]) == (1, 50)
    (miss,) = facts["largest"]
    assert sorted(miss["rollouts"]) == ["x", "y"] and miss["groups"] == ["g", "g"]
    text = " ".join(run("report", path).stdout.split())
    assert "50 tokens to win" in text and "at token 20" in text
    # no loss mask: the policy may have sampled the difference
    assert "to win without the differences (an upper bound: no loss mask tells" in text
    assert run_json("report", path, "--near-misses", 0)["near_misses"] is None


def test_report_says_what_to_do(tmp_path):
    new = Tokens()
    system, instruction = new(20), new(60)
    rows = asked(*([*system, *new(30), *instruction] for _ in range(2)))
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    facts = run_json("report", path)["near_misses"]
    assert (facts["tokens_to_win"], facts["tokens_of_instructions_behind_questions"]) == (0, 60)
    text = " ".join(run("report", path).stdout.split())
    assert "instructions after questions: 60 tokens, shared if they stood before" in text
    assert "1. 60 tokens of an instruction run again at token 20: another question" in text
    assert "do move this instruction before the question" in text


@pytest.mark.skipif(not AIRLINE.exists(), reason=f"needs {AIRLINE}, which is not in the project")
def test_what_separates_real_trials():
    # read by hand: the simulated user words the task anew in every trial, from its first message
    facts = run_json("report", AIRLINE)
    assert facts["groups"]["first_forks"] == {"user": 10}
    for entry in [*facts["groups"]["best"], *facts["groups"]["worst"]]:
        fork = entry["first_fork"]
        assert (fork["role"], fork["message"]) == ("user", 1)
        assert 1270 < fork["position"] < 1280
    largest = facts["near_misses"]["largest"][0]
    assert sorted(largest["rollouts"]) == ["task0-trial0", "task0-trial2"]
    assert (largest["position"], largest["message"], largest["role"]) == (1460, 5, "user")
    assert any("I want to use my certificates first" in text for text in largest["texts"])
