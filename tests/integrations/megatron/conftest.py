"""These tests run in an environment of their own (`make test-megatron`), never with the others."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

if importlib.util.find_spec("megatron") is None:
    raise pytest.UsageError("tests/integrations/megatron needs Megatron: run `make test-megatron`")

pytest.register_assert_rewrite("tests.integrations.megatron.runs")


@pytest.fixture(scope="session", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone, and Megatron's groups in it."""
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    dist.destroy_process_group()
