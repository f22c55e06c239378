"""What is said of calls that compile: once per kind, and only where they are waited for."""

from __future__ import annotations

import logging
import time

import pytest

from prefixtree.kernels import operators as module
from prefixtree.kernels.operators import first_call, first_calls


@pytest.fixture(autouse=True)
def nothing_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_begun", set())
    monkeypatch.setattr(module, "_took", {})


def test_a_long_first_call_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    for seconds in (0.5, 0.2):
        with (
            caplog.at_level(logging.WARNING, logger="prefixtree"),
            first_call("the forward", 128),
        ):
            time.sleep(seconds)
            if seconds == 0.5:
                # while it is waited for
                assert "compiling the forward 128: the first call" in caplog.text
    assert [r.message.split()[0] for r in caplog.records] == ["compiling", "compiled"]
    assert list(first_calls()) == ["the forward 128"]
    assert 0.5 <= first_calls()["the forward 128"] < 30


def test_short_ones_say_nothing_and_kinds_are_apart(caplog: pytest.LogCaptureFixture) -> None:
    for kind in ("forward", "backward", "forward"):
        with caplog.at_level(logging.WARNING, logger="prefixtree"), first_call(kind):
            pass
    assert not caplog.records
    assert list(first_calls()) == ["forward", "backward"]


def test_an_error_passes(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ZeroDivisionError), first_call("forward"):
        raise ZeroDivisionError
    assert list(first_calls()) == ["forward"]
