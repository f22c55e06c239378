"""OpenAI chat messages to token ids, through the chat template of a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from prefixtree.errors import InputError
from prefixtree.rollouts.image_messages import (
    FIRST_IMAGE,
    ImageReader,
    RolloutImage,
    expand,
    has_images,
    place,
)
from prefixtree.rollouts.tokenizer import TokenizerFiles


@dataclass(frozen=True)
class Conversation:
    """A tokenized conversation.

    Attributes:
        tokens: int64 [n], token ids of the whole conversation; those of image k are `FIRST_IMAGE` +
            k.
        loss_mask: bool [n], true for the tokens of assistant turns. None where the template
            rewrites earlier turns, so that `tokens` does not hold them as the policy saw them.
        turn_ends: int64, the number of tokens up to the end of each assistant turn; None with
            loss_mask.
        turns: where loss_mask is None, one (tokens, loss_mask, sampled) per assistant turn: the
            conversation up to the turn's end, the tokens of this turn alone, and those of all
            assistant turns in it, as far as they are found. Otherwise None.
        messages: as they were given, but images by their numbers.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray | None
    turn_ends: np.ndarray | None
    turns: list[tuple[np.ndarray, np.ndarray, np.ndarray]] | None
    messages: list[dict[str, Any]]


class ChatTokenizer:
    """A tokenizer with a chat template.

    To find where a turn starts and ends, the conversation is templated up to there, with and
    without the turn. Each of these texts must begin the next one. Some templates rewrite earlier
    turns as a conversation goes on (they strip thinking). Then no single sequence holds all turns
    as the policy saw them, and each turn becomes a separate sequence.

    Images need the model's image processor in the same folder.

    Args:
        path: a folder with the files of a tokenizer, or its name on the Hugging Face hub.

    Attributes:
        images: the distinct images of all messages so far, by number.

    Raises:
        InputError: a path without a tokenizer.json. One without a chat template raises when it is
            called.
    """

    def __init__(self, path: str | Path) -> None:
        self._tokenizer = TokenizerFiles(path)
        self._path = path
        self._reader = ImageReader(path)

    @property
    def images(self) -> tuple[RolloutImage, ...]:
        return tuple(self._reader.images)

    @property
    def placeholder(self) -> int | None:
        """The token id that stands for an image; None where the tokenizer has none."""
        return self._tokenizer.id_of(self._placeholder_text)

    @property
    def _placeholder_text(self) -> str:
        return self._tokenizer.special.get("image_token", "<|image_pad|>")

    def __len__(self) -> int:
        """The number of tokens in the vocabulary."""
        return len(self._tokenizer)

    def decode(self, token_ids: list[int]) -> str:
        """Decodes token ids, special ones included; a run of image k's becomes "[image k]".

        Raises:
            InputError: token ids outside the tokenizer's vocabulary.
        """
        if self.images and max(token_ids, default=0) >= FIRST_IMAGE:
            runs = [(n, list(ids)) for n, ids in groupby(token_ids, _image_number)]
            return "".join(
                self.decode(ids) if n is None else str(self.images[n]) for n, ids in runs
            )
        try:
            return self._tokenizer.decode(token_ids)
        except (OverflowError, IndexError):
            raise InputError(
                f"--tokenizer {self._path}: cannot decode the token id {max(token_ids)}, its "
                f"vocabulary has {len(self._tokenizer)} tokens; is it the tokenizer of these "
                "rollouts?"
            ) from None

    def __call__(
        self,
        messages: Any,
        tools: Any = None,
        folder: Path | None = None,
        *,
        num_given: int = 0,
    ) -> Conversation:
        """Tokenizes a conversation and finds its assistant turns.

        Args:
            messages: OpenAI chat messages; tool calls' arguments as JSON text or as objects.
            tools: the tools' schemas, for templates that show them. Default: no tools.
            folder: paths of images are relative to it. Default: the current folder.
            num_given: the first messages are a prompt of so many, whose assistant turns the policy
                did not write. Default: 0.

        Raises:
            InputError: messages of another shape or that the template refuses, or a tokenizer
                without a chat template.
        """
        if not self._tokenizer.has_template:
            raise InputError(f"--tokenizer {self._path}: has no chat template to put messages in")
        unnumbered = messages
        messages, images = self._numbered(_checked(messages), folder)
        named = messages if any(images) else unnumbered
        tools = tools or None
        text = self._tokenizer.render(messages, tools)
        all_images = [image for found in images for image in found]
        spans, last = [], []
        for i, message in enumerate(messages):
            if message["role"] == "assistant" and i >= num_given:
                last.append(i)
                prompt = self._tokenizer.render(messages[:i], tools, True) if i else ""
                spans.append((prompt, self._tokenizer.render(messages[: i + 1], tools)))
        tokens, borders = self._encode(text, all_images)
        if not spans:
            loss_mask = np.zeros(len(tokens), bool)
            return Conversation(tokens, loss_mask, np.empty(0, np.int64), None, named)
        loss_mask, ends = np.zeros(len(tokens), bool), []
        done = 0
        for prompt, turn in spans:
            span = _span(prompt, turn, borders) if text.startswith(turn) else None
            if span is None or span[0] < done:
                break
            start, done = span[0], self._trim(tokens, *span)
            loss_mask[start:done] = True
            ends.append(done)
        else:
            return Conversation(tokens, loss_mask, np.array(ends), None, named)
        turns = []
        for number, (prompt, turn) in enumerate(spans):
            so_far = [image for found in images[: last[number] + 1] for image in found]
            tokens_there, borders = self._encode(turn, so_far)
            span = _span(prompt, turn, borders)
            if span is None:
                raise InputError(
                    f"the chat template writes assistant turn {number} so that its tokens do not "
                    "begin with the tokens of the messages before it and the generation prompt; "
                    "give token_ids with loss_mask or turn_ends"
                )
            end = self._trim(tokens_there, *span)
            loss_mask = np.arange(end) >= span[0]
            sampled = loss_mask.copy()
            before = messages[: last[number]]
            for first, beyond in _written_spans(before, num_given, prompt, self._placeholder_text):
                sampled[_tokens_of(borders, first, beyond)] = True
            turns.append((tokens_there[:end], loss_mask, sampled))
        return Conversation(tokens, None, None, turns, named)

    def continued(
        self, prompt: str, completion: str, *, is_sampled: bool = False, is_bare: bool = False
    ) -> Conversation:
        """Tokenizes a text and the completion that follows it, the one turn.

        Args:
            is_sampled: whether a policy sampled the completion, so that a token ends between the
                two. Default: they are tokenized as one, with the end token, as TRL does with data
                sets.
            is_bare: whether special tokens are written out in the text, or lost, so that none are
                added before it. Default: the tokenizer's are.
        """
        before, _ = self._tokenizer.encode(prompt, special=not is_bare)
        if is_sampled:
            tokens = np.concatenate([before, self._tokenizer.encode(completion)[0]])
            start = len(before)
        else:
            end = self._tokenizer.special.get("eos_token", "")
            text = prompt + completion.removesuffix(end) + end
            tokens, _ = self._tokenizer.encode(text, special=not is_bare)
            same = tokens[: len(before)] == before[: len(tokens)]
            # a token over the border belongs to what follows
            start = len(same) if same.all() else int(same.argmin())
        loss_mask = np.arange(len(tokens)) >= start
        ends = np.array([len(tokens)] if loss_mask.any() else [], np.int64)
        roles = ("user", prompt), ("assistant", completion)
        messages = [{"role": role, "content": text} for role, text in roles]
        return Conversation(tokens, loss_mask, ends, None, messages)

    def place(
        self, token_ids: np.ndarray, messages: Any, folder: Path | None = None
    ) -> tuple[np.ndarray, list[dict[str, Any]]]:
        """Puts the images of messages on the placeholders of the token ids beside them.

        Args:
            token_ids: int64 [n].
            folder: paths of images are relative to it. Default: the current folder.

        Returns:
            The token ids, those of image k `FIRST_IMAGE` + k, and the messages, images by their
                numbers.

        Raises:
            InputError: other runs of placeholders than the images have, or an unreadable image.
        """
        named, images = self._numbered(_checked(messages), folder)
        flat = [image for part in images for image in part]
        return place(token_ids, self._checked_placeholder(), flat), named

    def _numbered(
        self, messages: list[dict[str, Any]], folder: Path | None
    ) -> tuple[list[dict[str, Any]], list[list[RolloutImage]]]:
        if not has_images(messages):
            return messages, [[] for _ in messages]
        return self._reader.number(messages, folder or Path())

    def _checked_placeholder(self) -> int:
        if self.placeholder is None:
            raise InputError(
                f"--tokenizer {self._path}: has no token {self._placeholder_text} to stand for an "
                "image of the messages; expected the tokenizer of Qwen2.5-VL or Qwen3-VL"
            )
        return self.placeholder

    def _encode(self, text: str, images: list[RolloutImage]) -> tuple[np.ndarray, dict[int, int]]:
        """Token ids, and {character index where a token ends: number of tokens up to there}."""
        # the template has written the special tokens already
        tokens, characters = self._tokenizer.encode(text)
        if len(tokens) == 0:
            raise InputError("messages has no token; a sequence has at least one")
        counts: Iterable[int] = range(1, len(tokens) + 1)
        if images:
            tokens, ends = expand(tokens, self._checked_placeholder(), images)
            counts = ends.tolist()
        borders = {0: 0}
        for count, end in zip(counts, characters, strict=True):
            borders[end] = count
        return tokens, borders

    def _trim(self, tokens: np.ndarray, start: int, end: int) -> int:
        """The turn's end, without the text that templates write after its last stop token."""
        stops = np.flatnonzero(tokens[start:end] == self._tokenizer.eos_id)
        if len(stops) and not self.decode(tokens[start + stops[-1] + 1 : end].tolist()).strip():
            return start + int(stops[-1]) + 1
        return end


def _image_number(token_id: int) -> int | None:
    return token_id - FIRST_IMAGE if token_id >= FIRST_IMAGE else None


def _span(prompt: str, turn: str, borders: dict[int, int]) -> tuple[int, int] | None:
    """First token and end token of a turn; None where its borders are not token borders."""
    start, end = borders.get(len(prompt)), borders.get(len(turn))
    if not turn.startswith(prompt) or start is None or end is None or start >= end:
        return None
    return start, end


def _written_spans(
    messages: list[dict[str, Any]], num_given: int, text: str, placeholder: str
) -> list[tuple[int, int]]:
    """Finds the assistant's parts of `text` as (start, end) in characters, between other messages.

    Left out are turns next to a message that is not found, and those of the first `num_given`. An
    image is searched as its placeholder.
    """
    spans = []
    # where the last other message ended, None where it was not found; how far was searched
    end: int | None = 0
    searched, wrote = 0, False
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            wrote = i >= num_given
            continue
        span = _find(_pieces(message["content"], placeholder), text, searched)
        if wrote and end is not None and span is not None:
            spans.append((end, span[0]))
        wrote, end = False, None
        if span is not None:
            end = searched = span[1]
    return spans


def _pieces(content: Any, placeholder: str) -> list[str]:
    """The texts that a template writes for a message's content, in order."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [
        placeholder if part.get("type") == "image" else part.get("text")
        for part in parts
        if isinstance(part, dict)
    ]
    return [text.strip() for text in texts if isinstance(text, str) and text.strip()]


def _find(pieces: list[str], text: str, searched: int) -> tuple[int, int] | None:
    """Finds where the pieces begin and end in `text`; None if one is missing, or there is none."""
    begin = None
    for piece in pieces:
        at = text.find(piece, searched)
        if at < 0:
            return None
        begin, searched = at if begin is None else begin, at + len(piece)
    return None if begin is None else (begin, searched)


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
