"""One rank of the runs of test_distributed.py.

Runs every case, one after the other; gives the result or the traceback per case.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import prefixtree as pt
from prefixtree.models.checks import find_causal_lm
from prefixtree.models.layers import layers_of
from prefixtree.recompute.layers import MODES
from prefixtree.recompute.plan import RecomputePlan
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.support import image_ranks
from tests.support.full import asked_for
from tests.support.models import (
    Objective,
    backward_of,
    build,
    enable_checkpointing,
    logprob_and_entropy,
    make_objective,
    ragged_sequences,
    randomise,
    recurrent,
    text_parameters,
    with_measured,
)
from tests.support.replay import drawn_routes

# what each rank does between two updates: micro-batches, None for a rank that has none left
Step = list[list[Objective | None]]


def _objective(seed: int, count: int) -> Objective:
    return make_objective(ragged_sequences(seed)[:count], seed)


def balanced(objective: Objective, case: Case) -> Objective:
    """The objective with the case's load-balancing loss."""
    return replace(objective, balance=case.balance)


def _nothing_scored(objective: Objective) -> Objective:
    return replace(objective, loss_masks=[np.zeros(len(s)) for s in objective.sequences])


STEPS: dict[str, Step] = {
    "different forests": [[_objective(1, 12)], [_objective(2, 4)]],
    "one scores nothing": [[_objective(1, 5)], [_nothing_scored(_objective(2, 9))]],
    "one has nothing": [[None], [_objective(1, 7)]],
    "accumulation": [[_objective(1, 3), _objective(2, 8)], [_objective(3, 6), None]],
}


@dataclass(frozen=True)
class Case:
    """A wrapper and a model."""

    wrapper: str
    model_type: str = "qwen3"
    checkpointing: bool = False
    lora: bool = False
    # for DistributedDataParallel
    options: tuple[tuple[str, bool], ...] = ()
    # FSDP2: the head, or every recurrent layer, in a separate group; bfloat16 parameters
    head_alone: bool = False
    mixers_alone: bool = False
    half: bool = False
    # `prepare` is called "before" or "after" the model is wrapped, or not at all
    prepared: str = ""
    # "auto", or "differs": each rank recomputes something else
    recompute: str = ""
    # the coefficient of the load-balancing loss: as much gradient as the log-probabilities'
    balance: float = 0.0
    # recorded routes, `drawn_routes`
    replays: bool = False
    # three quarters of each score come from a measure
    measured: bool = False
    # parameters without a gradient, those of indexers, ask for none
    frozen: bool = True

    def model(self, implementation: str = "prefixtree") -> Any:
        """The model before it is wrapped."""
        model = build(self.model_type, implementation)
        trained = text_parameters(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained or not self.frozen)
        if not self.lora:
            return model
        import peft

        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj", "lm_head"])
        adapted = peft.get_peft_model(model, config)
        randomise(adapted)  # B starts at 0, where A has no gradient
        return adapted.train()


CASES: dict[str, Case] = {
    "ddp": Case("ddp"),
    "ddp, static graph": Case("ddp", options=(("static_graph", True),)),
    "ddp, lora": Case("ddp", lora=True, measured=True),
    "ddp, experts": Case("ddp", "qwen3_moe", balance=300.0),
    "fsdp2": Case("fsdp2"),
    "fsdp2, head alone": Case("fsdp2", head_alone=True, checkpointing=True, measured=True),
    "fsdp2, experts, checkpointing": Case("fsdp2", "gpt_oss", True, balance=300.0),
    "fsdp2, replay": Case("fsdp2", "qwen3_moe", checkpointing=True, replays=True),
    "fsdp2, recompute": Case("fsdp2", recompute="differs"),
    "fsdp2, recompute, lora": Case("fsdp2", lora=True, recompute="auto", measured=True),
    "fsdp2, bfloat16": Case("fsdp2", half=True),
    "fsdp2, hybrid, bfloat16": Case("fsdp2", "qwen3_5", half=True),
    "ddp, hybrid, prepared after": Case("ddp", "qwen3_5", True, prepared="after"),
    "fsdp2, hybrid, prepared before": Case("fsdp2", "qwen3_5", True, prepared="before"),
    "fsdp2, mixers alone, prepared before": Case(
        "fsdp2", "nemotron_h", mixers_alone=True, prepared="before"
    ),
    "fsdp2, mixers alone, not prepared": Case("fsdp2", "qwen3_5", mixers_alone=True),
    "ddp, indexers": Case("ddp", "deepseek_v32", checkpointing=True, measured=True),
    "ddp, indexers, find unused": Case(
        "ddp", "glm_moe_dsa", options=(("find_unused_parameters", True),), frozen=False
    ),
    "fsdp2, indexers": Case("fsdp2", "deepseek_v4", recompute="differs", frozen=False),
    "fsdp2, indexers, lora": Case("fsdp2", "deepseek_v32", True, lora=True, prepared="after"),
}

# the two wrappers with every step, and every other case with the step that has parts of all, but
# for a limit of torch: the first iteration of a static graph must be reduced
RUNS = [
    (case, step)
    for case in CASES
    for step in STEPS
    if case in ("ddp", "fsdp2")
    or step == ("one has nothing" if case == "ddp, static graph" else "accumulation")
]
# each step, wrapper and kind of layers once
QUICK = [
    ("ddp", "different forests"),
    ("ddp", "one has nothing"),
    ("ddp, static graph", "one has nothing"),
    ("fsdp2", "one scores nothing"),
    *(
        (case, "accumulation")
        for case in (
            "ddp, experts",
            "fsdp2, head alone",
            "fsdp2, replay",
            "fsdp2, recompute",
            "fsdp2, bfloat16",
            "ddp, hybrid, prepared after",
            "fsdp2, mixers alone, prepared before",
            "ddp, indexers, find unused",
            "fsdp2, indexers, lora",
        )
    ),
]


def wrap(case: Case) -> tuple[nn.Module, Callable[[bool], Any]]:
    """The wrapped model, and a context in which gradients are (not) reduced."""
    model = case.model()
    if case.prepared == "before":
        pt.prepare(model)
    if case.checkpointing:
        enable_checkpointing(model, use_reentrant=False)
    if case.wrapper == "ddp":
        ddp = nn.parallel.DistributedDataParallel(model, **dict(case.options))
        return ddp, lambda last: nullcontext() if last else ddp.no_sync()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    if case.half:
        options["mp_policy"] = MixedPrecisionPolicy(
            torch.bfloat16, torch.float32, output_dtype=torch.float32
        )
    inner = model.get_base_model() if case.lora else model
    for mixer in recurrent(inner) if case.mixers_alone else ():
        fully_shard(mixer, **options)
    for layer in inner.get_decoder().layers:
        fully_shard(layer, **options)
    if case.head_alone:
        fully_shard(inner.lm_head, **options)
    fully_shard(model, **options)

    def reduced(last: bool) -> Any:
        model.set_requires_gradient_sync(last)
        return nullcontext()

    return model, reduced


def _run(case: Case, step: Step, rank: int) -> dict[str, Any]:
    """Gradients after the step, their clipped norm, the parameters after an update, scores."""
    model, reduced = wrap(case)
    if case.prepared == "after":
        pt.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # static graphs only reduce as they should from the second iteration on, and a rank's second
    # step must not depend on what the others did in the first; FSDP2 keeps nothing of a model's
    for _ in range(2 if case.wrapper == "ddp" or case == CASES["fsdp2"] else 1):
        optimizer.zero_grad(set_to_none=True)
        logprobs = []
        for i, objective in enumerate(step[rank]):
            with reduced(i == len(step[rank]) - 1):
                logprobs += _backward(model, objective, case, _recompute(model, case, rank))
    gradients = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    norm = whole(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    optimizer.step()
    parameters = {n: whole(p.detach()) for n, p in model.named_parameters()}
    return {
        "logprobs": logprobs,
        "gradients": gradients,
        "norm": float(norm),
        "parameters": parameters,
    }


def _recompute(model: nn.Module, case: Case, rank: int) -> Any:
    if case.recompute != "differs":
        return case.recompute or None
    layers = len(layers_of(find_causal_lm(model)))
    return RecomputePlan(tuple(MODES[(i + rank) % 3] for i in range(layers)), 0)


def _backward(
    model: nn.Module, objective: Objective | None, case: Case, recompute: Any
) -> list[torch.Tensor]:
    if objective is None:
        # a rank without work takes part with a token that nothing is scored on
        packed = pt.pack(pt.PrefixForest.from_sequences([[0]]))
        scores = sequence_logprobs(model, packed, recompute=recompute)
        torch.cat(scores.logprobs).sum().backward()
        return []
    objective = balanced(objective, case)
    routes = drawn_routes(objective.sequences) if case.replays else None
    scores = sequence_logprobs(
        model,
        pt.pack(pt.PrefixForest.from_sequences(objective.sequences, routes=routes)),
        objective.temperatures,
        objective.loss_masks,
        return_entropy=True,
        chunk_size=7,
        recompute=recompute,
        output_router_logits=bool(objective.balance) or None,
        measure=logprob_and_entropy if case.measured else None,
    )
    scores = with_measured(scores)
    backward_of(objective, scores)
    return [p.detach() for p in scores.logprobs]


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def on_rank(rank: int, folder: Path) -> dict[tuple[str, str], Any]:
    """Runs all cases on this rank."""
    results: dict[tuple[str, str], Any] = {}
    for name, step_name in asked_for(RUNS, QUICK):
        try:
            results[name, step_name] = _run(CASES[name], STEPS[step_name], rank)
        except Exception:
            results[name, step_name] = traceback.format_exc()
    for run in asked_for(image_ranks.RUNS, image_ranks.QUICK):
        name = "images", ", ".join(run)
        try:
            results[name] = image_ranks.run(*run, rank)
        except Exception:
            results[name] = traceback.format_exc()
    return results
