"""Several processes: DDP, FSDP2 and HSDP through accelerate, with whole groups on every rank.

A launch is dear, so one runs many cases (`rank.CASES`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.trl.launch import launch
from tests.integrations.trl.rank import (
    CASES,
    compare,
    distilled,
    in_bfloat16,
    joined,
    other_samples,
    resume,
    sampled,
    samples,
)
from tests.integrations.trl.runs import save_model
from tests.support.full import asked_for, mostly


def run_cases(folder: Path, ranks: int, names: list[str]) -> dict[str, dict[str, Any]]:
    """The results of rank 0, per case."""
    module = "tests.integrations.trl.rank"
    results = launch(module, save_model(folder), *names, processes=ranks, ACCELERATE_USE_CPU="true")
    assert list(results) == names
    for name, result in results.items():
        print(name, result)
    return results


def check_run(name: str, result: dict[str, Any], ranks: int) -> None:
    """It was spread as meant: accelerate ignores FSDP without a word where it finds no GPU."""
    case = CASES[name][1]
    kinds = {"hybrid": "Qwen3_5ForCausalLM", "experts": "Qwen3MoeForCausalLM"}
    kind = "PeftModel" if case.lora else kinds.get(case.model, "Qwen3For")
    if case.fsdp is None:
        assert result["wrapper"] == "DistributedDataParallel" and not result["fsdp"]
        return
    assert result["fsdp"] and result["wrapper"].startswith("FSDP" + kind)
    assert case.lora or result["reference"] == result["wrapper"]
    # an evaluation leaves the head whole
    assert result["sharded"] >= 0.9 if ranks > 1 else result["sharded"] == 0
    assert result["checkpointed"] == bool(case.fsdp.get("activation_checkpointing"))


def check_equality(result: dict[str, Any]) -> None:
    assert result["moved"] > 1e-3 and result["trained"] >= 12
    assert result["kl"] > 1e-3  # the reference took part
    assert result["parameters"] < 1e-5
    assert result["metrics"][0] < 1e-5
    # 4 completions of one prompt, never of two
    assert result["ratio"] > 1.6


def check_sampled(name: str, result: dict[str, Any]) -> None:
    """Behind updates too: with the numbers of the update before it would be red."""
    assert result["generations"] >= 2 and result["stale"] > 0.1
    # the copy computes what training does, to the bit
    assert result["copy"] == 0
    if "bfloat16" in name:
        assert result["training"] < result["logprobs"] < 0.2
    else:
        # a state that grows by one token at a time rounds otherwise than one of chunks
        limit = 1e-4 if "hybrid" in name else 2e-5
        assert result["logprobs"] < limit and result["training"] < 2e-5
        assert result["wrong tokens"] == 0


def check_samples(name: str, result: dict[str, Any]) -> None:
    for found in result.values():
        assert found["wrapper"].startswith("FSDPQwen3For" if "sharded" in name else "Distributed")
        assert found["moved"] > 1e-3
        assert found["metrics"] < 1e-5
        assert found["parameters"] < 1e-5
        # pairs, turns of conversations, prompts that begin alike
        assert min(found["ratio"]) > 1.5


TWO = [name for name in CASES if name not in ("rollouts", "hsdp")]
# both wrappers, ranks unlike each other, an adapter, a checkpoint, and the trainers of samples
EVERY_TIME = (
    *("ddp", "generation", "unequal ranks", "lora"),
    "FSDP's checkpointing, kept whole, loaded by rank 0",
    *("cut groups", "cut groups, sharded"),
    *("tree", "tree, lora, bfloat16"),
    *("resume, full", "dpo and sft, sharded", "distillation", "distillation, sharded"),
    *("rloo", "kto and rewards"),
)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The results of two ranks, per case."""
    pytest.importorskip("peft")
    return run_cases(tmp_path_factory.mktemp("two"), 2, asked_for(TWO, EVERY_TIME))


@pytest.mark.parametrize("name", mostly(TWO, EVERY_TIME))
def test_two_ranks(two_ranks: dict[str, dict[str, Any]], name: str) -> None:
    ask, result = CASES[name][0], two_ranks[name]
    if ask in (samples, other_samples, joined, distilled):
        check_samples(name, result)
        return
    check_run(name, result, 2)
    if ask is compare:
        check_equality(result)
    elif ask is sampled:
        check_sampled(name, result)
    elif ask is resume:
        assert result["steps"] == 4
        # to the bit, and far from where the run began
        assert result["parameters"] == result["saved"] == 0 < 1e-3 < result["moved"]
        assert result["names"] == []
        assert result["loaded"] == ["Qwen3ForCausalLM", "sdpa"]
    else:
        assert ask is in_bfloat16
        assert result["policy"] == ["torch.bfloat16", "None"]
        # squared distances; of 16 seeds the ratios were between 0.69 and 1.42
        assert 0.4 * result["theirs"] < result["ours"] < 2.5 * result["theirs"]


def test_two_ranks_are_what_they_were_meant_to_be(two_ranks: dict[str, dict[str, Any]]) -> None:
    # the same run, sharded or not
    assert two_ranks["generation"]["kl"] == pytest.approx(two_ranks["ddp"]["kl"], rel=1e-5)
    assert two_ranks["generation"]["evaluated"] == 2
    one, other = two_ranks["unequal ranks"]["shapes"]
    assert one[0] != other[0]


def test_one_rank(tmp_path: Path) -> None:
    """A group of one, which shards nothing and runs through the same wrappers."""
    (result,) = run_cases(tmp_path, 1, ["rollouts"]).values()
    check_run("rollouts", result, 1)
    check_equality(result)


@pytest.mark.full
def test_replicas_of_shards(tmp_path: Path) -> None:
    """HSDP: two by two."""
    (result,) = run_cases(tmp_path, 4, ["hsdp"]).values()
    check_run("hsdp", result, 4)
    check_equality(result)
