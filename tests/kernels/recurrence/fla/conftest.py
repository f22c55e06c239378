"""These tests run in an environment of their own (`make test-fla`), never with the others:
transformers takes other functions where fla-core is installed.

Without a GPU fla's kernels run in Triton's interpreter, in float32; on one, natively, in bfloat16.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if importlib.util.find_spec("fla") is None:
        raise pytest.UsageError("tests/kernels/recurrence/fla needs fla-core: run `make test-fla`")
    # fla names what it could use too
    config.addinivalue_line("filterwarnings", "ignore::ImportWarning")
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning")
    config.addinivalue_line("filterwarnings", "ignore::UserWarning")
    # nan in lanes that are masked later, in the interpreter
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _first_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """fla tunes each kernel over dozens of configurations, which changes no result here. All that
    are tuned are among those that compile side by side."""
    from triton.runtime.autotuner import Autotuner

    from prefixtree.kernels.recurrence import fla_rules

    known = list(fla_rules.tuners(fla_rules))

    def bench(self: Any, *_: Any, config: Any, **__: Any) -> list[float]:
        assert any(self is x for x in known), self.base_fn
        return [float(self.configs.index(config))] * 3

    monkeypatch.setattr(Autotuner, "_bench", bench)
    monkeypatch.setattr(Autotuner, "prune_configs", lambda self, _: self.configs[:2])
