"""OpenAI chat messages to token ids, through the chat template of a tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prefixtree.errors import InputError
from prefixtree.hub import explain, first_line


@dataclass(frozen=True)
class Conversation:
    """A tokenized conversation.

    Attributes:
        tokens: int64 [n], token ids of the whole conversation.
        loss_mask: bool [n], true for the tokens of assistant turns. None where the template
            rewrites earlier turns, so that `tokens` does not hold them as the policy saw them.
        turn_ends: int64, the number of tokens up to the end of each assistant turn. None where
            loss_mask is None.
        turns: where loss_mask is None, one (tokens, loss_mask, sampled) per assistant turn: the
            conversation templated up to the turn's end, the tokens of this turn alone, and the
            tokens of all assistant turns in it, as far as they are found. Otherwise None.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray | None
    turn_ends: np.ndarray | None
    turns: list[tuple[np.ndarray, np.ndarray, np.ndarray]] | None


class ChatTokenizer:
    """A tokenizer with a chat template.

    To find where a turn starts and ends, the conversation is templated up to there, with and
    without the turn. Each of these texts must begin the next one. Some templates rewrite earlier
    turns as a conversation goes on (they strip thinking). Then no single sequence holds all turns
    as the policy saw them, and each turn becomes a separate sequence.

    Args:
        path: a folder with the files of a tokenizer, or its name on the Hugging Face hub.

    Raises:
        InputError: a path that holds no tokenizer. A tokenizer without a chat template, or one that
            does not tell which characters a token stands for, raises when it is called.
    """

    def __init__(self, path: str | Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(path))
        except Exception as problem:
            raise InputError(explain("--tokenizer", path, problem)) from None
        self._path = path

    def decode(self, token_ids: list[int]) -> str:
        """Decodes token ids, special ones included.

        Args:
            token_ids: the token ids.

        Returns:
            The text.

        Raises:
            InputError: token ids outside the tokenizer's vocabulary.
        """
        try:
            return self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        except (OverflowError, IndexError):
            raise InputError(
                f"--tokenizer {self._path}: cannot decode the token id {max(token_ids)}, its "
                f"vocabulary has {len(self._tokenizer)} tokens; is it the tokenizer of these "
                "rollouts?"
            ) from None

    def __call__(self, messages: Any, tools: Any = None) -> Conversation:
        """Tokenizes a conversation and finds its assistant turns.

        Args:
            messages: OpenAI chat messages; tool calls' arguments as JSON text or as objects.
            tools: the tools' schemas, for templates that show them. Default: no tools.

        Returns:
            The tokens, with loss mask and turns.

        Raises:
            InputError: messages of another shape or that the template refuses, a tokenizer without
                a chat template, or one that does not tell which characters a token stands for.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise InputError(f"--tokenizer {self._path}: has no chat template to put messages in")
        if not self._tokenizer.is_fast:
            raise InputError(
                f"--tokenizer {self._path}: is a slow tokenizer, which does not tell which "
                "characters a token stands for; expected one with a tokenizer.json"
            )
        messages = _checked(messages)
        tools = tools or None
        whole = self._text(messages, tools)
        spans, last = [], []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                last.append(i)
                prompt = self._text(messages[:i], tools, add_generation_prompt=True) if i else ""
                spans.append((prompt, self._text(messages[: i + 1], tools)))
        tokens, borders = self._encode(whole)
        if not spans:
            return Conversation(tokens, np.zeros(len(tokens), bool), np.empty(0, np.int64), None)
        loss_mask, ends = np.zeros(len(tokens), bool), []
        done = 0
        for prompt, turn in spans:
            span = _span(prompt, turn, borders) if whole.startswith(turn) else None
            if span is None or span[0] < done:
                break
            start, done = span[0], self._trim(tokens, *span)
            loss_mask[start:done] = True
            ends.append(done)
        else:
            return Conversation(tokens, loss_mask, np.array(ends), None)
        turns = []
        for number, (prompt, turn) in enumerate(spans):
            tokens_there, borders = self._encode(turn)
            span = _span(prompt, turn, borders)
            if span is None:
                raise InputError(
                    f"the chat template writes assistant turn {number} so that what comes before "
                    "it, with the generation prompt, is not its beginning in whole tokens; give "
                    "token_ids with loss_mask or turn_ends"
                )
            end = self._trim(tokens_there, *span)
            loss_mask = np.arange(end) >= span[0]
            sampled = loss_mask.copy()
            for first, beyond in _assistant_spans(messages[: last[number]], prompt):
                sampled[_tokens_of(borders, first, beyond)] = True
            turns.append((tokens_there[:end], loss_mask, sampled))
        return Conversation(tokens, None, None, turns)

    def _text(self, messages: list[dict[str, Any]], tools: Any, **options: Any) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, **options
            )
        except Exception as problem:
            raise InputError(
                f"the chat template refuses the messages: {first_line(problem)}"
            ) from None

    def _encode(self, text: str) -> tuple[np.ndarray, dict[int, int]]:
        """Token ids, and {character index where a token ends: number of tokens up to there}."""
        # the template has written the special tokens already
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens = np.array(encoded["input_ids"], np.int64)
        if len(tokens) == 0:
            raise InputError("messages has no token; a sequence has at least one")
        borders = {0: 0}
        for count, (_, end) in enumerate(encoded["offset_mapping"], 1):
            borders[end] = count
        return tokens, borders

    def _trim(self, tokens: np.ndarray, start: int, end: int) -> int:
        """The turn's end, without the text that templates write behind its last stop token."""
        stops = np.flatnonzero(tokens[start:end] == self._tokenizer.eos_token_id)
        if len(stops) and not self.decode(tokens[start + stops[-1] + 1 : end].tolist()).strip():
            return start + int(stops[-1]) + 1
        return end


def _span(prompt: str, turn: str, borders: dict[int, int]) -> tuple[int, int] | None:
    """First token and end token of a turn; None where its borders are not token borders."""
    start, end = borders.get(len(prompt)), borders.get(len(turn))
    if not turn.startswith(prompt) or start is None or end is None or start >= end:
        return None
    return start, end


def _assistant_spans(messages: list[dict[str, Any]], text: str) -> list[tuple[int, int]]:
    """Finds the assistant's parts of `text`, as (start, end) in characters.

    They lie between messages of other roles, which are searched in order. The assistant turns
    beside a message that is not found are left out.
    """
    spans = []
    # where the last other message ended, None where it was not found; how far was searched
    end: int | None = 0
    searched, wrote = 0, False
    for message in messages:
        if message["role"] == "assistant":
            wrote = True
            continue
        content = message["content"].strip() if isinstance(message["content"], str) else ""
        begin = text.find(content, searched) if content else -1
        if wrote and end is not None and begin >= 0:
            spans.append((end, begin))
        wrote, end = False, None
        if begin >= 0:
            end = searched = begin + len(content)
    return spans


def _tokens_of(borders: dict[int, int], first: int, beyond: int) -> slice:
    """The tokens of the characters first .. beyond."""
    ends, counts = np.array(list(borders)), np.array(list(borders.values()))
    before = int(np.searchsorted(ends, first, side="right")) - 1
    last = min(int(np.searchsorted(ends, beyond)), len(counts) - 1)
    return slice(int(counts[before]), int(counts[last]))


def _checked(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise InputError("messages must be a list of chat messages, at least one")
    checked = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InputError(f"messages[{i}] must be an object with a role")
        # a field that is null is an absent one, but content: templates join it to text
        message = {name: value for name, value in message.items() if value is not None}
        message.setdefault("content", "")
        if calls := message.get("tool_calls"):
            if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
                raise InputError(f"messages[{i}].tool_calls must be a list of objects")
            message["tool_calls"] = [_with_object_arguments(call) for call in calls]
        checked.append(message)
    return checked


def _with_object_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments are an object, as templates expect them, where they parse."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
