"""Parts of a packed forest: rows, masks, exchanges and scored edges, against the whole."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixtree import ForestError, PackedForest, PrefixForest, TileShape, pack
from prefixtree.planning.part_states import PartStates
from prefixtree.planning.parts import Parts
from tests.support.part_exchange import (
    attend_in_parts,
    attend_whole,
    give_back,
    import_rows,
    random_values,
    whole,
)
from tests.support.strategies import ancestors_or_self, divisions, random_forest, random_owner
from tests.support.table_checks import assert_tables_exact


def visible_pairs(packed: PackedForest) -> np.ndarray:
    """bool [T, T], along the paths of sequences; padding sees itself."""
    visible = np.eye(packed.num_tokens, dtype=bool)
    count = packed.forest.num_tokens
    visible[:count, :count] = ancestors_or_self(packed.forest)
    return visible


# ---- what a part is ------------------------------------------------------------------------------


@given(divisions())
def test_a_part_is_the_whole_restricted_to_its_rows(parts: Parts) -> None:
    packed, owner = parts.packed, parts.owner
    visible = visible_pairs(packed)
    assert (np.bincount(owner, minlength=len(parts)) == parts.num_own_tokens).all()
    for part in parts:
        own = owner == part.index
        rows = visible[own].any(0)
        assert part.own_tokens.tolist() == np.flatnonzero(own).tolist()
        assert part.tokens.tolist() == np.flatnonzero(rows).tolist()
        assert part.tokens[part.own_rows].tolist() == part.own_tokens.tolist()
        assert sorted(part.imported_tokens) == np.flatnonzero(rows & ~own).tolist()
        assert part.num_rows == parts.num_rows[part.index]
        assert (part.mask.dense().numpy() == visible[np.ix_(own, rows)]).all()
        # windows are distances in these
        assert (part.mask.position_ids.numpy() == packed.position_ids.numpy()[rows]).all()
        for start, row, length in part.own_runs:
            assert (part.tokens[row : row + length] == np.arange(start, start + length)).all()


@given(divisions())
def test_what_is_imported_is_exported(parts: Parts) -> None:
    owner = parts.owner
    for part in parts:
        exporters = owner[part.imported_tokens]
        assert part.index not in exporters and (np.diff(part.imported_tokens) > 0).all()
        assert np.bincount(exporters, minlength=len(parts)).tolist() == (
            parts.imported[part.index].tolist()
        )
        imported = [t for p in parts for t in p.imported_tokens if owner[t] == part.index]
        assert part.own_tokens[part.exported_rows].tolist() == np.unique(imported).tolist()
        assert part.num_exported == len(imported)
    border, exported = parts.exported_runs()
    tokens = [t for p in parts for t in p.imported_tokens]
    assert (
        np.flatnonzero(np.repeat(exported, np.diff(border))).tolist() == np.unique(tokens).tolist()
    )


@given(divisions())
def test_the_exchange_brings_the_owners_rows_and_returns_every_gradient(parts: Parts) -> None:
    values = torch.arange(parts.packed.num_tokens, dtype=torch.float64)[:, None]
    rows = import_rows(parts, [part.own(values) for part in parts])
    for part, got in zip(parts, rows, strict=True):
        assert got[:, 0].tolist() == part.tokens.tolist()
    # every part that holds a token returns 1 for it
    got = whole(parts, give_back(parts, [torch.ones_like(x) for x in rows]))
    holders = np.bincount(np.concatenate([part.tokens for part in parts]))
    assert got[:, 0].tolist() == holders.tolist()


@settings(max_examples=60)
@given(divisions(), st.data())
def test_every_scored_edge_is_scored_once_by_the_owner_of_its_predictor(parts, data) -> None:
    packed = parts.packed
    forest = packed.forest
    masks = [
        data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
        for n in forest.sequence_lengths.tolist()
    ]
    edges = packed.edges(data.draw(st.sampled_from([None, masks])))
    count = np.zeros(len(edges.token), int)
    for part in parts:
        which, row = part.scored(edges.predictor)
        count[which] += 1
        assert part.own_tokens[row].tolist() == edges.predictor[which].tolist()
        assert (parts.owner[edges.predictor[which].numpy()] == part.index).all()
    assert (count == 1).all()


# ---- attention -----------------------------------------------------------------------------------


@settings(max_examples=40)
@given(divisions(), st.integers(0, 99), st.sampled_from([None, 1, 3]), st.booleans())
def test_attention_of_all_parts_is_that_of_the_whole(parts, seed, window, extras) -> None:
    *qkv, dout = random_values(parts.packed.num_tokens, seed, kv_heads=1 + seed % 2)
    options = {"window": window}
    if extras:
        options |= {"softcap": 5.0, "sinks": torch.tensor([0.5, -1.0], dtype=torch.float64)}
    expected = attend_whole(parts.packed, qkv, dout, **options)
    got = attend_in_parts(parts, tuple(qkv), dout, **options)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@settings(max_examples=60)
@given(divisions(), st.integers(1, 4))
def test_a_convolution_over_a_part_and_its_tails_reads_the_true_ancestors(
    parts: Parts, width: int
) -> None:
    """Also where a rank's tokens lie above another's, and below them again."""
    predictor = parts.packed.mask.host.predictor.tolist()

    def near(token: int, above: list[int]) -> list[int]:
        """The nearest W - 1 tokens above one."""
        found = []
        while len(found) < width - 1 and above[token] >= 0:
            token = above[token]
            found.append(token)
        return found

    for part in parts:
        own = part.own_tokens.tolist()
        read = {t: near(t, predictor) for t in own}
        tails = PartStates(part).tails(width)
        assert set(tails.tokens.tolist()) >= {t for of in read.values() for t in of} - {*own}
        assert not {*tails.tokens.tolist()} & {*own}
        tokens = sorted([*tails.tokens.tolist(), *own])
        assert [tokens[row] for row in tails.own_rows.tolist()] == own
        assert [[*tails.tokens, *own][i] for i in tails.joined.tolist()] == tokens
        above = tails.mask.host.predictor.tolist()
        for token, row in zip(own, tails.own_rows.tolist(), strict=True):
            assert [tokens[t] for t in near(row, above)] == read[token]


def test_the_check_turns_red_without_one_importers_gradient() -> None:
    rng = np.random.default_rng(0)
    checked = 0
    for _ in range(20):
        packed = pack(random_forest(rng, 8, 6))
        parts = Parts(packed, random_owner(rng, packed.num_tokens, 3, "runs"), 3)
        *qkv, dout = random_values(packed.num_tokens)
        expected = attend_whole(packed, qkv, dout)
        for importer, exporter in zip(*np.nonzero(parts.imported), strict=True):
            got = attend_in_parts(parts, tuple(qkv), dout, left_out=(importer, exporter))
            # the forward and dq know nothing of it
            for one, other in zip(got[:2], expected[:2], strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
            for one, other in zip(got[2:], expected[2:], strict=True):
                assert (one - other).abs().max() > 1e-6
            checked += 1
    assert checked > 20


@settings(max_examples=40)
@given(divisions(), st.sampled_from([None, 3]))
def test_block_tables_need_to_know_nothing_of_parts(parts: Parts, window) -> None:
    for part in parts:
        if part.num_tokens:
            for shape in (TileShape(16, 64), TileShape(4, 8, cut=True, piece_tiles=2)):
                assert_tables_exact(part.mask, shape, window)


def test_options_of_the_mask_go_to_the_parts() -> None:
    packed = pack(PrefixForest.from_sequences([[1, 2, 3], [1, 2, 4]]))
    packed = packed.with_options("reference", deterministic=True)
    for part in Parts(packed, [0, 1, 0, 1], 2):
        assert (part.mask.backend, part.mask.deterministic) == ("reference", True)


def test_a_part_that_imports_nothing_has_a_mask_for_all_queries() -> None:
    packed = pack(PrefixForest.from_sequences([[1, 2], [3, 4, 5]]))
    for part in Parts(packed, [0, 0, 0, 1, 1], 2):
        assert part.mask.query_tokens is None
    (only,) = Parts(packed, [0] * 5, 1)
    assert only.mask.query_tokens is None and only.num_imported == 0


def test_parts_are_a_sequence_and_survive_pickling() -> None:
    packed = pack(PrefixForest.from_sequences([[1, 2, 3], [1, 2, 4]]))
    parts = Parts(packed, torch.tensor([0, 1, 0, 1]), 3)
    assert len(parts) == len(list(parts)) == 3 and parts[0] is parts[0] and parts[-1] is parts[2]
    with pytest.raises(IndexError, match="part 3 does not exist; there are 3 parts"):
        parts[3]
    again = pickle.loads(pickle.dumps(parts))
    for one, other in zip(parts, again, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.exported_rows.tolist() == other.exported_rows.tolist()
        assert (one.mask.dense() == other.mask.dense()).all()
    assert "2 own tokens, 1 imported" in repr(parts[1])


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "owner, num_parts, error, message",
    [
        ([0, 1, 0], 2, ForestError, "each of the 4 packed tokens, got 3"),
        ([0.0, 1, 0, 1], 2, ForestError, r"1-D integers, got shape \[4\] of float64"),
        ([[0, 1, 0, 1]], 2, ForestError, r"1-D integers, got shape \[1, 4\]"),
        ([True, False, True, False], 2, ForestError, "1-D integers, got .* of bool"),
        ([0, 1, 2, 1], 2, ForestError, r"owner\[2\] is 2; expected 0 to 1, as there are 2 parts"),
        ([0, -1, 0, 1], 2, ForestError, r"owner\[1\] is -1"),
        ([0, 0, 0, 0], 0, ValueError, "num_parts must be an integer >= 1, got 0"),
        ([0, 0, 0, 0], 1.5, ValueError, "num_parts must be an integer >= 1, got 1.5"),
    ],
)
def test_bad_owners(owner, num_parts, error, message) -> None:
    packed = pack(PrefixForest.from_sequences([[1, 2, 3], [1, 2, 4]]))
    with pytest.raises(error, match=message):
        Parts(packed, owner, num_parts)


def test_what_is_no_packed_forest_or_has_not_all_queries() -> None:
    packed = pack(PrefixForest.from_sequences([[1, 2, 3], [1, 2, 4]]))
    with pytest.raises(TypeError, match="Parts takes a packed forest, got TreeMask; pack"):
        Parts(packed.mask, [0, 0, 0, 0], 1)
    subset = PackedForest(packed.forest, packed._buffer, packed.mask.for_queries([(0, 3)]))
    with pytest.raises(ForestError, match="mask is for all queries, got a mask for 3 of 4"):
        Parts(subset, [0, 0, 0, 0], 1)


def test_predictors_that_are_no_packed_tokens() -> None:
    packed = pack(PrefixForest.from_sequences([[1, 2, 3], [1, 2, 4]]))
    part = Parts(packed, [0, 0, 0, 0], 1)[0]
    with pytest.raises(ForestError, match=r"predictor\[1\] is 4; expected 0 to 3"):
        part.scored([0, 4])
    with pytest.raises(ForestError, match="predictor must be 1-D integers"):
        part.scored([0.5])
