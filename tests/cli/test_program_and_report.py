"""The program and `report`: what they print, where, and how they exit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Qwen3Config

import prefixtree
from prefixtree.forest import PrefixForest
from prefixtree.sharing.measure import measure
from tests.support.chat_tokenizer import CHATML, save_tokenizer
from tests.support.cli_runs import run, run_json, write_rollouts
from tests.support.full import mostly
from tests.support.warm import run_warm

AIRLINE = Path(__file__).parents[3] / "shared" / "data" / "airline_rollouts.jsonl.gz"


@pytest.fixture
def rollout_file(tmp_path):
    return write_rollouts(tmp_path / "rollouts.jsonl")


# ---- the program ---------------------------------------------------------------------------------


def test_help_teaches():
    for command in ((), ("report",), ("verify",), ("demo",), ("bench",), ("doctor",)):
        result = run(*command, "--help")
        assert result.exit_code == 0
        assert "prefixtree" in result.output.split("Options")[0].split("Usage")[1].split("\n", 1)[1]


def test_version():
    assert run("--version").stdout == f"prefixtree {prefixtree.__version__}\n"


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["report"], ["report", "x", "--nonsense"], ["report", "nowhere"]]
)
def test_wrong_usage_exits_2(arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_an_interrupt_exits_130(monkeypatch, rollout_file):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("prefixtree.cli.console.read_rollouts", interrupted)
    result = run("report", rollout_file)
    assert result.exit_code == 130
    assert "Traceback" not in result.stderr


def test_help_and_report_do_not_import_transformers(rollout_file):
    for arguments in (["--help"], ["report", str(rollout_file), "--json"]):
        code = (
            "import sys; sys.argv = ['prefixtree', *sys.argv[1:]]\n"
            "from prefixtree.cli import main\n"
            "try: main()\n"
            "except SystemExit as e: assert e.code == 0\n"
            "assert not {'transformers', 'networkx', 'matplotlib'} & set(sys.modules)\n"
        )
        done = run_warm(code, *arguments)
        assert done.returncode == 0, done.stderr


def test_python_m(rollout_file):
    command = [sys.executable, "-m", "prefixtree", "report", str(rollout_file), "--json"]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert json.loads(result.stdout)["sequences"] == 4
    assert result.stderr == ""


# ---- report --------------------------------------------------------------------------------------


def test_measure_on_a_forest_counted_by_hand():
    # a root of 3 tokens; below it 2 tokens, a leaf of 1, and 4 tokens; a second tree of 1 token
    forest = PrefixForest.from_sequences(
        [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 8], [1, 2, 3, 9, 9, 9, 9], [7], [7]]
    )
    facts = measure(forest)
    assert facts["sequences"] == 6
    assert facts["tokens"] == {"replicated": 25, "distinct": 13, "ratio": 25 / 13}
    # pairs: n (n + 1) / 2 of 5, 7, 4, 7, 1, 1; then 6 + (4 + 5) + (6 + 7) + 4 + (4 + 5 + 6 + 7) + 1
    assert facts["attention"] == {
        "replicated_pairs": 15 + 28 + 10 + 28 + 1 + 1,
        "packed_pairs": 6 + 9 + 13 + 4 + 22 + 1,
        "flop_ratio": 83 / 55,
    }
    assert facts["nodes"] == 6
    assert facts["trees"] == 2
    assert facts["leaves"] == 4
    assert facts["levels"] == facts["depth"] == 3
    assert facts["branching"] == {"nodes": 1, "mean_children": 3.0, "max_children": 3}
    assert facts["node_length"] == {"min": 1, "median": 2.0, "mean": 13 / 6, "max": 4}
    assert facts["sequence_length"] == {"min": 1, "median": 4.5, "mean": 25 / 6, "max": 7}


def test_measure_without_any_sharing():
    facts = measure(PrefixForest.from_sequences([[1, 2], [3, 4]]))
    assert facts["tokens"]["ratio"] == facts["attention"]["flop_ratio"] == 1.0
    assert facts["branching"] == {"nodes": 0, "mean_children": 0.0, "max_children": 0}


def test_measure_does_not_overflow_int32():
    structure = PrefixForest.from_parents([-1], [200_000])
    assert measure(structure)["attention"]["packed_pairs"] == 200_000 * 200_001 // 2


def test_report(rollout_file):
    facts = run_json("report", rollout_file)
    assert (facts["file"], facts["per_turn"], facts["left_out"]) == (str(rollout_file), False, 0)
    assert facts["tokens"]["replicated"] == 4 * 46
    result = run("report", rollout_file)
    assert result.exit_code == 0
    assert "184" in result.stdout and "attention FLOP ratio" in result.stdout
    assert result.stderr == ""


def test_report_per_turn(rollout_file):
    facts = run_json("report", rollout_file, "--per-turn")
    assert facts["sequences"] == 8
    assert facts["tokens"]["replicated"] == 4 * (28 + 46)
    assert facts["tokens"]["distinct"] == run_json("report", rollout_file)["tokens"]["distinct"]


def test_both_ratios_are_told_where_turns_are_known(rollout_file, tmp_path):
    facts = run_json("report", rollout_file)
    per_turn = run_json("report", rollout_file, "--per-turn")
    assert facts["turns"] == per_turn["turns"]
    assert facts["turns"]["rollouts"] == 4
    for unit, alone in (("per_rollout", facts), ("per_turn", per_turn)):
        told = facts["turns"][unit]
        assert told == {name: alone[name] for name in ("sequences", "tokens", "attention")}
    words = " ".join(run("report", rollout_file).stdout.replace("│", "").split())
    assert "token ratio per turn 2.74x 296 / 108 tokens of 8 sequences (--per-turn)" in words
    words = " ".join(run("report", rollout_file, "--per-turn").stdout.replace("│", "").split())
    assert "token ratio per rollout 1.70x 184 / 108 tokens of 4 sequences (without" in words
    # a rollout without turns is in neither ratio; one turn each is no other unit
    with rollout_file.open("a") as file:
        file.write('{"token_ids": [1, 2]}\n{"token_ids": [7, 8], "loss_mask": [0, 0]}\n')
    assert run_json("report", rollout_file)["turns"] == facts["turns"]
    single = write_rows(tmp_path / "s.jsonl", {"prompt_ids": [1], "response_ids": [2]})
    assert run_json("report", single)["turns"] is None


def test_report_reads_standard_input(rollout_file):
    result = run("report", "-", "--json", input=rollout_file.read_bytes())
    assert json.loads(result.stdout)["sequences"] == 4


def test_broken_lines_are_left_out_and_said(rollout_file):
    with rollout_file.open("a") as file:
        file.write("broken\n" * 7)
    result = run("report", rollout_file, "--json")
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert facts["sequences"] == 4 and facts["left_out"] == 7
    lines = result.stderr.splitlines()
    assert len(lines) == 6
    assert lines[0].startswith(f"left out: {rollout_file}:5: not valid JSON")
    assert lines[-1] == "left out 7 broken line(s) (2 not shown); --strict stops at the first"


def test_strict_stops_at_the_first_broken_line(rollout_file):
    with rollout_file.open("a") as file:
        file.write("broken\n" * 7)
    result = run("report", rollout_file, "--strict")
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"prefixtree: {rollout_file}:5: not valid JSON")


def test_a_missing_file_is_one_line(tmp_path):
    result = run("report", tmp_path / "nowhere.jsonl")
    assert result.exit_code == 2
    assert result.stderr == (
        f"prefixtree: {tmp_path}/nowhere.jsonl: cannot be read: No such file or directory\n"
    )


@pytest.mark.skipif(not AIRLINE.exists(), reason=f"needs {AIRLINE}, which is not in the project")
@pytest.mark.parametrize(
    "options, sequences, distinct, replicated",
    [(["--per-turn"], 579, 155_958, 2_135_816), ([], 40, 156_918, 206_981)],
)
def test_report_on_real_rollouts(options, sequences, distinct, replicated):
    facts = run_json("report", AIRLINE, *options)
    assert facts["sequences"] == sequences
    assert facts["tokens"]["distinct"] == distinct
    assert facts["tokens"]["replicated"] == replicated
    assert f"{distinct:,}" in run("report", AIRLINE, *options).stdout


# ---- groups --------------------------------------------------------------------------------------


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_groups_counted_by_hand(tmp_path):
    path = write_rows(
        tmp_path / "r.jsonl",
        {"group": "a", "token_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1]},
        {"group": "a", "token_ids": [1, 2, 5], "loss_mask": [0, 0, 1]},
        {"group": "b", "token_ids": [1, 2, 9, 9], "loss_mask": [0, 0, 0, 0]},
        {"group": "b", "token_ids": [1, 2, 9], "loss_mask": [0, 0, 0]},
        {"group": "b", "token_ids": [1, 7], "loss_mask": [0, 0]},
        {"group": "c", "token_ids": [6, 6]},
        {"token_ids": [1, 2, 3]},
    )
    groups = run_json("report", path)["groups"]
    # distinct a 5, b 5, c 2, the rollout without a group 3; all in one forest 10
    assert groups["groups"] == 3 and groups["across"] == 5 + 5 + 2 + 3 - 10
    entries = {e["group"]: e for e in [*groups["best"], *groups["worst"]]}
    assert list(entries) == ["b", "a", "c"]
    assert {g: (e["sequences"], e["replicated"], e["distinct"]) for g, e in entries.items()} == {
        "a": (2, 7, 5),
        "b": (3, 9, 5),
        "c": (1, 2, 2),
    }
    assert entries["b"]["ratio"] == 9 / 5
    assert groups["ratio"] == {
        "min": 1.0,
        "median": 7 / 5,
        "mean": pytest.approx((9 / 5 + 7 / 5 + 1) / 3),
        "max": 9 / 5,
    }
    # b forks twice: after one token, and not where a sequence merely ends
    assert groups["first_forks"] == {"sampled": 1, "given": 1}
    assert entries["a"]["first_fork"]["position"] == 2
    assert entries["b"]["first_fork"]["position"] == 1
    assert set(entries["b"]["first_fork"]["texts"]) == {"2 9 9", "7"}
    assert entries["c"]["first_fork"] is None


def test_groups_that_share_nothing_fork_at_the_start(tmp_path):
    rows = [{"group": g, "token_ids": [10 * g + i, 1]} for g in range(30) for i in range(3)]
    groups = run_json("report", write_rows(tmp_path / "r.jsonl", *rows))["groups"]
    assert groups["groups"] == 30 and groups["across"] == 0
    assert len(groups["best"]) == len(groups["worst"]) == 5
    assert all(e["first_fork"]["position"] == 0 for e in groups["best"])


def test_without_groups_there_are_none(tmp_path):
    path = write_rows(tmp_path / "r.jsonl", {"token_ids": [1, 2]})
    assert run_json("report", path)["groups"] is None
    assert "sharing across groups" not in run("report", path).stdout


def test_groups_are_printed(rollout_file):
    text = " ".join(run("report", rollout_file).stdout.split())
    assert "2 groups: token ratio 1.44x in the mean" in text
    assert "sharing across groups saves another 20 tokens" in text
    assert "what parts the rollouts of a group first: not sampled by the policy (2)" in text


# ---- chats ---------------------------------------------------------------------------------------


def test_chats_through_a_tokenizer(tmp_path):
    folder = save_tokenizer(tmp_path / "tokenizer", CHATML)
    talks = [
        [
            {"role": "user", "content": f"{hour}:00. where is the red kettle?"},
            {"role": "assistant", "content": "on shelf three, i will fetch it"},
        ]
        for hour in (1, 2)
    ]
    path = write_rows(tmp_path / "r.jsonl", *({"messages": t, "group": "g"} for t in talks))
    facts = run_json("report", path, "--tokenizer", folder, "--per-turn")
    assert facts["sequences"] == 2 and facts["left_out"] == 0
    (miss,) = facts["near_misses"]["largest"]
    assert (miss["kind"], miss["role"], miss["lengths"]) == ("given", "user", [1, 1])
    assert sorted(miss["texts"]) == ["1", "2"]
    assert miss["before"].endswith("<|im_start|>user\n") and miss["after"].startswith(":00. where")
    assert miss["tokens_to_win"] > 50
    text = run("report", path, "--tokenizer", folder).stdout
    assert "':00. where is t" in text
    without = run("report", path)
    assert without.exit_code == 2 and "--tokenizer" in without.stderr


def test_the_tokenizer_of_a_report_is_the_models(tmp_path):
    folder = save_tokenizer(tmp_path / "model", CHATML)
    config = Qwen3Config(vocab_size=300, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    config.save_pretrained(folder)
    talk = [{"role": "user", "content": "where?"}, {"role": "assistant", "content": "here"}]
    path = write_rows(tmp_path / "r.jsonl", {"messages": talk}, {"messages": talk})
    for model in (folder, folder / "config.json"):
        facts = run_json("report", path, "--model", model)
        assert facts["sequences"] == 2 and facts["estimate"]["model_type"] == "qwen3"
    # of a model without one, nothing else is asked
    bare = tmp_path / "bare"
    config.save_pretrained(bare)
    assert "--tokenizer" in run("report", path, "--model", bare).stderr
    same = list(range(3, 40))
    # its text is quoted if the token ids are the model's
    for first, is_text in ((65, True), (2**20, False)):
        rows = [{"token_ids": [1, first + i, *same], "group": "g"} for i in range(2)]
        path = write_rows(tmp_path / "ids.jsonl", *rows)
        (miss,) = run_json("report", path, "--model", folder)["near_misses"]["largest"]
        assert miss["is_text"] == is_text


def test_token_ids_that_the_tokenizer_does_not_have(tmp_path):
    folder = save_tokenizer(tmp_path / "tokenizer", CHATML)
    same = list(range(3, 40))
    rows = [{"token_ids": [1, 2**40 + i, *same], "group": "g"} for i in range(2)]
    path = write_rows(tmp_path / "r.jsonl", *rows)
    result = run("report", path, "--tokenizer", folder)
    assert result.exit_code == 2 and "Traceback" not in result.stderr
    assert "cannot decode the token id 10995116277" in result.stderr


def test_a_template_that_rewrites_turns_is_said_so(tmp_path):
    folder = save_tokenizer(tmp_path / "tokenizer", CHATML)
    talk, answer = [], "the red kettle is on shelf "
    for number in ("one", "two"):
        talk.append({"role": "user", "content": number})
        talk.append({"role": "assistant", "content": number + answer, "reasoning_content": number})
    path = write_rows(tmp_path / "r.jsonl", {"messages": talk})
    whole = run("report", path, "--tokenizer", folder)
    assert whole.exit_code == 0
    assert "the chat template writes earlier turns anew" in whole.stderr
    turns = run("report", path, "--tokenizer", folder, "--per-turn", "--json")
    facts = json.loads(turns.stdout)
    assert turns.stderr == "" and facts["sequences"] == 2
    # the second turn's history has the first without its thinking, which hides the answer
    (miss,) = facts["near_misses"]["largest"]
    assert miss["kind"] == "thinking" and sorted(miss["texts"]) == ["", "<think>one</think>"]
    assert miss["tokens_to_win"] == len("one" + answer) + 1


# ---- output that cannot be written ---------------------------------------------------------------


def run_program(*arguments, stdout):
    """The program in a process of its own, whose stdout is a real file or pipe."""
    command = [sys.executable, "-m", "prefixtree", *map(str, arguments)]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)


needs_dev_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")


@pytest.mark.full
@needs_dev_full
def test_a_full_disk_is_one_line_and_not_a_red_check(rollout_file):
    with open("/dev/full", "w") as full:
        done = run_program("report", rollout_file, "--json", stdout=full)
    assert done.stderr == "prefixtree: standard output: No space left on device\n"
    assert done.returncode == 2


@needs_dev_full
@pytest.mark.parametrize("ending", mostly([".png", ".pdf", ".svg"], [".png"]))
def test_an_image_for_which_there_is_no_room(rollout_file, tmp_path, ending):
    image = tmp_path / f"full{ending}"
    image.symlink_to("/dev/full")
    result = run("report", rollout_file, "--plot", image)
    assert result.exit_code == 2
    assert result.stderr == f"prefixtree: {image}: cannot be written: No space left on device\n"


@pytest.mark.full
def test_a_reader_that_leaves_ends_the_program_quietly(rollout_file):
    """`prefixtree report FILE | head -1`: the exit code of a program that SIGPIPE ends."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        done = run_program("report", rollout_file, stdout=pipe)
    assert done.stderr == ""
    assert done.returncode == 141


def test_other_errors_of_the_system_name_their_file(monkeypatch, rollout_file):
    def fails(*_, **__):
        raise PermissionError(13, "Permission denied", "somewhere")

    monkeypatch.setattr("prefixtree.sharing.measure.measure", fails)
    result = run("report", rollout_file)
    assert result.exit_code == 2
    assert result.stderr == "prefixtree: somewhere: Permission denied\n"


# ---- recorded routes -----------------------------------------------------------------------------


def _routes(*experts):
    """Two layers of two experts per token: a number and the next one."""
    return [[[e, e + 1], [e, e + 1]] for e in experts]


def test_what_recorded_routes_cost(tmp_path):
    same = {"token_ids": [1, 2, 3, 4], "routes": _routes(0, 0, 0, 0), "turn_ends": [3, 4]}
    other = {"token_ids": [1, 2, 3, 5], "routed_experts": _routes(0, 2, 0), "turn_ends": [3, 4]}
    path = write_rows(tmp_path / "r.jsonl", same, same, other, {"token_ids": [1, 2]})
    assert run_json("report", path)["routes"] == {
        "sequences": 3,
        "layers": 2,
        "experts_per_token": 2,
        "distinct": 7,
        "ratio": 12 / 7,
        "distinct_without_routes": 5,
        "ratio_without_routes": 12 / 5,
    }
    text = " ".join(run("report", path).stdout.split())
    assert "with recorded routes" in text and "1.71x" in text
    assert "7 distinct tokens of 3: 2 are shared no more" in text
    # a turn's sequence ends at a token whose route is known
    per_turn = run_json("report", path, "--per-turn")["routes"]
    assert (per_turn["sequences"], per_turn["distinct"]) == (6, 7)
    plain = write_rows(tmp_path / "plain.jsonl", {"token_ids": [1, 2]})
    assert run_json("report", plain)["routes"] is None
    assert "recorded routes" not in run("report", plain).stdout


def test_routes_that_are_not_of_one_model(tmp_path):
    one = {"token_ids": [1, 2], "routes": _routes(0, 0)}
    for wrong, message in (
        ([[[0, 1]]] * 2, "has 1 layers of 2 experts per token, and routes[0] 2 of 2"),
        # of a token that the engine did not record
        ([*_routes(0), [[0, 0], [0, 1]]], None),
        ([[[3, 3], [0, 1]]] * 2, "routes[1][0] names an expert twice"),
    ):
        path = write_rows(tmp_path / "r.jsonl", one, {**one, "routes": wrong})
        result = run("report", path)
        assert result.exit_code == (0 if message is None else 2)
        assert message is None or message in " ".join(result.stderr.split())
