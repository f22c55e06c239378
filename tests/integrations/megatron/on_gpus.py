"""The cases of two ranks and of four on as many GPUs with NCCL, half precision through our
backends, and times of an 8B-shaped slice. There is no fused attention of Megatron's to compare
times with where TransformerEngine is not installed, so a forest without sharing, through our
kernels, stands for it.

    torchrun --nproc-per-node 2 -m tests.integrations.megatron.on_gpus
    torchrun --nproc-per-node 2 -m tests.integrations.megatron.on_gpus context_times
    torchrun --nproc-per-node 4 -m tests.integrations.megatron.on_gpus context

Rank 0 writes all results to the file that OUT names, where it does.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from benchmarks.lib.environment import environment
from prefixtree import PrefixForest, SequenceScores, pack
from prefixtree.integrations.megatron import pack_batches, tree_logprobs, tree_spec
from prefixtree.kernels.attention import explain
from tests.integrations.megatron import context_ranks, pipeline_ranks, tensor_ranks
from tests.integrations.megatron.runs import (
    Case,
    Weights,
    build,
    errors,
    layer_spec,
    make_config,
    make_sequences,
    run_forest,
    run_replicated,
    thd,
)
from tests.integrations.megatron.test_one_process import FULL
from tests.support.megatron_cpu import DEVICE

# head dims of real models, for the GPU's kernels
_HALF = {"sequence_parallel": True, "kv_channels": 128, "hidden_size": 256, "ffn_hidden_size": 512}
_SLICE = {
    "num_layers": 4,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "kv_channels": 128,
    "ffn_hidden_size": 12288,
    "sequence_parallel": True,
    "use_cpu_initialization": False,
    "bf16": True,
}
_VOCABULARY = 151_936


def half() -> dict[str, Any]:
    """Errors of bfloat16 against float64, beside those of Megatron's own attention in bfloat16."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    sequences = make_sequences()
    weights = Weights.of(sequences)
    exact = run_replicated(build(Case(_HALF), lambda spec: spec), sequences, weights)
    bf16 = Case(_HALF | {"bf16": True}, dtype=torch.bfloat16)
    theirs = run_replicated(build(bf16, lambda spec: spec), sequences, weights)
    results: dict[str, Any] = {"megatron": vars(errors(theirs, exact))}
    for name, case in {
        "triton": replace(bf16, backend="triton"),
        "flash": replace(bf16, backend="flash"),
        "pack_batches": replace(bf16, way="pack_batches"),
    }.items():
        try:
            found = errors(run_forest(build(case), case, sequences, weights), exact)
            results[name] = vars(found)
        except NotImplementedError as error:
            results[name] = str(error)
    parallel_state.destroy_model_parallel()
    return results


def _rollouts(prompt: int = 4096, count: int = 8, response: int = 512) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)

    def new(length: int) -> list[int]:
        return torch.randint(0, _VOCABULARY, (length,), generator=generator).tolist()

    shared = new(prompt)
    return [shared + new(response) for _ in range(count)]


def _slice(config: dict[str, Any], longest: int) -> GPTModel:
    """Four layers of Qwen3-8B's shape for sequences of at most so many tokens."""
    made = make_config(Case(config, dtype=torch.bfloat16))
    spec = tree_spec(layer_spec(made))
    model = GPTModel(made, spec, _VOCABULARY, longest, position_embedding_type="rope")
    return model.to(torch.bfloat16).to(DEVICE)


def times() -> dict[str, Any]:
    """Milliseconds of forward and backward of a 4-layer slice of Qwen3-8B's shape."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model = _slice(_SLICE, 8192)
    sequences = _rollouts()
    separate = range(len(sequences))

    def packed(namespaces: Any = None) -> Any:
        forest = PrefixForest.from_sequences(sequences, namespaces=namespaces)
        return pack(forest, pad_to_multiple_of=2).to(DEVICE)

    forest, chains = packed(), packed(list(separate))

    def shared() -> None:
        inputs = thd(sequences)
        model(**inputs, labels=inputs["input_ids"].roll(-1, 1)).mean().backward()

    results: dict[str, Any] = {
        "tokens": sum(map(len, sequences)),
        "distinct": forest.num_tokens,
        "attention": explain(forest.mask),
        "scored edges": _milliseconds(model, partial(_scored, model, forest)),
        "chains": _milliseconds(model, partial(_scored, model, chains)),
    }
    pack_batches(model)
    results["pack_batches"] = _milliseconds(model, shared)
    parallel_state.destroy_model_parallel()
    return results


def _scored(model: Any, tree: Any) -> torch.Tensor:
    """Log p of all sequences, behind a backward."""
    scores = tree_logprobs(model, tree)
    assert isinstance(scores, SequenceScores)
    logprobs = torch.cat(scores.logprobs)
    logprobs.mean().backward()
    return logprobs


def context_times() -> dict[str, Any]:
    """The same by context parallelism, beside every rank with the whole tree, which it recomputes;
    and how far log p is off."""
    results: dict[str, Any] = {}
    whole = {"sequence_parallel": False} | FULL
    for tokens in (32_768, 131_072):
        rollouts = _rollouts(tokens // 4, tokens * 3 // 4 // 2048, 2048)
        tree = pack(PrefixForest.from_sequences(rollouts)).to(DEVICE)
        logprobs: dict[int, torch.Tensor] = {}
        for size in (1, 2):
            parallel_state.initialize_model_parallel(context_parallel_size=size)
            model = _slice(_SLICE | whole, tokens)
            generator = torch.Generator(DEVICE).manual_seed(1)
            for weight in model.parameters():
                if weight.ndim > 1:
                    torch.nn.init.normal_(weight, std=0.02, generator=generator)

            run = partial(_scored, model, tree)
            logprobs[size] = run().detach()
            results[f"{tokens} tokens, CP {size}"] = _milliseconds(model, run, 3)
            parallel_state.destroy_model_parallel()
        off = (logprobs[1] - logprobs[2]).abs()
        results[f"{tokens} tokens, log p off"] = [float(off.mean()), float(off.max())]
    return results


def _milliseconds(model: Any, run: Callable[[], Any], repeats: int = 5) -> dict[str, float]:
    """The median of some runs after two, and the peak of memory in GiB."""
    found = []
    torch.cuda.reset_peak_memory_stats()
    for at in range(2 + repeats):
        model.zero_grad(set_to_none=True)
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if at >= 2:
            found.append(start.elapsed_time(end))
    return {
        "ms": sorted(found)[repeats // 2],
        "GiB": torch.cuda.max_memory_allocated() / 2**30,
    }


def tensor() -> dict[str, Any]:
    """Every case of test_ranks.py."""
    found = tensor_ranks.on_rank(dist.get_rank(), Path())
    parallel_state.destroy_model_parallel()
    return found


def pipeline() -> dict[str, Any]:
    """Every case of test_pipeline.py."""
    found = pipeline_ranks.on_rank(dist.get_rank(), Path())
    parallel_state.destroy_model_parallel()
    return found


def context() -> dict[str, Any]:
    """Every case of test_context_parallel.py for so many ranks."""
    return context_ranks.on_rank(dist.get_rank(), Path())


if __name__ == "__main__":
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl")
    runs = {"context": context}
    if dist.get_world_size() == 2:
        runs |= {"tensor": tensor, "pipeline": pipeline, "half": half, "times": times}
        runs |= {"context_times": context_times}
    rows: list[dict[str, Any]] = []
    for chosen in sys.argv[1:] or runs:
        # Megatron keeps the first scale's shape, and its schedules give another than a backward
        # without them
        MoEAuxLossAutoScaler.main_loss_backward_scale = None
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, runs[chosen]())
        rows += [{"run": chosen, "rank": rank, **row} for rank, row in enumerate(found)]
        if dist.get_rank() == 0:
            print(
                *(json.dumps(row, default=str) for row in rows[-len(found) :]), sep="\n", flush=True
            )
    if dist.get_rank() == 0 and (out := os.environ.get("OUT")):
        here = environment() | {n: version(n) for n in ("triton", "megatron-core")}
        data = {"environment": here, "ranks": dist.get_world_size(), "rows": rows}
        Path(out).write_text(json.dumps(data, indent=1, default=str))
    dist.destroy_process_group()
