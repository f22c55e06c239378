"""FlashQLA's kernels for a call, compiled side by side.

FlashQLA compiles each kernel where it first calls it, up to nine, one after another. What a call
will ask for is found by running `flash_qla_rules` over tensors without memory while calls of
TileLang are noted instead of made. TileLang then compiles in threads, as its `par_compile` does. If
anything of this fails, FlashQLA compiles as it does without it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from prefixtree.kernels.operators import first_call
from prefixtree.kernels.recurrence.protocol import DeltaCall
from prefixtree.kernels.recurrence.states import CHUNK

_log = logging.getLogger("prefixtree")
_lock = threading.Lock()
# kinds of calls whose kernels were asked for
_known: set[tuple[Any, ...]] = set()


class _Asked(NamedTuple):
    """A call of one of TileLang's factories of kernels."""

    factory: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def compile_ahead(call: DeltaCall, branches: bool, backward: bool) -> None:
    """Compiles what the first call of a kind needs; later ones cost a look-up.

    Args:
        call: of a backward, or of a forward. With a forward whose inputs require gradients, the
            kernels of its backward are compiled too.
        branches: whether states are handed on.
        backward: which it is.
    """
    kind = (*call.key.shape[1:], *call.value.shape[1:], call.value.dtype, call.beta.dtype, branches)
    inputs = (call.query, call.key, call.value, call.g, call.beta, call.initial)
    needs = {"backward"} if backward else {"forward"}
    if any(x is not None and x.requires_grad for x in inputs):
        needs.add("backward")
    if all((kind, need) in _known for need in needs):
        return
    with _lock:
        needs = {need for need in needs if (kind, need) not in _known}
        _known.update((kind, need) for need in needs)
        try:
            asked = _asked_for(call, branches, needs)
            sizes = "{}x{} and {}x{}".format(*kind)
            what = f"{len(asked)} kernels of flash-qla side by side,"
            with first_call(what, call.value.dtype, f"sizes {sizes}"):
                _compile(asked)
        except Exception as error:
            # FlashQLA's own call says what is wrong, or does not need it
            _log.info("flash-qla compiles its kernels one after another: %r", error)


def _asked_for(call: DeltaCall, branches: bool, needs: set[str]) -> list[_Asked]:
    """The calls that `flash_qla` makes of TileLang, in its order, each once."""
    from prefixtree.kernels.recurrence import flash_qla_rules as rules

    assert call.mask is not None
    tables = call.mask.segment_tables(torch.device("cpu"))
    query, key, value, g, beta = (
        torch.empty(x.shape, dtype=x.dtype, device="meta")
        for x in (call.query, call.key, call.value, call.g, call.beta)
    )
    g = g.float()
    solved = value.new_empty(*value.shape[:2], CHUNK)
    starts = g.new_empty(tables.host.num_segments, *call.state_shape)
    inputs = (query, key, value, g, beta)
    rest = (tables, call.scale)
    with _noted() as asked:
        if "forward" in needs and branches:
            rules.solve(key, g, beta, tables)
            rules.ends(key, value, g, beta, solved, tables)
            rules.outputs(*inputs, solved, starts, *rest)
        elif "forward" in needs:
            rules.sequences_forward(*inputs, *rest)
        if "backward" in needs and branches:
            rules.ends(key, value, g, beta, solved, tables)
            rules.gradients_of_starts(query, key, g, beta, solved, value, *rest)
            before = rules.states(key, value, g, beta, solved, starts, tables)
            rules.gradients(*inputs, solved, value, before, starts, *rest)
        elif "backward" in needs:
            rules.sequences_gradients(*inputs, solved, value, *rest)
    return asked


@contextmanager
def _noted() -> Iterator[list[_Asked]]:
    """This thread's calls of TileLang's factories are noted, and their kernels do nothing. Those of
    other threads are made."""
    from tilelang.jit import JITImpl

    asked: list[_Asked] = []
    made: Callable[..., Any] = JITImpl.__call__
    thread = threading.get_ident()

    def note(factory: Any, *arguments: Any, **options: Any) -> Any:
        if threading.get_ident() != thread:
            return made(factory, *arguments, **options)
        one = _Asked(factory, arguments, options)
        if one not in asked:
            asked.append(one)
        return lambda *_: None

    JITImpl.__call__ = note
    try:
        yield asked
    finally:
        JITImpl.__call__ = made


def _compile(asked: list[_Asked]) -> None:
    """Afterwards TileLang has them."""
    # Python traces a kernel, which threads cannot share; a factory keeps what it traced
    for factory, arguments, options in asked:
        factory.get_tir(*arguments, **options)
    # Not `factory(...)`: its memory of the last call is written without a lock, and could hand one
    # thread the kernel of another.
    with ThreadPoolExecutor(min(len(asked), len(os.sched_getaffinity(0)))) as pool:
        list(pool.map(lambda one: one.factory.compile(*one.arguments, **one.options), asked))
    # TileLang's hint that there is a decorator, once per kernel
    hints = logging.getLogger("tilelang.cache.kernel_cache")
    hints.addFilter(_no_hints)
    try:
        for factory, arguments, options in asked:
            factory(*arguments, **options)
    finally:
        hints.removeFilter(_no_hints)


def _no_hints(record: logging.LogRecord) -> bool:
    return record.levelno > logging.WARNING
