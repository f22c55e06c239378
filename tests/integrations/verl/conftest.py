"""verl on a CPU, in one process and one rank, and tiny models on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# before anything imports verl
os.environ.update(
    VERL_PLATFORM="cpu",
    WORLD_SIZE="1",
    RANK="0",
    LOCAL_RANK="0",
    MASTER_ADDR="127.0.0.1",
    MASTER_PORT="0",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    RAY_USAGE_STATS_ENABLED="0",
)

import pytest
import torch
import torch.distributed as dist

from tests.integrations.verl.cpu_platform import register_engines
from tests.integrations.verl.image_runs import VISION
from tests.integrations.verl.runs import save_model
from tests.support.full import add_option, set_up
from tests.support.hooks import unprobed as unprobed

pytest.register_assert_rewrite("tests.integrations.verl.compare")


def pytest_addoption(parser: pytest.Parser) -> None:
    # tests/conftest.py is above this suite's own pytest.ini, and not read
    add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    set_up(config)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model of each kind."""
    folder = tmp_path_factory.mktemp("models")
    for kind in ("qwen3", "qwen3_moe", "qwen3_tied", "qwen3_moe_tied"):
        save_model(kind, folder)
    return folder


@pytest.fixture(scope="session")
def sees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model with a vision encoder of each type."""
    folder = tmp_path_factory.mktemp("vision")
    for model_type in VISION:
        save_model(model_type, folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone, and the engines registered for the CPU."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    register_engines()
    yield
    dist.destroy_process_group()
