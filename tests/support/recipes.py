"""The recipes of docs/losses.md beside each sequence alone, and one rank of test_recipes.py.

The page's own code runs, whatever way its model is called. The reference uses nothing of
prefixtree.
"""

from __future__ import annotations

import copy
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import prefixtree as pt
from prefixtree.kernels.lm_head import kernels
from prefixtree.scoring import lm_head
from tests.support.float64 import Float64
from tests.support.full import asked_for
from tests.support.hooks import lose_copies, place
from tests.support.models import (
    VOCABULARY,
    Objective,
    build,
    make_objective,
    pack_sequences,
    ragged_sequences,
)
from tests.support.spawn import ROOT, WORLD_SIZE
from tests.support.step_ranks import LIGHT, MAX_STEP_TOKENS

# ways of two ranks, and that which runs every time
ON_RANKS, QUICK = ("group", "sharded"), ("group",)
# the recipes, and what follows them
WHOLE_PAGE = (ROOT / "docs/losses.md").read_text()
PAGE, _, OF_FORKS = WHOLE_PAGE.partition("## Rollouts that fork")
K = 64
Alone = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def objective_of(place: int = 0) -> Objective:
    """The objective of a forest; those of places have other sizes."""
    return make_objective(ragged_sequences(place)[: (12, 4)[place]], place)


def candidates(objective: Objective) -> list[torch.Tensor]:
    """Three per token, the same in all copies: they follow from the tokens up to it."""
    return [
        torch.stack([(torch.from_numpy(s).cumsum(0) * k) % VOCABULARY for k in (1, 5, 7)], -1)
        for s in objective.sequences
    ]


def names_of_page(
    model: Any, teacher: Any, objective: Objective, temperature: Any, **options: Any
) -> dict[str, Any]:
    """The names of the page once its code has run; `options` are of its calls for the model."""

    def scored(called: Any, *args: Any, **kwargs: Any) -> Any:
        more = options if called is model else {}
        return pt.sequence_logprobs(called, *args, chunk_size=9, **kwargs, **more)

    names: dict[str, Any] = {
        "pt": SimpleNamespace(sequence_logprobs=scored, Teacher=pt.Teacher),
        "torch": torch,
        "model": model,
        "teacher": teacher,
        "packed": pack_sequences(objective.sequences),
        "temperature": temperature,
        "loss_mask": objective.loss_masks,
        "weights": [w[:, 0] for w in objective.weights],
        "candidates": candidates(objective),
    }
    for code in code_of(PAGE):
        # of layers that few models have: tests/scoring/test_mtp.py
        if "MtpModel" not in code:
            exec(compile(code, "losses.md", "exec"), names)
    return names


def code_of(text: str) -> list[str]:
    """The blocks of a page."""
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def values_of(page: dict[str, Any], name: str) -> list[torch.Tensor]:
    """A recipe's values [n - 1, C] of each sequence."""
    given = page["model"], page["packed"], page["temperature"], page["loss_mask"]
    if name != "without a measure":
        found: list[torch.Tensor] = (
            page["pt"].sequence_logprobs(*given, measure=page[name]).measured
        )
        return found
    assert all(bonus.requires_grad for bonus in page["bonus"])
    columns = page["scores"].entropy, page["k1"], page["k2"], page["k3"]
    return [torch.stack(of_one, -1) for of_one in zip(*columns, strict=True)]


# ---- each sequence alone -------------------------------------------------------------------------


def _kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.exp() * (a - b)).sum(-1, keepdim=True)


def _jensen_shannon(t: torch.Tensor, s: torch.Tensor, *_: Any) -> torch.Tensor:
    m = (0.3 * t.exp() + 0.7 * s.exp()).log()
    return 0.3 * _kl(t, m) + 0.7 * _kl(s, m)


def _top_k(t: torch.Tensor, s: torch.Tensor, *_: Any) -> torch.Tensor:
    p, ids = t.exp().topk(K)
    q = s.exp().gather(1, ids)
    p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (p, q))
    return (p * (p / q).log()).sum(-1, keepdim=True)


def _estimators(t: torch.Tensor, s: torch.Tensor, _: Any, taken: torch.Tensor) -> torch.Tensor:
    entropy = -(s.exp() * s).sum(-1, keepdim=True)
    x = t.gather(1, taken) - s.gather(1, taken)
    return torch.cat([entropy, -x, x**2 / 2, x.exp() - x - 1], -1)


# of the log p of the teacher and of the student [n - 1, V], the candidates [n - 1, 3] and the
# tokens [n - 1, 1]
ALONE: dict[str, Alone] = {
    # first, as it takes the scores that the page's code leaves
    "without a measure": _estimators,
    "forward_kl": lambda t, s, *_: _kl(t, s),
    "kl_by_hand": lambda t, s, *_: _kl(t, s),
    "reverse_kl": lambda t, s, *_: _kl(s, t),
    "jensen_shannon": _jensen_shannon,
    "top_k_kl": _top_k,
    "log_p_of_candidates": lambda t, s, ids, _: s.gather(1, ids),
}
# what the Triton kernels of the lm_head make
FUSED = ("forward_kl", "reverse_kl", "jensen_shannon")


def log_p_alone(
    model: Any, teacher: Any, objective: Objective, temperature: Any
) -> list[tuple[torch.Tensor, ...]]:
    """The log p of each sequence's tokens [n - 1, V], the teacher's and the model's, by copies in
    eager whose parameters the model's graph ends in."""
    if isinstance(temperature, float):
        temperature = [temperature] * len(objective.sequences)
    found = []
    for tokens, divisor in zip(objective.sequences, temperature, strict=True):
        ids = torch.from_numpy(tokens)[None]
        logits = [m(ids, use_cache=False).logits[0, :-1].double() for m in (teacher, model)]
        t, s = ((z / np.float32(divisor)).log_softmax(-1) for z in logits)
        found.append((t.detach(), s))
    return found


def alone(name: str, log_p: list[tuple[torch.Tensor, ...]], of: Objective) -> list[torch.Tensor]:
    """A recipe's values, as `values_of` has them."""
    assert of.loss_masks is not None
    given = zip(log_p, candidates(of), of.sequences, of.loss_masks, strict=True)
    return [
        ALONE[name](t, s, ids[1:], torch.from_numpy(tokens)[1:, None])
        * torch.from_numpy(mask[1:])[:, None]
        for (t, s), ids, tokens, mask in given
    ]


def eager_copy(model: Any) -> Any:
    """A copy that computes without prefixtree."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    return model


def loss_of(values: list[torch.Tensor], objective: Objective) -> torch.Tensor:
    """A weight per copy and column."""
    scale = 1 + torch.arange(values[0].shape[1]) / 2
    pairs = zip(values, objective.weights, strict=True)
    return torch.stack([((v * scale).sum(1) * w[:, 0].to(v)).sum() for v, w in pairs]).sum()


# ---- a way of running ----------------------------------------------------------------------------

Found = dict[str, tuple[float, float]]


def compared(way: str, group: Any = None, place: int = 0) -> dict[str, Found]:
    """The largest differences of a way's values, and of its gradients by their norm, for each
    recipe; and the same where the gradient of one copy stands for the sum.

    Args:
        way: "float64", "fused", "group" or "sharded".
        group: the process group of the last two.
        place: this rank's, in "sharded".
    """
    dtype = torch.float64 if way == "float64" else torch.float32
    model = build("gemma2", tie_word_embeddings=way in ("fused", "sharded")).to(dtype)
    teacher = build("llama", seed=5).to(dtype).eval()
    # few sequences
    places = range(WORLD_SIZE) if way == "sharded" else [1]
    objectives = [objective_of(at) for at in places]
    with Float64() if way == "float64" else nullcontext():
        expected = _expected(model, teacher, objectives)
    options: dict[str, Any] = {}
    if way == "fused":
        options = {"max_step_tokens": MAX_STEP_TOKENS, "import_cost": LIGHT}
    if way == "group":
        options = {"group": group}
    if way == "sharded":
        for sharded in (model, teacher):
            _shard(sharded)
    objective = objectives[place]
    found: dict[str, Found] = {"exact": {}, "red": {}}
    for kind in found:
        with _in(way), pytest.MonkeyPatch.context() as changes:
            if kind == "red":
                lose_copies(changes, behind=0)
            page = names_of_page(model, teacher, objective, objective.temperatures, **options)
            names = FUSED if way == "fused" else tuple(ALONE)
            for name in names if kind == "exact" else dict.fromkeys((names[0], "forward_kl")):
                with _by_kernels() if way == "fused" else nullcontext():
                    values = values_of(page, name)
                    loss_of(values, objective).backward()
                want, gradients = expected[name]
                got, wanted = torch.cat(values).detach(), torch.cat(want[place])
                apart = float((got - wanted).abs().max() / wanted.abs().max())
                found[kind][name] = apart, _apart(_gradients(model, group), gradients)
                # behind a forward, parameters of FSDP2 would be others
                model.zero_grad(set_to_none=True)
    assert not any(p.grad is not None for p in teacher.parameters())
    return found


def _expected(
    model: Any, teacher: Any, objectives: list[Objective]
) -> dict[str, tuple[list[list[torch.Tensor]], dict[str, torch.Tensor]]]:
    """The values of each objective, and the gradients of their mean, of every recipe."""
    student, other = eager_copy(model), eager_copy(teacher)
    trained = {n: p for n, p in student.named_parameters() if p.requires_grad}
    log_p = [log_p_alone(student, other, o, o.temperatures) for o in objectives]
    found = {}
    for name in ALONE:
        values = [alone(name, *pair) for pair in zip(log_p, objectives, strict=True)]
        losses = [loss_of(*pair) for pair in zip(values, objectives, strict=True)]
        loss = sum(losses) / len(losses)
        gradients = torch.autograd.grad(loss, [*trained.values()], retain_graph=True)
        detached = [[v.detach() for v in of_place] for of_place in values]
        found[name] = detached, dict(zip(trained, gradients, strict=True))
    return found


def _apart(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    norms = {name: float(g.norm()) for name, g in expected.items()}
    floor = 1e-3 * sum(norm**2 for norm in norms.values()) ** 0.5
    return max(
        float((found[name] - g).norm()) / max(norms[name], floor) for name, g in expected.items()
    )


def _gradients(model: Any, group: Any) -> dict[str, torch.Tensor]:
    """Averaged over ranks."""
    found = {}
    for name, p in model.named_parameters():
        if p.grad is None:
            continue
        found[name] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone()
        if group is not None and not isinstance(p.grad, DTensor):
            dist.all_reduce(found[name], group=group)
            found[name] /= WORLD_SIZE
    return found


def _shard(model: Any) -> None:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    weight = model.lm_head.weight
    assert weight.to_local().shape[0] < weight.shape[0]


@contextmanager
def _in(way: str) -> Iterator[None]:
    with in_float64() if way == "float64" else nullcontext():
        yield


@contextmanager
def in_float64() -> Iterator[None]:
    """The sums of scores in float64, as Megatron's models in float64 have them."""
    scored = partial(lm_head.linear_logprobs, accumulate=torch.float64)
    with Float64(), patch.object(lm_head, "linear_logprobs", scored):
        yield


@contextmanager
def _by_kernels() -> Iterator[None]:
    """Triton's, in several steps over the vocabulary."""
    with (
        patch.object(kernels, "BLOCK", 128),
        patch.object(*place("kernels of the head"), lambda hidden: kernels),
    ):
        yield


def on_rank(rank: int, folder: Path) -> dict[str, Any]:
    """The ways of ranks that are asked for."""
    results: dict[str, Any] = {}
    for way in asked_for(ON_RANKS, QUICK):
        place = rank if way == "sharded" else 0
        try:
            results[way] = compared(way, dist.group.WORLD, place)
        except Exception:
            results[way] = traceback.format_exc()
    return results
