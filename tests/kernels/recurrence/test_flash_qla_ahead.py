"""What flash-qla will ask TileLang for is compiled side by side, before its first call.

Neither is installed where these tests run: `Factory` is TileLang's, and the rules are those of
`test_flash_qla`, in torch, each with a kernel. `fla/test_flash_qla.py` looks at the real ones.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

from prefixtree.kernels.recurrence import flash_qla, tree_delta_rule
from tests.kernels.recurrence.test_flash_qla import (
    IN_TORCH,
    NAMES,
    SegmentsInTorch,
    call_of,
    reference_of,
)
from tests.support.recurrence_cases import forest_of, relative
from tests.support.strategies import mask_of

pytestmark = IN_TORCH
FORWARD = {"solve", "ends", "outputs"}
BACKWARD = {"ends", "gradients_of_starts", "states", "gradients"}


class Factory:
    """As `tilelang.jit.JITImpl`: a call compiles what it does not have; it returns a kernel."""

    def __init__(self, name: str) -> None:
        self.name, self.kernels = name, dict[Any, Any]()
        self.traced_by = threading.get_ident()
        self.compiled = list[Any]()
        self.barrier: threading.Barrier | None = None

    def get_tir(self, *sizes: int) -> None:
        assert threading.get_ident() == self.traced_by

    def compile(self, *sizes: int) -> Any:
        if sizes not in self.compiled:
            if self.barrier is not None:
                self.barrier.wait(5)
            self.compiled.append(sizes)
        return lambda *_: None

    def __call__(self, *sizes: int) -> Any:
        assert threading.get_ident() == self.traced_by
        return self.kernels.setdefault(sizes, self.compile(*sizes))


class Compiled(SegmentsInTorch):
    """The rules in torch, behind a kernel each. Tensors without memory get no further."""

    def __init__(self) -> None:
        super().__init__()
        self.factories = {name: Factory(name) for name in FORWARD | BACKWARD}

    def compiled(self) -> set[str]:
        return {name for name, factory in self.factories.items() if factory.compiled}

    def compile_together(self, count: int) -> None:
        """Each kernel waits until so many are being compiled."""
        barrier = threading.Barrier(count)
        for factory in self.factories.values():
            factory.barrier = barrier


def _behind_its_kernel(name: str) -> Any:
    def rule(self: Compiled, *given: Any) -> Any:
        self.factories[name](given[0].shape[1])()
        return None if given[0].is_meta else getattr(SegmentsInTorch, name)(self, *given)

    return rule


for _name in FORWARD | BACKWARD:
    setattr(Compiled, _name, _behind_its_kernel(_name))


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiled]:
    found = Compiled()
    for name in ("tilelang", "tilelang.jit"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["tilelang.jit"], "JITImpl", Factory, raising=False)
    module = ModuleType(f"{flash_qla.__package__}.flash_qla_rules")
    # functions that a module has by looking them up
    vars(module)["__getattr__"] = partial(getattr, found)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(
        sys.modules[flash_qla.__package__], "flash_qla_rules", module, raising=False
    )
    monkeypatch.setattr(flash_qla, "LEAST_TOKENS", 0)
    monkeypatch.setattr(flash_qla, "refusal", lambda _: None)
    monkeypatch.setattr(flash_qla, "_known", set())
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16))
    before = Factory.__call__
    yield found
    assert Factory.__call__ is before


def run(grad: bool) -> None:
    """A forward, and with `grad` a backward, whose results are compared."""
    mask = mask_of(forest_of("caterpillar"))
    call = call_of(mask)
    dout = torch.randn_like(call.value)
    leaves = [getattr(call, name).requires_grad_(grad) for name in NAMES]
    out = tree_delta_rule(*leaves, mask, scale=call.scale, qk_l2norm=False, backend="flash_qla")
    want, want_grads = reference_of(call, dout)
    assert relative(out.detach(), want) < 2e-6
    if grad:
        for x, y in zip(torch.autograd.grad(out, leaves, dout), want_grads, strict=True):
            assert relative(x, y) < 5e-6


def test_a_forward_that_trains_compiles_all_kernels_at_once(rules: Compiled) -> None:
    rules.compile_together(len(FORWARD | BACKWARD))
    run(grad=True)
    assert rules.compiled() == FORWARD | BACKWARD
    # each of them once
    assert all(len(x.compiled) == 1 for x in rules.factories.values())
    run(grad=True)


def test_without_gradients_the_backward_is_left_for_later(rules: Compiled) -> None:
    rules.compile_together(len(FORWARD))
    run(grad=False)
    assert rules.compiled() == FORWARD
    rules.compile_together(len(BACKWARD - FORWARD))
    run(grad=True)
    assert rules.compiled() == FORWARD | BACKWARD


def test_what_fails_ahead_is_compiled_where_it_is_called(
    rules: Compiled, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Factory, "get_tir", None)
    with caplog.at_level(logging.INFO, logger="prefixtree"):
        run(grad=True)
    assert "one after another: TypeError" in caplog.text
    assert rules.compiled() == FORWARD | BACKWARD


def test_kernels_of_other_threads_run_while_calls_are_noted(rules: Compiled) -> None:
    other, ran = Factory("other"), []

    def call_it() -> None:
        other.traced_by = threading.get_ident()
        ran.append(other(7))

    with flash_qla._noted() as asked:
        rules.factories["ends"](3)()
        thread = threading.Thread(target=call_it)
        thread.start()
        thread.join()
    assert [one.factory.name for one in asked] == ["ends"]
    assert ran and other.compiled == [(7,)] and not rules.factories["ends"].compiled
