"""One rank of test_tensor_parallel.py: torch's and transformers' tensor parallelism."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM

from tests.support.models import build, ragged_objective, ragged_packed, run_packed
from tests.support.spawn import WORLD_SIZE

HEADS: dict[str, Any] = {
    "head left out": None,
    "head colwise": ColwiseParallel(),
    "head colwise, gathered": ColwiseParallel(output_layouts=Replicate()),
    "head rowwise": RowwiseParallel(input_layouts=Replicate()),
}
AUTO = "auto"
# some of what both plans cut
SHARDED = ("model.layers.0.self_attn.q_proj.weight", "model.layers.2.mlp.down_proj.weight")


def _parallelized(head: Any) -> Any:
    model = build("llama")
    plan: dict[str, Any] = {} if head is None else {"lm_head": head}
    for name, _ in model.named_modules():
        if name.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            plan[name] = ColwiseParallel()
        elif name.endswith(("o_proj", "down_proj")):
            plan[name] = RowwiseParallel()
    return parallelize_module(model, init_device_mesh("cpu", (WORLD_SIZE,)), plan)


def _run(model: Any) -> dict[str, Any]:
    run = run_packed(model, ragged_packed(), ragged_objective())
    whole = {
        name: gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        for name, gradient in run.gradients.items()
    }
    return {"logprobs": run.logprobs, "entropy": run.entropy, "gradients": whole}


def on_rank(rank: int, folder: Path) -> dict[str, Any]:
    """Runs, or the messages of those that are refused."""
    results: dict[str, Any] = {}
    for name, head in HEADS.items():
        try:
            results[name] = _run(_parallelized(head))
        except Exception as problem:
            results[name] = f"{type(problem).__name__}: {problem}"
    if rank == 0:
        build("llama").save_pretrained(folder / "model")
    torch.distributed.barrier()
    # as torchrun sets them
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE)}
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", tp_plan="auto", attn_implementation="prefixtree"
    )
    assert all(hasattr(model.get_parameter(name), "placements") for name in SHARDED)
    results[AUTO] = _run(model.train())
    return results
