"""Rows of data sets as rollouts: chats in the fields of a rollout (messages, prompt, completion),
and parquet files.

Chats and texts are TRL's types (`prompt` with `completion`, `chosen` with `rejected`); chats are
ShareGPT's `conversations`, too. A parquet file has a row each, token ids and masks in list columns.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from prefixtree.errors import InputError
from prefixtree.rollouts import dumps

FIELDS = ("prompt", "completion", "chosen", "rejected", "conversations", "system", *dumps.FIELDS)
_PAIR = ("chosen", "rejected")
_ROLES = {
    **{name: name for name in ("system", "user", "assistant", "tool")},
    **{"human": "user", "gpt": "assistant", "observation": "tool"},
}


def rollouts_of(row: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Finds the rollouts of a row without token ids: one, or the two of a pair.

    Returns (what tells it from the other of its row, fields) of each: a chat in `messages`, or in
    `prompt` and `completion`; `tools` as a list; text in `texts`. A row in no known form is
    returned as it is.
    """
    if isinstance(tools := row.get("tools"), str):
        row = {**row, "tools": _parsed_tools(tools)}
    if "messages" in row:
        return [("", row)]
    if "conversations" in row:
        return [("", {**row, "messages": _from_sharegpt(row)})]
    if texts := dumps.texts_of(row):
        return [(name, {**row, "texts": found}) for name, found in texts]
    if all(name in row for name in _PAIR):
        prompt, sides = _pair(row)
        return [
            (f" {name}", {**row, "prompt": prompt, "completion": side})
            for name, side in zip(_PAIR, sides, strict=True)
        ]
    if "prompt" in row and "completion" not in row:
        raise InputError(
            "has a prompt and no completion; a rollout has both. docs/verl.md and docs/trl.md say "
            "how a trainer writes its rollouts (verl: +trainer.prefixtree_rollouts=FOLDER)"
        )
    if "completion" in row:
        prompt, completion = _messages(row, "prompt", 0), _messages(row, "completion")
        return [("", {**row, "prompt": prompt, "completion": completion})]
    return [("", row)]


def _pair(row: dict[str, Any]) -> tuple[list[Any], list[list[Any]]]:
    """The prompt, and what follows it in each; without a prompt it is what both begin with."""
    sides = [_messages(row, name) for name in _PAIR]
    # a prompt that is text repeats what the messages hold
    if isinstance(row.get("prompt"), list):
        return row["prompt"], sides
    same = min(map(len, sides)) - 1
    same = next((i for i in range(same) if sides[0][i] != sides[1][i]), same)
    return sides[0][:same], [side[same:] for side in sides]


def _messages(row: dict[str, Any], name: str, least: int = 1) -> list[Any]:
    messages = row.get(name, "")
    if isinstance(messages, str):
        fault = f"{name} is text" if name in row else f"has no {name}"
        raise InputError(
            f"{fault}; expected a list of chat messages, each with role and content. Or give token "
            "ids: prompt_ids and completion_ids"
        )
    if not isinstance(messages, list) or len(messages) < least:
        raise InputError(f"{name} must be a list of chat messages, at least one")
    return messages


def _from_sharegpt(row: dict[str, Any]) -> list[dict[str, Any]]:
    conversation = _messages(row, "conversations")
    system = row.get("system")
    messages = [{"role": "system", "content": system}] if system else []
    for i, turn in enumerate(conversation):
        # some files have OpenAI's messages under this name
        if isinstance(turn, dict) and "role" in turn:
            messages.append(turn)
            continue
        sender = turn.get("from") if isinstance(turn, dict) else None
        if sender not in _ROLES:
            raise InputError(
                f"conversations[{i}] is from {sender!r}; expected one of {', '.join(_ROLES)}; "
                "write calls of tools as messages with tool_calls"
            )
        messages.append({"role": _ROLES[sender], "content": turn.get("value")})
    return messages


def _parsed_tools(text: str) -> Any:
    """Data sets keep schemas of tools as JSON text, because their fields differ."""
    try:
        return json.loads(text) if text.strip() else None
    except ValueError:
        raise InputError("tools is text that is not JSON; expected a list of schemas") from None


MAGIC = b"PAR1"
_BATCH_ROWS = 4096


def read_rows(file: BinaryIO, fields: frozenset[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Reads numbered rows, from 1, of the columns named in `fields`.

    A list column of integers or booleans gives numpy arrays, views of the file's buffers. Raises
    ImportError without pyarrow, ValueError for a file that is damaged or no parquet.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file)
        names = table.schema_arrow.names
        columns = [name for name in names if name in fields]
        if not columns:
            raise ValueError(
                f"has none of the columns {', '.join(sorted(fields))}; it has "
                f"{', '.join(names) or 'none'}"
            )
        number = 0
        for batch in table.iter_batches(_BATCH_ROWS, columns=columns):
            values = [_values(batch.column(name)) for name in columns]
            for row in zip(*values, strict=True):
                number += 1
                yield number, dict(zip(columns, row, strict=True))
    except (pa.ArrowException, OSError) as problem:
        raise ValueError(f"cannot be read as parquet: {problem}") from None


def _values(column: Any) -> list[Any]:
    import pyarrow as pa

    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_list or not (
        pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)
    ):
        return column.to_pylist()
    elements = column.values
    if elements.null_count:
        return column.to_pylist()
    flat = elements.to_numpy(zero_copy_only=False)
    offsets = column.offsets.to_pylist()
    valid = column.is_valid().to_pylist()
    return [flat[offsets[i] : offsets[i + 1]] if valid[i] else None for i in range(len(column))]
