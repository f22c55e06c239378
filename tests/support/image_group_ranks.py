"""One rank of test_images_in_groups.py: images that the ranks of a group divide."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import prefixtree as pt
from prefixtree.images import vision
from prefixtree.images.vision import encoder_of
from prefixtree.models.checks import find_causal_lm
from prefixtree.packing.copies import gather
from prefixtree.scoring import in_groups
from prefixtree.scoring.edges import find_edges
from prefixtree.scoring.forward import AskedWings
from tests.support.distributed_ranks import whole
from tests.support.float64 import Float64
from tests.support.full import asked_for
from tests.support.hooks import inner, place
from tests.support.hybrid_configs import HYBRIDS, OLDEST_WITH_STATES
from tests.support.image_cases import Batch, batch, build, images_of, videos
from tests.support.models import TRANSFORMERS
from tests.support.part_exchange import scattered


@dataclass(frozen=True)
class Case:
    """A model, and how it is run.

    Attributes:
        model_type: of `image_cases.build`.
        kind: "images" or "videos" of `image_cases`; "one" for two sequences with one image.
        group_mode: as `sequence_logprobs` takes it.
        scattered: each token belongs to any rank, so that every image is cut.
        wrapper: "ddp" or "fsdp2", or "" where gradients are averaged by hand.
        recompute: as `sequence_logprobs` takes it; each image is then a run of the vision encoder.
        double: in float64, by the model's logits.
        mistake: a key of MISTAKES.
    """

    model_type: str
    kind: str = "images"
    group_mode: Any = "parts"
    scattered: bool = False
    wrapper: str = ""
    recompute: Any = None
    double: bool = True
    mistake: str = ""

    @property
    def served(self) -> bool:
        """Whether the installed transformers has it."""
        return self.model_type not in HYBRIDS or str(TRANSFORMERS) >= OLDEST_WITH_STATES


def batch_of(case: Case) -> Batch:
    """Its sequences and images."""
    if case.kind == "videos":
        return videos(case.model_type)
    made = batch(case.model_type)
    if case.kind == "images":
        return made
    # two rows share one image
    few = [made.sequences[i] for i in (0, 1)]
    count = int(made.arguments["image_grid_thw"][0].prod())
    arguments = {
        "pixel_values": made.arguments["pixel_values"][: 2 * count],
        "image_grid_thw": made.arguments["image_grid_thw"][:2],
    }
    return Batch(few, arguments, made.weights[:2])


# of three layers; each rank has more than one image, of which the last is kept
_PLAN = pt.RecomputePlan(("all",) * 3, 0, patches=1, kept=40)
# on as many ranks
CASES: dict[int, dict[str, Case]] = {
    2: {
        "qwen3_vl": Case("qwen3_vl"),
        "qwen3_vl, scattered videos": Case("qwen3_vl", "videos", scattered=True),
        "qwen3_vl, heads": Case("qwen3_vl", group_mode="ulysses"),
        "qwen2_5_vl, videos": Case("qwen2_5_vl", "videos"),
        "qwen3_5, scattered": Case("qwen3_5", scattered=True),
        "gemma4, scattered": Case("gemma4", scattered=True),
        "one image": Case("qwen3_vl", "one", scattered=True),
        "FSDP2, a plan": Case("qwen3_vl", wrapper="fsdp2", recompute=_PLAN, double=False),
        "FSDP2, auto": Case("qwen3_vl", "one", wrapper="fsdp2", recompute="auto", double=False),
        "DDP, videos, heads": Case("qwen3_vl", "videos", "ulysses", wrapper="ddp", double=False),
        "no gradients come back": Case("qwen3_vl", mistake="left out"),
        "gradients come twice": Case("qwen3_vl", mistake="twice"),
    },
    3: {
        "qwen2_5_vl, one image": Case("qwen2_5_vl", "one", scattered=True),
    },
}
# of two ranks
QUICK = (
    *("qwen3_vl, scattered videos", "qwen3_vl, heads", "gemma4, scattered", "one image"),
    *("FSDP2, a plan", "no gradients come back", "gradients come twice"),
)


def _nothing_back(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """Takes part in the exchange, and adds nothing."""
    return 0 * _BACK(ctx, gradient)[0], None, None, None


def _back_twice(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """As if two ranks had encoded each image."""
    return 2 * _BACK(ctx, gradient)[0], None, None, None


_BACK = inner("backward of images' rows")
MISTAKES = {"": _BACK, "left out": _nothing_back, "twice": _back_twice}


@contextmanager
def _counted(encoder: nn.Module) -> Iterator[list[int]]:
    """The patches of each call of a vision encoder, before it is cut into runs."""
    patches: list[int] = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        (pixels,) = args or [kwargs["pixel_values"]]
        patches.append(int(pixels[..., 0].numel()))

    handle = encoder.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield patches
    finally:
        handle.remove()


def _logprobs_in_float64(model: Any, packed: Any, images: Any, case: Case) -> Any:
    """`sequence_logprobs` without its lm_head."""
    group = dist.group.WORLD
    found = find_edges(packed, 1.0, None)
    what = (lambda: (model, found)), in_groups.scores_of_rank, {"recompute": None}
    how = {"mode": case.group_mode, "asked": AskedWings(images)}
    causal_lm, local = in_groups.part_of_rank(model, packed, group, *what, **how)
    shown: Any = local.wings["images"].forward(None)
    with shown.encoded():
        logits = causal_lm(**local.inputs | shown.inputs).logits[0]
    edges = local.edges
    of_edges = gather(logits[edges.predictors], edges.to_predictors).log_softmax(-1)
    (scores,) = local.gathered((of_edges.gather(-1, edges.target[:, None].long()),))
    return [p[:, 0] for p in gather(scores, local.to_sequences).split(local.lengths)]


def run(case: Case) -> dict[str, Any]:
    """Log-probabilities, gradients averaged over the ranks, and patches of each call of the
    vision encoder."""
    made = batch_of(case)
    with Float64() if case.double else nullcontext():
        model = build(case.model_type, dtype=torch.float64 if case.double else torch.float32)
    images = images_of(model, made)
    packed = pt.pack(pt.PrefixForest.from_sequences(images.sequences))
    pt.prepare(model)
    encoder = encoder_of(model)
    wrapped: nn.Module = model
    if case.wrapper == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    elif case.wrapper:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*encoder.blocks, encoder, *model.get_decoder().layers, model):
            fully_shard(part, mesh=mesh)
    with ExitStack() as stack:
        patches = stack.enter_context(_counted(encoder))
        stack.enter_context(
            patch.object(*place("backward of images' rows"), staticmethod(MISTAKES[case.mistake]))
        )
        if case.scattered:
            stack.enter_context(patch.object(in_groups, "split_slots", scattered))
        if case.double:
            stack.enter_context(Float64())
            logprobs = _logprobs_in_float64(model, packed, images, case)
        else:
            stack.enter_context(patch.object(vision, "RUN", 1))
            logprobs = pt.sequence_logprobs(
                wrapped,
                packed,
                images=images,
                recompute=case.recompute,
                group=dist.group.WORLD,
                group_mode=case.group_mode,
            ).logprobs
        terms = zip(logprobs, made.weights, strict=True)
        sum((p * w.to(p.dtype)).sum() for p, w in terms).backward()
    found = {}
    for name, parameter in find_causal_lm(wrapped).named_parameters():
        # experts that no token of a rank chose have none there
        grad = parameter.grad
        gradient = whole(torch.zeros_like(parameter) if grad is None else grad)
        if not case.wrapper:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        if grad is not None or gradient.any():
            found[name] = gradient
    return {"logprobs": [p.detach() for p in logprobs], "gradients": found, "patches": patches}


def _tried(compute: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return compute(*arguments)
    except Exception:
        return traceback.format_exc()


def on_rank(rank: int, folder: Path) -> dict[str, Any]:
    """Results, or tracebacks."""
    cases = CASES[dist.get_world_size()]
    names = (name for name in asked_for(cases, QUICK) if cases[name].served)
    return {name: _tried(run, cases[name]) for name in names}
