"""The backend "flash_qla": the gated delta rule by FlashQLA's fused kernels, on Hopper.

FlashQLA walks sequences from given start states to given gradients of their ends, and can compute
how a sequence maps its start to its end. Segments of a forest are such sequences. So its kernels
run once for all segments, and a segment hands its children one product (`states.starts_of`).
Without branches its own functions serve the forest, which also cut long sequences. Forests of short
segments run through the backend "fla", which saves tensors of the same shapes.

FlashQLA compiles each kernel when it first calls it, up to nine, one after another. Here they
compile side by side. `flash_qla_rules` runs over tensors without memory, and calls of TileLang are
noted instead of made: these are the kernels that a call needs. TileLang then compiles in threads,
as its `par_compile` does. If any of this fails, FlashQLA compiles as it does without it.

Legend: T packed tokens, N segments, H key heads, HV value heads, K and V head dims.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch

from prefixtree.kernels import runtime
from prefixtree.kernels.operators import first_call
from prefixtree.kernels.recurrence import fla
from prefixtree.kernels.recurrence.protocol import Call, Computed, DeltaCall
from prefixtree.kernels.recurrence.states import CHUNK, gradients_of_ends, starts_of
from prefixtree.packing.segments import SegmentTables, StateSchedule, tables_of

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
    """Compiles the kernels of the first call of a kind; later calls cost a look-up."""
    # if the inputs of a forward require gradients, the kernels of its backward are compiled too
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
            calls = _asked_for(call, branches, needs)
            sizes = "{}x{} and {}x{}".format(*kind)
            what = f"{len(calls)} kernels of flash-qla side by side,"
            with first_call(what, call.value.dtype, f"sizes {sizes}"):
                _compile(calls)
        except Exception as error:
            # FlashQLA's own call says what is wrong, or does not need it
            _log.info("flash-qla compiles its kernels one after another: %r", error)


def _asked_for(call: DeltaCall, branches: bool, needs: set[str]) -> list[_Asked]:
    """Lists the calls that `flash_qla` makes of TileLang, in its order, each once."""
    from prefixtree.kernels.recurrence import flash_qla_rules as rules

    assert call.mask is not None
    tables = tables_of(call.mask, torch.device("cpu"))
    query, key, value, g, beta = (
        torch.empty(x.shape, dtype=x.dtype, device="meta")
        for x in (call.query, call.key, call.value, call.g, call.beta)
    )
    g = g.float()
    solved = value.new_empty(*value.shape[:2], CHUNK)
    starts = g.new_empty(tables.host.num_segments, *call.state_shape)
    inputs = (query, key, value, g, beta)
    tables_and_scale = (tables, call.scale)
    with _noted() as calls:
        if "forward" in needs and branches:
            rules.solve(key, g, beta, tables)
            rules.ends(key, value, g, beta, solved, tables)
            rules.outputs(*inputs, solved, starts, *tables_and_scale)
        elif "forward" in needs:
            rules.sequences_forward(*inputs, *tables_and_scale)
        if "backward" in needs and branches:
            rules.ends(key, value, g, beta, solved, tables)
            rules.gradients_of_starts(query, key, g, beta, solved, value, *tables_and_scale)
            before = rules.states(key, value, g, beta, solved, starts, tables)
            rules.gradients(*inputs, solved, value, before, starts, *tables_and_scale)
        elif "backward" in needs:
            rules.sequences_gradients(*inputs, solved, value, *tables_and_scale)
    return calls


@contextmanager
def _noted() -> Iterator[list[_Asked]]:
    """Notes this thread's calls of TileLang's factories, whose kernels then do nothing."""
    from tilelang.jit import JITImpl

    calls: list[_Asked] = []
    original: Callable[..., Any] = JITImpl.__call__
    thread = threading.get_ident()

    def note(factory: Any, *arguments: Any, **options: Any) -> Any:
        if threading.get_ident() != thread:
            return original(factory, *arguments, **options)
        asked_call = _Asked(factory, arguments, options)
        if asked_call not in calls:
            calls.append(asked_call)
        return lambda *_: None

    JITImpl.__call__ = note
    try:
        yield calls
    finally:
        JITImpl.__call__ = original


def _compile(asked: list[_Asked]) -> None:
    """Compiles the kernels of these calls; afterwards TileLang has them."""
    # Python traces a kernel, which threads cannot share; a factory keeps what it traced
    for factory, arguments, options in asked:
        factory.get_tir(*arguments, **options)
    # not `factory(...)`: its memory of the last call is written without a lock, and could hand one
    # thread the kernel of another
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


# releases whose inner functions are those that `flash_qla_rules` calls
VERSIONS = ("0.1.3",)
HEAD_DIM = 128
# tokens per segment from which on FlashQLA's kernels are faster. On an H200 they took 36.3 ms and
# fla's 28.7 with 126 tokens per segment, and 35.5 and 58.4 with 256 (benchmarks/results.md): each
# kernel reads and writes a float32 state per segment and head
LEAST_TOKENS = 192
# fla's own switch of this package
SWITCH = "FLA_FLASH_QLA"


def refusal(call: Call) -> str | None:
    """Says why this backend cannot serve a call; None if it can."""
    if not isinstance(call, DeltaCall) or call.g.ndim == 3:
        return "it serves the gated delta rule with one gate per head"
    if (reason := fla.refusal(call)) is not None:
        return reason
    if (dims := (call.key.shape[2], call.value.shape[2])) != (HEAD_DIM, HEAD_DIM):
        return f"head dims must be {HEAD_DIM} and {HEAD_DIM}, and are {dims[0]} and {dims[1]}"
    if runtime.capability(call.key.device)[0] != 9:
        return "it was verified on Hopper (compute capability 9.0) alone"
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 switches it off"
    return _package_refusal()


@cache
def _package_refusal() -> str | None:
    try:
        installed = version("flash-qla")
    except PackageNotFoundError:
        return f"flash-qla ({' or '.join(VERSIONS)}) is not installed"
    if installed not in VERSIONS:
        return f"it works with flash-qla {' or '.join(VERSIONS)}, and {installed} is installed"
    return None


def saves(call: Call) -> list[torch.Tensor]:
    """Makes tensors like `forward` saves: gates summed along chunks, the triangle of each chunk."""
    assert isinstance(call, DeltaCall)
    tokens, heads, _ = call.value.shape
    return [
        call.g.new_empty(call.g.shape, dtype=torch.float32),
        call.value.new_empty(tokens, heads, CHUNK),
    ]


def forward(call: Call) -> Computed:
    """Computes out [T, HV, V], and saves what the backward needs in addition."""
    from prefixtree.kernels.recurrence import flash_qla_rules as rules

    assert isinstance(call, DeltaCall)
    tables, schedule = _tables(call)
    if _is_short(tables):
        return fla.forward(call)
    compile_ahead(call, schedule.num_states > 0, backward=False)
    with runtime.current(call.value.device):
        query, key = fla.normed(call)[:2]
        value, beta = call.value.contiguous(), call.beta.contiguous()
        g = call.g.float().contiguous()
        # states that enter or leave count as branch points
        if not schedule.num_states:
            out, *kept = rules.sequences_forward(query, key, value, g, beta, tables, call.scale)
            no_final = None if call.num_final is None else g.new_empty(0, *call.state_shape)
            return Computed(out, kept, no_final)
        g, solved = rules.solve(key, g, beta, tables)
        ends, transitions = rules.ends(key, value, g, beta, solved, tables)
        starts, final = starts_of(schedule, ends, transitions, call.initial)
        out = rules.outputs(query, key, value, g, beta, solved, starts, tables, call.scale)
    return Computed(out, [g, solved], None if call.num_final is None else final)


def backward(
    call: Call, dout: torch.Tensor, saved: list[torch.Tensor], dfinal: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Computes the gradients of query, key, value, g and beta, in their dtypes."""
    from prefixtree.kernels.recurrence import flash_qla_rules as rules

    assert isinstance(call, DeltaCall)
    tables, schedule = _tables(call)
    if _is_short(tables):
        return fla.backward(call, dout, saved, dfinal)
    compile_ahead(call, schedule.num_states > 0, backward=True)
    g, solved = saved
    with runtime.current(call.value.device):
        query, key, *norms = fla.normed(call)
        value, beta, dout = call.value.contiguous(), call.beta.contiguous(), dout.contiguous()
        inputs = (query, key, value, g, beta, solved, dout)
        if not schedule.num_states:
            grads = rules.sequences_gradients(*inputs, tables, call.scale)
        else:
            # computed again: kept, they would take a state per segment and head
            ends, transitions = rules.ends(key, value, g, beta, solved, tables)
            starts, _ = starts_of(schedule, ends, transitions, call.initial)
            del ends
            dstarts = rules.gradients_of_starts(
                query, key, g, beta, solved, dout, tables, call.scale
            )
            dends, dinitial = gradients_of_ends(tables, schedule, dstarts, transitions, dfinal)
            del dstarts, transitions
            states = rules.states(key, value, g, beta, solved, starts, tables)
            del starts
            grads = rules.gradients(*inputs, states, dends, tables, call.scale)
            if call.initial is not None:
                grads.append(dinitial)
        fla.through_norms(grads, query, key, *norms)
    return fla.in_dtypes(call, grads)


def _tables(call: DeltaCall) -> tuple[SegmentTables, StateSchedule]:
    assert call.mask is not None
    tables = tables_of(call.mask, call.value.device)
    return tables, tables.schedule(CHUNK)


def _is_short(tables: SegmentTables) -> bool:
    """Whether fla's kernels are faster; the same for a backward as for its forward."""
    segments = tables.host
    return len(segments.predictor) < LEAST_TOKENS * segments.num_segments
