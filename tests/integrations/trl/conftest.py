"""These tests run in an environment of their own (`make test-trl`), never with the others."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

# TRL and transformers announce their own renamings, and a reward at its ceiling has no deviation
_WARNINGS = (
    "ignore::FutureWarning",
    "ignore::DeprecationWarning",
    "ignore:You are using 'rollout_func'",
    "ignore:You are importing from 'trl.experimental'",
    "ignore:.*pin_memory.*:UserWarning",
    # what is new in another version, its tests tell
    "ignore:TRL .* the adapter is tested with",
)


def pytest_configure(config: pytest.Config) -> None:
    if importlib.util.find_spec("trl") is None:
        raise pytest.UsageError("tests/integrations/trl needs TRL: run `make test-trl`")
    for warning in _WARNINGS:
        config.addinivalue_line("filterwarnings", warning)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out two files where AsyncGRPO packs no trees; test_contract.py's skips say so."""
    import trl
    from packaging.version import Version

    from prefixtree.integrations.trl.contract import TREES_SINCE

    about_trees = collection_path.name in ("test_async.py", "test_tree_rows.py")
    return (about_trees and Version(trl.__version__) < Version(TREES_SINCE)) or None


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two test processes of two threads each on two cores mostly wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with random weights and its tokenizer of bytes, saved."""
    from tests.integrations.trl.runs import save_model

    return save_model(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of one layer, for what compiles or interprets each."""
    from tests.integrations.trl.runs import save_model, tiny_config

    return save_model(tmp_path_factory.mktemp("one"), tiny_config(num_hidden_layers=1))
