"""Real weights and real text: the folder of the model that `make test-real` writes, and chats of an
agent that calls tools."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from prefixtree.rollouts import ChatTokenizer, Rollouts, read_rollouts

VARIABLE = "PREFIXTREE_REAL_MODEL"
# tokens with which all chats begin: system message, request, head of the assistant's turn
PROMPT = 62
CHATS = Path(__file__).with_name("chats.jsonl")
NEEDED = f"needs the folder of a pretrained model in {VARIABLE}: run `make test-real`"


def folder() -> Path | None:
    """The model's folder, or None where there is none."""
    name = os.environ.get(VARIABLE)
    return Path(name).resolve() if name else None


@cache
def chats() -> Rollouts:
    """Three chats of 190 to 222 tokens, by the model's template; the assistant's turns are scored.

    All begin with one request, and two go on with one call and its result.
    """
    found = folder()
    assert found is not None, NEEDED
    return read_rollouts(CHATS, strict=True, tokenizer=ChatTokenizer(found))
