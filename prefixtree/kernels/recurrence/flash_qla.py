"""The backend "flash_qla": the gated delta rule by FlashQLA's fused kernels, on Hopper.

FlashQLA walks sequences from given start states to given gradients of their ends, and can tell what
a sequence makes of its start. Segments of a forest are such sequences. So its kernels run once for
all segments, and what a segment hands to its children is one product per segment with children
(`handover`). Without branches its own functions serve the forest, which cut long sequences as well.
Forests of short segments run through the backend "fla", which saves tensors of the same shapes.

Legend: T packed tokens, N segments, H key heads, HV value heads, K and V head dims.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

from prefixtree.kernels import runtime
from prefixtree.kernels.recurrence import fla
from prefixtree.kernels.recurrence.flash_qla_ahead import compile_ahead
from prefixtree.kernels.recurrence.handover import gradients_of_ends, starts_of
from prefixtree.kernels.recurrence.protocol import Call, Computed, DeltaCall
from prefixtree.kernels.recurrence.states import CHUNK
from prefixtree.packing.segments import SegmentTables
from prefixtree.packing.state_schedule import StateSchedule

# releases whose inner functions are those that `flash_qla_rules` calls
VERSIONS = ("0.1.3",)
HEAD_DIM = 128
# Tokens per segment from which FlashQLA's kernels are the faster ones. On an H200 they took 36.3 ms
# beside fla's 28.7 with 126 tokens per segment, and 35.5 beside 58.4 with 256
# (benchmarks/results.md): each kernel reads and writes a float32 state per segment and head.
LEAST_TOKENS = 192
# fla's own switch of this package
SWITCH = "FLA_FLASH_QLA"


def refusal(call: Call) -> str | None:
    """Why this backend cannot serve a call; None where it can."""
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
        found = version("flash-qla")
    except PackageNotFoundError:
        return f"flash-qla ({' or '.join(VERSIONS)}) is not installed"
    if found not in VERSIONS:
        return f"it works with flash-qla {' or '.join(VERSIONS)}, and {found} is installed"
    return None


def saves(call: Call) -> list[torch.Tensor]:
    """Tensors like those `forward` saves: gates summed along chunks, the triangle of each chunk."""
    assert isinstance(call, DeltaCall)
    tokens, heads, _ = call.value.shape
    return [
        call.g.new_empty(call.g.shape, dtype=torch.float32),
        call.value.new_empty(tokens, heads, CHUNK),
    ]


def forward(call: Call) -> Computed:
    """-> out [T, HV, V], and what the backward reads besides the call."""
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
        # states that enter or leave are among them
        if not schedule.num_states:
            out, *kept = rules.sequences_forward(query, key, value, g, beta, tables, call.scale)
            none = None if call.num_final is None else g.new_empty(0, *call.state_shape)
            return Computed(out, kept, none)
        g, solved = rules.solve(key, g, beta, tables)
        ends, transitions = rules.ends(key, value, g, beta, solved, tables)
        starts, final = starts_of(schedule, ends, transitions, call.initial)
        out = rules.outputs(query, key, value, g, beta, solved, starts, tables, call.scale)
    return Computed(out, [g, solved], None if call.num_final is None else final)


def backward(
    call: Call, dout: torch.Tensor, saved: list[torch.Tensor], dfinal: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """-> gradients of query, key, value, g and beta, in their dtypes."""
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
            # made again: kept, they would take a state per segment and head
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
    tables = call.mask.segment_tables(call.value.device)
    return tables, tables.schedule(CHUNK)


def _is_short(tables: SegmentTables) -> bool:
    """Whether fla's kernels are the faster ones; the same for a backward as for its forward."""
    segments = tables.host
    return len(segments.predictor) < LEAST_TOKENS * segments.num_segments
