"""Chats of text: tokens, loss masks and turns by a template, and what is refused."""

import numpy as np
import pytest

from prefixtree.errors import InputError
from prefixtree.rollouts import ChatTokenizer, expand_turns, read_rollouts
from tests.rollouts.conftest import TALK, as_lists
from tests.support.chat_tokenizer import CHATML, save_tokenizer


def test_a_chat_is_tokenized_by_its_template(write, chat_tokenizer):
    path = write({"messages": TALK, "group": "g"})
    rollouts = read_rollouts(path, strict=True, tokenizer=chat_tokenizer)
    (tokens,), (mask,), (ends,) = rollouts.sequences, rollouts.loss_masks, rollouts.turn_ends
    assert chat_tokenizer.decode(tokens.tolist()) == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\noù est-il?<|im_end|>\n"
        '<|im_start|>assistant\n<tool>find {"a": 1}</tool><|im_end|>\n'
        "<|im_start|>tool\nshelf 3<|im_end|>\n<|im_start|>assistant\nOn shelf 3.<|im_end|>\n"
    )
    # what the policy says, up to and with the token that ends its turn
    starts = np.flatnonzero(np.diff(mask.astype(int)) == 1) + 1
    turns = [chat_tokenizer.decode(tokens[a:b].tolist()) for a, b in zip(starts, ends, strict=True)]
    assert turns == ['<tool>find {"a": 1}</tool><|im_end|>', "On shelf 3.<|im_end|>"]
    assert mask.sum() == sum(b - a for a, b in zip(starts, ends, strict=True))
    assert rollouts.messages == [TALK] and rollouts.turns == [None]
    turns = expand_turns(rollouts, strict=True)
    assert [len(s) for s in turns.sequences] == ends.tolist()
    # the line before is what the file said, arguments as text and content null
    assert TALK[2]["content"] is None


def test_token_ids_win_over_messages(write, chat_tokenizer):
    path = write({"token_ids": [1, 2], "messages": TALK})
    rollouts = read_rollouts(path, strict=True, tokenizer=chat_tokenizer)
    assert as_lists(rollouts.sequences) == [[1, 2]] and rollouts.messages == [TALK]


def test_tools_reach_the_template(write, tmp_path):
    tokenizer = ChatTokenizer(
        save_tokenizer(
            tmp_path / "t", "{% for t in tools or [] %}{{ t.name }},{% endfor %}" + CHATML
        )
    )
    row = {"messages": TALK[:2], "tools": [{"name": "find"}, {"name": "take"}]}
    rollouts = read_rollouts(write(row), strict=True, tokenizer=tokenizer)
    assert tokenizer.decode(rollouts.sequences[0].tolist()).startswith("find,take,<|im_start|>")
    assert rollouts.turn_ends[0].tolist() == [] and not rollouts.loss_masks[0].any()


def test_a_template_that_rewrites_earlier_turns_gives_a_sequence_per_turn(write, chat_tokenizer):
    talk = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1", "reasoning_content": "easy"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "2", "reasoning_content": "hard"},
    ]
    rollouts = read_rollouts(write({"messages": talk}), strict=True, tokenizer=chat_tokenizer)
    assert rollouts.loss_masks is None and rollouts.turn_ends == [None]
    turns = expand_turns(rollouts, strict=True)
    texts = [chat_tokenizer.decode(s.tolist()) for s in turns.sequences]
    scored = [
        chat_tokenizer.decode(s[m].tolist())
        for s, m in zip(turns.sequences, turns.loss_masks, strict=True)
    ]
    head = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    assert texts[0] == head + "<think>easy</think>1<|im_end|>"
    assert texts[1].startswith(head + "1<|im_end|>\n<|im_start|>user\ntwo")
    assert scored == ["<think>easy</think>1<|im_end|>", "<think>hard</think>2<|im_end|>"]
    assert turns.ids == ["line 1 turn 0", "line 1 turn 1"]


def test_a_turn_that_does_not_begin_with_its_prompt_is_refused(write, tmp_path):
    template = CHATML.replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>model\n{% endif %}"
    )
    tokenizer = ChatTokenizer(save_tokenizer(tmp_path / "t", template))
    with pytest.raises(InputError, match=r":1: the chat template writes assistant turn 0 so that"):
        read_rollouts(write({"messages": TALK}), strict=True, tokenizer=tokenizer)


@pytest.mark.parametrize(
    "row, message",
    [
        ({"messages": "hi"}, "messages must be a list of chat messages"),
        ({"messages": []}, "messages must be a list of chat messages"),
        ({"messages": ["hi"]}, "messages[0] must be an object with a role"),
        ({"messages": [{"content": "hi"}]}, "messages[0] must be an object with a role"),
        (
            {"messages": [{"role": "user", "tool_calls": 3}]},
            "messages[0].tool_calls must be a list",
        ),
        ({"messages": TALK, "loss_mask": [1]}, "has loss_mask or turn_ends but no token ids"),
        ({"messages": TALK, "turn_ends": [1]}, "has loss_mask or turn_ends but no token ids"),
    ],
)
def test_broken_chats_are_named(write, chat_tokenizer, row, message):
    with pytest.raises(InputError) as caught:
        read_rollouts(write(row), strict=True, tokenizer=chat_tokenizer)
    assert message in str(caught.value)


def test_what_a_template_refuses_is_passed_on(write, tmp_path):
    template = "{{ raise_exception('roles must alternate') }}"
    tokenizer = ChatTokenizer(save_tokenizer(tmp_path / "t", template))
    with pytest.raises(InputError, match="refuses the messages: roles must alternate"):
        read_rollouts(write({"messages": TALK}), strict=True, tokenizer=tokenizer)


def test_messages_without_a_tokenizer_ask_for_one(write):
    with pytest.raises(InputError, match="give a tokenizer folder by --tokenizer"):
        read_rollouts(write({"messages": TALK}))


def test_a_tokenizer_that_cannot_be_used(write, tmp_path):
    with pytest.raises(InputError, match="does not exist; expected a folder"):
        ChatTokenizer(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"--tokenizer .*empty: "):
        ChatTokenizer(tmp_path / "empty")
    plain = ChatTokenizer(save_tokenizer(tmp_path / "plain", None))
    with pytest.raises(InputError, match="has no chat template"):
        read_rollouts(write({"messages": TALK}), strict=True, tokenizer=plain)
