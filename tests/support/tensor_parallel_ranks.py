"""One rank of test_tensor_parallel.py: torch's and transformers' tensor and expert parallelism."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from prefixtree import PrefixForest, pack
from prefixtree.kernels.lm_head.eager import LogitRule, VocabularySlice
from prefixtree.kernels.lm_head.logprobs import ScoreOptions, linear_logprobs
from prefixtree.scoring import lm_head as scoring_lm_head
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.support.full import asked_for, quick_ones_run
from tests.support.models import (
    HIDDEN,
    AdaptedHead,
    Objective,
    build,
    enable_checkpointing,
    make_objective,
    pack_sequences,
    ragged_objective,
    ragged_packed,
    ragged_sequences,
    run_packed,
)
from tests.support.replay import drawn_routes
from tests.support.spawn import WORLD_SIZE

TORCH_HEADS: dict[str, Any] = {
    "head left out": None,
    "head colwise": ColwiseParallel(),
    "head colwise, gathered": ColwiseParallel(output_layouts=Replicate()),
    "head rowwise": RowwiseParallel(input_layouts=Replicate()),
}
QUERY, DOWN = "model.layers.0.self_attn.q_proj.weight", "model.layers.2.mlp.down_proj.weight"
EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Case:
    """A model that transformers spreads over ranks.

    Attributes:
        family: of `models.build`.
        config: of its DistributedConfig; None for `tp_plan="auto"`.
        head: which function scores.
        sharded: some of the parameters that are spread.
        changes: of the model's configuration.
        checkpointing: of the layers.
        recompute: as `sequence_logprobs` takes it.
        forests: whether ranks that FSDP2 averages over have forests of their own.
        balance: the coefficient of the load-balancing loss, with as much gradient as the
            log-probabilities.
    """

    family: str
    config: dict[str, Any] | None
    head: str
    sharded: tuple[str, ...]
    changes: dict[str, Any] = field(default_factory=dict)
    checkpointing: bool = False
    recompute: str | None = None
    forests: bool = False
    balance: float = 0.0


_DENSE = (QUERY, DOWN, HEAD)
# some versions of transformers refuse slices of two widths
_EVEN = {"vocab_size": 98}
_TIED = {**_EVEN, "tie_word_embeddings": True}
# on two ranks
CASES: dict[str, Case] = {
    "llama": Case("llama", None, "sliced", _DENSE, _EVEN),
    # 97 tokens: 49 and 48
    "uneven slices, checkpointing": Case("qwen3", None, "sliced", _DENSE, checkpointing=True),
    "tied": Case("llama", None, "sliced", (QUERY, EMBEDDING), _TIED),
    "softcap, windows": Case("gemma2", None, "sliced", (QUERY, DOWN), _EVEN),
    "head not gathered": Case(
        "llama", {"tp_size": 2, "tp_plan": {"lm_head": "colwise"}}, "sliced", _DENSE, _EVEN
    ),
    "experts, TP": Case("qwen3_moe", None, "sliced", (QUERY, EXPERTS, HEAD), _EVEN, balance=300.0),
    "experts, TP and EP": Case(
        "qwen3_moe", {"tp_size": 2, "ep_size": 2}, "sliced", (QUERY, EXPERTS, HEAD), balance=300.0
    ),
    "experts, EP with FSDP2": Case(
        "qwen3_moe",
        {"fsdp_size": 2, "ep_size": 2},
        "whole",
        (QUERY, EXPERTS),
        forests=True,
        balance=300.0,
    ),
    "sinks, EP with FSDP2": Case(
        "gpt_oss", {"fsdp_size": 2, "ep_size": 2}, "whole", (QUERY, EXPERTS), forests=True
    ),
}
QUICK = {
    *("llama", "uneven slices, checkpointing", "head not gathered", "experts, TP and EP"),
    "experts, EP with FSDP2",
}
# on four
WIDE_CASES: dict[str, Case] = {
    "TP x FSDP2, checkpointing": Case(
        "llama",
        {"tp_size": 2, "fsdp_size": 2},
        "sliced",
        _DENSE,
        _TIED,
        checkpointing=True,
        forests=True,
    ),
    "TP and EP x FSDP2": Case(
        "qwen3_moe",
        {"tp_size": 2, "ep_size": 2, "fsdp_size": 2},
        "sliced",
        _DENSE[:1],
        forests=True,
    ),
}
WIDE_QUICK = {"TP and EP x FSDP2"}


def objective_of(case: Case, index: int) -> Objective:
    """The objective of the ranks with this place along FSDP2's dimension."""
    objective = ragged_objective()
    if case.forests:
        objective = make_objective(ragged_sequences(index), index)
    return replace(objective, balance=case.balance)


def _torch_parallelized(head: Any) -> Any:
    model = build("llama")
    plan: dict[str, Any] = {} if head is None else {"lm_head": head}
    for name, _ in model.named_modules():
        if name.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            plan[name] = ColwiseParallel()
        elif name.endswith(("o_proj", "down_proj")):
            plan[name] = RowwiseParallel()
    return parallelize_module(model, init_device_mesh("cpu", (WORLD_SIZE,)), plan)


def _loaded(case: Case, folder: Path) -> Any:
    spread = {"tp_plan": "auto"}
    if case.config is not None:
        spread = {"distributed_config": DistributedConfig(**case.config)}
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="prefixtree", dtype=torch.float32, **spread
    )
    for name in case.sharded:
        parameter = model.get_parameter(name)
        assert isinstance(parameter, DTensor) and parameter.to_local().shape != parameter.shape
    wrapped = any(isinstance(module, FSDPModule) for module in model.modules())
    assert wrapped == ((case.config or {}).get("fsdp_size", 1) > 1)
    if case.checkpointing:
        enable_checkpointing(model, use_reentrant=False)
    return model.train()


@contextmanager
def _heads() -> Iterator[list[str]]:
    """Which function scores: one name per call."""
    called: list[str] = []

    def linear(*args: Any, **options: Any) -> torch.Tensor:
        called.append("sliced" if isinstance(args[-1], VocabularySlice) else "whole")
        return linear_logprobs(*args, **options)

    def gathered(*args: Any, **options: Any) -> torch.Tensor:
        called.append("gathered")
        return original(*args, **options)

    original = scoring_lm_head.lm_head_logprobs
    with (
        patch.object(scoring_lm_head, "linear_logprobs", linear),
        patch.object(scoring_lm_head, "lm_head_logprobs", gathered),
    ):
        yield called


def _run(
    model: Any, objective: Objective, packed: Any, recompute: str | None = None, **options: Any
) -> dict[str, Any]:
    with _heads() as called:
        run = run_packed(model, packed, objective, recompute=recompute, **options)
    whole = {
        name: gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        for name, gradient in run.gradients.items()
    }
    return {
        "run": {"logprobs": run.logprobs, "entropy": run.entropy, "gradients": whole},
        "head": called,
    }


def _run_torchs(head: Any) -> dict[str, Any]:
    return _run(_torch_parallelized(head), ragged_objective(), ragged_packed())


def place_of(case: Case, rank: int) -> int:
    """The rank's place along FSDP2's dimension; tensor parallelism's is the inner one."""
    return rank // (case.config or {}).get("tp_size", 1) if case.forests else 0


def _run_case(case: Case, folder: Path, rank: int) -> dict[str, Any]:
    objective = objective_of(case, place_of(case, rank))
    packed = pack_sequences(objective.sequences)
    return _run(_loaded(case, folder), objective, packed, case.recompute)


def _tried(compute: Callable[..., Any], *args: Any) -> Any:
    """The result of `compute`, or the message of its error."""
    try:
        return compute(*args)
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"


# ---- what goes wrong is seen ---------------------------------------------------------------------


def _one_slice_left_out(self: VocabularySlice, partial: torch.Tensor) -> torch.Tensor:
    """The second rank's sums of exponentials and targets count nothing."""
    if partial.shape[1] <= 3 and self.first > 0:
        partial.zero_()
    return _SUMMED(self, partial)


def _hidden_not_summed(self: VocabularySlice, partial: torch.Tensor) -> torch.Tensor:
    return partial if partial.shape[1] == HIDDEN else _SUMMED(self, partial)


_SUMMED = VocabularySlice.summed
MISTAKES = {"a slice left out": _one_slice_left_out, "hidden not summed": _hidden_not_summed}


def _mistaken(model: Any, mistake: Any) -> dict[str, Any]:
    with patch.object(VocabularySlice, "summed", mistake):
        return _run(model, ragged_objective(), ragged_packed())


# ---- heads beyond the plan's ---------------------------------------------------------------------


STATISTICS = ("mean_logits", "is_top1", "log_sum_sq_probs")


def _scores(model: Any, statistics: tuple[str, ...]) -> dict[str, Any]:
    with torch.no_grad(), _heads() as called:
        scores = sequence_logprobs(model, ragged_packed(), return_statistics=statistics)
    return {"head": called, "logprobs": scores.logprobs, **(scores.statistics or {})}


ROUTED = ("experts, TP", "experts, TP and EP", "sinks, EP with FSDP2")


def _replayed(model: Any) -> Any:
    sequences = ragged_sequences()
    forest = PrefixForest.from_sequences(sequences, routes=drawn_routes(sequences))
    return sequence_logprobs(model, pack(forest)).logprobs


def _in_a_group(model: Any) -> Any:
    return sequence_logprobs(model, ragged_packed(), group=dist.group.WORLD)


# ---- the operator --------------------------------------------------------------------------------

# rows of the two slices
CUTS = ((25, 24), (48, 1))


def _operator(rank: int, sizes: tuple[int, int], dtype: torch.dtype, columns: int) -> Any:
    """Scores and gradients: pairs of what this rank's slice gives, and what the whole does."""
    g = torch.Generator().manual_seed(7)
    hidden, weight = torch.randn(29, 16, generator=g), torch.randn(49, 16, generator=g)
    bias, grad = torch.randn(49, generator=g), torch.randn(29, columns, generator=g)
    target = torch.randint(0, 49, (29,), generator=g)
    temperature = torch.rand(29, generator=g) + 0.5
    rest = (target, temperature, ScoreOptions(columns == 2, (), 8, LogitRule(1.3, 20.0)))

    def run(part: slice, *more: Any) -> list[torch.Tensor]:
        inputs = [t.to(dtype).requires_grad_() for t in (hidden, weight[part], bias[part])]
        out = linear_logprobs(*inputs, *rest, *more)
        return [out.detach(), *torch.autograd.grad((out * grad).sum(), inputs)]

    group = dist.group.WORLD
    assert group is not None
    first = sum(sizes[:rank])
    part = slice(first, first + sizes[rank])
    scores, dhidden, dweight, dbias = run(slice(None))
    expected = [scores, dhidden, dweight[part], dbias[part]]
    return list(zip(run(part, VocabularySlice(group, first, max(sizes))), expected, strict=True))


def on_rank(rank: int, folder: Path) -> dict[str, Any]:
    """Runs, or the messages of those that are refused."""
    ranks = dist.get_world_size()
    # as torchrun sets them
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    cases, quick = (CASES, QUICK) if ranks == WORLD_SIZE else (WIDE_CASES, WIDE_QUICK)
    results: dict[Any, Any] = {
        name: _tried(_run_case, cases[name], folder / name, rank)
        for name in asked_for(cases, quick)
    }
    if ranks != WORLD_SIZE or not quick_ones_run():
        return results
    for name, head in TORCH_HEADS.items():
        results[name] = _tried(_run_torchs, head)
    for name in ("llama", "experts, EP with FSDP2"):
        model = _loaded(CASES[name], folder / name)
        results["in a group", name] = _tried(_in_a_group, model)
    model = _loaded(CASES["llama"], folder / "llama")
    for name, mistake in MISTAKES.items():
        results[name] = _mistaken(model, mistake)
    results["no gradients"] = _scores(model, ())
    results["statistics"] = _scores(model, STATISTICS)
    results["measured"] = _run(model, ragged_objective(), ragged_packed(), measured=True)
    model.lm_head = AdaptedHead(model.lm_head)
    results["adapted head"] = _run(model, ragged_objective(), ragged_packed())
    for name in ROUTED:
        spread = _loaded(CASES[name], folder / name)
        results[f"routes, {name}"] = _tried(_replayed, spread)
    name = "head not gathered"
    results[f"statistics, {name}"] = _tried(
        _scores, _loaded(CASES[name], folder / name), STATISTICS
    )
    results["operator"] = {
        (cut, dtype, columns): _operator(rank, cut, dtype, columns)
        for cut in CUTS
        for dtype in (torch.float32, torch.bfloat16)
        for columns in (1, 2)
    }
    return results
