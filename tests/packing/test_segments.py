"""Segments, chunk tables and the tables of a convolution against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given

from prefixtree import PrefixForest, TreeMask, pack
from prefixtree.packing import segments
from prefixtree.packing.segments import Segments, find_segments, segments_of, tables_of
from tests.support.strategies import forests, mask_of, predictors_of, token_sequences


def _paths(sequences: list[list[int]]) -> list[tuple[int, ...]]:
    """Every distinct prefix: a packed token each."""
    return list({tuple(s[: i + 1]) for s in sequences for i in range(len(s))})


def _naive(predictor: np.ndarray) -> list[list[int]]:
    """Maximal runs of packed tokens, each the only child of the one before it, by definition."""
    children: dict[int, list[int]] = {}
    for t, above in enumerate(predictor.tolist()):
        children.setdefault(above, []).append(t)
    runs: list[list[int]] = []
    for t, above in enumerate(predictor.tolist()):
        if above >= 0 and children[above] == [t]:
            assert runs[-1][-1] == above == t - 1
            runs[-1].append(t)
        else:
            runs.append([t])
    return runs


def _check(found: Segments, predictor: np.ndarray) -> None:
    runs = _naive(predictor)
    of_token = {t: s for s, run in enumerate(runs) for t in run}
    parent = [of_token[predictor[run[0]]] if predictor[run[0]] >= 0 else -1 for run in runs]
    level: list[int] = []
    for above in parent:
        level.append(0 if above < 0 else level[above] + 1)
    children = [[s for s, above in enumerate(parent) if above == p] for p in range(len(runs))]
    assert found.num_segments == len(runs)
    assert found.start.tolist() == [*(run[0] for run in runs), len(predictor)]
    assert found.parent.tolist() == parent
    assert found.level.tolist() == level
    assert found.has_children.tolist() == [bool(c) for c in children]
    assert found.num_levels == max(level, default=-1) + 1
    order = sorted(range(len(runs)), key=lambda s: (level[s], s))
    assert found.order.tolist() == order
    for number in range(found.num_levels):
        mine = found.order[found.level_start[number] : found.level_start[number + 1]]
        assert mine.tolist() == [s for s in range(len(runs)) if level[s] == number]
        # the children of a parent are neighbours, so that their gradients are one run
        above = [parent[s] for s in mine]
        assert [p for i, p in enumerate(above) if i == 0 or above[i - 1] != p] == sorted(set(above))
    for s in range(len(runs)):
        of_s = found.children[found.children_start[s] : found.children_start[s + 1]]
        assert of_s.tolist() == children[s]
    inner = [s for s in order if children[s]]
    assert found.num_states == len(inner)
    assert [found.state_row[s] for s in inner] == list(range(len(inner)))
    assert all(found.state_row[s] == -1 for s in range(len(runs)) if not children[s])
    for name in ("start", "parent", "level", "order", "level_start", "children", "state_row"):
        assert getattr(found, name).dtype == np.int32, name


@given(forests())
def test_segments_of_any_forest(forest: PrefixForest) -> None:
    predictor = predictors_of(forest).astype(np.int32)
    _check(segments_of(mask_of(forest).host), predictor)


@given(token_sequences())
def test_a_segment_goes_on_while_every_prefix_has_one_continuation(sequences: list) -> None:
    """From the sequences alone: a prefix starts a segment if it is a root or has siblings."""
    prefixes = _paths(sequences)
    continuations: dict[tuple[int, ...], int] = {}
    for p in prefixes:
        continuations[p[:-1]] = continuations.get(p[:-1], 0) + 1
    starts = sum(len(p) == 1 or continuations[p[:-1]] > 1 for p in prefixes)
    found = segments_of(pack(PrefixForest.from_sequences(sequences)).mask.host)
    assert found.num_segments == starts
    ends = sum(continuations.get(p, 0) > 1 for p in prefixes)
    assert found.num_states == ends


@pytest.mark.parametrize("size", [1, 2, 3, 64])
@given(forest=forests())
def test_chunks(forest: PrefixForest, size: int) -> None:
    found = segments_of(mask_of(forest).host)
    cu, indices = found.chunks(size)
    want = [
        (s, c)
        for s in range(found.num_segments)
        for c in range(-(-int(found.start[s + 1] - found.start[s]) // size))
    ]
    assert [tuple(row) for row in indices.tolist()] == want
    before = [sum(s < number for s, _ in want) for number in range(found.num_segments + 1)]
    assert cu.tolist() == before
    assert found.chunks(size).cu_chunks is cu


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7])
@given(forest=forests(max_length=3))
def test_taps(forest: PrefixForest, width: int) -> None:
    predictor = predictors_of(forest)
    found = segments_of(mask_of(forest).host)
    ancestors, start, token, tap, branch_tokens, run_start = found.taps(width)
    assert branch_tokens.tolist() == np.flatnonzero(np.diff(start)).tolist()
    assert run_start[-1] == len(predictor) and (np.diff(run_start) <= segments.RUN).all()
    inside = np.setdiff1d(np.arange(len(predictor)), run_start)
    assert (predictor[inside] == inside - 1).all()
    pairs = set()
    for t in range(len(predictor)):
        above = t
        for j in range(width):
            assert ancestors[j, t] == above
            if above >= 0:
                pairs.add((above, t, j))
                above = predictor[above]
    # what the gradient reads: the tokens next in packed order, and the entries
    read = [
        (s, s + j, j)
        for s in range(len(predictor))
        for j in range(width)
        if s + j < len(predictor) and ancestors[j, s + j] == s
    ]
    for s in range(len(predictor)):
        mine = slice(start[s], start[s + 1])
        read += [(s, int(t), int(j)) for t, j in zip(token[mine], tap[mine], strict=True)]
        assert token[mine].tolist() == sorted(token[mine].tolist())
    assert len(read) == len(set(read)) and set(read) == pairs
    assert len(token) <= found.num_segments * width * (width - 1) // 2
    assert np.array_equal(found.ancestors(width), ancestors)


def test_no_tokens_and_padding() -> None:
    empty = segments_of(TreeMask(np.empty(0, np.int32)).host)
    assert empty.num_segments == empty.num_levels == empty.num_states == 0
    assert len(empty.chunks(64).chunk_indices) == 0
    assert empty.taps(4).ancestors.shape == (4, 0)
    packed = pack(PrefixForest.from_sequences([[1, 2, 3], [1, 2, 4]]), pad_to_multiple_of=8)
    # a padding token is a root of its own: nothing passes from or to it
    assert segments_of(packed.mask.host).start.tolist() == [0, 2, 3, 4, 5, 6, 7, 8]
    assert segments_of(packed.mask.host).parent.tolist() == [-1, 0, 0, -1, -1, -1, -1]


def test_a_sequence_that_ends_inside_is_no_branch() -> None:
    packed = pack(PrefixForest.from_sequences([[1, 2, 3, 4], [1, 2], [1, 2]]))
    assert segments_of(packed.mask.host).start.tolist() == [0, 4]
    assert (
        repr(segments_of(packed.mask.host)) == "Segments(1 of 4 tokens, 1 levels, 0 with children)"
    )


def test_tables_on_a_device_are_those_of_the_host_and_kept() -> None:
    mask = pack(PrefixForest.from_sequences([[1, 2, 3], [1, 2, 4, 5], [6]])).mask
    host, tables = segments_of(mask.host), tables_of(mask.host, mask.device)
    assert tables is tables_of(mask.with_options(deterministic=True).host, mask.device)
    for name in ("start", "parent", "level", "has_children", "order", "level_start", "state_row"):
        tensor = getattr(tables, name)
        assert tensor.dtype == torch.int32, name
        assert tensor.tolist() == getattr(host, name).astype(int).tolist(), name
    assert tables.children_start.tolist() == host.children_start.tolist()
    assert tables.children.tolist() == host.children.tolist()
    for ours, theirs in ((tables.chunks(2), host.chunks(2)), (tables.taps(3), host.taps(3))):
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == torch.int32 and a.tolist() == b.tolist()
    assert tables.taps(3) is tables.taps(3) and tables.chunks(2) is tables.chunks(2)


def test_made_in_inference_mode_they_serve_training_later() -> None:
    mask = pack(PrefixForest.from_sequences([[1, 2, 3], [1, 2, 4]])).mask
    with torch.inference_mode():
        taps, tables = (
            tables_of(mask.host, mask.device).taps(3),
            tables_of(mask.host, mask.device),
        )
    assert not taps.ancestors.is_inference() and not tables.start.is_inference()


def test_found_from_the_predictor_alone() -> None:
    predictor = np.array([-1, 0, 1, 1, 3, -1], np.int32)
    _check(find_segments(predictor), predictor)
