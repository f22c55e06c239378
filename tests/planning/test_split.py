"""`split_tokens`: balance, borders and predictions of a packed forest divided among ranks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lib.workloads import AIRLINE, NAMES, forest_of, single, workload
from prefixtree import CostModel, ForestError, PackedForest, PrefixForest, pack
from prefixtree.planning.costs import ImportCost, import_cost_of
from prefixtree.planning.model_cost import model_cost
from prefixtree.planning.parts import Parts
from prefixtree.planning.split import Split, split_stats, split_tokens
from tests.support.hooks import limit
from tests.support.strategies import forests

SYNTHETIC = [name for name in NAMES if name != AIRLINE]


def same_runs(one: Parts, other: Parts) -> bool:
    return all((a == b).all() for a, b in zip(one.runs, other.runs, strict=True))


def split_by(monkeypatch, chunks: int, packed: PackedForest, num_parts: int) -> Split:
    """With a fixed number of chunks per rank."""
    with monkeypatch.context() as patch:
        limit(patch, "chunks of a split", (chunks,))
        return split_tokens(packed, num_parts)


# ---- balance -------------------------------------------------------------------------------------


@pytest.mark.parametrize("multiple", [3, 8])
def test_parts_of_multiples(multiple) -> None:
    """For ranks that cut their part again; of few tokens and of many."""
    few = PrefixForest.from_sequences([[1, 2], [1, 3]])
    for forest in (few, forest_of(single(900, 4, 300))):
        packed = pack(forest, pad_to_multiple_of=3 * multiple)
        own = split_tokens(packed, 3, multiple=multiple).num_own_tokens
        assert (own % multiple == 0).all() and (own > 0).all() and own.sum() == packed.num_tokens
        for wrong in (pack(few, multiple + 1), pack(few, multiple)):
            with pytest.raises(ForestError, match=f"pad_to_multiple_of={3 * multiple}"):
                split_tokens(wrong, 3, multiple=multiple)


@pytest.mark.parametrize("name", SYNTHETIC)
def test_ranks_have_equal_tokens_and_nearly_equal_work(name, monkeypatch) -> None:
    packed = pack(workload(name))
    for ranks in (2, 4, 8, 16):
        stats = split_tokens(packed, ranks).stats
        assert stats.token_balance <= 1.025 and stats.work_balance <= 1.03
        for chunks in (1, 2, 4, 8, 16):
            fixed = split_by(monkeypatch, chunks, packed, ranks)
            assert fixed.chunks_per_part == chunks
            assert stats.efficiency >= fixed.stats.efficiency - 1e-12
            if chunks == 8:
                assert fixed.stats.work_balance <= 1.03


def test_the_number_of_chunks_follows_the_predicted_time() -> None:
    """A slow link wants few imported rows, a fast one even work."""
    packed = pack(workload("caterpillar 12"))
    slow = split_tokens(packed, 8, import_cost=ImportCost(link_rate=1e10))
    fast = split_tokens(packed, 8, import_cost=ImportCost(link_rate=1e15))
    assert slow.chunks_per_part < fast.chunks_per_part
    assert max(slow.stats.received_rows) < max(fast.stats.received_rows)
    assert fast.stats.work_balance < slow.stats.work_balance


@pytest.mark.parametrize("tile", [128, 64, 100, 1])
def test_chunks_start_at_multiples_of_the_tile(tile) -> None:
    packed = pack(workload("caterpillar 24"))
    parts = split_tokens(packed, 4, tile=tile)
    border, _ = parts.runs
    assert parts.tile == tile and (border[:-1] % tile == 0).all()
    assert border[-1] == packed.num_tokens


def test_short_parts_have_smaller_tiles() -> None:
    packed = pack(forest_of(single(512, 8, 64)))
    parts = split_tokens(packed, 8)
    # 16 tiles per rank
    assert parts.tile == 8 and parts.stats.token_balance <= 1.07


@given(forests(), st.data())
def test_every_part_has_tokens_and_every_token_one_part(forest, data) -> None:
    packed = pack(forest, data.draw(st.sampled_from([None, 4])))
    ranks = data.draw(st.integers(1, min(6, packed.num_tokens)))
    parts = split_tokens(packed, ranks)
    assert len(parts) == ranks and (parts.num_own_tokens > 0).all()
    tokens = np.concatenate([part.own_tokens for part in parts])
    assert sorted(tokens) == list(range(packed.num_tokens))
    assert same_runs(parts, split_tokens(pack(forest, 4 if packed.num_padding else None), ranks))
    assert same_runs(parts, Parts(packed, parts.owner, ranks))


# ---- predictions ---------------------------------------------------------------------------------


@settings(max_examples=50)
@given(forests(), st.data())
def test_flops_are_those_of_the_tokens_one_by_one(forest, data) -> None:
    packed = pack(forest, data.draw(st.sampled_from([None, 4])))
    ranks = data.draw(st.integers(1, 4))
    owner = data.draw(
        st.lists(st.integers(0, ranks - 1), min_size=packed.num_tokens, max_size=packed.num_tokens)
    )
    parts = Parts(packed, owner, ranks)
    cost = CostModel(linear=100.0, attention=3.0, windowed=2.0, window=4)
    imports = ImportCost(lm_head=40.0, linear_rate=10.0, attention_rate=5.0)
    masks = [
        data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
        for n in forest.sequence_lengths.tolist()
    ]
    edges = packed.edges(masks)
    for scored in (None, edges):
        stats = split_stats(parts, cost, scored, import_cost=imports)
        flops, seconds = np.zeros(ranks), np.zeros(ranks)
        for token, position in enumerate(packed.position_ids.tolist()):
            predicts = 1 if scored is None else edges.predictor.tolist().count(token)
            linear = 60.0 + 40.0 * predicts
            attention = 3.0 * (position + 1) + 2.0 * min(position + 1, 4)
            flops[owner[token]] += linear + attention
            seconds[owner[token]] += linear / 10 + attention / 5
        np.testing.assert_allclose(stats.flops, flops)
        np.testing.assert_allclose(stats.seconds, seconds)


def test_stats_add_up() -> None:
    packed = pack(workload("prompt 8K x 16 x 2K"))
    cost, imports = CostModel(), ImportCost()
    parts = split_tokens(packed, 4, cost, import_cost=imports)
    stats = parts.stats
    assert stats.own_tokens == tuple(part.num_tokens for part in parts)
    assert stats.received_rows == tuple(part.num_imported for part in parts)
    assert stats.sent_rows == tuple(part.num_exported for part in parts)
    # 8 kv heads of 128 + 128 columns: bf16 twice and fp32 once, in 36 layers
    row = 36 * 8 * 256 * (2 + 2 + 4)
    assert stats.received_bytes == tuple(rows * row for rows in stats.received_rows)
    busiest = max(*stats.received_rows, *stats.sent_rows)
    assert stats.exchange_seconds == pytest.approx(3 * 36 * 4e-5 + busiest * row / 3.3e11)
    together = max(stats.seconds) + stats.exchange_seconds
    assert stats.efficiency == pytest.approx(sum(stats.seconds) / 4 / together)
    foreign = [packed.num_tokens - n for n in stats.own_tokens]
    shares = [r / n for r, n in zip(stats.received_rows, foreign, strict=True)]
    assert stats.received_share == pytest.approx(max(shares))
    text = str(stats)
    assert "40,960 tokens on 4 ranks" in text and f"efficiency {stats.efficiency:.3f}" in text


def test_one_rank_and_separate_trees_exchange_nothing() -> None:
    packed = pack(workload("documents 32 x 4K"))
    for ranks in (1, 8):
        stats = split_tokens(packed, ranks).stats
        assert stats.exchange_seconds == 0 and stats.efficiency == pytest.approx(1)
        assert not any(stats.received_rows)


def test_unscored_prompts_are_lighter() -> None:
    """Two trees of 4,096 tokens; where one is not scored, its owner can do more of the other."""
    packed = pack(PrefixForest.from_sequences([np.arange(4096), np.arange(4096) + 9000]))
    masks = [np.ones(4096), np.zeros(4096)]
    imports = ImportCost(lm_head=4e10)
    even = split_tokens(packed, 2, import_cost=imports)
    scored = split_tokens(packed, 2, CostModel(), packed.edges(masks), import_cost=imports)
    assert split_stats(even, None, packed.edges(masks), import_cost=imports).work_balance > 1.4
    assert scored.stats.work_balance < 1.01


def test_the_defaults_are_a_qwen3_8b_in_bfloat16_with_checkpointing() -> None:
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    )
    cost = model_cost(config, element_bytes=2)
    read = import_cost_of(cost, token_bytes=559_928)
    assert dataclasses.replace(read, lm_head=4.98e9) == ImportCost()
    assert read.lm_head == pytest.approx(4.98e9, rel=1e-3)
    # keys and values in bf16, their gradients in fp32
    assert read.weight == 36 * 8 * 256 * (2 + 4) / 559_928
    with pytest.raises(ValueError, match="needs token_bytes, the memory per own token; got None"):
        _ = import_cost_of(cost).weight


# ---- bad input -----------------------------------------------------------------------------------


def test_bad_input() -> None:
    packed = pack(PrefixForest.from_sequences([[1, 2, 3], [1, 2, 4]]))
    with pytest.raises(ForestError, match="cannot divide 4 packed tokens among 5 parts"):
        split_tokens(packed, 5)
    for bad in (0, -1, 1.0, True, "2"):
        with pytest.raises(ValueError, match="num_parts must be an integer >= 1, got"):
            split_tokens(packed, bad)
    with pytest.raises(ValueError, match="tile must be an integer >= 1, got 0"):
        split_tokens(packed, 2, tile=0)
    with pytest.raises(TypeError, match="split_tokens takes a packed forest, got PrefixForest"):
        split_tokens(packed.forest, 2)
    subset = PackedForest(packed.forest, packed._buffer, packed.mask.for_queries([(0, 3)]))
    with pytest.raises(ForestError, match=r"split_tokens takes .* got a mask for 3 of 4"):
        split_tokens(subset, 2)
    with pytest.raises(ValueError, match=r"at least import_cost.lm_head 4.98e\+09, got 5"):
        split_tokens(packed, 2, CostModel(linear=5.0), packed.edges())
    edges = packed.edges()._replace(predictor=[9])
    with pytest.raises(ForestError, match=r"scored.predictor\[0\] is 9; expected 0 to 3"):
        split_tokens(packed, 2, scored=edges)


@pytest.mark.parametrize(
    "bad",
    [
        {"layers": 0},
        {"link_rate": 0.0},
        {"latency": -1.0},
        {"token_bytes": 0.0},
        {"lm_head": float("nan")},
    ],
)
def test_costs_that_make_no_sense(bad) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"):
        ImportCost(**bad)
