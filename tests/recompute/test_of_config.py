"""The memory of models without weights, against what an H200 took, and the page that it makes."""

from __future__ import annotations

import json
import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import prefixtree as pt
from prefixtree.models.checks import find_causal_lm
from prefixtree.recompute.choose import memory_of
from prefixtree.recompute.memory import ModelMemory
from prefixtree.recompute.plan import Work, reserve, scoring_bytes, tokens_that_fit
from prefixtree.recompute.probes import memory_of_config, memory_on_shapes
from prefixtree.sharing.estimate import _GPUS
from tests.support.full import mostly
from tests.support.models import build

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("model_type", mostly(["qwen3", "qwen3_5", "gemma2"], ["qwen3"]))
def test_shapes_tell_what_a_probe_does(model_type):
    """Of a model with weights, and of its configuration."""
    model = build(model_type)
    assert memory_of_config(model.config, torch.float32) == memory_of(
        model, model, torch.device("cpu")
    )


def test_memory_is_that_of_how_experts_run():
    """Kernels that run on a GPU alone count as torch's grouped products."""
    config = build("qwen3_moe", intermediate_size=32, num_hidden_layers=1).config
    memories = {}
    for chosen in ("sonicmoe", "grouped_mm", "batched_mm"):
        config._experts_implementation = chosen
        memories[chosen] = memory_of_config(config, torch.float32)
    assert memories["sonicmoe"] == memories["grouped_mm"]
    # a matrix per token
    held = {chosen: memory.layers["nothing"][0].held[0] for chosen, memory in memories.items()}
    assert held["batched_mm"] > 2 * held["grouped_mm"]


@pytest.mark.full
def test_predicted_peaks_against_those_measured():
    """The rows of benchmarks/results/h200/memory.json: one H200, Qwen3-8B's shape, 12 layers, all
    recomputed; 5 % apart at most."""
    from transformers import Qwen3Config

    data = json.loads((ROOT / "benchmarks/results/h200/memory.json").read_text())
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=data["layers"],
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    )
    memory = memory_of_config(config, torch.bfloat16)
    rows = [row for row in data["rows"] if row["side"] == "packed" and "peak_bytes" in row]
    assert len(rows) == 16
    for row in rows:
        count, response = row["count"], row["response"]
        forest = pt.PrefixForest.from_parents(
            [-1] + [0] * count, [row["prompt"]] + [response] * count
        )
        work = Work(forest, count * response)
        predicted = memory.peak(forest.num_tokens, "all", scoring_bytes(memory, work))
        assert predicted == pytest.approx(row["peak_bytes"], rel=0.05), row


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_tokens_that_the_page_says_fit():
    """AdamW in float32; on one GPU under autocast, on several under FSDP2; LoRA in bfloat16."""
    transformers = pytest.importorskip("transformers", "5.23")
    dense = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
    qwen3 = partial(transformers.Qwen3Config, **dense)
    eight = qwen3(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
    )
    shapes = {
        "Qwen3-0.6B": qwen3(
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            tie_word_embeddings=True,
        ),
        "Qwen3-8B": eight,
        "Qwen3-8B, LoRA": eight,
        "Qwen3-32B": qwen3(
            hidden_size=5120,
            intermediate_size=25600,
            num_hidden_layers=64,
            num_attention_heads=64,
        ),
        # the defaults of its class
        "Qwen3.5-9B, text": transformers.Qwen3_5TextConfig(),
    }

    # rows of several GPUs differ in their number alone
    @cache
    def held(name: str, alone: bool) -> tuple[ModelMemory, int]:
        if name.endswith("LoRA"):
            return _with_adapters(shapes[name])
        dtype, autocast = (torch.float32, torch.bfloat16) if alone else (torch.bfloat16, None)
        memory = memory_of_config(shapes[name], dtype, autocast)
        return memory, 16 * memory.cost.parameters

    page = (ROOT / "docs" / "what-fits-where.md").read_text()
    section = page.split("## Distinct tokens")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (Qwen[^|]+) \| (\d+) \| (.*) \|$", section, re.M)
    assert len(rows) == 16 and {name for name, _, _ in rows} == shapes.keys()
    for name, gpus, cells in rows:
        config = shapes[name]
        alone = gpus == "1"
        memory, fixed = held(name, alone)
        parameters, embedding = memory.cost.parameters, config.vocab_size * config.hidden_size
        if not config.tie_word_embeddings:
            embedding *= 2
        layer = (parameters - embedding) / config.num_hidden_layers
        # four layers as `plan_recomputation` counts them, embedding and lm_head with gradients
        gathered = 0 if alone else 4 * 4 * layer + 2 * 2 * embedding
        expected = []
        for size in _GPUS.values():
            left = size - reserve(size) - fixed / int(gpus) - gathered
            expected += [tokens_that_fit(memory, left, 1.0, mode) for mode in ("all", "nothing")]
        found = " | ".join(map(_thousands, expected))
        assert cells == found, f"| {name} | {gpus} | {found} |"


def _with_adapters(config: Any) -> tuple[ModelMemory, int]:
    """Of a model in bfloat16 with adapters of rank 16; and the bytes of weights, gradients and
    moments."""
    import transformers

    peft = pytest.importorskip("peft")
    options = {"r": 16, "target_modules": "all-linear", "lora_dropout": 0.0}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="prefixtree"
        )
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    memory = memory_on_shapes(find_causal_lm(model), torch.bfloat16)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return memory, weights + 12 * trained


def _thousands(tokens: int) -> str:
    """Rounded down."""
    if not tokens:
        return "-"
    return f"{tokens // 1000}K" if tokens >= 10_000 else f"{tokens // 100 / 10}K"
