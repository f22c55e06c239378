"""Output of the commands (results to stdout, progress and complaints to stderr), and the files that
they read and write.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console
from rich.progress import Progress, track

from prefixtree.errors import InputError
from prefixtree.rollouts import ChatTokenizer, Rollouts, expand_turns, read_rollouts
from prefixtree.rollouts.image_messages import FIRST_IMAGE

_SHOWN_PROBLEMS = 5


class _Output(Console):
    def on_broken_pipe(self) -> None:
        """Nobody reads on: the program decides how it exits, not rich."""
        raise


def out() -> Console:
    """Results; made anew each time, because tests and pipes exchange sys.stdout."""
    return _Output(highlight=False)


def complain(message: str) -> None:
    """One plain line to stderr, never wrapped and never read as markup."""
    _Output(stderr=True).print(message, markup=False, highlight=False, soft_wrap=True)


def complain_about(problems: Iterable[str]) -> None:
    """Names the first broken lines that were left out, and says how many there were."""
    problems = list(problems)
    for problem in problems[:_SHOWN_PROBLEMS]:
        complain(f"left out: {problem}")
    if problems:
        hidden = len(problems) - _SHOWN_PROBLEMS
        more = f" ({hidden} not shown)" if hidden > 0 else ""
        complain(f"left out {len(problems)} broken line(s){more}; --strict stops at the first")


def discard_output() -> None:
    """Sends the rest of stdout nowhere: a last flush would fail again and change the exit code."""
    with suppress(OSError, ValueError):
        # a stream without a file, as in tests, has nothing that fails
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def print_json(facts: dict[str, Any]) -> None:
    """One JSON object to stdout, strictly JSON: a number that is not finite must not come here."""
    print(json.dumps(facts, allow_nan=False))


def steps(items: Iterable[Any], description: str, total: int) -> Iterator[Any]:
    """`items` with a progress bar on stderr, where that is a terminal."""
    console = Console(stderr=True)
    yield from track(
        items,
        description,
        total=total,
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


def status(description: str) -> AbstractContextManager[Any]:
    """A spinner on stderr, where that is a terminal."""
    console = Console(stderr=True)
    return console.status(description) if console.is_terminal else nullcontext()


class Reading:
    """A progress bar over the bytes of a file: `read_rollouts(path, watch=reading.watch)`."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self.progress = Progress(console=console, disable=not console.is_terminal, transient=True)

    def __enter__(self) -> Reading:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def watch(self, file: BinaryIO, size: int) -> BinaryIO:
        """The file, which moves the bar as it is read."""
        return self.progress.wrap_file(file, size, description="reading")


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


def chat_tokenizer(name: str | None, model: str | None = None) -> ChatTokenizer | None:
    """The tokenizer that --tokenizer names, else that of --model, if it has one; else None."""
    if name is not None:
        return ChatTokenizer(name)
    if model is None:
        return None
    # a config.json may have a tokenizer beside it
    folder = Path(model).parent if Path(model).is_file() else model
    with suppress(InputError):
        return ChatTokenizer(folder)
    return None


def is_of(rollouts: Rollouts, tokenizer: ChatTokenizer) -> bool:
    """Whether all token ids are in the tokenizer's vocabulary, or stand for images."""
    largest = (ids[ids < FIRST_IMAGE].max(initial=0) for ids in rollouts.sequences)
    return max(largest, default=0) < len(tokenizer)


def read(file: str, per_turn: bool, strict: bool, tokenizer: ChatTokenizer | None) -> Rollouts:
    """A file of rollouts, or of their turns; what was left out of it is said on stderr."""
    rollouts = read_whole(file, per_turn, strict, tokenizer)
    return in_unit(rollouts, per_turn, strict)


def in_unit(rollouts: Rollouts, per_turn: bool, strict: bool) -> Rollouts:
    """Rollouts, or their turns; what was left out is said on stderr."""
    if per_turn:
        rollouts = expand_turns(rollouts, strict=strict)
    complain_about(rollouts.problems)
    return rollouts


def read_whole(
    file: str, per_turn: bool, strict: bool, tokenizer: ChatTokenizer | None
) -> Rollouts:
    """A file of rollouts, with a progress bar; `per_turn` tells what is to be made of them."""
    with Reading() as reading:
        rollouts = read_rollouts(file, strict=strict, watch=reading.watch, tokenizer=tokenizer)
    rewritten = sum(turns is not None for turns in rollouts.turns)
    if rewritten and not per_turn:
        complain(
            f"{rewritten} conversation(s): the chat template writes earlier turns anew as they go "
            "on (stripped thinking, say), so no one sequence holds every turn as the policy saw "
            "it; --per-turn takes each turn as it was, and here all tokens count as scored"
        )
    return rollouts
