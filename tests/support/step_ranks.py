"""One rank of the runs of tests/scoring/test_steps_on_ranks.py.

Runs every case, one after the other; gives what it found or the traceback per case. The reference
of a case is the packed run of each rank's forests in one forward, of a model without a wrapper.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from prefixtree.planning.costs import ImportCost
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.support.full import asked_for
from tests.support.models import (
    Objective,
    adapted,
    build,
    counted,
    enable_checkpointing,
    logprob_and_entropy,
    make_objective,
    pack_sequences,
    ragged_sequences,
    with_measured,
)
from tests.support.spawn import WORLD_SIZE, results_of

# an imported token counts a twentieth of an own one
LIGHT = ImportCost(token_bytes=20 * 36 * 8 * 256 * 6)
MAX_STEP_TOKENS = 20
# micro-batches of each rank: 91 tokens and 10, and each has another number of steps
FORESTS = (
    (make_objective(ragged_sequences(0), 0), make_objective(ragged_sequences(1)[:2], 1)),
    (make_objective(ragged_sequences(2)[10:11], 2), make_objective(ragged_sequences(3)[:8], 3)),
)


@dataclass(frozen=True)
class Case:
    """A wrapper and a model; micro-batches of one update."""

    wrapper: str
    model_type: str = "qwen3"
    checkpointing: bool = False
    lora: bool = False
    micro_batches: int = 1
    half: bool = False
    find_unused: bool = False
    # all micro-batches are scored before the first backward
    interleaved: bool = False
    # in steps, three quarters of each score come from a measure
    measured: bool = False

    @property
    def updates(self) -> int:
        """How many: DDP builds its buckets anew after the first."""
        return 2 if self.wrapper == "ddp" else 1

    def model(self) -> Any:
        """The model before it is wrapped."""
        model = build(self.model_type)
        if self.lora:
            model = adapted(model, "q_proj", "v_proj", "down_proj")
        if self.checkpointing:
            enable_checkpointing(model, use_reentrant=False)
        return model


CASES = {
    "ddp": Case("ddp", micro_batches=2),
    "ddp, interleaved": Case("ddp", micro_batches=2, interleaved=True),
    "fsdp2": Case("fsdp2", micro_batches=2),
    "fsdp2, checkpointing": Case(
        "fsdp2", "gpt_oss", checkpointing=True, micro_batches=2, measured=True
    ),
    "fsdp2, lora": Case("fsdp2", lora=True, checkpointing=True),
    "fsdp2, interleaved": Case("fsdp2", micro_batches=2, interleaved=True),
    "fsdp2, bfloat16": Case("fsdp2", half=True),
    "fsdp1, checkpointing": Case("fsdp1", "gpt_oss", checkpointing=True, micro_batches=2),
    "fsdp2, recurrent": Case("fsdp2", "qwen3_5", checkpointing=True),
    "ddp, indexers": Case("ddp", "glm_moe_dsa", find_unused=True),
    "tensor parallel": Case("tensor parallel", "llama", checkpointing=True, measured=True),
    "expert parallel, fsdp2": Case("expert parallel", "qwen3_moe", micro_batches=2),
}
# each wrapper once, and what differs most
QUICK = (
    *("ddp, interleaved", "ddp, indexers", "fsdp2, interleaved"),
    *("fsdp1, checkpointing", "expert parallel, fsdp2", "tensor parallel"),
)
# for transformers to spread the model, `from_pretrained`'s or DistributedConfig's, whose ep_size is
# not there before transformers 5.23; the ranks of the first share their forests
_SPREAD: dict[str, dict[str, Any]] = {
    "tensor parallel": {"tp_plan": "auto"},
    "expert parallel": {"fsdp_size": 2, "ep_size": 2},
}


def loss_of(objective: Objective, scores: Any) -> torch.Tensor:
    """The objective, and what is no sum over tokens."""
    everything = torch.cat(scores.logprobs)
    entropy = torch.cat(scores.entropy)
    loss = objective.loss(scores.logprobs, scores.entropy)
    if objective.balance:
        loss = loss + objective.balance * scores.aux_loss
    return loss + 1e-3 * everything.sum().pow(2) + entropy.exp().mean()


def backward(model: nn.Module, objective: Objective, **options: Any) -> torch.Tensor:
    """Adds the gradients of one micro-batch; gives its log-probabilities."""
    loss, logprobs = forward(model, objective, **options)
    loss.backward()
    return logprobs


def forward(model: nn.Module, objective: Objective, **options: Any) -> tuple[torch.Tensor, ...]:
    """The loss of one micro-batch, and its log-probabilities."""
    scores = sequence_logprobs(
        model,
        pack_sequences(objective.sequences),
        objective.temperatures,
        objective.loss_masks,
        return_entropy=True,
        **options,
    )
    scores = with_measured(scores)
    return loss_of(objective, scores), torch.cat(scores.logprobs).detach()


def _wrap(case: Case, folder: Path) -> tuple[nn.Module, Callable[[bool], Any]]:
    """The wrapped model, and a context in which gradients are (not) reduced."""
    model = case.model()
    if case.wrapper in _SPREAD:
        spread_by = _SPREAD[case.wrapper]
        if case.wrapper == "expert parallel":
            spread_by = {"distributed_config": DistributedConfig(**spread_by)}
        saved = folder / case.wrapper
        if dist.get_rank() == 0:
            model.save_pretrained(saved)
        dist.barrier()
        spread = AutoModelForCausalLM.from_pretrained(
            saved,
            attn_implementation="prefixtree",
            dtype=torch.float32,
            **spread_by,
        ).train()
        if case.checkpointing:
            enable_checkpointing(spread, use_reentrant=False)
        return spread, lambda last: nullcontext()
    if case.wrapper == "ddp":
        ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=case.find_unused)
        return ddp, lambda last: nullcontext() if last else ddp.no_sync()
    if case.wrapper == "fsdp1":
        fsdp1 = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        return fsdp1, lambda last: nullcontext() if last else fsdp1.no_sync()
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (WORLD_SIZE,))}
    if case.half:
        options["mp_policy"] = MixedPrecisionPolicy(
            torch.bfloat16, torch.float32, output_dtype=torch.float32
        )
    inner = model.get_base_model() if case.lora else model
    for layer in inner.get_decoder().layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)

    def reduced(last: bool) -> Any:
        model.set_requires_gradient_sync(last)
        return nullcontext()

    return model, reduced


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return {
                name.replace("_fsdp_wrapped_module.", ""): p.grad.clone()
                for name, p in model.named_parameters()
            }
    return {
        name.removeprefix("module."): p.grad.full_tensor()
        if isinstance(p.grad, DTensor)
        else p.grad.clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def distance(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of a parameter's gradient by its norm, as `models.Errors`."""
    assert got.keys() == expected.keys()
    norms = {name: float(g.norm()) for name, g in expected.items()}
    floor = 1e-3 * sum(norm**2 for norm in norms.values()) ** 0.5
    return max(
        float((got[name].float() - g).norm()) / max(norms[name], floor)
        for name, g in expected.items()
    )


def _run(case: Case, rank: int, folder: Path) -> dict[str, Any]:
    alone = case.model()
    together = case.wrapper == "tensor parallel"
    mine = FORESTS[0 if together else rank][: case.micro_batches]
    references: dict[int, torch.Tensor] = {}
    for of_rank in FORESTS[:1] if together else FORESTS:
        for objective in of_rank[: case.micro_batches]:
            references[id(objective)] = backward(alone, objective)
    ranks = 1 if together else WORLD_SIZE
    expected = {name: g.float() / ranks for name, g in gradients_of(alone).items()}

    model, reduced = _wrap(case, folder)
    if case.wrapper == "ddp":
        assert isinstance(model, nn.parallel.DistributedDataParallel)
    elif case.wrapper == "fsdp1":
        assert isinstance(model.model.layers[0], FullyShardedDataParallel)
    else:
        # norms and some biases stay whole under tensor parallelism
        sharded = [
            isinstance(p, DTensor) and p.to_local().shape != p.shape
            for name, p in model.named_parameters()
            if not together or name.endswith("_proj.weight")
        ]
        assert sharded and all(sharded)
    found: dict[str, Any] = {"forwards": []}
    if case.half:
        # how far one forward is from float32
        backward(model, FORESTS[rank][0])
        found["in one forward"] = distance(gradients_of(model), expected)
    for _ in range(case.updates):
        model.zero_grad(set_to_none=True)
        losses = []
        for number, objective in enumerate(mine):
            is_last = number == case.micro_batches - 1
            with reduced(is_last), counted([model]) as forwards:
                loss, logprobs = forward(
                    model,
                    objective,
                    max_step_tokens=MAX_STEP_TOKENS,
                    import_cost=LIGHT,
                    chunk_size=7,
                    measure=logprob_and_entropy if case.measured else None,
                )
                losses.append(loss)
                # the first ones first
                while losses and (is_last or not case.interleaved):
                    losses.pop(0).backward()
                found["forwards"].append(forwards())
            found["logprobs"] = float((logprobs - references[id(objective)]).abs().max())
    got = gradients_of(model)
    found["gradients"] = distance(got, expected)
    found["sum"] = sum(float(g.double().sum()) for g in got.values())
    return found


def _told(packed: Any, static: bool = False, **options: Any) -> str:
    """The error that a rank of DDP gets; "scores" where nothing is refused."""
    model = nn.parallel.DistributedDataParallel(build("qwen3"), static_graph=static)
    try:
        scores = sequence_logprobs(model, packed, **options)
        torch.cat(scores.logprobs).sum().backward()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return "scores"


def _one_rank_cannot(rank: int) -> dict[str, str]:
    """The error of each rank where the forest of rank 0 fits no steps, or may not be divided."""
    short, long = ([1, 2, 3], list(range(60)))
    packed = pack_sequences([long if rank == 0 else short])
    heavy, light = ({"import_cost": ImportCost(token_bytes=bytes)} for bytes in (1e4, 1e7))
    return {
        "path": _told(packed, max_step_tokens=30, **heavy),
        "static graph": _told(packed, static=True, max_step_tokens=30, **light),
    }


def _scores_without_gradients(rank: int, folder: Path) -> float:
    """The largest difference of log-probabilities, as a reference model is scored."""
    model, _ = _wrap(CASES["fsdp2"], folder)
    model.eval()
    objective = FORESTS[rank][0]
    packed = pack_sequences(objective.sequences)
    with torch.no_grad():
        whole = sequence_logprobs(CASES["fsdp2"].model().eval(), packed)
        stepped = sequence_logprobs(
            model, packed, max_step_tokens=MAX_STEP_TOKENS, import_cost=LIGHT
        )
    assert not stepped.logprobs[0].requires_grad
    return float((torch.cat(stepped.logprobs) - torch.cat(whole.logprobs)).abs().max())


def on_rank(rank: int, folder: Path) -> dict[str, Any]:
    """Runs all cases on this rank."""
    warnings.simplefilter("ignore", FutureWarning)
    # as torchrun sets them
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE)}
    runs: dict[str, Callable[[], Any]] = {
        name: lambda case=CASES[name]: _run(case, rank, folder) for name in asked_for(CASES, QUICK)
    }
    runs["one rank cannot"] = lambda: _one_rank_cannot(rank)
    runs["without gradients"] = lambda: _scores_without_gradients(rank, folder)
    return results_of(runs)
