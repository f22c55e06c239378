"""Reading rollout files: every accepted form, and a message of its own for every broken one."""

import gzip
import io
import json

import numpy as np
import pytest

from prefixtree.errors import InputError
from prefixtree.rollouts import expand_turns, read_rollouts
from tests.rollouts.conftest import as_lists

# ---- what is accepted ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rollouts.jsonl", "rollouts.jsonl.gz"])
def test_whole_rollouts(write, name):
    path = write(
        {
            "id": "a",
            "group": "t0",
            "token_ids": [1, 2, 3],
            "loss_mask": [0, 1, 1],
            "turn_ends": [3],
        },
        {"id": 7, "group": "t0", "input_ids": [1, 2], "loss_mask": [False, True], "reward": 1.0},
        name=name,
    )
    rollouts = read_rollouts(path, strict=True)
    assert as_lists(rollouts.sequences) == [[1, 2, 3], [1, 2]]
    assert all(sequence.dtype == np.int64 for sequence in rollouts.sequences)
    assert as_lists(rollouts.loss_masks) == [[False, True, True], [False, True]]
    assert rollouts.ids == ["a", "7"]
    assert rollouts.groups == ["t0", "t0"]
    assert rollouts.lines == [1, 2]
    assert rollouts.problems == ()


@pytest.mark.parametrize("field", ["response_ids", "completion_ids"])
def test_prompt_and_response_imply_the_loss_mask(write, field):
    rollouts = read_rollouts(write({"prompt_ids": [5, 6], field: [7, 8, 9]}), strict=True)
    assert as_lists(rollouts.sequences) == [[5, 6, 7, 8, 9]]
    assert as_lists(rollouts.loss_masks) == [[False, False, True, True, True]]
    assert as_lists(rollouts.turn_ends) == [[5]]


def test_a_given_loss_mask_wins_over_the_implied_one(write):
    row = {"prompt_ids": [5, 6], "response_ids": [7, 8], "loss_mask": [0, 1, 0, 1]}
    rollouts = read_rollouts(write(row), strict=True)
    assert as_lists(rollouts.loss_masks) == [[False, True, False, True]]
    assert as_lists(rollouts.turn_ends) == [[2, 4]]


def test_without_masks_groups_and_ids(write):
    rollouts = read_rollouts(write({"token_ids": [1]}, {"token_ids": [2, 3]}), strict=True)
    assert rollouts.loss_masks is None
    assert rollouts.groups is None
    assert rollouts.turn_ends == [None, None]
    assert rollouts.ids == ["line 1", "line 2"]


def test_a_rollout_without_a_mask_among_others_is_scored_whole(write):
    path = write({"token_ids": [1, 2], "loss_mask": [0, 1]}, {"token_ids": [1, 2, 3]})
    rollouts = read_rollouts(path, strict=True)
    assert as_lists(rollouts.loss_masks) == [[False, True], [True, True, True]]
    # scored whole, but where its turns end nobody said
    assert rollouts.turn_ends[1] is None


def test_null_fields_count_as_absent(write):
    row = {"token_ids": [1], "loss_mask": None, "turn_ends": None, "id": None, "group": None}
    rollouts = read_rollouts(write(row), strict=True)
    assert rollouts.loss_masks is None and rollouts.groups is None and rollouts.ids == ["line 1"]


@pytest.mark.parametrize("name", ["rollouts.json", "rollouts.json.gz"])
def test_a_json_array(write, name):
    """On one line or on many; its entries are numbered like lines."""
    rows = [{"token_ids": [1, 2]}, 17, {"token_ids": [3], "id": "a"}]
    for text in (json.dumps(rows), "\n" + json.dumps(rows, indent=1)):
        rollouts = read_rollouts(write(text, name=name))
        assert as_lists(rollouts.sequences) == [[1, 2], [3]]
        assert (rollouts.ids, rollouts.lines) == (["line 1", "a"], [1, 3])
        (problem,) = rollouts.problems
        assert problem.endswith(":2: expected a JSON object, got the number 17")


def test_lines_of_which_the_first_is_a_list_are_no_array(write):
    rollouts = read_rollouts(write("[1, 2]", {"token_ids": [1]}))
    assert as_lists(rollouts.sequences) == [[1]]
    (problem,) = rollouts.problems
    assert problem.endswith(":1: expected a JSON object, got a list")


def test_blank_lines_are_no_lines(write):
    path = write({"token_ids": [1]}, "", {"token_ids": [2]}, "  ", "", "")
    rollouts = read_rollouts(path, strict=True)
    assert rollouts.lines == [1, 3]


def test_the_same_tokens_under_both_names(write):
    path = write({"token_ids": [1, 2], "input_ids": [1, 2]})
    assert as_lists(read_rollouts(path, strict=True).sequences) == [[1, 2]]


@pytest.mark.parametrize("field", ["routes", "routed_experts"])
@pytest.mark.parametrize("rows", [3, 2])
def test_recorded_routes(write, field, rows):
    """Engines record none for the last token; turns are cut with their routes."""
    routes = [[[token, 9], [token, 8]] for token in range(rows)]
    row = {"token_ids": [1, 2, 3], field: routes, "turn_ends": [2, 3]}
    rollouts = read_rollouts(write(row, {"token_ids": [1]}), strict=True)
    assert rollouts.routes[0].tolist() == routes and rollouts.routes[1] is None
    turns = expand_turns(rollouts.first(1), strict=True)
    assert as_lists(turns.routes) == [routes[:2], routes]


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ([[[0]]], r"routes has 1 entries for 3 token ids; expected one each, or one less"),
        ([[[0]]] * 4, r"routes has 4 entries for 3 token ids"),
        ([[[0]], [[0, 1]], [[0]]], "routes is ragged; expected as many layers for every token"),
        ([[0]] * 3, r"\[experts per token\], got shape \[3, 1\] of int64"),
        ([[[0.5]]] * 3, "of float64"),
        ("x", r"got shape \[\] of <U1"),
    ],
)
def test_broken_routes(write, routes, message):
    with pytest.raises(InputError, match=message):
        read_rollouts(write({"token_ids": [1, 2, 3], "routes": routes}), strict=True)


@pytest.mark.parametrize("compress", [False, True])
def test_standard_input(monkeypatch, compress):
    data = b'{"token_ids": [4, 5]}\n'
    stdin = io.TextIOWrapper(io.BytesIO(gzip.compress(data) if compress else data))
    monkeypatch.setattr("sys.stdin", stdin)
    rollouts = read_rollouts("-", strict=True)
    assert as_lists(rollouts.sequences) == [[4, 5]]
    assert rollouts.source == "<stdin>"


def test_watch_sees_the_file_and_its_size(write):
    path = write({"token_ids": [1]}, name="r.jsonl.gz")
    seen = []

    def watch(file, size):
        seen.append(size)
        return file

    read_rollouts(path, watch=watch)
    assert seen == [path.stat().st_size]


# ---- what is refused -----------------------------------------------------------------------------

BROKEN = {
    "bad json": ('{"token_ids": [1, 2}', "not valid JSON: expecting ',' delimiter at column 20"),
    "cut off": ('{"token_ids": [1, 2', "not valid JSON: expecting ',' delimiter at column 20"),
    "not text": (b'{"token_ids": [1], "id": "\xff"}', "not valid JSON: 'utf-8' codec can't decode"),
    "deep": ("[" * 100_000, "not usable JSON: nested too deeply"),
    "list": ("[1, 2]", "expected a JSON object, got a list"),
    "number": ("17", "expected a JSON object, got the number 17"),
    "no tokens": (
        {"id": "a", "text": "hi"},
        "expected token_ids, input_ids, prompt_ids with response_ids or completion_ids, messages, "
        "conversations, prompt with completion, or chosen with rejected; got the fields id, text",
    ),
    "no field": ("{}", "got the fields none at all"),
    "no response": ({"prompt_ids": [1]}, "got the fields prompt_ids"),
    "no prompt": ({"response_ids": [1]}, "got the fields response_ids"),
    "two kinds": ({"token_ids": [1], "input_ids": [2]}, "token_ids and input_ids differ"),
    "text tokens": ({"token_ids": "1 2"}, "token_ids must be a list of integers, got a string"),
    "null tokens": ({"token_ids": None}, "expected token_ids, input_ids, prompt_ids with"),
    "float": ({"token_ids": [1, 2.0]}, "token_ids[1] is 2.0; expected an integer"),
    "boolean": ({"input_ids": [1, True]}, "input_ids[1] is True; expected an integer"),
    "nested": ({"token_ids": [[1, 2]]}, "token_ids[0] is [1, 2]; expected an integer"),
    "wide": ({"token_ids": [2**70]}, "token_ids holds an integer that needs more than 64 bits"),
    "padding": ({"token_ids": [1, -100]}, "token_ids[1] is -100; token ids are >= 0"),
    "bad response": (
        {"prompt_ids": [1], "response_ids": [2, "x"]},
        "response_ids[1] is 'x'; expected an integer",
    ),
    "empty": ({"token_ids": []}, "has no token; a sequence has at least one"),
    "empty parts": ({"prompt_ids": [], "response_ids": []}, "has no token"),
    "mask kind": ({"token_ids": [1], "loss_mask": 1}, "loss_mask must be a list of 0 and 1, got"),
    "mask length": (
        {"token_ids": [1, 2, 3], "loss_mask": [1, 1]},
        "loss_mask has 2 entries for 3 token ids; expected one each",
    ),
    "response mask": (
        {"prompt_ids": [1, 2], "response_ids": [3], "loss_mask": [1]},
        "loss_mask has 1 entries for 3 token ids; expected one each",
    ),
    "mask value": ({"token_ids": [1, 2], "loss_mask": [0, 0.5]}, "loss_mask[1] is 0.5; expected 0"),
    "mask text": ({"token_ids": [1], "loss_mask": ["1"]}, "loss_mask[0] is '1'; expected 0 or 1"),
    "ends kind": ({"token_ids": [1], "turn_ends": 1}, "turn_ends must be a list of integers, got"),
    "ends float": ({"token_ids": [1], "turn_ends": [1.0]}, "turn_ends[0] is 1.0; expected an int"),
    "ends zero": ({"token_ids": [1], "turn_ends": [0]}, "turn_ends[0] is 0; expected 1 to 1"),
    "ends past": ({"token_ids": [1, 2], "turn_ends": [1, 3]}, "turn_ends[1] is 3; expected 1 to 2"),
    "ends order": (
        {"token_ids": [1, 2, 3], "turn_ends": [1, 3, 3]},
        "turn_ends must ascend, got 3 after 3 at [2]",
    ),
    "group": ({"token_ids": [1], "group": ["a"]}, "group must be a string or an integer, got a li"),
    "id": ({"token_ids": [1], "id": {}}, "id must be a string or an integer, got an object"),
}


@pytest.mark.parametrize("line, message", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_line_is_named(write, line, message):
    path = write({"token_ids": [1]}, line, {"token_ids": [2]})

    rollouts = read_rollouts(path)
    assert as_lists(rollouts.sequences) == [[1], [2]]
    (problem,) = rollouts.problems
    assert problem.startswith(f"{path}:2: ")
    assert message in problem
    assert len(problem) < 300

    with pytest.raises(InputError) as caught:
        read_rollouts(path, strict=True)
    assert str(caught.value) == problem


def test_nothing_left(write):
    path = write('{"token_ids": []}', "nonsense")
    with pytest.raises(
        InputError, match=r"no usable rollout, 2 broken line\(s\), the first: .*:1:"
    ):
        read_rollouts(path)


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.jsonl.gz"])
def test_an_empty_file(write, name):
    with pytest.raises(InputError, match="holds no rollout"):
        read_rollouts(write("", name=name))


def test_a_missing_file(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.jsonl: cannot be read: No such file"):
        read_rollouts(tmp_path / "nowhere.jsonl")


def test_a_directory(tmp_path):
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        read_rollouts(tmp_path)


def random_lines(count):
    rng = np.random.default_rng(0)
    return [{"token_ids": rng.integers(0, 100_000, 400).tolist()} for _ in range(count)]


def test_a_truncated_gzip_is_an_error_even_when_not_strict(write):
    path = write(*random_lines(60), name="r.jsonl.gz")
    path.write_bytes(path.read_bytes()[:-4000])
    with pytest.raises(InputError, match=r"ends too early, after line \d\d; the file is truncated"):
        read_rollouts(path)


def test_a_damaged_gzip(write):
    path = write(*random_lines(60), name="r.jsonl.gz")
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 50] = bytes(50)
    path.write_bytes(data)
    with pytest.raises(InputError, match="the gzip stream is damaged after line"):
        read_rollouts(path)


# ---- per turn ------------------------------------------------------------------------------------


def test_turns_by_turn_ends(write):
    path = write(
        {"id": "a", "group": 1, "token_ids": [1, 2, 3, 4, 5], "turn_ends": [2, 4]},
        {"id": "b", "group": 2, "token_ids": [1, 2], "turn_ends": [2]},
    )
    turns = expand_turns(read_rollouts(path, strict=True), strict=True)
    assert as_lists(turns.sequences) == [[1, 2], [1, 2, 3, 4], [1, 2]]
    assert turns.ids == ["a turn 0", "a turn 1", "b turn 0"]
    assert turns.groups == [1, 1, 2]
    assert turns.lines == [1, 1, 2]
    assert turns.loss_masks is None


def test_turns_by_the_runs_of_the_loss_mask(write):
    mask = [1, 0, 1, 1, 0, 0, 1]
    path = write({"token_ids": [1, 2, 3, 4, 5, 6, 7], "loss_mask": mask})
    turns = expand_turns(read_rollouts(path, strict=True), strict=True)
    assert as_lists(turns.sequences) == [[1], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7]]
    # each turn keeps the rollout's mask up to its end: earlier turns are scored again
    assert as_lists(turns.loss_masks) == [
        [True],
        [True, False, True, True],
        [True, False, True, True, False, False, True],
    ]


def test_turn_ends_win_over_the_loss_mask(write):
    path = write({"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "turn_ends": [2, 3]})
    turns = expand_turns(read_rollouts(path, strict=True), strict=True)
    assert as_lists(turns.sequences) == [[1, 2], [1, 2, 3]]
    assert as_lists(turns.loss_masks) == [[False, True], [False, True, True]]


@pytest.mark.parametrize(
    "row, message",
    [
        ({"token_ids": [1, 2]}, "has neither turn_ends nor loss_mask"),
        ({"token_ids": [1, 2], "loss_mask": [0, 0]}, "has no assistant turn"),
        ({"token_ids": [1, 2], "turn_ends": []}, "has no assistant turn"),
        ({"prompt_ids": [1], "response_ids": []}, "has no assistant turn"),
    ],
)
def test_unknown_turns_are_a_broken_line(write, row, message):
    path = write("broken", {"token_ids": [1, 2, 3], "turn_ends": [3]}, row)
    rollouts = read_rollouts(path)
    turns = expand_turns(rollouts)
    assert as_lists(turns.sequences) == [[1, 2, 3]]
    assert len(turns.problems) == 2
    assert turns.problems[0] == rollouts.problems[0]
    assert turns.problems[1].startswith(f"{path}:3: {message}")
    with pytest.raises(InputError, match=f":3: {message}"):
        expand_turns(rollouts, strict=True)


def test_no_turn_at_all(write):
    rollouts = read_rollouts(write({"token_ids": [1, 2]}))
    with pytest.raises(InputError, match="no usable assistant turn"):
        expand_turns(rollouts)


# ---- choosing ------------------------------------------------------------------------------------


def test_first_groups_keeps_whole_groups_in_file_order(write):
    rows = [{"token_ids": [i + 1], "group": g} for i, g in enumerate("abacbd")]
    rollouts = read_rollouts(write(*rows), strict=True)
    chosen = rollouts.first_groups(2)
    assert as_lists(chosen.sequences) == [[1], [2], [3], [5]]
    assert chosen.groups == ["a", "b", "a", "b"]
    assert len(rollouts.first_groups(9)) == 6


def test_first_groups_needs_groups(write):
    with pytest.raises(InputError, match=":1: has no group"):
        read_rollouts(write({"token_ids": [1]})).first_groups(1)
    some = read_rollouts(write({"token_ids": [1], "group": 0}, {"token_ids": [2]}))
    with pytest.raises(InputError, match=":2: has no group"):
        some.first_groups(1)


def test_first(write):
    rows = [{"token_ids": [i], "loss_mask": [1], "group": i, "id": f"r{i}"} for i in range(4)]
    rollouts = read_rollouts(write(*rows), strict=True)
    two = rollouts.first(2)
    assert len(two) == 2 and two.ids == ["r0", "r1"] and two.groups == [0, 1]
    assert len(two.loss_masks) == len(two.turn_ends) == len(two.lines) == 2
    assert len(rollouts.first(100)) == 4
