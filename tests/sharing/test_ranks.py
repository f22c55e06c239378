"""`report --ranks`: what it predicts, prints and refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest
from transformers import GptOssConfig, Qwen3Config

from prefixtree import CostModel, PrefixForest, pack
from prefixtree.errors import InputError
from prefixtree.planning.costs import ImportCost, cost_model_of, import_cost_of
from prefixtree.planning.model_cost import model_cost
from prefixtree.planning.split import split_tokens
from prefixtree.rollouts import read_rollouts
from prefixtree.sharing.estimate import predict_ranks
from tests.support.cli_runs import run, run_json, write_rollouts


@pytest.fixture
def rollout_file(tmp_path):
    return write_rollouts(tmp_path / "rollouts.jsonl")


@pytest.fixture
def config(tmp_path):
    made = Qwen3Config(
        vocab_size=500, hidden_size=64, intermediate_size=160, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, dtype="bfloat16"
    )  # fmt: skip
    made.save_pretrained(tmp_path / "model")
    return tmp_path / "model" / "config.json"


def test_the_report_predicts_what_split_tokens_finds(rollout_file, config) -> None:
    """Of the scored edges and of the model, where one is given."""
    rollouts = read_rollouts(rollout_file)
    packed = pack(PrefixForest.from_sequences(rollouts.sequences))
    scored = packed.edges(rollouts.loss_masks)
    cost = model_cost(Qwen3Config.from_pretrained(config.parent))
    of_model = (
        cost_model_of(cost),
        import_cost_of(cost),
    )
    plain, modelled = ((), (CostModel(), ImportCost())), (("--model", config), of_model)
    for options, (flops, imports) in (plain, modelled):
        facts = run_json("report", rollout_file, "--ranks", 2, *options)["ranks"]
        split = split_tokens(packed, 2, flops, scored, import_cost=imports)
        assert facts["ranks"] == 2 and facts["chunks_per_rank"] == split.chunks_per_part
        assert facts["model_type"] == ("qwen3" if options else None)
        assert facts["own_tokens"] == list(split.stats.own_tokens)
        assert facts["received_bytes"] == list(split.stats.received_bytes)
        np.testing.assert_allclose(facts["flops"], split.stats.flops)
        assert facts["efficiency"] == pytest.approx(split.stats.efficiency)
    # 3 layers of 2 kv heads with 16 + 16 columns: bf16 twice and fp32 once
    assert facts["received_bytes"] == [n * 3 * 64 * 8 for n in facts["received_rows"]]
    assert run_json("report", rollout_file)["ranks"] is None


def test_the_table(rollout_file) -> None:
    text = run("report", rollout_file, "--ranks", 4, env={"COLUMNS": "120"}).stdout
    assert "one forest on 4 ranks, a model like Qwen3-8B" in text
    assert "rows imported, per layer" in text and "predicted efficiency" in text
    words = " ".join(text.split())
    assert "sequence_logprobs(group=) divides a forest like this" in words
    # what the prediction assumes of a GPU is said
    rates = ImportCost()
    for assumed in (rates.linear_rate / 1e12, rates.attention_rate / 1e12, rates.link_rate / 1e9):
        assert f" {assumed:.0f} " in words


def test_what_cannot_be_divided(rollout_file) -> None:
    many = run("report", rollout_file, "--ranks", 100000)
    assert many.exit_code == 2 and "among 100000 parts" in many.stderr
    assert run("report", rollout_file, "--ranks", 0).exit_code == 2
    assert json.loads(run("report", rollout_file, "--ranks", 1, "--json").stdout)["ranks"][
        "efficiency"
    ] == pytest.approx(1)


def test_layers_without_keys_are_not_counted(rollout_file) -> None:
    import dataclasses

    cost = model_cost(GptOssConfig(
        vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=2
    ))  # fmt: skip
    assert import_cost_of(cost).layers == 2
    without = dataclasses.replace(
        cost, layers=tuple(dataclasses.replace(x, per_pair=0) for x in cost.layers)
    )
    rollouts = read_rollouts(rollout_file)
    forest = PrefixForest.from_sequences(rollouts.sequences)
    with pytest.raises(InputError, match="--ranks: gpt_oss has no layer with softmax attention"):
        predict_ranks(forest, rollouts, 2, without)
