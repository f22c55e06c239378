"""One rank of test_in_groups.py: forests that the ranks of a group compute together."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from prefixtree.parallel.attention import PartMask
from prefixtree.parallel.ledger import Divided, Exchange
from prefixtree.parallel.states import part_mask
from prefixtree.planning.part_states import KEYS
from prefixtree.planning.split import split_tokens
from prefixtree.scoring import in_groups as shares
from tests.support import distributed_ranks
from tests.support.distributed_ranks import whole, wrap
from tests.support.full import asked_for, quick_ones_run
from tests.support.group_bad_calls import BAD, message_of, scored
from tests.support.group_cases import (
    BALANCED,
    CASES,
    FORESTS,
    HALF,
    QUICK,
    TEMPERATURES,
    WIDE_CASES,
    WIDE_QUICK,
    Case,
    num_groups,
    objective_of,
    packed_of,
)
from tests.support.hooks import inner, own_gradients_alone, place
from tests.support.models import (
    build,
    gradients,
    numbers_and_logprob,
    pack_sequences,
    ragged_sequences,
    reward_model,
    run_packed,
)
from tests.support.part_exchange import scattered
from tests.support.spawn import ROOT

# of values per token: a forest and who averages over ranks
VALUES = [(name, wrapper) for name in ("ragged", "one token") for wrapper in ("ddp", "fsdp2")]
QUICK_VALUES = [("ragged", "fsdp2"), ("one token", "ddp")]


@contextmanager
def _spied(calls: list[tuple[int, int]]) -> Iterator[None]:
    """Notes own rows, and the rows that come to them, of each exchange in a forward."""
    importing, starting = Exchange.import_rows, inner("heads of tokens")

    def import_rows(self: Any, *own: torch.Tensor) -> Any:
        joined = importing(self, *own)
        # keys with their values; those of heads are all there
        if len(own) == 2 and self.ledger.group is not None:
            calls.append((len(own[0]), len(joined[0]) - len(own[0])))
        return joined

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
        patch.object(Exchange, "import_rows", import_rows),
        patch.object(*place("heads of tokens"), start_to_heads),
    ):
        yield


def run_case(case: Case, group: Any, rank: int, loss_scale: float = 1.0) -> dict[str, Any]:
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
    split = scattered if case.scattered else shares.split_slots
    with _spied(calls), patch.object(shares, "split_slots", split):
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


# ---- what goes wrong is seen ---------------------------------------------------------------------


def _own_rows_alone(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """As if a sum over ranks followed, not a mean."""
    return gradient.split(ctx.counts)[ctx.index], None, None, None


MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "importers' gradients": own_gradients_alone(lambda kind, _: kind == KEYS),
    "scale": (*place("backward of gathered rows"), staticmethod(_own_rows_alone)),
}


def _mistaken(mistake: tuple[Any, str, Any], group: Any, rank: int) -> dict[str, Any]:
    with patch.object(*mistake):
        return run_case(Case(), group, rank)


# ---- more on two ranks ---------------------------------------------------------------------------


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
    first, second = (run_case(Case("gpt_oss"), group, rank)["run"]["gradients"] for _ in range(2))
    return all(torch.equal(first[name], second[name]) for name in first)


def _losses_of_their_own(rank: int, group: Any) -> dict[str, Any]:
    """Rank r computes 1 + 2 r times the objective, on average twice the objective."""
    return run_case(Case(), group, rank, loss_scale=1.0 + 2 * rank)


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


def values_per_token(
    wrapper: str, sequences: Sequence[np.ndarray], recompute: Any
) -> dict[str, Any]:
    """Values of every token of a reward model, and the gradients, averaged by its wrapper."""
    model, packed = reward_model("gemma2"), pack_sequences(sequences)
    inner = model
    if wrapper == "fsdp2":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model)
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
    mask = part_mask(Divided.of_group(parts, rank, group).at_once(), by_heads=True)
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


def tried(compute: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return compute(*arguments)
    except Exception:
        return traceback.format_exc()


def on_rank(rank: int, folder: Path) -> dict[Any, Any]:
    """Results, or tracebacks."""
    ranks = dist.get_world_size()
    results: dict[Any, Any] = {}
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "cp"))
    cases, quick = (CASES, QUICK) if ranks == 2 else (WIDE_CASES, WIDE_QUICK)
    for name in asked_for(cases, quick):
        case = cases[name]
        group = mesh["cp"].get_group() if num_groups(case) > 1 else dist.group.WORLD
        results[name] = tried(run_case, case, group, rank)
    for name, wrapper in asked_for(VALUES, QUICK_VALUES):
        sequences, recompute = FORESTS[name](0).sequences, {"fsdp2": "all"}.get(wrapper)
        run = tried(values_per_token, wrapper, sequences, recompute)
        results["values", name, wrapper] = run
    if not quick_ones_run():
        return results
    if ranks > 2:
        results["documented"] = tried(_documented, rank)
        results["heads in bfloat16"] = tried(_heads_in_bfloat16, rank, dist.group.WORLD)
        return results
    group = dist.group.WORLD
    for name, mistake in MISTAKES.items():
        results["mistake", name] = tried(_mistaken, mistake, group, rank)
    for name, call in BAD.items():
        results["bad", name] = message_of(call, rank, group)
    results["statistics"] = tried(_statistics, rank, group)
    results["group of one"] = tried(_group_of_one, rank)
    results["bits"] = tried(_bits, rank, group)
    results["half"] = tried(run_case, HALF, group, rank)
    results["losses of their own"] = tried(_losses_of_their_own, rank, group)
    results["balanced by one"] = tried(_balanced_by_one, rank, group)
    return results
