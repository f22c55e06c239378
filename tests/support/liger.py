"""Liger Kernel in tests: what it changes in transformers, and its kernels on a CPU."""

from __future__ import annotations

import sys

import numpy as np
import pytest


def keep_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts back what Liger replaces in transformers' modules, for every model of the process."""
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and ".modeling_" in name:
            for attribute, value in list(vars(module).items()):
                monkeypatch.setattr(module, attribute, value)


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets Triton's interpreter run Liger's rotary embeddings and MLPs.

    It hands Python's floats to kernels as they are, while compiled kernels get float32 scalars. Its
    norms do not run: the interpreter has no `rsqrt` of libdevice.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    before = interpreter._implicit_cvt

    def converted(value: object) -> object:
        if type(value) is not float:
            return before(value)
        return tl.tensor(
            interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32
        )

    monkeypatch.setattr(interpreter, "_implicit_cvt", converted)
