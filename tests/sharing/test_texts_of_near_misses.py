"""Near misses as a reader sees them: their text, who wrote it, and what to do."""

import json

import pytest

from prefixtree.sharing.differences import Difference
from tests.sharing.conftest import Tokens, Words, chat
from tests.support.chat_tokenizer import CHATML, save_tokenizer
from tests.support.cli_runs import run, run_json


def test_a_tokenizer_gives_the_text(find):
    new = Tokens()
    system, rest = new(20), new(50)
    rows = [{"token_ids": [*system, stamp, *rest]} for stamp in (700, 701)]
    difference = find(*rows, tokenizer=Words()).shown[0].difference
    assert difference.is_text and set(difference.texts) == {"700", "701"}
    assert difference.before.endswith("18 19") and difference.after.startswith("20 21")


@pytest.mark.parametrize(
    "own, kind",
    [(([1001], [1002]), "re-tokenised"), (([5000, 1003], []), "thinking"), (([1], [2]), "sampled")],
)
def test_the_text_tells_retokenised_turns_and_thinking(find, own, kind):
    new = Tokens()
    system, rest = new(20), new(50)
    rows = []
    for tokens in own:
        ids = [*system, *tokens, *rest]
        rows.append({"token_ids": ids, "loss_mask": [0] * 20 + [1] * (len(ids) - 20)})
    assert find(*rows, tokenizer=Words()).shown[0].difference.kind == kind


@pytest.mark.parametrize(
    "before, own, after, kind",
    [
        ([], ([1004, 5000, 1003], []), [], "thinking"),
        # the block's end is written in both, as some templates do
        ([], ([1004, 5000], []), [1003], "thinking"),
        # an empty block is none
        ([1004], ([5000], []), [1003], "thinking"),
        ([], ([1004, 5000, 1003], [1004, 1003]), [], "thinking"),
        # both think; one of them is done before they run on alike
        ([1004], ([5000, 1003, 5001], [5002]), [], "sampled"),
        ([], ([1004, 5000, 1003], [1004, 5001]), [1003], "sampled"),
        ([1004, 5003], ([5000], []), [1003], "sampled"),
        # one of them does not, but says something else too
        ([], ([1004, 5000, 1003, 5001], [5002]), [], "sampled"),
    ],
)
def test_thinking_is_named_where_one_of_them_lacks_it_and_nothing_else(
    find, before, own, after, kind
):
    new = Tokens()
    system, rest = new(20), new(50)
    rows = []
    for tokens in own:
        ids = [*system, *before, *tokens, *after, *rest]
        rows.append({"token_ids": ids, "loss_mask": [0] * 20 + [1] * (len(ids) - 20)})
    assert find(*rows, tokenizer=Words()).shown[0].difference.kind == kind


def test_what_the_policy_sampled_in_an_earlier_row_cannot_be_won(find):
    # a row a turn, in which earlier turns are prompt: none of them is scored in the longest rows
    new = Tokens()
    system, question = new(20), new(90)
    rows = []
    for _ in range(2):
        first, second = new(8), new(8)
        rows.append({"prompt_ids": system, "response_ids": first})
        rows.append({"prompt_ids": [*system, *first, *question], "response_ids": second})
    found = find(*rows)
    assert (found.win, found.win_sampled) == (0, 90)
    assert [miss.difference.kind for miss in found.shown] == ["sampled"]
    # and what can be won, though less, stands above
    prompt, rest = new(10), new(40)
    rows += [{"prompt_ids": [*prompt, *new(2), *rest], "response_ids": new(5)} for _ in range(2)]
    found = find(*rows)
    assert [(miss.win, miss.difference.can_be_won) for miss in found.shown] == [
        (40, True),
        (90, False),
    ]
    assert [miss.win for miss in find(*rows, most=1).shown] == [40]


def test_chats_whose_template_strips_thinking(tmp_path):
    tokenizer = save_tokenizer(tmp_path / "tokenizer", CHATML)
    path = tmp_path / "chats.jsonl"
    rows = []
    for thought, answer in (("so it is the first one", "Yes."), ("perhaps another", "Surely not!")):
        talk = [
            *chat("Answer.", "Is this the parcel that I ordered? It looks small.", answer)[:2],
            {"role": "assistant", "content": answer, "reasoning_content": thought},
            {"role": "user", "content": "Are you sure of that? Please look again, then tell me."},
            {"role": "assistant", "content": answer, "reasoning_content": thought},
        ]
        rows.append({"messages": talk, "group": "g"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--per-turn", "--tokenizer", tokenizer)
    facts = run_json("report", path, *options)["near_misses"]
    # the second turns run the second question again, behind answers that the policy sampled
    (miss,) = facts["largest"]
    assert sorted(miss["rollouts"]) == ["line 1 turn 1", "line 2 turn 1"]
    assert (miss["kind"], miss["can_be_won"]) == ("sampled", False)
    assert facts["tokens_to_win"] == 0 < facts["tokens_to_win_at_sampled_forks"]
    text = " ".join(run("report", path, *options).stdout.split())
    assert "tokens run again, which cannot be won, at token" in text


def test_turns_of_one_rollout_that_differ_were_written_anew(tmp_path):
    tokenizer = save_tokenizer(tmp_path / "tokenizer", CHATML)
    path = tmp_path / "chats.jsonl"
    answer = "I looked at all of the shelves, and this is the only one with your name on it."
    talk = [
        *chat("Answer.", "Which one is it?", answer)[:2],
        {"role": "assistant", "content": answer, "reasoning_content": "hm"},
        {"role": "user", "content": "Thanks."},
        {"role": "assistant", "content": "Bye."},
    ]
    path.write_text(json.dumps({"messages": talk}) + "\n")
    options = ("--per-turn", "--tokenizer", tokenizer)
    (miss,) = run_json("report", path, *options)["near_misses"]["largest"]
    assert (miss["kind"], miss["can_be_won"]) == ("thinking", True)
    assert miss["tokens_to_win"] >= len(answer)


def chat_rows(messages, ends=((80,), (80,))):
    new = Tokens()
    prompt, rest = new(20), new(50)
    return [
        {"token_ids": [*prompt, *new(5), *rest, *new(5)], "messages": m, "turn_ends": list(e)}
        for m, e in zip(messages, ends, strict=True)
    ]


def test_the_files_messages_give_the_text(find):
    said = [chat("be kind", f"It is {hour}:00 here. Where is my parcel?", "ok") for hour in (9, 17)]
    difference = find(*chat_rows(said)).shown[0].difference
    assert (difference.role, difference.message, difference.kind) == ("user", 1, "given")
    assert set(difference.texts) == {"9", "17"}
    assert difference.before == "It is " and difference.after == ":00 here. Where is my parcel?"


def test_messages_that_do_not_fit_the_turns_are_not_quoted(find):
    # by its turn_ends an assistant turn is over before the fork, by the messages none is
    said = [chat("be kind", question, "ok") for question in "12"]
    difference = find(*chat_rows(said, ends=((10, 80), (10, 80)))).shown[0].difference
    assert not difference.is_text and difference.role is None


def test_equal_messages_are_not_quoted(find):
    difference = find(*chat_rows([chat("s", "q", "a")] * 2)).shown[0].difference
    assert not difference.is_text and difference.kind == "unknown"


def test_tool_calls_and_parts_are_text(find):
    call = {"id": "call_1", "function": {"name": "find", "arguments": '{"x": 1}'}}
    other = {"id": "call_2", "function": {"name": "find", "arguments": '{"x": 2}'}}
    said = []
    for c in (call, other):
        parts = [{"type": "text", "text": "hello"}]
        said.append(
            [
                {"role": "user", "content": parts},
                {"role": "assistant", "content": None, "tool_calls": [c]},
            ]
        )
    difference = find(*chat_rows(said)).shown[0].difference
    assert difference.message == 1 and difference.kind == "sampled"
    assert set(difference.texts) == {"1", "2"} and difference.before == 'find({"x": '


def test_every_kind_says_what_to_do():
    def remedy(kind, role=None, message=None):
        return Difference(0, kind, role, message, None, "", ("", ""), "", True).remedy

    for kind in ("question", "given", "unknown", "rewritten", "re-tokenised", "thinking"):
        assert remedy(kind)
    assert remedy("sampled") is remedy("mixed") is None
    # a user's or a tool's words, but not those of the prompt
    assert remedy("given", "tool", 3) == remedy("given", "user", 5) != remedy("given", "user", 0)
    assert "fixed seed" in remedy("given", "tool", 3)
