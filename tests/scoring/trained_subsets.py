"""Draws of what trains (frozen layers, adapters on some, the head, the embedding, norms, nothing),
of a way to run and of a recomputation: each beside plain eager gradients, a sequence at a time.

`python -m tests.scoring.trained_subsets COUNT [SEED]` runs many draws, and prints those that fail.
"""

from __future__ import annotations

import copy
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForTokenClassification

import prefixtree as pt
from prefixtree.models.checks import transformer_of
from prefixtree.models.layers import layers_of
from prefixtree.recompute import forward
from prefixtree.recompute.plan import Work, peaks_of
from tests.scoring import kept_cases, steps_cases
from tests.support.models import (
    Objective,
    Run,
    assert_same,
    build,
    enable_checkpointing,
    gradients,
    make_objective,
    pack_sequences,
    randomise,
    run_packed,
    run_replicated,
    tolerance,
)
from tests.support.spawn import run_ranks

_NAME = "tests.scoring.trained_subsets"
FAMILIES = ("qwen3", "qwen3_5", "qwen3_moe", "deepseek_v3", "nemotron_h", "gpt_oss", "lfm2")
SUBSETS = ("upper", "one", "adapters", "head", "embedding", "norms", "vectors", "any", "nothing")
WAYS = ("forward", "steps", "trunks", "again", "values", "kept_values", "group")
MODES = (None, "nothing", "all", "all_but_attention", "auto")


@dataclass(frozen=True)
class Draw:
    """One case.

    Attributes:
        seed: of what is drawn within it.
        family, subset, way, mode: of the constants above; or as subset the end of a name: the
            first parameter that has it.
        reentrant: of transformers' checkpointing, which is on unless None.
    """

    seed: int
    family: str
    subset: str
    way: str
    mode: str | None
    reentrant: bool | None = None


def draw(seed: int) -> Draw:
    rng = np.random.default_rng(seed)
    family, subset, way, mode = (
        values[rng.integers(len(values))] for values in (FAMILIES, SUBSETS, WAYS, MODES)
    )
    if "values" in way and family in ("nemotron_h", "qwen3_5", "lfm2"):
        # transformers has no token classifier of them
        family = "qwen3"
    if way == "steps" and mode == "auto":
        # the budget of a step bounds the memory
        mode = None
    reentrant = (None, False, True)[rng.integers(3)] if mode is None else None
    if reentrant and family == "qwen3_moe":
        # it hides the routers' logits
        reentrant = False
    return Draw(seed, family, subset, way, mode, reentrant)


def sequences(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    root, branch = rng.integers(3, 90, 9), rng.integers(3, 90, 5)
    tails = [rng.integers(3, 90, n) for n in (4, 6, 1, 5)]
    found = [np.concatenate([root, *([branch] if i % 2 else []), x]) for i, x in enumerate(tails)]
    return [*found, np.concatenate([root, branch]), rng.integers(3, 90, 7)]


def model_of(case: Draw) -> nn.Module:
    """The model, of which the subset trains."""
    rng = np.random.default_rng(case.seed)
    changes: dict[str, Any] = {"num_hidden_layers": 4} if case.family == "qwen3" else {}
    if case.family == "qwen3" and case.way != "group" and rng.integers(2):
        changes["tie_word_embeddings"] = True
    model = build(case.family, **changes)
    if "values" in case.way:
        config = model.config.get_text_config()
        config.classifier_dropout = 0.0
        model = AutoModelForTokenClassification.from_config(
            config, attn_implementation="prefixtree"
        )
        randomise(model)
    return freeze(model.train(), case.subset, rng)


def freeze(model: Any, subset: str, rng: np.random.Generator) -> Any:
    layers = layers_of(model)
    chosen = int(rng.integers(len(layers)))
    if subset == "adapters":
        return _adapted(model, layers, rng)
    trained: set[int] = set()

    def train(module: nn.Module | None) -> None:
        if module is not None:
            trained.update(map(id, module.parameters()))

    head = model.get_output_embeddings() or getattr(model, "score", None)
    names = dict(model.named_parameters())
    if subset == "upper":
        train(head)
        for layer in layers[chosen:]:
            train(layer)
    elif subset == "one":
        train(layers[chosen])
    elif subset == "head":
        train(head)
    elif subset == "embedding":
        train(model.get_input_embeddings())
    elif subset == "norms":
        trained = {id(p) for name, p in names.items() if "norm" in name}
    elif subset == "vectors":
        some = [n for n, p in names.items() if p.ndim == 1]
        trained = {id(names[n]) for n in rng.choice(some, min(2, len(some)), replace=False)}
    elif subset == "any":
        some = rng.choice([*names], int(rng.integers(1, 4)), replace=False).tolist()
        trained = {id(names[n]) for n in some}
    elif subset != "nothing":
        trained = {next(id(p) for name, p in names.items() if name.endswith(subset))}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    return model


def _adapted(model: Any, layers: Any, rng: np.random.Generator) -> Any:
    """LoRA on some of the linear modules of some layers, or on the head alone."""
    import peft

    inside = {id(m): f"{i}" for i, layer in enumerate(layers) for m in layer.modules()}
    # PEFT refuses what Mamba's kernels read the weights of, and experts by halves
    linear = [
        n
        for n, m in model.named_modules()
        if isinstance(m, nn.Linear) and not (n.endswith(".out_proj") or ".mlp" in n)
    ]
    modules = dict(model.named_modules())
    places = sorted({inside[id(modules[n])] for n in linear if id(modules[n]) in inside})
    some = rng.choice(places, int(rng.integers(1, len(places) + 1)), replace=False)
    of_layers = [n for n in linear if inside.get(id(modules[n])) in some]
    targets = rng.choice(of_layers, min(len(of_layers), int(rng.integers(1, 6))), replace=False)
    if rng.integers(6) == 0:
        targets = [n for n in linear if id(modules[n]) not in inside]
    config = peft.LoraConfig(r=2, target_modules="|".join(map(re.escape, targets)))
    adapted = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            generator = torch.Generator().manual_seed(len(name))
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.15
    return adapted.train()


def objective_of(case: Draw) -> Objective:
    objective = make_objective(sequences(case.seed), case.seed)
    balanced = case.family == "qwen3_moe" and case.way in ("forward", "steps", "group")
    return replace(objective, balance=0.7 if balanced else 0.0)


@contextmanager
def _losses(checked: bool) -> Iterator[None]:
    """Losses have a backward also where nothing trains; scores have no graph there if `checked`."""
    of = Objective.loss

    def loss(objective: Objective, *scores: Any) -> torch.Tensor:
        found = of(objective, *scores)
        assert not (checked and found.requires_grad)
        return found + torch.zeros((), requires_grad=True)

    with patch.object(Objective, "loss", loss):
        yield


def _loss_of_values(case: Draw, which: Any, values: Any) -> torch.Tensor:
    total: Any = sum(((v - 0.3 * i) ** 2).sum() for i, v in zip(which, values, strict=True))
    assert total.requires_grad or case.subset == "nothing"
    return total + torch.zeros((), requires_grad=True)


def expected(case: Draw) -> Run:
    """Of each sequence alone through eager attention, without checkpoints."""
    model = copy.deepcopy(model_of(case))
    transformer = transformer_of(model)
    transformer.set_attn_implementation("eager")
    objective = objective_of(case)
    if "values" not in case.way:
        with _losses(False):
            return run_replicated(model, objective)
    found = []
    for tokens in objective.sequences:
        ids = torch.from_numpy(tokens)[None]
        hidden = transformer.base_model(ids, use_cache=False).last_hidden_state
        found.append(transformer.score(hidden)[0])
    _loss_of_values(case, range(len(found)), found).backward()
    return Run([x.detach() for x in found], [x.detach() for x in found], gradients(model))


def got(case: Draw, group: Any = None) -> Run:
    """The same packed."""
    model = model_of(case)
    if case.reentrant is not None:
        enable_checkpointing(transformer_of(model), case.reentrant)
        # transformers of some versions does so itself
        transformer_of(model).enable_input_require_grads()
    pt.prepare(model)
    objective, options = objective_of(case), {"recompute": case.mode}
    packed = pack_sequences(objective.sequences)
    checked = case.subset == "nothing" and case.reentrant is None
    with _losses(checked), patch.object(forward, "available_bytes", lambda _: _bytes(case, model)):
        if case.way in ("forward", "group"):
            return run_packed(model, packed, objective, group=group, **options)
        if case.way == "steps":
            return _run_steps(model, objective, packed, options)
        if case.way == "values":
            values = pt.sequence_values(model, packed, **options)
            _loss_of_values(case, range(len(values)), values).backward()
            detached = [v.detach() for v in values]
            return Run(detached, detached, gradients(model))
        again = "again" if case.way == "again" else None
        plan = kept_cases.plan_of(objective, 18)
        if case.way == "kept_values":
            return _run_kept_values(case, model, plan, options)
        return kept_cases.run(
            model, objective, plan, kept_cases.linear, recompute_trunks=again, **options
        )


def _bytes(case: Draw, model: nn.Module) -> int:
    """Bytes: more than enough, or so few that not all of a forward is kept."""
    if case.seed % 2 or case.way != "forward":
        return 1 << 40
    packed = pack_sequences(sequences(case.seed))
    memory = forward.memory_of(model, transformer_of(model), packed.device)
    # three temperatures
    peaks = peaks_of(memory, Work(packed.forest, 3 * packed.num_tokens))
    peaks = peaks[np.isfinite(peaks)]
    return round(float(peaks.min() + peaks.max()) / 2)


def _run_steps(model: nn.Module, objective: Objective, packed: Any, options: Any) -> Run:
    scores = steps_cases.score(model, objective, packed, max_tokens=14, **options)
    loss = objective.loss(scores.logprobs, scores.entropy)
    if objective.balance:
        loss = loss + objective.balance * scores.aux_loss
    loss.backward()
    detached = ([x.detach() for x in of] for of in (scores.logprobs, scores.entropy))
    return Run(*detached, gradients(model))


def _run_kept_values(case: Draw, model: nn.Module, plan: Any, options: Any) -> Run:
    found: dict[int, torch.Tensor] = {}
    with pt.kept_values(model, plan[0], **options) as scored:
        for batch, values in scored:
            which = batch.sequence_indices.tolist()
            found |= dict(zip(which, values, strict=True))
            _loss_of_values(case, which, values).backward()
    detached = [found[i].detach() for i in sorted(found)]
    return Run(detached, detached, gradients(model))


def check(case: Draw, run: Run | None = None) -> None:
    """Fails unless the packed run has the eager one's values, and gradients of the same parameters.

    Args:
        run: of a rank of a group. Default: run here.
    """
    reference = expected(case)
    run = got(case) if run is None else run
    # no parameter that does not train has one
    assert_same(run, reference, 4 * tolerance(case.family))


def on_rank(rank: int, folder: Path, cases: list[Draw]) -> list[Run | str]:
    """The runs of draws in a group, gradients summed over its ranks; or what went wrong."""
    found: list[Run | str] = []
    for case in cases:
        try:
            run = got(case, dist.group.WORLD)
            for gradient in run.gradients.values():
                dist.all_reduce(gradient)
                gradient /= dist.get_world_size()
            found.append(run)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def run_groups(cases: list[Draw], folder: Path) -> list[Run | str]:
    """What the first rank of two has of each draw."""
    first: list[Run | str] = run_ranks(_NAME, folder, arguments=(cases,))[0]
    return first


def main(count: int, seed: int = 0) -> int:
    cases = [draw(seed + i) for i in range(count)]
    in_groups = [case for case in cases if case.way == "group"]
    with TemporaryDirectory() as folder:
        of_groups = run_groups(in_groups, Path(folder))
    runs = dict(zip(in_groups, of_groups, strict=True))
    failed = []
    for case in cases:
        try:
            run = runs.get(case)
            assert not isinstance(run, str), run
            check(case, run)
        except Exception as error:
            failed.append(case)
            print(case, f"{type(error).__name__}: {str(error)[:300]}", flush=True)
    print(f"{count - len(failed)} of {count} as eager", Counter(case.way for case in failed))
    return len(failed)


if __name__ == "__main__":
    sys.exit(bool(main(*map(int, sys.argv[1:]))))
