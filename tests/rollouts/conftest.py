"""Files of rollouts to read, written by fixtures, and a tokenizer for the chats in them."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefixtree.rollouts import ChatTokenizer, read_rollouts
from tests.support.chat_tokenizer import CHATML, save_tokenizer

TALK = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "où est-il?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "function": {"name": "find", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "shelf 3"},
    {"role": "assistant", "content": "On shelf 3."},
]


@pytest.fixture
def write(tmp_path):
    def _write(*lines, name="rollouts.jsonl"):
        texts = [line if isinstance(line, (str, bytes)) else json.dumps(line) for line in lines]
        data = b"\n".join(t if isinstance(t, bytes) else t.encode() for t in texts)
        path = tmp_path / name
        path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
        return path

    return _write


@pytest.fixture
def write_parquet(tmp_path):
    def _write(name="rollouts.parquet", **columns):
        path = tmp_path / name
        pq.write_table(pa.table(columns), path)
        return path

    return _write


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """Bytes as tokens, no merges, ChatML, and reasoning shown in the last message alone."""
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), CHATML)


@pytest.fixture(scope="session")
def chat_tokenizer(tokenizer_folder):
    return ChatTokenizer(tokenizer_folder)


@pytest.fixture
def read(write, chat_tokenizer):
    """Writes rows and reads them with the tokenizer."""

    def _read(*rows):
        return read_rollouts(write(*rows), strict=True, tokenizer=chat_tokenizer)

    return _read


def as_lists(arrays):
    return [array.tolist() for array in arrays]
