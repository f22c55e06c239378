"""Compares packed with replicated on the user's model and rollouts, for `prefixtree verify`."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from prefixtree.errors import ForestError, InputError
from prefixtree.forest import PrefixForest
from prefixtree.hub import load_config
from prefixtree.images.images import Images
from prefixtree.packing.layout import pack
from prefixtree.progress import Status, Watch, unannounced, unwatched
from prefixtree.recompute.layers import Mode
from prefixtree.rollouts import Rollouts
from prefixtree.sharing.estimate import read_cost, read_memory
from prefixtree.sharing.measure import measure_images
from prefixtree.testing.compare import (
    Objective,
    Run,
    run_packed,
    run_replicated,
    scored_tokens,
    worst_difference,
)
from prefixtree.testing.judge import Check, Limits, float32_limits, judge
from prefixtree.testing.models import Setting, build, build_as_trained, check_vocabulary
from prefixtree.testing.reference import (
    EAGER_BY_ROWS,
    FaithfulSums,
    Margins,
    PackedChoices,
    Replay,
    chooses_keys,
    float32_convolutions,
)

if TYPE_CHECKING:
    from prefixtree.recompute.memory import ModelMemory

_ENTROPY_SHARE = 0.1
_GIB = 2**30


def verify(
    rollouts: Rollouts,
    setting: Setting,
    *,
    watch: Watch = unwatched,
    status: Status = unannounced,
    announce: Callable[[str], object] | None = None,
) -> dict[str, Any]:
    """Runs the rollouts' sequences packed and replicated, and compares; ready for JSON.

    The reference is replicated, in float32, with eager attention. In a shorter dtype a replicated
    eager run in that dtype shows what rounding does. `judge` says how far packed may be off. Where
    indexers choose keys, a float32 run takes those that the packed run chose, and tells how far
    these are from the best: in float32 it is the reference, in a shorter dtype a run more. The time
    that packing saves is measured against what trainers run: a replicated run with FA2 or sdpa. In
    all runs, weights' gradients are summed in float32 on a CPU, and float32 convolutions are no
    TF32 on a GPU.

    Args:
        rollouts: what to run; loss masks tell which tokens are scored, all where there are none.
        setting: the model, its dtype and its device.
        watch, status: show progress.
        announce: called once before the first run, with a line that says what will run and how
            much memory it will take.

    Raises:
        InputError: a model or device that cannot be used, a token id beyond the vocabulary,
            nothing scored, memory exhausted.
        UnsupportedError: a model that prefixtree cannot serve exactly.
    """
    setting = setting.resolved()
    config = load_config(setting.model)
    check_vocabulary(rollouts, config, setting.model)
    sides = _Sides.of(rollouts, config)
    setting = replace(setting, images=sides.images is not None)
    objective = random_objective(rollouts.sequences, rollouts.loss_masks, setting.seed)
    if not any(scored.any() for scored in objective.scored):
        raise InputError(f"{rollouts.source}: loss_mask scores no token; nothing to compare")
    forest = PrefixForest.from_sequences(sides.packed)
    memory = _memory(forest, objective, setting)
    if announce is not None:
        announce(_announcement(forest, setting, config, memory))
    try:
        with FaithfulSums(), float32_convolutions():
            runs = _run_all(forest, sides, objective, setting, watch, status)
    except torch.OutOfMemoryError as problem:
        raise InputError(
            f"out of memory on {setting.device}; try a smaller --limit, or "
            f"--gradient-checkpointing ({str(problem).splitlines()[0]})"
        ) from None
    packed, trained, replicated, exact = runs.packed, runs.trained, runs.replicated, runs.exact
    if setting.dtype == "float32":
        limits = float32_limits(config)
    else:
        limits = Limits.alike(torch.finfo(getattr(torch, setting.dtype)).eps)

    def in_float64() -> Run | None:
        return _in_float64(sides, objective, setting, watch, runs)

    checks, longer = judge(packed, replicated, exact, limits, in_float64)
    exact = longer or exact
    if runs.margins is not None and runs.exact is runs.followed:
        checks.insert(0, Check("chosen keys", runs.margins.largest, limits.scores))
    passed = all(check.passed for check in checks)
    seen = measure_images(PrefixForest.from_sequences(rollouts.sequences), rollouts)
    return {
        "passed": passed,
        "model": str(setting.model),
        "model_type": config.model_type,
        "dtype": setting.dtype,
        "device": setting.device,
        "gradient_checkpointing": setting.gradient_checkpointing,
        "sequences": forest.num_sequences,
        "tokens": {
            "replicated": forest.num_replicated_tokens,
            "distinct": forest.num_tokens,
            "ratio": forest.replication_ratio,
            "scored": sum(int(scored.sum()) for scored in objective.scored),
        },
        **({} if seen is None else {"images": seen}),
        "checks": {
            check.name: {
                "difference": _finite(check.value),
                "limit": _finite(check.limit),
                "passed": check.passed,
                **({} if check.where is None else {"parameter": check.where}),
                **({} if check.replicated is None else {"replicated": _finite(check.replicated)}),
            }
            for check in checks
        },
        **({} if longer is None else {"reference": "float64"}),
        **_indexers(runs),
        "estimated_bytes": memory,
        "replicated": {
            **_cost(trained),
            "attention": runs.attention,
            "logprob_difference": _finite(worst_difference(trained.logprobs, exact.logprobs)),
        },
        "packed": _cost(packed),
        # a wrong result has no speed-up
        "speedup": trained.seconds / packed.seconds if passed else None,
    }


@dataclass(frozen=True)
class _Sides:
    """The sequences as both sides take them; the two differ where there are images.

    Attributes:
        loss_masks: of both; None if every token is scored.
        copies: the images of the replicated side, every copy for itself, so that an image that is
            taken for another shows in the comparison. None without images.
        images: those of the packed side.
    """

    replicated: list[np.ndarray]
    packed: list[np.ndarray]
    loss_masks: list[np.ndarray] | None
    copies: Images | None = None
    images: Images | None = None

    @classmethod
    def of(cls, rollouts: Rollouts, config: Any) -> _Sides:
        batch = rollouts.image_batch()
        if batch is None:
            return cls(rollouts.sequences, rollouts.sequences, rollouts.loss_masks)
        inputs = batch.sequences, batch.pixel_values, batch.image_grid_thw, config
        try:
            images = Images.from_batch(*inputs)
        except (ForestError, ValueError) as problem:
            raise InputError(f"{rollouts.source}: {problem}") from None
        copies = Images.from_batch(*inputs, image_keys=range(len(batch.pixel_values)))
        return cls(copies.sequences, images.sequences, rollouts.loss_masks, copies, images)


@dataclass(frozen=True)
class _Runs:
    """The results of all runs.

    Attributes:
        packed: all sequences at once.
        trained: each sequence alone, with `attention`, which trainers use; the timed run.
        replicated: each alone, with eager attention in the setting's dtype.
        exact: each alone, with eager attention in float32; `replicated` itself if that is float32.
        followed: `exact` with the keys that the packed run's indexers chose; in float32 `exact`
            itself. None without indexers.
        by_itself: `exact` with the keys of its own choice; `followed` if these are the same.
        margins: how far the packed run's keys are from the best of `followed`.
    """

    packed: Run
    trained: Run
    attention: str
    replicated: Run
    exact: Run
    followed: Run | None = None
    by_itself: Run | None = None
    margins: Margins | None = None


def _run_all(
    forest: PrefixForest,
    sides: _Sides,
    objective: Objective,
    setting: Setting,
    watch: Watch,
    status: Status,
) -> _Runs:
    def alone(model: Any, name: str, replay: Replay | None = None) -> Run:
        def watched(sequences: Any) -> Any:
            return watch(sequences, name, len(sequences))

        over = watched if replay is None else replay.watched(watched)
        return run_replicated(model, sides.replicated, objective, over, sides.copies)

    def in_float32(name: str) -> Run:
        return alone(build(setting, EAGER_BY_ROWS).float(), name)

    # packed comes first: it refuses models before the long replicated runs
    with status("packed"):
        model = build(setting, "prefixtree")
        _warm_up(model, True, sides, objective)
        batch = pack(forest)
        chosen = PackedChoices(model, batch) if chooses_keys(model.config) else None
        packed = run_packed(model, batch, objective, sides.loss_masks, sides.images)
        del model
    model = build_as_trained(setting)
    attention = model.config._attn_implementation
    _warm_up(model, False, sides, objective)
    trained = alone(model, f"replicated, {attention}")
    del model
    followed = by_itself = margins = None
    if chosen is not None:
        model = build(setting, EAGER_BY_ROWS).float()
        replay = Replay(model, chosen)
        followed = by_itself = alone(model, "replicated, eager, packed's keys", replay)
        margins = replay.margins
        del model, replay
        # an indexer and its replaced forward now hold one another
        gc.collect()
    if setting.dtype == "float32":
        if margins is not None and margins.differ:
            by_itself = in_float32("replicated, eager")
        replicated = exact = followed or alone(build(setting, EAGER_BY_ROWS), "replicated, eager")
    else:
        replicated = alone(build(setting, EAGER_BY_ROWS), "replicated, eager")
        exact = in_float32("replicated, eager in float32")
        by_itself = exact
    return _Runs(packed, trained, attention, replicated, exact, followed, by_itself, margins)


def _in_float64(
    sides: _Sides, objective: Objective, setting: Setting, watch: Watch, runs: _Runs
) -> Run | None:
    """Runs each sequence alone in float64; None without the memory, or if indexers would choose."""
    if runs.followed is not None:
        return None

    def watched(sequences: Any) -> Any:
        return watch(sequences, "replicated, eager in float64", len(sequences))

    try:
        with FaithfulSums():
            model = build(setting, EAGER_BY_ROWS).double()
            return run_replicated(model, sides.replicated, objective, watched, sides.copies)
    except torch.OutOfMemoryError:
        return None


def _indexers(runs: _Runs) -> dict[str, Any]:
    """Counts other choices of the packed run's indexers, and measures their effect on log p."""
    if runs.margins is None or runs.followed is None or runs.by_itself is None:
        return {}
    same = worst_difference(runs.packed.logprobs, runs.followed.logprobs)
    moved = worst_difference(runs.by_itself.logprobs, runs.followed.logprobs)
    facts = {"choices": runs.margins.count, "differ": runs.margins.differ}
    differences = {"logprobs_with_the_same": _finite(same), "logprobs_of_others": _finite(moved)}
    return {"indexers": {**facts, **differences}}


def _announcement(forest: PrefixForest, setting: Setting, config: Any, memory: int | None) -> str:
    """Writes the line that says what will run, and its memory beyond the program's."""
    runs = ["packed", "each sequence alone as trainers run it", "each alone with eager attention"]
    if setting.dtype != "float32":
        runs[2] += f" in {setting.dtype}"
        runs.append("the same in float32")
        if chooses_keys(config):
            runs.append("once more with the keys of the packed run")
    need = "an unknown amount of" if memory is None else f"about {memory / _GIB:.2g} GiB of"
    beside = " beside what the vision encoder takes" if setting.images else ""
    return (
        f"verify: {config.model_type} in {setting.dtype} on {setting.device}, "
        f"{forest.num_sequences:,} sequences of {forest.num_replicated_tokens:,} tokens, "
        f"{forest.num_tokens:,} distinct, "
        f"at most {int(forest.sequence_lengths.max()):,} in one; {len(runs)} runs, forward and "
        f"backward ({', '.join(runs)}); takes {need} memory{beside}. --limit takes fewer sequences"
    )


def _memory(forest: PrefixForest, objective: Objective, setting: Setting) -> int | None:
    """Estimates the most bytes held at once; None for a model that the estimate does not know."""
    try:
        cost = read_cost(setting.model, setting.dtype)
    except InputError:
        return None
    memory = read_memory(setting.model, setting.dtype)
    if memory is None:
        return None
    lengths = [int(n) for n in forest.sequence_lengths]
    scored = [int(s.sum()) for s in objective.scored]
    mode: Mode = "all" if setting.gradient_checkpointing else "nothing"

    def held(element_bytes: int) -> int:
        # weights, gradients, and a gradient of the embedding next to its sum
        return element_bytes * (2 * cost.parameters + cost.hidden * cost.vocabulary)

    def alone(layers: ModelMemory, element_bytes: int) -> int:
        # the sequence's logits and their gradient, its mask with as much again to make it, and
        # blocks of attention scores
        return held(element_bytes) + max(
            layers.peak(n, mode)
            + 2 * element_bytes * k * cost.vocabulary
            + 2 * n * n
            + 6 * 4 * min(cost.heads * n * n, 2**24)
            for n, k in zip(lengths, scored, strict=True)
            if k
        )

    b = cost.element_bytes
    # the second term is a float32 sum of the head's weight
    packed = held(b) + 4 * cost.hidden * cost.vocabulary + memory.peak(forest.num_tokens, mode)
    sides = [packed, alone(memory, b), alone(memory.scaled(4 / b, 4), 4)]
    if setting.device.startswith("cpu"):
        # gradients of the runs before: packed, trained, and the replicated one where there is
        earlier = b * cost.parameters
        count = 2 if setting.dtype == "float32" else 3
        sides = [sides[0], sides[1] + earlier, sides[2] + count * earlier]
    return max(sides)


def random_objective(
    sequences: Sequence[np.ndarray], loss_masks: Sequence[np.ndarray] | None, seed: int
) -> Objective:
    """Draws random weights for scored tokens' log-probabilities, smaller ones for entropies."""
    generator = torch.Generator().manual_seed(seed)
    scored = scored_tokens(sequences, loss_masks)
    total = max(1, sum(int(s.sum()) for s in scored))
    weights = [torch.randn(2, len(s), generator=generator) * s / total for s in scored]
    return Objective(scored, [w[0] for w in weights], [w[1] * _ENTROPY_SHARE for w in weights])


def _warm_up(model: Any, packed: bool, sides: _Sides, objective: Objective) -> None:
    """Runs the shortest scored sequence once: what is compiled or loaded once is not timed."""
    lengths = [
        len(s) if o.any() else math.inf
        for s, o in zip(sides.replicated, objective.scored, strict=True)
    ]
    i = int(np.argmin(lengths))
    if packed:
        masks = None if sides.loss_masks is None else [sides.loss_masks[i]]
        forest = pack(PrefixForest.from_sequences([sides.packed[i]]))
        run_packed(model, forest, objective.take(i), masks, sides.images)
    else:
        # sequences without scored tokens do not run
        scored = [s if j == i else torch.zeros_like(s) for j, s in enumerate(objective.scored)]
        alone = replace(objective, scored=scored)
        run_replicated(model, sides.replicated, alone, images=sides.copies)


def _cost(run: Run) -> dict[str, Any]:
    return {
        "seconds": run.seconds,
        "peak_bytes": run.peak_bytes,
        "loss": _finite(run.loss),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
