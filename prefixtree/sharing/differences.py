"""Describes how two rollouts differ where they fork: who wrote the tokens, and both texts.

The text comes from a tokenizer, or from the messages of the file where the turns before the fork
prove that the messages' first difference is the fork; otherwise token ids are shown.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from prefixtree.rollouts import Rollouts

_THINK = "<think>", "</think>"
_THOUGHT = re.compile(r"<think>(.*?)(?:</think>|$)", re.DOTALL)
_REMEDIES = {
    "question": "move this instruction before the question",
    "given": "write it alike in all of them, or behind what they share",
    "unknown": "write it alike in all of them, or behind what they share, if the policy did not "
    "sample it",
    "rewritten": "keep earlier turns as they were sampled, and append to them",
    "re-tokenised": "keep the token ids that were sampled; do not tokenize their text again",
    "thinking": "take a chat template that keeps the thinking of earlier turns",
}
# of a user or a tool
_ANSWERS = "let the environment answer alike (no ids and times, a fixed seed)"
_CONTEXT_TOKENS, _SHOWN_TOKENS = 16, 24
_CONTEXT_LETTERS, _SHOWN_LETTERS = 60, 120


@dataclass(frozen=True)
class Difference:
    """The place where two sequences part, and how they differ there.

    Attributes:
        position: tokens before it, equal in both.
        kind: "sampled" (tokens of the policy from the first on), "mixed" (not the first, but
            later ones), "given" (no token of the policy in at least one of them),
            "rewritten" (two turns of one rollout, the second of which has the first in other
            words), "re-tokenised" (the same text), "thinking" (the same text but for thinking that
            one of them lacks), "question" (they ask something else, and the same instruction
            follows) or "unknown" (nothing tells).
        role: of the message it stands in, or None where that is not known.
        message: that message's number from 0, or None.
        lengths: the number of tokens that differ in each, before both go on with equal tokens;
            None where they never do.
        before, after: text around it; after is "" where nothing equal follows.
        texts: the text of each at the difference.
        is_text: whether before, after and texts are text; otherwise token ids written out.
    """

    position: int
    kind: str
    role: str | None
    message: int | None
    lengths: tuple[int, int] | None
    before: str
    texts: tuple[str, str]
    after: str
    is_text: bool

    @property
    def can_be_won(self) -> bool:
        """Whether it could be gone: not where they ask or the policy sampled something else."""
        return self.kind not in ("sampled", "mixed", "question")

    @property
    def remedy(self) -> str | None:
        """The advice on it; None where there is nothing to do."""
        if self.kind in ("given", "unknown") and self.role in ("user", "tool") and self.message:
            return _ANSWERS
        return _REMEDIES.get(self.kind)

    def facts(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**asdict(self), "can_be_won": self.can_be_won, "remedy": self.remedy}


def describe(
    rollouts: Rollouts,
    pair: tuple[int, int],
    position: int,
    lengths: tuple[int, int] | None,
    tokenizer: Any = None,
    is_question: bool = False,
) -> Difference:
    """Describes the difference of two sequences that are equal for `position` tokens.

    Args:
        pair: two sequence indices; both have a token at `position`, and another one.
        lengths: as in `Difference`.
        tokenizer: decodes tokens to text. Default: messages or token ids are shown.
        is_question: whether they are known to ask something else.
    """
    located = _first_difference(rollouts, pair, position)
    role = message = None
    if located is not None:
        message, role, *_ = located
    kind = _kind(rollouts, pair, position, lengths, role)
    if tokenizer is not None:
        before, differing, after = (
            [tokenizer.decode(ids.tolist()) for ids in piece]
            for piece in _pieces(rollouts, pair, position, lengths)
        )
        if lengths is not None and differing[0] == differing[1]:
            kind = "re-tokenised"
        elif lengths is not None and _lacks_thinking(
            tokenizer.decode(rollouts.sequences[pair[0]][:position].tolist()), differing, after[0]
        ):
            kind = "thinking"
        excerpt = before[0], (_head(differing[0]), _head(differing[1])), after[0]
    elif located is not None:
        excerpt = _excerpt(*located[2:])
    else:
        before, differing, after = (
            [_written(ids) for ids in piece] for piece in _pieces(rollouts, pair, position, lengths)
        )
        excerpt = before[0], (differing[0], differing[1]), after[0]
    if is_question:
        kind = "question"
    is_text = tokenizer is not None or located is not None
    return Difference(position, kind, role, message, lengths, *excerpt, is_text)


def _kind(
    rollouts: Rollouts,
    pair: tuple[int, int],
    position: int,
    lengths: tuple[int, int] | None,
    role: str | None,
) -> str:
    if rollouts.origins[pair[0]] == rollouts.origins[pair[1]]:
        return "rewritten"
    if rollouts.loss_masks is None:
        return {None: "unknown", "assistant": "sampled"}.get(role, "given")
    masks = [rollouts.loss_masks[i][position:] for i in pair]
    if all(mask[0] for mask in masks):
        return "sampled"
    # where one side has no token at the difference, the token that follows tells
    ends = (1, 1) if lengths is None else [max(1, n) for n in lengths]
    return "mixed" if all(m[:n].any() for m, n in zip(masks, ends, strict=True)) else "given"


def _lacks_thinking(before: str, own: list[str], after: str) -> bool:
    """Whether two texts differ by thinking alone; a block open in `before` goes on in both."""
    start = before.rfind(_THINK[0])
    lead = before[start:] if start > before.rfind(_THINK[1]) else ""
    thoughts, others = [], []
    for text in own:
        text = lead + text + after
        close = text.find(_THINK[1])
        if close >= 0 and _THINK[0] not in text[:close]:
            # some templates write the end alone
            text = _THINK[0] + text
        thoughts.append("".join(_THOUGHT.findall(text)).strip())
        # templates also strip the space around a block
        others.append("".join(_THOUGHT.sub("", text).split()))
    return others[0] == others[1] and bool(thoughts[0]) != bool(thoughts[1])


# ---- text from messages --------------------------------------------------------------------------


def _first_difference(
    rollouts: Rollouts, pair: tuple[int, int], position: int
) -> tuple[int, str, str, str] | None:
    """Finds number, role and both texts of the first message that differs; None if unknown."""
    if rollouts.messages is None:
        return None
    first, second = (rollouts.messages[i] for i in pair)
    ends = [e for i in pair if (e := rollouts.turn_ends[i]) is not None]
    if first is None or second is None or len(ends) < 2:
        return None
    turns = 0
    for number, (a, b) in enumerate(zip(first, second, strict=False)):
        texts = message_text(a), message_text(b)
        if texts[0] != texts[1] or a.get("role") != b.get("role"):
            # as many assistant turns must have ended before the fork as before this message
            if any(np.count_nonzero(e <= position) != turns for e in ends):
                return None
            roles = dict.fromkeys(str(m.get("role")) for m in (a, b))
            return number, " or ".join(roles), *texts
        turns += a.get("role") == "assistant"
    return None


def first_user_text(messages: list[dict[str, Any]] | None) -> str | None:
    """The text of the first user message; None where there is none."""
    asked = (message for message in messages or () if message.get("role") == "user")
    return next((message_text(message) for message in asked), None)


def message_text(message: dict[str, Any]) -> str:
    """A chat message's content and tool calls as text; ids of calls, rarely templated, left out."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", part.get("image", part))) for part in content)
    parts = [str(message.get("reasoning_content") or ""), str(content or "")]
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        parts.append(f"{function.get('name')}({function.get('arguments')})")
    return "\n".join(part for part in parts if part)


def _excerpt(one: str, other: str) -> tuple[str, tuple[str, str], str]:
    start = _common_start(one, other)
    # back to the start of a word: half a word is no text to read
    while start > 0 and one[start - 1].isalnum():
        start -= 1
    rest = one[start:], other[start:]
    common = _common_start(rest[0][::-1], rest[1][::-1])
    after = rest[0][len(rest[0]) - common :]
    while after and after[0].isalnum():
        after = after[1:]
    texts = tuple(text[: len(text) - len(after)] for text in rest)
    before = one[:start]
    return _tail(before), (_head(texts[0]), _head(texts[1])), _head(after, _CONTEXT_LETTERS)


def _common_start(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _head(text: str, letters: int = _SHOWN_LETTERS) -> str:
    return text if len(text) <= letters else text[: letters - 1] + "…"


def _tail(text: str) -> str:
    return text if len(text) <= _CONTEXT_LETTERS else "…" + text[1 - _CONTEXT_LETTERS :]


# ---- tokens --------------------------------------------------------------------------------------


def _pieces(
    rollouts: Rollouts, pair: tuple[int, int], position: int, lengths: tuple[int, int] | None
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Tokens before the fork, the tokens that differ in each, and the equal ones after."""
    first, second = (rollouts.sequences[i] for i in pair)
    before = first[max(0, position - _CONTEXT_TOKENS) : position]
    if lengths is None:
        differing = [s[position : position + _SHOWN_TOKENS + 1] for s in (first, second)]
        return [before], differing, [before[:0]]
    ends = [position + length for length in lengths]
    differing = [first[position : ends[0]], second[position : ends[1]]]
    return [before], differing, [first[ends[0] : ends[0] + _CONTEXT_TOKENS]]


def _written(ids: np.ndarray) -> str:
    more = " …" if len(ids) > _SHOWN_TOKENS else ""
    return " ".join(map(str, ids[:_SHOWN_TOKENS].tolist())) + more
