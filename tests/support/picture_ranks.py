"""Pictures on the ranks of `distributed_ranks`: rank 0 has those of a batch, rank 1 none."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import prefixtree as pt
from tests.support.group_bad_calls import message_of
from tests.support.models import counted
from tests.support.picture_cases import batch, build, pictures_of, videos

RUNS = [
    *((wrapper, kind, "images") for wrapper in ("ddp", "fsdp2") for kind in ("qwen3_vl", "gemma4")),
    ("ddp", "qwen3_vl", "videos"),
]
# sequences of each micro-batch, rank by rank; one without any has nothing left to do
PARTS: dict[str, list[list[list[int]]]] = {
    "images": [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8], []]],
    "videos": [[[0, 1, 2], [3, 4]], [[5], []]],
}


def run(wrapper: str, model_type: str, kind: str, rank: int) -> dict[str, Any]:
    """Log-probabilities, whole gradients, how often the tower ran, and what refuses videos."""
    model = build(model_type)
    made = batch(model_type) if kind == "images" else videos(model_type)
    pictures = pictures_of(model, made)
    inner = model.model
    tower = inner.visual if hasattr(inner, "visual") else inner.vision_tower
    blocks = tower.blocks if hasattr(tower, "blocks") else tower.encoder.layers
    wrapped: nn.Module
    if wrapper == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*blocks, tower, *model.get_decoder().layers, model):
            fully_shard(part, mesh=mesh)
        wrapped = model
    logprobs = []
    with counted([tower]) as towers:
        for indices in PARTS[kind][rank]:
            rows = [pictures.sequences[i] for i in indices] or [pictures.sequences[0][:1]]
            packed = pt.pack(pt.PrefixForest.from_sequences(rows))
            scores = pt.sequence_logprobs(wrapped, packed, pictures=pictures).logprobs
            weights = [made.weights[i] for i in indices] or [torch.zeros(0)]
            sum((p * w.to(p.dtype)).sum() for p, w in zip(scores, weights, strict=True)).backward()
            logprobs += [p.detach() for p in scores if len(p)]
        calls = towers()
    refused = ""
    if wrapper == "fsdp2" and model_type != "gemma4":
        shown = pictures_of(model, videos(model_type))
        packed = pt.pack(pt.PrefixForest.from_sequences(shown.sequences))
        refused = message_of(lambda: pt.sequence_logprobs(wrapped, packed, pictures=shown))
    return {
        "refused": refused,
        "logprobs": logprobs,
        "gradients": {
            name.removeprefix("module."): p.grad.full_tensor()
            if hasattr(p.grad, "full_tensor")
            else p.grad.clone()
            for name, p in wrapped.named_parameters()
            if p.grad is not None
        },
        "calls": calls,
        "wrapper": type(wrapped).__name__,
        "sharded": sum(hasattr(p, "placements") for p in wrapped.parameters()),
    }
