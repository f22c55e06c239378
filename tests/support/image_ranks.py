"""Images on the ranks of `distributed_ranks`: rank 0 has those of a batch, rank 1 none."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import prefixtree as pt
from prefixtree.images import vision
from prefixtree.recompute import image_work
from tests.support.group_bad_calls import message_of
from tests.support.image_cases import batch, build, images_of, videos
from tests.support.models import counted
from tests.support.step_ranks import LIGHT

RUNS = [
    ("ddp", "qwen3_vl", "images"),
    ("ddp", "qwen3_vl", "videos"),
    ("fsdp2", "qwen3_vl", "runs"),
    ("fsdp2", "gemma4", "runs"),
    ("fsdp2", "qwen3_vl", "plans"),
    ("ddp", "qwen3_vl", "steps"),
    ("fsdp2", "qwen3_vl", "steps"),
    ("ddp", "qwen3_vl", "kept"),
    ("fsdp2", "qwen3_vl", "kept, again"),
    ("fsdp2", "qwen3_vl", "kept, uneven"),
    ("fsdp2", "qwen3_vl", "kept, auto"),
]
QUICK = [
    ("ddp", "qwen3_vl", "videos"),
    ("fsdp2", "qwen3_vl", "runs"),
    ("fsdp2", "qwen3_vl", "plans"),
    ("fsdp2", "qwen3_vl", "steps"),
    ("fsdp2", "qwen3_vl", "kept, uneven"),
]
# sequences of each micro-batch, rank by rank; one without any has nothing left to do
PARTS: dict[str, list[list[list[int]]]] = {
    "images": [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8], []]],
    "videos": [[[0, 1, 2], [3, 4]], [[5], []]],
}
PARTS |= dict.fromkeys(("runs", "steps", "plans"), PARTS["images"])
# of `kept_trunks`
KEPT = {"kept": {}, "kept, again": {"recompute_trunks": "again"}}
# sequences of each rank; in "uneven" those of rank 0 show two images in their trunk and none of
# their own, so that the other rank's forwards, and then its backwards, meet others of another size
OF_RANKS = {kind: [[*range(8)], [8]] for kind in KEPT}
KEPT |= {"kept, uneven": {"recompute": "all"}, "kept, auto": {"recompute": "auto"}}
OF_RANKS["kept, uneven"] = OF_RANKS["kept, auto"] = [[2, 3], [0, 1, 4, 5, 6, 7, 8]]


def run(wrapper: str, model_type: str, kind: str, rank: int) -> dict[str, Any]:
    """Log-probabilities, whole gradients, how often the vision encoder and its first block ran, and
    what refuses videos. In "runs" and "steps" each image is a run of its own, recomputed; in
    "plans" the last ones of rank 0 are kept. In "kept" the micro-batches of rank 0 share trunks,
    and rank 1 has none."""
    model = build(model_type)
    made = videos(model_type) if kind == "videos" else batch(model_type)
    images = images_of(model, made)
    inner = model.model
    encoder = inner.visual if hasattr(inner, "visual") else inner.vision_tower
    blocks = encoder.blocks if hasattr(encoder, "blocks") else encoder.encoder.layers
    wrapped: nn.Module
    if wrapper == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*blocks, encoder, *model.get_decoder().layers, model):
            fully_shard(part, mesh=mesh)
        wrapped = model
    logprobs = []
    options: dict[str, Any] = {"recompute": "all"} if kind in ("runs", "steps") else {}
    if kind == "plans":
        layers = len(model.get_decoder().layers)
        kept = 35 if rank == 0 else None
        options["recompute"] = pt.RecomputePlan(("all",) * layers, 0, patches=1, kept=kept)
    if kind == "steps":
        options |= {"max_step_tokens": 30, "import_cost": LIGHT}
    with (
        mock.patch.object(vision, "RUN", 1),
        mock.patch.object(image_work, "RUN", 1),
        counted([encoder]) as encoders,
        counted(blocks[:1]) as first_blocks,
    ):
        if kind in KEPT:
            logprobs = _kept(wrapped, images, made, rank, kind, **KEPT[kind])
        for indices in PARTS[kind][rank] if kind in PARTS else ():
            rows = [images.sequences[i] for i in indices] or [images.sequences[0][:1]]
            packed = pt.pack(pt.PrefixForest.from_sequences(rows))
            scores = pt.sequence_logprobs(wrapped, packed, images=images, **options).logprobs
            weights = [made.weights[i] for i in indices] or [torch.zeros(0)]
            sum((p * w.to(p.dtype)).sum() for p, w in zip(scores, weights, strict=True)).backward()
            logprobs += [p.detach() for p in scores if len(p)]
        calls, of_blocks = encoders(), first_blocks()
    refused = two_modes = ""
    if wrapper == "fsdp2" and kind in KEPT:
        given = {"recompute": "nothing", "recompute_trunks": "all"}
        two_modes = message_of(lambda: _kept(wrapped, images, made, rank, **given))
    if wrapper == "fsdp2" and model_type != "gemma4":
        shown = images_of(model, videos(model_type))
        packed = pt.pack(pt.PrefixForest.from_sequences(shown.sequences))
        refused = message_of(lambda: pt.sequence_logprobs(wrapped, packed, images=shown))
    return {
        "refused": refused,
        "two modes": two_modes,
        "logprobs": logprobs,
        "gradients": {
            name.removeprefix("module."): p.grad.full_tensor()
            if hasattr(p.grad, "full_tensor")
            else p.grad.clone()
            for name, p in wrapped.named_parameters()
            if p.grad is not None
        },
        "calls": calls,
        "blocks": of_blocks,
        "wrapper": type(wrapped).__name__,
        "sharded": sum(hasattr(p, "placements") for p in wrapped.parameters()),
    }


def _kept(
    model: nn.Module, images: Any, made: Any, rank: int, kind: str = "kept", **options: Any
) -> list[Any]:
    """Log-probabilities of the sequences of a rank, whose micro-batches keep their trunks."""
    mine = OF_RANKS[kind][rank]
    micro_batches = pt.plan_micro_batches(
        [images.sequences[i] for i in mine], 40, trunks=True, import_cost=LIGHT
    )
    found: dict[int, Any] = {}
    with pt.kept_trunks(model, micro_batches[0], images=images, **options) as scored:
        for each, scores in scored:
            weights = [made.weights[mine[i]] for i in each.sequence_indices]
            terms = zip(scores.logprobs, weights, strict=True)
            sum((p * w.to(p.dtype)).sum() for p, w in terms).backward()
            found |= dict(zip(each.sequence_indices.tolist(), scores.logprobs, strict=True))
    return [found[i].detach() for i in sorted(found)]
