"""The cases of two ranks and of four on as many GPUs with NCCL, half precision through our
backends, and times of an 8B-shaped slice. There is no fused attention of Megatron's to compare
times with where TransformerEngine is not installed, so a forest without sharing, through our
kernels, stands for it.

    torchrun --nproc-per-node 2 -m tests.integrations.megatron.on_gpus
    torchrun --nproc-per-node 2 -m tests.integrations.megatron.on_gpus context_times state_times
    torchrun --nproc-per-node 4 -m tests.integrations.megatron.on_gpus context

Rank 0 writes all results to the file that OUT names, where it does.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

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
from tests.integrations.megatron.state_runs import mamba_stack, with_delta
from tests.integrations.megatron.test_one_process import FULL
from tests.support.megatron_cpu import DEVICE, Norm
from tests.support.megatron_states import stand_in_for_kernels

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
# four layers with a state of Qwen3-Next, its experts replaced by a dense MLP, and of Nemotron-H 8B,
# where two are Mamba's and two MLPs
_DELTA = {
    "experimental_attention_variant": "gated_delta_net",
    "hidden_size": 2048,
    "ffn_hidden_size": 5120,
    "num_attention_heads": 16,
    "num_query_groups": 2,
    "kv_channels": 256,
    "linear_attention_freq": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_MAMBA = {
    "ffn_hidden_size": 21504,
    "gated_linear_unit": False,
    "mamba_state_dim": 128,
    "mamba_head_dim": 64,
    "mamba_num_groups": 8,
    "mamba_num_heads": 128,
}


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


def _drawn(seed: int) -> Callable[[int], list[int]]:
    """A function that draws so many tokens."""
    generator = torch.Generator().manual_seed(seed)
    return lambda length: torch.randint(0, _VOCABULARY, (length,), generator=generator).tolist()


def _rollouts(prompt: int = 4096, count: int = 8, response: int = 512) -> list[list[int]]:
    new = _drawn(0)
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


def state_times() -> dict[str, Any]:
    """Layers with a state under tensor parallelism: milliseconds of forward and backward, of
    sequences that share nothing and of agents' turns; and how far log p and gradients of the turns
    are off. The gated delta rule is beside Megatron's own on the replicated batch; mamba-ssm,
    which Megatron's Mamba needs, is not there, so a forest without sharing stands for it."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    new = _drawn(2)
    system = new(2048)
    agents = [system + new(4096) for _ in range(2)]
    batches = {
        "nothing shared": [new(4608) for _ in range(8)],
        "agents' turns": [agent[:end] for agent in agents for end in range(2560, 6145, 512)],
    }
    results: dict[str, Any] = {}
    for kind in ("mamba", "gated delta rule"):
        # the constructor asks for mamba-ssm
        with stand_in_for_kernels() if kind == "mamba" else _norms_untuned():
            model = _states(kind, tree_spec)
            theirs = None
            if kind != "mamba":
                theirs = _states(kind, lambda spec: spec)
                theirs.load_state_dict(model.state_dict())
            rows = {name: _sides(model, theirs, batch) for name, batch in batches.items()}
            # kernels of the next kind compile for minutes
            print(kind, rows, flush=True)
            pack_batches(model)
            for name, batch in batches.items():
                run = partial(_replicated, model, thd(batch), batch)
                rows[name]["pack_batches"] = _milliseconds(model, run, 3)
        results |= {f"{kind}, {name}": row for name, row in rows.items()}
        del model, theirs
        torch.cuda.empty_cache()
    parallel_state.destroy_model_parallel()
    return results


@contextmanager
def _norms_untuned() -> Iterator[None]:
    """fla's norm tries 25 configurations for every 2,048 tokens more, for a minute each batch."""
    from fla.modules.norm.l2norm import l2norm_bwd_kernel, l2norm_fwd_kernel

    with ExitStack() as stack:
        for kernel in (l2norm_fwd_kernel, l2norm_bwd_kernel):
            one = [c for c in kernel.configs if c.kwargs["BT"] == 32 and c.num_warps == 4]
            stack.enter_context(patch.object(kernel, "configs", one))
        yield


def _states(kind: str, wrap: Callable[[Any], Any]) -> Any:
    """Four layers of a kind."""
    shape = _DELTA | {"experimental_attention_variant": "gated_delta_net"}
    config = make_config(
        Case(_SLICE | (_MAMBA if kind == "mamba" else shape), dtype=torch.bfloat16)
    )
    position: Any = {"position_embedding_type": "rope"}
    torch.manual_seed(5)
    if kind == "mamba":
        spec = wrap(mamba_stack(config))
        model = HybridModel(
            config, spec, _VOCABULARY, 8192, hybrid_layer_pattern="M-M-", **position
        )
    else:
        layers = [with_delta(layer_spec(config))] * config.num_layers
        spec = wrap(TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm))
        model = GPTModel(config, spec, _VOCABULARY, 8192, **position)
    return model.to(torch.bfloat16).to(DEVICE)


def _sides(model: Any, theirs: Any, batch: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Times of a batch by scored edges, by a forest of chains and, where there is one, by
    Megatron's own model; how far the first is off the last."""
    forest, chains = (
        pack(PrefixForest.from_sequences(batch, namespaces=n), pad_to_multiple_of=2).to(DEVICE)
        for n in (None, list(range(len(batch))))
    )
    runs = {
        "tree_logprobs": (model, partial(_scored, model, forest)),
        "chains": (model, partial(_scored, model, chains)),
    }
    if theirs is not None:
        runs["megatron"] = (theirs, partial(_replicated, theirs, thd(batch), batch))
    results: dict[str, Any] = {"tokens": sum(map(len, batch)), "distinct": forest.num_tokens}
    found = []
    for name, (side, run) in runs.items():
        results[name] = _milliseconds(side, run, 3)
        side.zero_grad(set_to_none=True)
        found.append((run().detach().float(), _gradients(side)))
    (logprobs, gradients), (expected, others) = found[0], found[-1]
    off = (logprobs - expected).abs()
    results["log p off"] = [float(off.mean()), float(off.max())]
    results["gradients off"] = float((gradients - others).norm() / others.norm())
    return results


def _replicated(model: Any, inputs: dict[str, Any], batch: Sequence[Sequence[int]]) -> torch.Tensor:
    """As `_scored`, of every sequence in a row."""
    losses = model(**inputs, labels=inputs["input_ids"].roll(-1, 1))
    kept = torch.zeros(inputs["input_ids"].shape[1], dtype=torch.bool)
    start = 0
    for sequence in batch:
        kept[start : start + len(sequence) - 1] = True
        start += len(sequence)
    logprobs = -losses[0][kept.to(DEVICE)]
    logprobs.mean().backward()
    return logprobs


def _gradients(model: Any) -> torch.Tensor:
    """Those of this rank in a row; what sequence parallelism leaves to be added is."""
    parts = []
    for weight in model.parameters():
        if weight.grad is None:
            continue
        part = weight.grad.float()
        if getattr(weight, "sequence_parallel", False):
            dist.all_reduce(part)
        parts.append(part.flatten())
    return torch.cat(parts)


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
        runs |= {"context_times": context_times, "state_times": state_times}
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
