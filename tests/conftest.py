"""Shared by every test of the suite: hypothesis profiles and the poisoned allocator."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

# modules and items are millions of objects that all stay: collections among them are a quarter of
# the time until the first test
gc.disable()

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# what has an environment of its own: make test-trl, make test-verl, ...
collect_ignore = [
    "integrations/batch_trainers",
    "integrations/megatron",
    "integrations/ms_swift",
    "integrations/trl",
    "integrations/verl",
    "kernels/attention/flash/fa4",
    "kernels/recurrence/fla",
    "models/test_torchao.py",
    "real",
]

# without a GPU the Triton kernels run in its interpreter; read when a kernel is defined
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# torch looks for garbage after each of the hundreds of small graphs that tests make
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

# operations of tiny tensors; threads that wait for a core beside other work make them 16x slower
torch.set_num_threads(1)

pytest.register_assert_rewrite("tests.support")

from tests.support.full import add_option, set_up  # noqa: E402
from tests.support.hooks import probe_each_kind_once  # noqa: E402
from tests.support.hooks import probed as probed  # noqa: E402
from tests.support.hooks import unprobed as unprobed  # noqa: E402

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.support.interpreter import without_repetition

    without_repetition()

_SETTINGS: dict[str, Any] = {
    # the first example of a test may compile numba functions, and CI machines are noisy
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
}
# the same examples every time; `--hypothesis-profile=explore` looks for new ones
settings.register_profile("suite", derandomize=True, max_examples=60, **_SETTINGS)
settings.register_profile("explore", max_examples=1000, **_SETTINGS)
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    set_up(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Among workers the files that take longest come first: none is left when the others end."""
    if not hasattr(config, "workerinput"):
        return
    costs = json.loads((Path(__file__).parent / "costs.json").read_text())
    seconds = {f"tests/{name}": value for name, value in costs["test"]["most"]}
    files = [item.nodeid.partition("::")[0] for item in items]
    tests = Counter(files)
    names = sorted(tests, key=lambda name: (-seconds.get(name, 0), -tests[name], name))
    place = {name: number for number, name in enumerate(names)}
    order = sorted(range(len(items)), key=lambda number: place[files[number]])
    items[:] = [items[number] for number in order]


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    # tests make few cycles, and very many objects
    gc.set_threshold(50_000, 20, 50)


def pytest_runtest_setup(item: pytest.Item) -> None:
    # adapters count what their trainers run, and import it as they like
    if "prefixtree.models.rows_alone" in sys.modules and "integrations" not in item.path.parts:
        probe_each_kind_once()
    torch.manual_seed(0)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Between two files: what lives now stays, and no later collection looks through it.

    Modules of torch and transformers and the items of all tests are millions of objects.
    """
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


class Poison:
    """Counts the allocations that came back filled with NaN."""

    def __init__(self) -> None:
        self.tensors = 0

    def wrap(self, allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
            out = allocate(*args, **kwargs)
            if out.is_floating_point() and out.device.type != "meta":
                with torch.no_grad():
                    out.fill_(float("nan"))
                self.tensors += 1
            return out

        return poisoned


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Poison:
    """`torch.empty` and its kin return NaN, so that a read of unwritten memory shows."""
    state = Poison()
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ):
        monkeypatch.setattr(owner, name, state.wrap(getattr(owner, name)))
    return state
