"""The kernels that carry states over a forest, against the recurrence chunk by chunk in float64;
in Triton's interpreter, natively where there is a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from prefixtree import PrefixForest
from prefixtree.kernels.recurrence import states as launches
from prefixtree.packing.segments import (
    MOST_SLOTS,
    Segments,
    SegmentTables,
    StateSchedule,
    find_segments,
    segments_of,
)
from tests.support.full import mostly
from tests.support.strategies import forests, mask_of

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# (lengths, parents) of segments: a chain would be one segment, so every parent has two children
FORESTS = {
    "one": ([5], [-1]),
    "chunks": ([150], [-1]),
    "star": ([70, 30, 64, 65, 1], [-1, 0, 0, 0, 0]),
    "caterpillar": ([3, 66, 9, 1, 64, 2, 70], [-1, 0, 0, 2, 2, 4, 4]),
    "two_trees": ([64, 1, 1, 130, 20, 7], [-1, 0, 0, -1, 3, 3]),
    "many_children": ([2, *[1] * (2 * MOST_SLOTS + 3)], [-1, *[0] * (2 * MOST_SLOTS + 3)]),
}


# (roots that states enter, their rows, segments whose states leave): two roots share a state, and
# one that is given enters nowhere; a leaf's state leaves, a branch point's, and a root's
BORDERS = {
    "one": ([0], [0], [0]),
    "star": ([0], [1], [0, 2, 4]),
    "two_trees": ([0, 3], [1, 1], [1, 3]),
    "many_children": ([], [], [0, 3]),
}


def segments_in(forest: str, with_states: bool = False) -> Segments:
    lengths, parent = FORESTS[forest]
    start = np.concatenate([[0], np.cumsum(lengths)])
    predictor = np.arange(start[-1], dtype=np.int32) - 1
    predictor[start[:-1]] = [start[p + 1] - 1 if p >= 0 else -1 for p in parent]
    if with_states:
        roots, rows, leaving = (np.array(x, np.int64) for x in BORDERS[forest])
        borders = start[roots], rows, start[leaving + 1] - 1
        segments = find_segments(predictor, *borders, num_entries=3 if len(rows) else 0)
    else:
        segments = find_segments(predictor)
    assert segments.parent.tolist() == parent and segments.start.tolist() == start.tolist()
    return segments


def schedule_of(segments: Segments) -> StateSchedule:
    return SegmentTables(segments, DEVICE).schedule(launches.CHUNK)


def make(
    segments: Segments, heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    start, lengths = segments.start, np.diff(segments.start)
    draw = torch.Generator().manual_seed(0)
    total = int(start[-1])

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=draw) / shape[-1] ** 0.5).to(DEVICE)

    tensors = {
        "q": normal(total, heads, key_dim),
        "k": normal(total, heads, key_dim),
        "w": normal(total, value_heads, key_dim),
        "u": normal(total, value_heads, value_dim),
        "do": normal(total, value_heads, value_dim),
        "dv": normal(total, value_heads, value_dim),
    }
    log_decay = -torch.rand(total, value_heads, generator=draw) * 0.1
    log_decay_k = -torch.rand(total, value_heads, key_dim, generator=draw) * 0.1
    for segment in range(len(lengths)):
        for first in range(start[segment], start[segment + 1], launches.CHUNK):
            last = min(first + launches.CHUNK, start[segment + 1])
            log_decay[first:last] = log_decay[first:last].cumsum(0)
            log_decay_k[first:last] = log_decay_k[first:last].cumsum(0)
    return tensors, log_decay.to(DEVICE), log_decay_k.to(DEVICE)


def by_chunks(
    segments: Segments,
    k: torch.Tensor,
    u: torch.Tensor,
    w: torch.Tensor | None,
    g: torch.Tensor | None,
    gk: torch.Tensor | None,
    initial: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States chunk by chunk, differentiable: h [NC, HV, K, V], v_new [T, HV, V], and those behind
    segments [N, HV, K, V]."""
    start, parent = segments.start, segments.parent
    groups = u.shape[1] // k.shape[1]
    k = k.repeat_interleave(groups, 1)
    ends, h, v_new = [], [], torch.zeros_like(u)
    for segment in range(len(parent)):
        state = u.new_zeros(u.shape[1], k.shape[2], u.shape[2])
        if parent[segment] >= 0:
            state = ends[parent[segment]]
        elif segments.entry[segment] >= 0:
            assert initial is not None
            state = initial[segments.entry[segment]]
        for first in range(start[segment], start[segment + 1], launches.CHUNK):
            t = slice(first, min(first + launches.CHUNK, start[segment + 1]))
            h.append(state)
            v = u[t] if w is None else u[t] - torch.einsum("thk,hkv->thv", w[t], state)
            v_new = torch.cat([v_new[: t.start], v, v_new[t.stop :]])
            if g is not None:
                v = v * torch.exp2(g[t][-1] - g[t])[..., None]
                state = state * torch.exp2(g[t][-1])[:, None, None]
            if gk is not None:
                state = state * torch.exp2(gk[t][-1])[..., None]
            state = state + torch.einsum("thk,thv->hkv", k[t], v)
        ends.append(state)
    return torch.stack(h), v_new, torch.stack(ends)


RULES = ["plain", "g", "gk", "w", "w_g", "w_gk"]


@pytest.mark.parametrize(
    "forest, rule, with_states",
    mostly(
        [
            *((forest, rule, False) for forest in FORESTS for rule in RULES),
            *(("star", rule, True) for rule in RULES),
            *(("one", "w_g", True), ("two_trees", "w_g", True), ("many_children", "g", True)),
        ],
        # each forest, each rule
        [
            *((forest, rule, False) for forest, rule in zip(FORESTS, RULES, strict=True)),
            *(("star", "w_gk", True), ("two_trees", "w_g", True), ("many_children", "g", True)),
        ],
    ),
)
def test_states_and_their_gradients(forest: str, rule: str, with_states: bool) -> None:
    value_heads, key_dim, value_dim = 2, 20, 36
    heads = 2 if "gk" in rule else 1
    segments = segments_in(forest, with_states)
    start, parent, schedule = segments.start, segments.parent, schedule_of(segments)
    tensors, g, gk = make(segments, heads, value_heads, key_dim, value_dim)
    g = g if "g" in rule.split("_") else None
    gk = gk if "gk" in rule else None
    w = tensors["w"] if "w" in rule else None
    q, k, u, do, dv = (tensors[name] for name in ("q", "k", "u", "do", "dv"))
    gates = {"g": g, "gk": gk}

    draw = torch.Generator().manual_seed(1)
    state = value_heads, key_dim, value_dim
    initial = torch.randn(segments.num_entries, *state, generator=draw).to(DEVICE)
    dfinal = torch.randn(len(segments.exits), *state, generator=draw).to(DEVICE)

    h, v_new, final = launches.carry_states(schedule, k, u, w, **gates, initial=initial)
    exact = {n: None if x is None else x.double() for n, x in (*gates.items(), ("w", w))}
    u64 = u.double().requires_grad_()
    initial64 = initial.double().requires_grad_()
    expected_h, expected_v, ends = by_chunks(segments, k.double(), u64, **exact, initial=initial64)
    expected_final = ends[torch.from_numpy(segments.exits).to(DEVICE)]
    assert_near(h, expected_h)
    assert_near(v_new, expected_v)
    assert final.shape == expected_final.shape
    assert_near(final, expected_final)

    # out = scale q (decay) h, and v_new is used once more inside its chunk, with gradient dv
    scale = 0.7
    grown = dv.clone() if w is not None else None
    dh, dinitial = launches.carry_gradients(
        schedule, q, k, do, w=w, dv=grown, **gates, scale=scale, dfinal=dfinal
    )
    q64 = q.double().repeat_interleave(value_heads // heads, 1)
    if g is not None:
        q64 = q64 * torch.exp2(g.double())[..., None]
    number = [
        (first, min(first + launches.CHUNK, start[s + 1]))
        for s in range(len(parent))
        for first in range(start[s], start[s + 1], launches.CHUNK)
    ]
    loss = sum(
        (scale * torch.einsum("thk,hkv->thv", q64[a:b], state) * do[a:b].double()).sum()
        for (a, b), state in zip(number, expected_h, strict=True)
    )
    loss = loss + (expected_v * dv.double()).sum() + (expected_final * dfinal.double()).sum()
    du, dstates = torch.autograd.grad(
        loss, [u64, initial64], allow_unused=True, materialize_grads=True
    )
    assert dinitial.shape == dstates.shape
    assert_near(dinitial, dstates)
    if w is not None:
        assert_near(grown, du)
    # v_new reaches the loss inside its chunk (dv) and through the state behind it (k dh, decayed)
    through = torch.zeros_like(du)
    k64 = k.double().repeat_interleave(value_heads // heads, 1)
    for (a, b), d_end in zip(number, dh.double(), strict=True):
        part = torch.einsum("thk,hkv->thv", k64[a:b], d_end)
        if g is not None:
            part = part * torch.exp2(g[a:b].double()[-1] - g[a:b].double())[..., None]
        through[a:b] = part
    assert_near(through + dv.double(), du)


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = (actual.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    assert error < 2e-6, error


def test_children_that_hand_nothing_up_are_missed() -> None:
    """The sum over children is what the gradient of a shared segment is made of."""
    segments = segments_in("star")
    tensors, g, _ = make(segments, 1, 2, 20, 36)
    q, k, do = (tensors[name] for name in ("q", "k", "do"))
    full, _ = launches.carry_gradients(schedule_of(segments), q, k, do, g=g, scale=1.0)
    alone = replace(segments, parent=np.full_like(segments.parent, -1))
    cut, _ = launches.carry_gradients(schedule_of(alone), q, k, do, g=g, scale=1.0)
    first = segments.chunks(launches.CHUNK).cu_chunks[1]
    assert (full[:first] - cut[:first]).norm() > 0.1 * full[:first].norm()
    assert torch.equal(full[first:], cut[first:])


@settings(max_examples=100)
@given(forest=forests())
def test_nothing_waits_for_what_comes_later(forest: PrefixForest) -> None:
    segments = segments_of(mask_of(forest).host)
    schedule = SegmentTables(segments, CPU).schedule(2)
    forward, backward = schedule.forward_order.numpy(), schedule.backward_order.numpy()
    place, back = np.argsort(forward), np.argsort(backward)
    assert sorted(forward) == sorted(backward) == list(range(segments.num_segments))
    slots: dict[int, list[tuple[int, int]]] = {}
    for segment, parent in enumerate(segments.parent):
        if parent < 0:
            assert schedule.slot_of[segment] == schedule.parent_state[segment] == -1
            continue
        assert place[parent] < place[segment] and back[segment] < back[parent]
        branch = int(schedule.parent_state[segment])
        assert branch == schedule.state_of[parent]
        slot, rank = int(schedule.slot_of[segment]), int(schedule.rank_of[segment])
        assert schedule.slot_start[branch] <= slot < schedule.slot_start[branch + 1]
        slots.setdefault(slot, []).append((rank, int(back[segment])))
    for slot, members in slots.items():
        # those of a slot add in the order in which they are dealt out
        members.sort()
        assert [rank for rank, _ in members] == list(range(int(schedule.slot_count[slot])))
        assert [place for _, place in members] == sorted(place for _, place in members)
    assert schedule.num_slots == len(slots)


@settings(max_examples=30)
@given(forest=forests())
def test_the_longest_way_begins_first(forest: PrefixForest) -> None:
    """Segments by the chunks that they wait for, and of equal ones the longest rest first."""
    segments = segments_of(mask_of(forest).host)
    schedule, parent = SegmentTables(segments, CPU).schedule(2), segments.parent.tolist()
    chunks = [-(-length // 2) for length in np.diff(segments.start).tolist()]
    paths: list[list[int]] = []
    for segment, up in enumerate(parent):
        paths.append([*(paths[up] if up >= 0 else []), segment])
    lengths = np.array([sum(chunks[s] for s in path) for path in paths])
    longest = np.zeros_like(lengths)
    for length, path in zip(lengths, paths, strict=True):
        longest[path] = np.maximum(longest[path], length)
    above, below = lengths - chunks, longest - lengths
    for order, waits, rest in (
        (schedule.forward_order, above, below),
        (schedule.backward_order, below, above),
    ):
        keys = [(int(waits[s]), -int(rest[s] + chunks[s])) for s in order.tolist()]
        assert keys == sorted(keys)
