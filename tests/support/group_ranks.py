"""One rank of test_in_groups.py: forests that the ranks of a group compute together."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import prefixtree as pt
from prefixtree.parallel import heads
from prefixtree.parallel import ranks as exchange_of_ranks
from prefixtree.parallel.attention import PartMask
from prefixtree.planning.parts import Parts
from prefixtree.planning.split import split_tokens
from prefixtree.recompute import forward as forward_plan
from prefixtree.recompute.layers import MODES
from prefixtree.recompute.plan import RecomputePlan, peaks_of, place_of
from prefixtree.recompute.trace import LiveBytes
from prefixtree.scoring import in_groups as shares
from tests.support import distributed_ranks
from tests.support.distributed_ranks import whole, wrap
from tests.support.full import asked_for, quick_ones_run
from tests.support.group_bad_calls import BAD, message_of, scored
from tests.support.models import (
    Objective,
    build,
    enable_checkpointing,
    gradients,
    make_objective,
    numbers_and_logprob,
    pack_sequences,
    ragged_sequences,
    reward_model,
    run_packed,
)
from tests.support.replay import drawn_routes
from tests.support.spawn import ROOT


@dataclass(frozen=True)
class Case:
    """A model, and how it is run.

    Attributes:
        family: of `models.build`.
        wrapper: "ddp", "fsdp1", "fsdp2", or "" where gradients are averaged by hand.
        checkpointing: "reentrant" or "not reentrant" checkpointing of every layer.
        recompute: as `sequence_logprobs` takes it. Of "auto", ranks have memory for other plans.
        lora, double, half: adapters, float64 parameters, FSDP2's mixed precision with bfloat16
            parameters.
        compiled: the backend of compiled layers, or "" where they are not compiled. One case
            with attention alone and one with states make graphs of the backward too, which takes
            seconds.
        forest: a key of FORESTS.
        group_mode: as `sequence_logprobs` takes it.
        measured: whether three quarters of each score come from a measure.
        balance: the coefficient of the load-balancing loss.
        replays: whether experts are recorded, `drawn_routes`.
        scattered: each token belongs to any rank, so that ranks borrow from one another.
        changes: of the model's configuration.
    """

    family: str = "qwen3"
    wrapper: str = ""
    checkpointing: str = ""
    recompute: str | RecomputePlan | None = None
    lora: bool = False
    double: bool = False
    half: bool = False
    compiled: str = ""
    forest: str = "ragged"
    group_mode: str = "parts"
    scattered: bool = False
    measured: bool = False
    balance: float = 0.0
    replays: bool = False
    changes: tuple[tuple[str, Any], ...] = ()

    def model(self) -> Any:
        """The model before it is wrapped."""
        model = build(self.family, **dict(self.changes))
        if self.lora:
            model = distributed_ranks.Case("", self.family, lora=True).model()
        if self.checkpointing:
            enable_checkpointing(model, self.checkpointing == "reentrant")
        return model.double() if self.double else model


TEMPERATURES = [(1.0, 0.7)[i % 2] for i in range(len(ragged_sequences()))]
# on two ranks
CASES: dict[str, Case] = {
    "float64": Case(double=True),
    "windows, softcap": Case("gemma2"),
    "windows, softcap, checkpointing": Case("gemma2", "ddp", "not reentrant"),
    "reentrant checkpointing": Case("llama", "", "reentrant"),
    "sinks": Case("gpt_oss", recompute="all_but_attention"),
    "MLA": Case("deepseek_v3", recompute="all"),
    "experts, DDP": Case("qwen3_moe", "ddp"),
    "experts, their loss, routes": Case(
        "qwen3_moe", "ddp", recompute="auto", scattered=True, balance=300.0, replays=True
    ),
    "adapters, DDP": Case(wrapper="ddp", lora=True, measured=True),
    "adapters, FSDP2": Case(wrapper="fsdp2", lora=True, recompute="auto"),
    "FSDP2": Case("gpt_oss", "fsdp2", recompute="nothing"),
    "scattered, FSDP2": Case("gemma2", "fsdp2", "not reentrant", scattered=True),
    "scattered, sinks": Case("gpt_oss", compiled="eager", recompute="all", scattered=True),
    "scattered, heads": Case("gpt_oss", group_mode="heads", scattered=True),
    "FSDP2, a plan": Case("gemma2", "fsdp2", recompute=RecomputePlan(MODES, 0), measured=True),
    "FSDP2, checkpointing": Case("gemma2", "fsdp2", "not reentrant"),
    "FSDP1, checkpointing": Case("gpt_oss", "fsdp1", "not reentrant"),
    "shared keys": Case("gemma3n_text", "", "not reentrant"),
    "compiled layers": Case("gemma2", compiled="aot_eager", recompute="all"),
    "one scores nothing": Case(wrapper="ddp", forest="one scores nothing", measured=True),
    "one token": Case(wrapper="fsdp2", forest="one token", measured=True),
    "heads, windows, checkpointing": Case("gemma2", "ddp", "not reentrant", group_mode="heads"),
    # as all heads that a rank can halve, in two turns
    "heads, sinks, FSDP2": Case(
        "gpt_oss",
        "fsdp2",
        recompute="auto",
        group_mode="heads",
        measured=True,
        changes=(("num_key_value_heads", 4),),
    ),
    "heads, MLA, compiled layers": Case(
        "deepseek_v3", compiled="eager", recompute="all_but_attention", group_mode="heads"
    ),
    "heads, adapters": Case(wrapper="ddp", lora=True, group_mode="heads"),
    "heads, one token": Case(forest="one token", group_mode="heads"),
    "trees apart": Case(forest="trees apart"),
    "states, DDP, checkpointing": Case("olmo_hybrid", "ddp", "not reentrant"),
    "states, FSDP2, heads": Case(
        "nemotron_h", "fsdp2", recompute="all_but_attention", group_mode="heads"
    ),
    "states, scattered, a plan": Case(
        "qwen3_5", recompute=RecomputePlan((*MODES, "all"), 0), scattered=True
    ),
    "states, adapters, FSDP2": Case("olmo_hybrid", "fsdp2", lora=True, recompute="auto"),
    "states, reentrant checkpointing": Case("kimi_linear", "", "reentrant", scattered=True),
    "states, compiled layers": Case("qwen3_next", compiled="aot_eager", recompute="auto"),
    "states, compiled layers, heads": Case("nemotron_h", compiled="eager", group_mode="heads"),
    "states, FSDP1": Case("nemotron_h", "fsdp1", "not reentrant"),
    "states, one scores nothing": Case("lfm2", "ddp", forest="one scores nothing"),
    "states, one token": Case("qwen3_next", "fsdp2", forest="one token"),
    "states, trees apart": Case("falcon_h1", forest="trees apart"),
    # each rank computes tokens above its own again, for all heads
    "states, odd heads": Case(
        "qwen3_5", changes=(("linear_num_key_heads", 3), ("linear_num_value_heads", 3))
    ),
}
# without those whose parts others have
QUICK = [
    name
    for name in CASES
    if name not in ("adapters, FSDP2", "scattered, FSDP2", "FSDP2, checkpointing")
    and name not in ("compiled layers", "heads, MLA, compiled layers")
    and name not in ("reentrant checkpointing", "experts, DDP", "heads, adapters")
    and not name.startswith(("states, compiled", "states, reentrant", "states, FSDP1"))
    and name not in ("states, one token", "states, trees apart", "states, scattered, a plan")
]
BALANCED = Case("qwen3_moe", balance=300.0)
HALF = Case("gemma2", "fsdp2", "not reentrant", half=True)
# on four: one group, and two groups with forests of their own
WIDE_CASES: dict[str, Case] = {
    "float64": Case(double=True, recompute="all"),
    "more ranks than tokens": Case(wrapper="ddp", forest="one token"),
    "scattered, groups, FSDP2": Case("deepseek_v3", "fsdp2", forest="groups", scattered=True),
    "scattered": Case("gpt_oss", scattered=True),
    # two kv heads: each is two ranks'
    "heads, float64": Case(double=True, recompute="all", group_mode="heads"),
    "heads, sinks": Case("gpt_oss", group_mode="heads"),
    "heads, groups, FSDP2, experts": Case(
        "qwen3_moe", "fsdp2", "not reentrant", forest="groups", group_mode="heads", balance=300.0
    ),
    "groups, FSDP2": Case("gpt_oss", "fsdp2", "not reentrant", forest="groups", measured=True),
    "groups, FSDP2, experts": Case("qwen3_moe", "fsdp2", forest="groups", replays=True),
    "groups, DDP": Case("gemma2", "ddp", recompute="auto", forest="groups"),
    "states, groups, FSDP2": Case("qwen3_next", "fsdp2", "not reentrant", forest="groups"),
    # two groups of heads: each is two ranks'
    "states, heads, DDP": Case(
        "nemotron_h", "ddp", recompute="all", group_mode="heads", scattered=True
    ),
}


def _ragged(seed: int) -> Objective:
    return make_objective(ragged_sequences(seed), seed)


def _masked(objective: Objective, first: int) -> Objective:
    """Nothing is scored after the first tokens of each sequence."""
    masks = [np.arange(len(s)) < first for s in objective.sequences]
    return replace(objective, loss_masks=masks)


def _apart() -> Objective:
    rng = np.random.default_rng(5)
    return make_objective([rng.integers(3, 90, 16) for _ in range(2)], plain=True)


# of the ranks with the same place along data parallelism
FORESTS: dict[str, Callable[[int], Objective]] = {
    "ragged": lambda place: _ragged(0),
    "groups": lambda place: _ragged(place + 1),
    # one rank has all of these
    "one scores nothing": lambda place: _masked(_ragged(0), 3),
    "one token": lambda place: make_objective([np.array([7])], plain=True),
    "trees apart": lambda place: _apart(),
}


def objective_of(case: Case, place: int = 0) -> Objective:
    """The objective of a group."""
    objective = FORESTS[case.forest](place)
    if case.double:
        objective = replace(objective, weights=[w.double() for w in objective.weights])
    return replace(objective, balance=case.balance)


def packed_of(case: Case, objective: Objective) -> pt.PackedForest:
    """The packed forest of a group."""
    routes = drawn_routes(objective.sequences) if case.replays else None
    return pt.pack(pt.PrefixForest.from_sequences(objective.sequences, routes=routes))


def num_groups(case: Case) -> int:
    """Groups with forests of their own."""
    return 2 if case.forest == "groups" else 1


@contextmanager
def _spied(calls: list[tuple[int, int]]) -> Iterator[None]:
    """Notes own rows, and the rows that come to them, of each exchange in a forward."""
    borrowing = exchange_of_ranks.RankExchange.borrow
    starting = exchange_of_ranks.TokensForHeads.start_to_heads

    def borrow(self: Any, *own: torch.Tensor) -> Any:
        key, value = borrowing(self, *own)
        calls.append((len(own[0]), len(key) - len(own[0])))
        return key, value

    def start_to_heads(self: Any, rows: Any) -> Any:
        arrived = starting(self, rows)
        # of an attention's queries, keys and values the first of both turns
        if len(rows) != 3 or (rows[0].ndim == 4 and rows[0].storage_offset()):
            return arrived

        def noted() -> Any:
            found = arrived()
            calls.append((len(rows[0]), len(found[0]) - len(rows[0])))
            return found

        return noted

    with (
        patch.object(exchange_of_ranks.RankExchange, "borrow", borrow),
        patch.object(exchange_of_ranks.TokensForHeads, "start_to_heads", start_to_heads),
    ):
        yield


@contextmanager
def _memory_of_rank(share: float, seen: dict[str, Any]) -> Iterator[None]:
    """Plans of "auto" have a share of the bytes between the least and the most that they may need;
    notes the modes of the last forward, and what it needs by the memory model."""
    planning, running = forward_plan.plan_for, forward_plan.recomputing
    of_plan: dict[str, Any] = {}

    def plan_for(memory: Any, work: Any, available: float, *_: Any, **__: Any) -> Any:
        of_plan["peaks"] = peaks = peaks_of(memory, work)
        least, most = float(peaks[-1, -1]), float(peaks[0, 0])
        seen["own"] = (plan := planning(memory, work, least + share * (most - least) + 1)).modes
        return plan

    def recomputing(model: Any, modes: Any) -> Any:
        seen["modes"] = tuple(modes)
        if of_plan:
            seen["bytes"] = float(of_plan["peaks"][place_of(RecomputePlan(tuple(modes), 0))])
        return running(model, modes)

    with (
        patch.object(forward_plan, "plan_for", plan_for),
        patch.object(forward_plan, "recomputing", recomputing),
    ):
        yield


def _scattered(packed: pt.PackedForest, ranks: int, *_: Any, **__: Any) -> Parts:
    """In the place of `split_tokens`."""
    return Parts(packed, np.random.default_rng(1).integers(0, ranks, packed.num_tokens), ranks)


def _run(case: Case, group: Any, rank: int, loss_scale: float = 1.0) -> dict[str, Any]:
    """Scores of the rank's forest, and gradients averaged over all ranks."""
    place = rank // dist.get_world_size(group)
    objective = objective_of(case, place)
    packed = packed_of(case, objective)
    model = case.model()
    wrapped = model
    if case.wrapper == "fsdp1":
        wrapped = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    elif case.wrapper:
        with patch.object(distributed_ranks.Case, "model", lambda self: model):
            wrapped, _ = wrap(
                distributed_ranks.Case(case.wrapper, case.family, lora=case.lora, half=case.half)
            )
    if case.compiled:
        pt.compile_layers(model, backend=case.compiled)
    _check_wrapped(case, wrapped)
    calls: list[tuple[int, int]] = []
    seen: dict[str, Any] = {}
    share = 0.5 if dist.get_rank(group) else 1.0
    split = _scattered if case.scattered else shares.split_tokens
    with (
        _spied(calls),
        _memory_of_rank(share, seen),
        patch.object(shares, "split_tokens", split),
    ):
        run = run_packed(
            wrapped,
            packed,
            objective,
            recompute=case.recompute,
            scale=loss_scale,
            group=group,
            group_mode=case.group_mode,
            measured=case.measured,
        )
    found = run.gradients
    if case.wrapper == "fsdp1":
        with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
            found = gradients(wrapped)
    averaged = {
        name.removeprefix("module.").replace("_fsdp_wrapped_module.", ""): whole(g)
        for name, g in found.items()
    }
    if not case.wrapper:
        for gradient in averaged.values():
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
    return {
        "run": {"logprobs": run.logprobs, "entropy": run.entropy, "gradients": averaged},
        "calls": calls,
        **seen,
    }


def _check_wrapped(case: Case, model: nn.Module) -> None:
    """The run is what the case says."""
    if case.wrapper == "ddp":
        assert isinstance(model, nn.parallel.DistributedDataParallel)
    if case.wrapper == "fsdp1":
        assert sum(isinstance(m, FullyShardedDataParallel) for m in model.modules()) > 2
    if case.wrapper == "fsdp2":
        assert isinstance(model, FSDPModule)
        sharded = next(p for p in model.parameters() if p.requires_grad)
        assert sharded.to_local().shape[0] < sharded.shape[0]


# ---- what goes wrong is seen ------------------------------------------------------------------


def _gradients_kept(self: Any, *gradients: torch.Tensor) -> Sequence[torch.Tensor]:
    """Takes part in the exchange, and adds nothing."""
    _GIVE_BACK(self, *gradients)
    rows = self._rows.own
    return [rows.take(x, x.new_empty(rows.count, *x.shape[1:])) for x in gradients]


def _own_rows_alone(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """As if a sum over ranks followed, not a mean."""
    return gradient.split(ctx.counts)[ctx.index], None, None, None


_GIVE_BACK = exchange_of_ranks.RankExchange.give_back
MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "borrowers' gradients": (exchange_of_ranks.RankExchange, "give_back", _gradients_kept),
    "scale": (exchange_of_ranks._GatherRows, "backward", staticmethod(_own_rows_alone)),
}


def _mistaken(mistake: tuple[Any, str, Any], group: Any, rank: int) -> dict[str, Any]:
    with patch.object(*mistake):
        return _run(Case(), group, rank)


# ---- what a rank holds ------------------------------------------------------------------------

PEAKS = {
    "scattered": Case(scattered=True),
    "heads": Case(group_mode="heads"),
    "values": Case(forest="values"),
}
# of the memory between the least and the most that a plan may need
SHARES = (0.4, 1.0)


def _peak(case: Case, share: float, group: Any) -> tuple[int, float, tuple[str, ...]]:
    """The most bytes of an update beside weights and gradients, counted; what they were predicted
    to be; the modes."""
    packed = pack_sequences([np.random.default_rng(0).integers(3, 90, 2000)])
    # few scored edges, whose logits are next to nothing
    masks = [np.arange(2000) >= 1992]
    is_classifier = case.forest == "values"
    model = reward_model("gemma2") if is_classifier else build(case.family, num_hidden_layers=4)
    model = model.to(torch.bfloat16).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    seen: dict[str, Any] = {}
    split = _scattered if case.scattered else shares.split_tokens

    def update() -> None:
        if is_classifier:
            rows = pt.sequence_values(model, packed, recompute="auto", group=group)
        else:
            options = {"loss_mask": masks, "group": group, "group_mode": case.group_mode}
            rows = pt.sequence_logprobs(model, packed, recompute="auto", **options).logprobs
        torch.cat(rows).sum().backward()

    with (
        _memory_of_rank(share, seen),
        patch.object(shares, "split_tokens", split),
        patch("prefixtree.recompute.plan._LOGITS", 1 << 12),
    ):
        # tables are made once
        update()
        live = LiveBytes(x for p in model.parameters() for x in (p, p.grad))
        with live:
            update()
    return live.restart(), seen["bytes"], seen["modes"]


# ---- more on two ranks ------------------------------------------------------------------------


def _statistics(rank: int, group: Any) -> Any:
    with torch.no_grad():
        scores = scored(
            rank,
            group,
            temperature=TEMPERATURES,
            return_statistics=("is_top1", "log_sum_sq_probs"),
            measure=numbers_and_logprob,
        )
    others = {"measured": scores.measured, "edges": [scores.measured_edges]}
    return {"logprobs": scores.logprobs, **scores.statistics, **others}


def _group_of_one(rank: int) -> bool:
    """The plain path: nothing of a part is made."""
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    with (
        patch.object(shares, "part_of_rank", None),
        patch.object(PartMask, "__init__", None),
    ):
        scores = scored(rank, groups[rank])
    return bool(torch.cat(scores.logprobs).isfinite().all())


def _bits(rank: int, group: Any) -> bool:
    """Two runs are equal to the bit."""
    first, second = (_run(Case("gpt_oss"), group, rank)["run"]["gradients"] for _ in range(2))
    return all(torch.equal(first[name], second[name]) for name in first)


def _losses_of_their_own(rank: int, group: Any) -> dict[str, Any]:
    """Rank r computes 1 + 2 r times the objective, on average twice the objective."""
    return _run(Case(), group, rank, loss_scale=1.0 + 2 * rank)


def _balanced_by_one(rank: int, group: Any) -> dict[str, torch.Tensor]:
    """Gradients, averaged, where rank 0 alone adds the load-balancing loss: twice the coefficient
    of `BALANCED`."""
    model = BALANCED.model()
    objective = objective_of(BALANCED)
    packed = pack_sequences(objective.sequences)
    scores = pt.sequence_logprobs(
        model, packed, objective.temperatures, group=group, output_router_logits=True
    )
    loss = torch.cat(scores.logprobs).sum()
    if rank == 0:
        loss = loss + 2 * BALANCED.balance * scores.aux_loss
    loss.backward()
    for gradient in (found := gradients(model)).values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return found


def _values_per_token(wrapper: str, sequences: Sequence[np.ndarray]) -> dict[str, Any]:
    """Values of every token of a reward model, and the gradients, averaged by its wrapper."""
    model, packed = reward_model("gemma2"), pack_sequences(sequences)
    inner = model
    if wrapper == "fsdp2":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    recompute = "auto" if wrapper == "fsdp2" else None
    rows = pt.sequence_values(model, packed, recompute=recompute, group=dist.group.WORLD)
    values = torch.cat(rows)
    (values * values_weight(values)).sum().backward()
    return {
        "values": values.detach(),
        "gradients": {name: whole(g) for name, g in gradients_of(inner).items()},
    }


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def values_weight(values: torch.Tensor) -> torch.Tensor:
    """Of a sum over all values."""
    return torch.linspace(-1, 1, values.numel()).view_as(values)


def rows_in_bfloat16() -> tuple[pt.PackedForest, list[torch.Tensor]]:
    """A prompt with 24 responses; q [T, 4, 16], k and v [T, 2, 16], and dout."""
    packed = pt.pack(pt.PrefixForest.from_parents([-1, *[0] * 24], [64, *[32] * 24]))
    generator = torch.Generator().manual_seed(0)
    shapes = [(packed.num_tokens, h, 16) for h in (4, 2, 2, 4)]
    return packed, [torch.randn(*s, generator=generator).bfloat16() for s in shapes]


def _heads_in_bfloat16(rank: int, group: Any) -> list[torch.Tensor]:
    """out, dq, dk and dv of the own tokens, with two ranks for each kv head; and the tokens."""
    packed, (*qkv, dout) = rows_in_bfloat16()
    parts = split_tokens(packed, dist.get_world_size())
    mask = heads.HeadsMask(parts, exchange_of_ranks.TokensForHeads(parts, rank, group))
    leaves = [mask.part.own(x).requires_grad_() for x in qkv]
    out = mask.attend(nn.Module(), *leaves)
    gradients = torch.autograd.grad(out, leaves, mask.part.own(dout))
    return [out.detach(), *gradients, torch.from_numpy(mask.part.own_tokens)]


def _documented(rank: int) -> dict[str, torch.Tensor]:
    """Parameters after the update of docs/parallel.md."""
    names = documented_names()
    text = (ROOT / "docs/parallel.md").read_text().partition("[start:fsdp2]")[2]
    exec(text.partition("```python")[2].partition("```")[0], names)
    return {name: whole(p.detach()) for name, p in names["model"].named_parameters()}


def documented_names() -> dict[str, Any]:
    """The names that the code of docs/parallel.md takes from its reader."""
    sequences = ragged_sequences()
    return {
        "device": "cpu",
        "num_ranks": 4,
        "model": build("llama"),
        "make_optimizer": partial(torch.optim.SGD, lr=0.1),
        "rollouts": sequences,
        "groups": [0] * 8 + [1] * 4,
        "advantages": np.linspace(-1, 1, len(sequences)).tolist(),
        "masks": [np.arange(len(s)) >= 3 for s in sequences],
    }


def _tried(compute: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return compute(*arguments)
    except Exception:
        return traceback.format_exc()


def on_rank(rank: int, folder: Path) -> dict[Any, Any]:
    """Results, or tracebacks."""
    ranks = dist.get_world_size()
    results: dict[Any, Any] = {}
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "cp"))
    for name in asked_for(CASES, QUICK) if ranks == 2 else WIDE_CASES:
        case = (CASES if ranks == 2 else WIDE_CASES)[name]
        group = mesh["cp"].get_group() if num_groups(case) > 1 else dist.group.WORLD
        results[name] = _tried(_run, case, group, rank)
    if not quick_ones_run():
        return results
    for name in ("ragged", "one token"):
        sequences = FORESTS[name](0).sequences
        for wrapper in ("ddp", "fsdp2"):
            results["values", name, wrapper] = _tried(_values_per_token, wrapper, sequences)
    if ranks > 2:
        results["documented"] = _tried(_documented, rank)
        results["heads in bfloat16"] = _tried(_heads_in_bfloat16, rank, dist.group.WORLD)
        return results
    group = dist.group.WORLD
    for name, case in PEAKS.items():
        for share in SHARES:
            results["peak", name, share] = _tried(_peak, case, share, group)
    for name, mistake in MISTAKES.items():
        results["mistake", name] = _tried(_mistaken, mistake, group, rank)
    for name, call in BAD.items():
        results["bad", name] = message_of(call, rank, group)
    results["statistics"] = _tried(_statistics, rank, group)
    results["group of one"] = _tried(_group_of_one, rank)
    results["bits"] = _tried(_bits, rank, group)
    results["half"] = _tried(_run, HALF, group, rank)
    results["losses of their own"] = _tried(_losses_of_their_own, rank, group)
    results["balanced by one"] = _tried(_balanced_by_one, rank, group)
    return results
