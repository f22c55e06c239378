"""Chats as data sets have them: TRL's prompt with completion, pairs, ShareGPT, verl's prompts."""

import json

import pytest

from prefixtree.errors import InputError
from prefixtree.rollouts import expand_turns, read_rollouts
from tests.rollouts.conftest import as_lists
from tests.support.cli_runs import run_json

ASK = {"role": "user", "content": "where is it?"}
GUESS = {"role": "assistant", "content": "on shelf 2"}
AGAIN = {"role": "user", "content": "no"}
FOUND = {"role": "assistant", "content": "on shelf 3"}
LOST = {"role": "assistant", "content": "i do not know"}
SHAREGPT = {"user": "human", "assistant": "gpt"}


def sharegpt(*messages):
    return [{"from": SHAREGPT[m["role"]], "value": m["content"]} for m in messages]


def scored(rollouts, tokenizer):
    """The text that each rollout's loss mask selects."""
    pairs = zip(rollouts.sequences, rollouts.loss_masks, strict=True)
    return [tokenizer.decode(tokens[mask].tolist()) for tokens, mask in pairs]


def test_prompt_and_completion(read, chat_tokenizer):
    row = {"prompt": [ASK, GUESS, AGAIN], "completion": [FOUND], "label": True, "id": "a"}
    rollouts, whole = read(row), read({"messages": [ASK, GUESS, AGAIN, FOUND]})
    assert as_lists(rollouts.sequences) == as_lists(whole.sequences)
    assert rollouts.messages == whole.messages and rollouts.ids == ["a"]
    # the prompt's assistant turn is given, and no turn of this rollout
    assert scored(rollouts, chat_tokenizer) == ["on shelf 3<|im_end|>"]
    assert scored(whole, chat_tokenizer) == ["on shelf 2<|im_end|>on shelf 3<|im_end|>"]
    assert len(expand_turns(rollouts, strict=True)) == 1


def test_a_template_that_rewrites_turns_counts_those_of_the_prompt_as_given(read, chat_tokenizer):
    thought = [{**m, "reasoning_content": "easy"} for m in (GUESS, FOUND, LOST)]
    row = {"prompt": [ASK, thought[0], AGAIN], "completion": [thought[1], AGAIN, thought[2]]}
    turns = read(row).turns[0]
    written = [chat_tokenizer.decode(t[sampled].tolist()) for t, _, sampled in turns]
    assert ["shelf 2" in text for text in written] == [False, False]
    assert ["shelf 3" in text for text in written] == [True, True]


@pytest.mark.parametrize("prompt", [{"prompt": [ASK]}, {}, {"prompt": "where is it?"}])
def test_a_pair_is_two_rollouts_of_a_group(read, chat_tokenizer, prompt):
    """With the prompt apart, and with it in both chats, beside it or not as text."""
    before = [] if isinstance(prompt.get("prompt"), list) else [ASK]
    pair = {"chosen": [*before, GUESS, AGAIN, FOUND], "rejected": [*before, LOST], **prompt}
    rollouts = read(pair, {**pair, "id": "x", "group": 7})
    assert rollouts.ids == ["line 1 chosen", "line 1 rejected", "x chosen", "x rejected"]
    assert rollouts.groups == ["line 1", "line 1", 7, 7]
    assert rollouts.lines == [1, 1, 2, 2] and rollouts.origins == [0, 1, 2, 3]
    assert rollouts.messages[:2] == [[ASK, GUESS, AGAIN, FOUND], [ASK, LOST]]
    texts = scored(rollouts, chat_tokenizer)
    assert texts[:2] == ["on shelf 2<|im_end|>on shelf 3<|im_end|>", "i do not know<|im_end|>"]
    assert expand_turns(rollouts).origins == [0, 0, 1, 2, 2, 3]


def test_the_two_of_a_pair_are_other_rollouts(tmp_path, tokenizer_folder):
    """Near misses take two sequences of one line for one rollout only if they are."""
    same = {"role": "user", "content": "and then? tell me all of it, from the beginning"}
    row = {"chosen": [ASK, FOUND, same, LOST], "rejected": [ASK, GUESS, same, LOST]}
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps([row], indent=2))
    facts = run_json("report", path, "--tokenizer", tokenizer_folder)
    (miss,) = facts["near_misses"]["largest"]
    assert miss["kind"] == "sampled" and facts["groups"]["groups"] == 1


def test_equal_sides_keep_their_last_message(read, chat_tokenizer):
    rollouts = read({"chosen": [ASK, FOUND], "rejected": [ASK, FOUND]})
    assert scored(rollouts, chat_tokenizer) == ["on shelf 3<|im_end|>"] * 2


def test_sharegpt(read):
    tools = [{"name": "find"}]
    rollouts = read(
        {"conversations": sharegpt(ASK, FOUND), "system": "be kind", "tools": json.dumps(tools)},
        {"conversations": [ASK, FOUND], "system": "", "tools": ""},
    )
    expected = read(
        {"messages": [{"role": "system", "content": "be kind"}, ASK, FOUND], "tools": tools},
        {"messages": [ASK, FOUND]},
    )
    assert as_lists(rollouts.sequences) == as_lists(expected.sequences)
    assert as_lists(rollouts.loss_masks) == as_lists(expected.loss_masks)


def test_token_ids_win(read):
    row = {"prompt": "text", "completion": "text", "chosen": 1, "conversations": 2}
    rollouts = read({"token_ids": [1, 2], **row}, {"prompt_ids": [1], "response_ids": [2], **row})
    assert as_lists(rollouts.sequences) == [[1, 2], [1, 2]]


def test_a_parquet_file_of_pairs(write_parquet, chat_tokenizer):
    path = write_parquet(prompt=[[ASK]] * 2, chosen=[[FOUND]] * 2, rejected=[[LOST]] * 2)
    rollouts = read_rollouts(path, strict=True, tokenizer=chat_tokenizer)
    assert len(rollouts) == 4 and rollouts.groups == ["line 1"] * 2 + ["line 2"] * 2


def test_verls_prompts_are_told_how_to_become_rollouts(write_parquet, chat_tokenizer):
    path = write_parquet(data_source=["gsm8k"], prompt=[[ASK]], reward_model=[{"style": "rule"}])
    with pytest.raises(InputError, match=r"no completion.*\+trainer\.prefixtree_rollouts=FOLDER"):
        read_rollouts(path, tokenizer=chat_tokenizer)


@pytest.mark.parametrize(
    "row, message",
    [
        (
            {"prompt": "a", "completion": [FOUND]},
            "prompt is text; expected a list of chat messages",
        ),
        ({"prompt": [ASK], "completion": "b"}, "completion is text; expected a list"),
        ({"completion": [FOUND]}, "has no prompt; expected a list of chat messages"),
        ({"prompt": [ASK], "completion": []}, "completion must be a list of chat messages, at"),
        ({"prompt": {}, "completion": [FOUND]}, "prompt must be a list of chat messages"),
        ({"chosen": "a", "rejected": [FOUND]}, "chosen is text; expected a list of chat messages"),
        ({"chosen": [FOUND]}, "or chosen with rejected; got the fields chosen"),
        ({"prompt": [ASK, "x"], "completion": [FOUND]}, "messages[1] must be an object with"),
        ({"conversations": [*sharegpt(ASK), {"from": "bot"}]}, "conversations[1] is from 'bot'"),
        ({"conversations": ["hi"]}, "is from None; expected one of system, user, assistant, tool"),
        ({"conversations": []}, "conversations must be a list of chat messages, at least one"),
        ({"messages": [ASK], "tools": "find"}, "tools is text that is not JSON"),
        ({"prompt": [ASK], "completion": [FOUND], "loss_mask": [1]}, "but no token ids that they"),
    ],
)
def test_what_is_missing_is_named(read, row, message):
    with pytest.raises(InputError) as caught:
        read(row)
    assert message in str(caught.value)


def test_without_a_tokenizer_one_is_asked_for(write):
    for row in (
        {"prompt": [ASK], "completion": [FOUND]},
        {"chosen": [FOUND], "rejected": [LOST], "prompt": [ASK]},
        {"conversations": sharegpt(ASK, FOUND)},
    ):
        with pytest.raises(InputError, match="give a tokenizer folder by --tokenizer"):
            read_rollouts(write(row))
