"""Rollouts as trainers write them, as rows: texts (TRL, veRL, SkyRL's evaluations) and pickles
(slime's rollouts, SkyRL's batches). A pickle is read without importing or running what it names."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from prefixtree.errors import InputError

#: how files begin that are a pickle within a zip, as torch.save writes it, or one alone
ZIP, PICKLE = b"PK\x03\x04", b"\x80"
#: fields of texts, and those that tell a dump from a data set
FIELDS = ("input", "output", "input_prompt", "output_response", "step", "score", "advantage")


class Texts(NamedTuple):
    """A text and what follows it: the arguments of `ChatTokenizer.continued`."""

    prompt: str
    completion: str
    is_sampled: bool = False
    is_bare: bool = False


def texts_of(row: dict[str, Any]) -> list[tuple[str, Texts]]:
    """The texts of a row, with what tells each from the other of a pair; [] where it has none."""
    if "input_prompt" in row and "output_response" in row:
        # SkyRL: trainer.dump_eval_results, decoded with special tokens
        return [("", _texts(row, "input_prompt", "output_response", True, True))]
    if all(name in row for name in ("input", "output", "score", "step")):
        # veRL: trainer.rollout_data_dir, decoded without special tokens
        return [("", _texts(row, "input", "output", True, True))]
    if isinstance(row.get("completion"), str) and isinstance(row.get("prompt"), str):
        # TRL: completions_STEP.parquet of log_completions has advantages, a data set has none
        return [("", _texts(row, "prompt", "completion", "advantage" in row))]
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if isinstance(chosen, str) and isinstance(rejected, str):
        if "prompt" not in row:
            row = {**row, **_without_prompt(chosen, rejected)}
        return [(f" {name}", _texts(row, "prompt", name)) for name in ("chosen", "rejected")]
    return []


def sampled_prompt(row: dict[str, Any]) -> str | None:
    """The prompt of a row that a trainer sampled, as text; None for other rows."""
    texts = row.get("texts")
    if isinstance(texts, Texts):
        return texts.prompt if texts.is_sampled else None
    return json.dumps(row["prompt"]) if "advantage" in row and "prompt" in row else None


def _texts(row: dict[str, Any], prompt: str, completion: str, *how: bool) -> Texts:
    for name in (prompt, completion):
        if not isinstance(row.get(name), str):
            kind = type(row.get(name)).__name__
            raise InputError(f"{name} must be text, as what goes with it is; got {kind}")
    return Texts(row[prompt], row[completion], *how)


def _without_prompt(chosen: str, rejected: str) -> dict[str, str]:
    """The prompt that both begin with, up to a word's end, and what follows it in each."""
    pairs = zip(chosen, rejected, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
    if same and chosen[same - 1] == " ":
        same -= 1
    return {"prompt": chosen[:same], "chosen": chosen[same:], "rejected": rejected[same:]}


# ---- pickles -------------------------------------------------------------------------------------


def read_pickle(data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """Reads numbered rows, from 1, of token ids and loss masks; ValueError for a damaged file."""
    try:
        contents = _Reader(_pickle_of(data)).load()
        if isinstance(contents, _Inert) and len(contents.given) == 2:
            contents = contents.given[1]
        kinds = {"samples": _of_slime, "batch_dict": _of_skyrl}
        readers = [
            make for name, make in kinds.items() if isinstance(contents, dict) and name in contents
        ]
        rows = list(readers[0](contents)) if readers else None
    except Exception as problem:  # a damaged pickle may ask for anything
        raise ValueError(
            f"cannot be read as a pickle: {type(problem).__name__}: {problem}"
        ) from None
    if rows is None:
        raise ValueError(
            "is a pickle of another kind; expected what slime writes for "
            "--save-debug-rollout-data, or SkyRL for trainer.dump_data_batch"
        )
    yield from enumerate(rows, 1)


def _of_slime(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for sample in found["samples"]:
        tokens, count = sample["tokens"], sample["response_length"]
        response_mask = sample.get("loss_mask")
        mask = [0] * (len(tokens) - count) + list(
            [1] * count if response_mask is None else response_mask
        )
        index, group = sample.get("index"), sample.get("group_index")
        name = None if index is None else f"sample {index}"
        yield {"token_ids": tokens, "loss_mask": mask, "id": name, "group": group}


def _of_skyrl(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    batch, metadata = found["batch_dict"], found["metadata"] or {}
    tokens, real, scored = (_array(batch[n]) for n in ("sequences", "attention_mask", "loss_mask"))
    # rows that fill a batch up are copies
    count = len(tokens) - metadata.get("pad_size", 0)
    groups = metadata.get("uids") or [None] * count
    for i in range(count):
        # responses end with their sequences, and only they have a mask
        mask = np.zeros(tokens.shape[1], np.int64)
        mask[tokens.shape[1] - scored.shape[1] :] = scored[i]
        kept = real[i] == 1
        yield {"token_ids": tokens[i][kept], "loss_mask": mask[kept], "group": groups[i]}


def _array(stored: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(stored["data"], stored["dtype"]).reshape(stored["shape"])


def _pickle_of(data: bytes) -> BinaryIO:
    file = io.BytesIO(data)
    if data[: len(ZIP)] != ZIP:
        return file
    with zipfile.ZipFile(file) as archive:
        (name,) = (n for n in archive.namelist() if n.rpartition("/")[2] == "data.pkl")
        return io.BytesIO(archive.read(name))


class _Inert:
    """Stands for whatever a pickle names: a class, a function, an object of them."""

    def __init__(self, *given: Any) -> None:
        self.given = given

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """Does nothing: entries of a list are of no interest."""

    add = extend = append


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Inert

    def persistent_load(self, pid: Any) -> Any:
        return _Inert()
