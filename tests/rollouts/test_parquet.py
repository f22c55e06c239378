"""Rollouts in parquet: what JSON lines give, and a message of its own for every broken file."""

import io
import sys

import numpy as np
import pyarrow as pa
import pytest

from prefixtree.errors import InputError
from prefixtree.rollouts import read_rollouts
from tests.rollouts.conftest import TALK, as_lists


def test_parquet_gives_what_json_lines_give(write, write_parquet):
    rows = [
        {"id": "a", "group": 1, "token_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "turn_ends": [3]},
        {"id": "b", "group": 2, "token_ids": [1, 2], "loss_mask": None, "turn_ends": None},
    ]
    path = write_parquet(**{name: [row[name] for row in rows] for name in rows[0]}, reward=[1, 2])
    found, expected = read_rollouts(path, strict=True), read_rollouts(write(*rows), strict=True)
    assert as_lists(found.sequences) == as_lists(expected.sequences)
    assert all(sequence.dtype == np.int64 for sequence in found.sequences)
    assert as_lists(found.loss_masks) == as_lists(expected.loss_masks)
    assert found.turn_ends[0].tolist() == [3]
    assert (found.groups, found.ids, found.lines) == ([1, 2], ["a", "b"], [1, 2])


@pytest.mark.parametrize("kind", [pa.int32(), pa.int64(), pa.uint16()])
@pytest.mark.parametrize("container", [pa.list_, pa.large_list])
def test_parquet_integers_of_any_width(write_parquet, kind, container):
    prompts = pa.array([[5, 6], [], [7]], container(kind))
    responses = pa.array([[1], [2, 3], [4]], container(kind))
    # a slice of a column starts in the middle of its values
    table = pa.table({"prompt_ids": prompts, "response_ids": responses}).slice(1)
    path = write_parquet(**{name: table[name] for name in table.column_names})
    rollouts = read_rollouts(path, strict=True)
    assert as_lists(rollouts.sequences) == [[2, 3], [7, 4]]
    assert as_lists(rollouts.loss_masks) == [[True, True], [False, True]]


def test_parquet_masks_may_be_boolean(write_parquet):
    path = write_parquet(token_ids=[[1, 2]], loss_mask=[[False, True]])
    assert as_lists(read_rollouts(path, strict=True).loss_masks) == [[False, True]]


def test_parquet_of_many_batches(write_parquet):
    path = write_parquet(token_ids=[[i] * (1 + i % 3) for i in range(10_000)])
    rollouts = read_rollouts(path, strict=True)
    assert as_lists(rollouts.sequences) == [[i] * (1 + i % 3) for i in range(10_000)]
    assert rollouts.lines == list(range(1, 10_001))


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"token_ids": [[1], None]}, ":2: expected token_ids, input_ids"),
        ({"token_ids": [[1], []]}, ":2: has no token"),
        ({"token_ids": [[1], [2, -1]]}, ":2: token_ids[1] is -1; token ids are >= 0"),
        ({"token_ids": [[1], [2, None]]}, ":2: token_ids[1] is None; expected an integer"),
        ({"token_ids": [[1.5], [2.0]]}, ":1: token_ids[0] is 1.5; expected an integer"),
        ({"token_ids": [[1]], "loss_mask": [[2]]}, ":1: loss_mask[0] is np.int64(2); expected 0"),
        ({"token_ids": [[1]], "turn_ends": [[2]]}, ":1: turn_ends[0] is 2; expected 1 to 1"),
        ({"text": ["hello"]}, ": has none of the columns"),
    ],
)
def test_a_broken_row_of_parquet_is_named(write_parquet, columns, message):
    path = write_parquet(**columns)
    with pytest.raises(InputError) as caught:
        read_rollouts(path, strict=True)
    assert f"{path}{message}" in str(caught.value)


def test_a_damaged_parquet_file(write_parquet):
    path = write_parquet(token_ids=[[1, 2]])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"rollouts\.parquet: cannot be read as parquet"):
        read_rollouts(path)


def test_parquet_without_pyarrow_names_the_extra(monkeypatch, write_parquet):
    path = write_parquet(token_ids=[[1, 2]])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"pip install 'prefixtree-attention\[parquet\]'"):
        read_rollouts(path)


def test_parquet_from_standard_input_is_refused(monkeypatch, write_parquet):
    data = write_parquet(token_ids=[[1, 2]]).read_bytes()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    with pytest.raises(InputError, match="give the file's name"):
        read_rollouts("-")


def test_chats_in_parquet(write_parquet, chat_tokenizer):
    talk = [{"role": m["role"], "content": m["content"] or "x"} for m in TALK]
    path = write_parquet(messages=[talk, talk[:3]])
    rollouts = read_rollouts(path, strict=True, tokenizer=chat_tokenizer)
    assert [len(ends) for ends in rollouts.turn_ends] == [2, 1]
