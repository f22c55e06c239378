"""The files that commands read and write, and what is said of them on stderr."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prefixtree.cli.console import Reading, complain, complain_about
from prefixtree.errors import InputError
from prefixtree.rollouts import ChatTokenizer, Rollouts, expand_turns, read_rollouts


def check_writable(path: Path) -> None:
    """Refuses a file that `write_rows` could not write; leaves what is there as it is."""
    existed = path.exists()
    try:
        with path.open("a"):
            pass
    except OSError as problem:
        raise InputError(f"{path}: cannot be written: {problem.strerror}") from None
    if not existed:
        path.unlink()


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes rows as JSON lines; `InputError` where the file cannot be written."""
    try:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    except OSError as problem:
        raise InputError(f"{path}: cannot be written: {problem.strerror}") from None


def chat_tokenizer(name: str | None) -> ChatTokenizer | None:
    """The tokenizer that --tokenizer names; None for none."""
    return None if name is None else ChatTokenizer(name)


def read(file: str, per_turn: bool, strict: bool, tokenizer: ChatTokenizer | None) -> Rollouts:
    """A file of rollouts, with a progress bar; what was left out of it is said on stderr."""
    with Reading() as reading:
        rollouts = read_rollouts(file, strict=strict, watch=reading.watch, tokenizer=tokenizer)
    rewritten = sum(turns is not None for turns in rollouts.turns)
    if rewritten and not per_turn:
        complain(
            f"{rewritten} conversation(s): the chat template writes earlier turns anew as they go "
            "on (stripped thinking, say), so no one sequence holds every turn as the policy saw "
            "it; --per-turn takes each turn as it was, and here all tokens count as scored"
        )
    if per_turn:
        rollouts = expand_turns(rollouts, strict=strict)
    complain_about(rollouts.problems)
    return rollouts
