"""Rollout files: JSON, gzipped or not, parquet, or pickles, in; token ids and loss masks out.

`read_rollouts` says what a line holds. Messages beside token ids are their text, for what `report`
quotes, and their images.
"""

from __future__ import annotations

import gzip
import io
import json
import reprlib
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from prefixtree.errors import InputError
from prefixtree.rollouts import datasets, dumps
from prefixtree.rollouts.chat import ChatTokenizer
from prefixtree.rollouts.image_messages import FIRST_IMAGE, has_images
from prefixtree.rollouts.sequences import Rollouts, complete_masks, note, require_some

_GZIP_MAGIC = b"\x1f\x8b"
_WHOLE, _RESPONSE = ("token_ids", "input_ids"), ("response_ids", "completion_ids")
_ROUTES = ("routes", "routed_experts")
_FIELDS = frozenset(
    (
        *_WHOLE,
        "prompt_ids",
        *_RESPONSE,
        "messages",
        "tools",
        "loss_mask",
        "turn_ends",
        *_ROUTES,
        "id",
        "group",
        *datasets.FIELDS,
    )
)
_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}


def read_rollouts(
    path: str | Path,
    *,
    strict: bool = False,
    watch: Callable[[BinaryIO, int], BinaryIO] | None = None,
    tokenizer: ChatTokenizer | None = None,
) -> Rollouts:
    """Reads a file of rollouts.

    A line of JSON lines, an entry of a JSON array, or a row of a parquet file is one object. It
    holds one of

        - `token_ids` (or `input_ids`): the whole rollout
        - `prompt_ids` with `response_ids` (or `completion_ids`): its two parts, in this order
        - `messages`: an OpenAI chat, tokenized by `tokenizer`; `tools` holds the tools' schemas
        - `prompt` with `completion`, or `chosen` with `rejected` (and `prompt`): messages or text,
          as in TRL's data sets and in the completions that it logs. The assistant turns of the
          prompt count as given. A pair makes two rollouts, of one group.
        - `conversations`: a chat of ShareGPT's form (`from`, `value`)
        - `input` with `output`, `score` and `step` (veRL's rollout_data_dir), or `input_prompt`
          with `output_response` (SkyRL's evaluations): text. veRL's lacks special tokens.

    and optionally `loss_mask` (0 or 1 per token id), `turn_ends` (for each assistant turn, the
    number of tokens up to its end), `routes` (or `routed_experts`: per token, perhaps without the
    last, and layer of experts the experts that were chosen), `id` and `group` (names; rollouts of
    one task share a group). Other fields are ignored.

    Messages may hold images: parts {"type": "image", "image": ...} or {"type": "image_url",
    "image_url": {"url": ...}}, each a path, relative to the file, or a data URL. They need a
    `tokenizer` with an image processor. Token ids beside them have the placeholders expanded.

    Args:
        path: JSON lines or one JSON array, gzipped or not, parquet, or a pickle of slime
            (--save-debug-rollout-data) or SkyRL (trainer.dump_data_batch); "-" is standard input,
            without parquet.
        strict: whether to raise at the first broken line. Default: False: leave it out and keep
            the reason in `Rollouts.problems`.
        watch: called with the open file and its size in bytes; returns the file to read from, to
            show progress. Not called for standard input. Default: no progress.
        tokenizer: tokenizes rollouts that have messages and no token ids. Default: such a rollout
            is a broken line.

    Returns:
        One sequence per rollout, in the file's order: token ids int64 [n], loss masks bool [n] or
        None where no rollout has one. `expand_turns` makes one sequence per assistant turn.

    Raises:
        InputError: a file that cannot be read, a truncated gzip, no rollout in it, parquet without
            pyarrow, or, with `strict`, a broken line.
    """
    is_stdin = str(path) == "-"
    source, folder = ("<stdin>", Path()) if is_stdin else (str(path), Path(path).parent)
    rows: list[tuple[int, dict[str, Any]]] = []
    problems: list[str] = []
    prompts: dict[str, str] = {}
    for number, text in _lines(source, path, watch):
        try:
            row = _parse(text) if isinstance(text, bytes) else text
            rows += [
                (number, found) for found in _rollouts(row, number, tokenizer, folder, prompts)
            ]
        except InputError as problem:
            note(f"{source}:{number}: {problem}", problems, strict)
    require_some(rows, source, problems, "rollout")
    masks = [row["loss_mask"] for _, row in rows]
    groups = [row["group"] for _, row in rows]
    messages = [row["messages"] for _, row in rows]
    sequences = [row["tokens"] for _, row in rows]
    return Rollouts(
        source=source,
        sequences=sequences,
        loss_masks=complete_masks(masks, sequences),
        groups=groups if any(group is not None for group in groups) else None,
        ids=[row["id"] for _, row in rows],
        lines=[number for number, _ in rows],
        origins=list(range(len(rows))),
        turn_ends=[row["turn_ends"] for _, row in rows],
        routes=[row["routes"] for _, row in rows],
        messages=messages if any(m is not None for m in messages) else None,
        turns=[row["turns"] for _, row in rows],
        sampled=[None] * len(rows),
        problems=tuple(problems),
        images=() if tokenizer is None else tokenizer.images,
        placeholder=None if tokenizer is None else tokenizer.placeholder,
    )


# ---- the file ------------------------------------------------------------------------------------


@contextmanager
def _opened(
    path: str | Path, watch: Callable[[BinaryIO, int], BinaryIO] | None
) -> Iterator[BinaryIO]:
    if str(path) == "-":
        yield sys.stdin.buffer
        return
    with open(path, "rb") as file:
        yield file if watch is None else watch(file, Path(path).stat().st_size)


def _lines(
    source: str, path: str | Path, watch: Callable[[BinaryIO, int], BinaryIO] | None
) -> Iterator[tuple[int, Any]]:
    """Numbered lines that are not blank, as bytes; else entries of an array, or rows of parquet."""
    number = 0
    try:
        with _opened(path, watch) as file:
            # the file's first bytes decide, not its name: standard input has none
            stream: Any = file
            if not hasattr(file, "peek"):
                stream = io.BufferedReader(stream)
            magic = stream.peek(4)[:4]
            if magic == datasets.MAGIC:
                yield from _parquet_rows(source, file)
                return
            if magic == dumps.ZIP or magic[:1] == dumps.PICKLE:
                yield from _pickle_rows(source, stream)
                return
            if magic[:2] == _GZIP_MAGIC:
                stream = gzip.GzipFile(fileobj=stream)
            for number, line in _array_or_lines(stream):
                if not isinstance(line, bytes):
                    yield number, line
                elif line and not line.isspace():
                    yield number, line.rstrip()
    except EOFError:
        raise InputError(
            f"{source}: the gzip stream ends too early, after line {number}; the file is truncated"
        ) from None
    except (gzip.BadGzipFile, zlib.error) as problem:
        raise InputError(
            f"{source}: the gzip stream is damaged after line {number}: {problem}"
        ) from None
    except OSError as problem:
        raise InputError(f"{source}: cannot be read: {problem.strerror or problem}") from None


def _array_or_lines(stream: Any) -> Iterator[tuple[int, Any]]:
    """The numbered entries of a file that is one JSON array, or else its lines."""
    number, lines = 0, stream
    for number, line in enumerate(stream, 1):
        if line.lstrip()[:1] == b"[":
            text = line + stream.read()
            try:
                yield from enumerate(json.loads(text), 1)
                return
            except (ValueError, RecursionError):
                number, lines = number - 1, text.splitlines()
                break
        yield number, line
        if not line.isspace():
            break
    yield from enumerate(lines, number + 1)


def _parquet_rows(source: str, file: BinaryIO) -> Iterator[tuple[int, dict[str, Any]]]:
    if source == "<stdin>":
        raise InputError("<stdin>: parquet is read from its end; give the file's name")
    file.seek(0)
    try:
        yield from datasets.read_rows(file, _FIELDS)
    except ImportError:
        raise InputError(
            f"{source}: parquet needs pyarrow; pip install 'prefixtree-attention[parquet]'"
        ) from None
    except ValueError as problem:
        raise InputError(f"{source}: {problem}") from None


def _pickle_rows(source: str, stream: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        yield from dumps.read_pickle(stream.read())
    except ValueError as problem:
        raise InputError(f"{source}: {problem}") from None


def _parse(text: bytes) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as problem:
        raise InputError(
            f"not valid JSON: {problem.msg.lower()} at column {problem.colno} of {len(text)} bytes"
        ) from None
    except RecursionError:
        raise InputError("not usable JSON: nested too deeply") from None
    except ValueError as problem:
        # bytes that are no UTF-8, or an integer of thousands of digits
        raise InputError(f"not valid JSON: {problem}") from None
    return row


# ---- the fields of a line ------------------------------------------------------------------------


def _rollouts(
    row: Any,
    number: int,
    tokenizer: ChatTokenizer | None,
    folder: Path,
    prompts: dict[str, str],
) -> list[dict[str, Any]]:
    """Makes a line's rollouts: one or a pair; `prompts` names groups of samples of one prompt."""
    if not isinstance(row, dict):
        raise InputError(f"expected a JSON object, got {_kind(row)}")
    # parquet has every column in every row
    row = {name: value for name, value in row.items() if value is not None}
    parts = [("", row)] if _has_tokens(row) else datasets.rollouts_of(row)
    rollouts = [_rollout(fields, tokenizer, folder) for _, fields in parts]
    for (part, fields), rollout in zip(parts, rollouts, strict=True):
        name = rollout["id"] or f"line {number}"
        rollout["id"] = name + part
        if rollout["group"] is None:
            prompt = dumps.sampled_prompt(fields)
            rollout["group"] = (
                prompts.setdefault(prompt, name) if prompt else name if part else None
            )
    return rollouts


def _has_tokens(row: dict[str, Any]) -> bool:
    parts = "prompt_ids" in row and any(name in row for name in _RESPONSE)
    return parts or any(name in row for name in _WHOLE)


def _rollout(row: dict[str, Any], tokenizer: ChatTokenizer | None, folder: Path) -> dict[str, Any]:
    tokens, mask, ends, turns, messages = _tokens(row, tokenizer, folder)
    if len(tokens) == 0:
        raise InputError("has no token; a sequence has at least one")
    if "loss_mask" in row:
        mask, ends = _loss_mask(row["loss_mask"], len(tokens)), None
    if "turn_ends" in row:
        ends = _turn_ends(row["turn_ends"], len(tokens))
    elif ends is None and mask is not None:
        ends = np.flatnonzero(mask & ~np.append(mask[1:], False)) + 1
    readable = isinstance(messages, list) and all(isinstance(m, dict) for m in messages)
    return {
        "tokens": tokens,
        "loss_mask": mask,
        "turn_ends": ends,
        "routes": _routes(row, len(tokens)),
        "turns": turns,
        "messages": messages if readable else None,
        "id": _name(row, "id"),
        "group": _name(row, "group"),
    }


def _tokens(
    row: dict[str, Any], tokenizer: ChatTokenizer | None, folder: Path
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None, Any, Any]:
    """Token ids, loss mask, turn ends, turns and messages, as far as the fields imply them."""
    fields = _given_tokens(row)
    if fields is not None:
        tokens, mask, ends = fields
        tokens, messages = _with_images(tokens, row.get("messages"), tokenizer, folder)
        return tokens, mask, ends, None, messages
    if "texts" in row and isinstance(row["texts"], dumps.Texts):
        if tokenizer is None:
            raise InputError("has text and no token ids; give a tokenizer folder by --tokenizer")
        chat = tokenizer.continued(**row["texts"]._asdict())
        return chat.tokens, chat.loss_mask, chat.turn_ends, None, chat.messages
    prompt = [] if "messages" in row else row.get("prompt", [])
    messages = row["messages"] if "messages" in row else prompt + row.get("completion", [])
    if "messages" not in row and not messages:
        raise InputError(
            "expected token_ids, input_ids, prompt_ids with response_ids or completion_ids, "
            "messages, conversations, prompt with completion, or chosen with rejected; got the "
            f"fields {', '.join(map(str, row)) or 'none at all'}"
        )
    if tokenizer is None:
        raise InputError("has messages and no token ids; give a tokenizer folder by --tokenizer")
    if "loss_mask" in row or "turn_ends" in row:
        raise InputError(
            "has loss_mask or turn_ends but no token ids that they count; give token_ids too"
        )
    chat = tokenizer(messages, row.get("tools"), folder, num_given=len(prompt))
    return chat.tokens, chat.loss_mask, chat.turn_ends, chat.turns, chat.messages


def _given_tokens(
    row: dict[str, Any],
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None] | None:
    """Token ids, loss mask and turn ends of the fields of token ids; None where there are none."""
    names = [name for name in _WHOLE if name in row]
    if names:
        tokens = _token_ids(row, names[0])
        if len(names) == 2 and not np.array_equal(tokens, _token_ids(row, names[1])):
            raise InputError("token_ids and input_ids differ; expected one of them")
        return tokens, None, None
    response = next((name for name in _RESPONSE if name in row), None)
    if "prompt_ids" not in row or response is None:
        return None
    parts = [_token_ids(row, "prompt_ids"), _token_ids(row, response)]
    tokens = np.concatenate(parts)
    mask = np.ones(len(tokens), bool)
    mask[: len(parts[0])] = False
    return tokens, mask, np.array([len(tokens)] if len(parts[1]) else [], np.int64)


def _with_images(
    tokens: np.ndarray, messages: Any, tokenizer: ChatTokenizer | None, folder: Path
) -> tuple[np.ndarray, Any]:
    """Token ids with the images of the messages beside them, and these messages."""
    placeholder = None if tokenizer is None else tokenizer.placeholder
    if placeholder is not None and tokens.max(initial=0) >= FIRST_IMAGE:
        raise InputError(f"has the token id {tokens.max()}; ids from 2^30 on stand for images")
    if has_images(messages):
        if tokenizer is None:
            raise InputError(
                "has token ids and images in messages; token ids alone do not tell images "
                "apart: give the model's folder, with its image processor, by --tokenizer"
            )
        return tokenizer.place(tokens, messages, folder)
    if placeholder is not None and (tokens == placeholder).any():
        raise InputError(
            f"has placeholders of images (id {placeholder}) and no messages with the images, "
            "which token ids alone do not tell apart"
        )
    return tokens, messages


def _token_ids(row: dict[str, Any], name: str) -> np.ndarray:
    tokens = _integers(row[name], name)
    if tokens.min(initial=0) < 0:
        bad = int((tokens < 0).argmax())
        raise InputError(f"{name}[{bad}] is {tokens[bad]}; token ids are >= 0: remove padding")
    return tokens


def _integers(values: Any, name: str) -> np.ndarray:
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu":
        if values.dtype == np.uint64 and values.max(initial=0) > np.iinfo(np.int64).max:
            raise InputError(f"{name} holds an integer that needs more than 63 bits")
        return values.astype(np.int64)
    if not isinstance(values, list):
        raise InputError(f"{name} must be a list of integers, got {_kind(values)}")
    # a set of types finds the true among the integers, which numpy would turn into 1
    if set(map(type, values)) - {int}:
        bad, value = next((i, v) for i, v in enumerate(values) if type(v) is not int)
        raise InputError(f"{name}[{bad}] is {reprlib.repr(value)}; expected an integer")
    try:
        # three times as fast as np.array
        return np.fromiter(values, np.int64, len(values))
    except OverflowError:
        raise InputError(f"{name} holds an integer that needs more than 64 bits") from None


def _loss_mask(values: Any, num_tokens: int) -> np.ndarray:
    if not isinstance(values, (list, np.ndarray)):
        raise InputError(f"loss_mask must be a list of 0 and 1, got {_kind(values)}")
    if len(values) != num_tokens:
        raise InputError(
            f"loss_mask has {len(values)} entries for {num_tokens} token ids; expected one each"
        )
    if isinstance(values, np.ndarray):
        usable = bool(((values == 0) | (values == 1)).all())
    else:
        usable = set(map(type, values)) <= {int, float, bool} and set(values) <= {0, 1}
    if not usable:
        bad, value = next(
            (i, v)
            for i, v in enumerate(values)
            if not isinstance(v, (int, float, np.integer)) or v not in (0, 1)
        )
        raise InputError(f"loss_mask[{bad}] is {reprlib.repr(value)}; expected 0 or 1")
    return np.array(values, bool)


def _turn_ends(values: Any, num_tokens: int) -> np.ndarray:
    ends = _integers(values, "turn_ends")
    for bad in np.flatnonzero((ends < 1) | (ends > num_tokens))[:1]:
        raise InputError(
            f"turn_ends[{bad}] is {ends[bad]}; expected 1 to {num_tokens} (its tokens)"
        )
    for bad in np.flatnonzero(np.diff(ends) <= 0)[:1]:
        raise InputError(
            f"turn_ends must ascend, got {ends[bad + 1]} after {ends[bad]} at [{bad + 1}]"
        )
    return ends


def _routes(row: dict[str, Any], num_tokens: int) -> np.ndarray | None:
    name = next((name for name in _ROUTES if name in row), None)
    if name is None:
        return None
    try:
        routes = np.array(row[name])
    except ValueError:
        raise InputError(
            f"{name} is ragged; expected as many layers for every token, and experts for every "
            "layer"
        ) from None
    if routes.ndim != 3 or routes.dtype.kind not in "iu":
        raise InputError(
            f"{name} must be integers [tokens][layers of experts][experts per token], got shape "
            f"{list(routes.shape)} of {routes.dtype}"
        )
    if len(routes) not in (num_tokens, num_tokens - 1):
        raise InputError(
            f"{name} has {len(routes)} entries for {num_tokens} token ids; expected one each, or "
            "one less where the last token's is not recorded"
        )
    return routes


def _name(row: dict[str, Any], field: str) -> Any:
    value = row.get(field)
    if value is not None and (not isinstance(value, (str, int)) or isinstance(value, bool)):
        raise InputError(f"{field} must be a string or an integer, got {_kind(value)}")
    return str(value) if field == "id" and value is not None else value


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), f"the number {reprlib.repr(value)}")
