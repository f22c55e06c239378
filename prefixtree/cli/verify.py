"""`prefixtree verify`: packed against replicated, on the user's own model and rollouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from prefixtree import PrefixForest, UnsupportedError, pack
from prefixtree.cli.compare import (
    Objective,
    Run,
    gradient_differences,
    run_packed,
    run_replicated,
    scored_tokens,
    worst_difference,
)
from prefixtree.cli.console import status, steps
from prefixtree.cli.rollouts import InputError, Rollouts

FLOAT32_LIMIT = 1e-4
_ENTROPY_SHARE = 0.1
_GIB = 2**30


@dataclass(frozen=True)
class Setting:
    """What to build and how to run it.

    Attributes:
        model: a folder of weights, or a config.json for random weights.
        dtype: float32, bfloat16 or float16.
        device: a torch device.
        seed: of random weights and of the loss's weights.
        gradient_checkpointing: in both runs.
    """

    model: Path
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0
    gradient_checkpointing: bool = False


@dataclass(frozen=True)
class Check:
    """One line of the verdict: green where value <= limit; `where` names the worst parameter."""

    name: str
    value: float
    limit: float
    where: str | None = None

    @property
    def passed(self) -> bool:
        """Whether it is green; a value that is not finite never is."""
        return math.isfinite(self.value) and self.value <= self.limit


def verify(rollouts: Rollouts, setting: Setting) -> dict[str, Any]:
    """Runs the rollouts' sequences packed and replicated, and compares; ready for JSON.

    In float32 the two must agree to `FLOAT32_LIMIT`. In a shorter dtype both are compared with a
    replicated float32 run of the same weights, and the packed error may be at most twice the
    replicated one plus the dtype's epsilon.

    Raises:
        InputError: a model or device that cannot be used, a token id beyond the vocabulary,
            nothing scored, memory exhausted.
        UnsupportedError: a model that prefixtree cannot serve exactly.
    """
    _check_device(setting.device)
    config = _load_config(setting.model)
    _check_vocabulary(rollouts, config, setting.model)
    sequences, masks = rollouts.sequences, rollouts.loss_masks
    objective = random_objective(sequences, masks, setting.seed)
    if not any(scored.any() for scored in objective.scored):
        raise InputError(f"{rollouts.source}: loss_mask scores no token; nothing to compare")
    try:
        # packed comes first: what it cannot serve it says before the long replicated run
        forest = PrefixForest.from_sequences(sequences)
        with status("packed"):
            model = build(setting, "prefixtree")
            _warm_up(model, True, rollouts, objective)
            packed = run_packed(model, pack(forest), objective, masks)
            del model
        model = build(setting, "eager")
        _warm_up(model, False, rollouts, objective)
        replicated = run_replicated(
            model, sequences, objective, lambda s: steps(s, "replicated", len(s))
        )
        del model
        exact = replicated
        if setting.dtype != "float32":
            exact = run_replicated(
                build(setting, "eager").float(),
                sequences,
                objective,
                lambda s: steps(s, "replicated in float32", len(s)),
            )
    except torch.OutOfMemoryError as problem:
        raise InputError(
            f"out of memory on {setting.device}; try a smaller --limit, or "
            f"--gradient-checkpointing ({str(problem).splitlines()[0]})"
        ) from None
    checks = compare(packed, replicated, exact, torch.finfo(getattr(torch, setting.dtype)).eps)
    passed = all(check.passed for check in checks)
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
        "checks": {
            check.name: {
                "difference": check.value if math.isfinite(check.value) else None,
                "limit": check.limit if math.isfinite(check.limit) else None,
                "passed": check.passed,
                **({} if check.where is None else {"parameter": check.where}),
            }
            for check in checks
        },
        "replicated": _cost(replicated),
        "packed": _cost(packed),
        # a speed-up of a wrong result is none
        "speedup": replicated.seconds / packed.seconds if passed else None,
    }


def random_objective(
    sequences: Sequence[np.ndarray], loss_masks: Sequence[np.ndarray] | None, seed: int
) -> Objective:
    """Random weights on every scored token's log-probability, smaller ones on its entropy."""
    generator = torch.Generator().manual_seed(seed)
    scored = scored_tokens(sequences, loss_masks)
    total = max(1, sum(int(s.sum()) for s in scored))
    weights = [torch.randn(2, len(s), generator=generator) * s / total for s in scored]
    return Objective(scored, [w[0] for w in weights], [w[1] * _ENTROPY_SHARE for w in weights])


def compare(packed: Run, replicated: Run, exact: Run, epsilon: float) -> list[Check]:
    """The verdict; `exact` is `replicated` itself where that ran in float32."""

    def limit(replicated_error: float) -> float:
        return FLOAT32_LIMIT if exact is replicated else 2 * replicated_error + epsilon

    checks = []
    for name in ("logprobs", "entropy"):
        expected = getattr(exact, name)
        error = worst_difference(getattr(replicated, name), expected)
        checks.append(Check(name, worst_difference(getattr(packed, name), expected), limit(error)))
    errors = gradient_differences(replicated.gradients, exact.gradients)
    found = gradient_differences(packed.gradients, exact.gradients)
    candidates = [Check("gradients", found[name], limit(errors[name]), name) for name in found]
    # an infinite limit, from a replicated run that is not finite, must not hide a parameter
    checks.append(max(candidates, key=lambda c: c.value / c.limit if c.passed else math.inf))
    return checks


def show(facts: dict[str, Any], console: Console) -> None:
    """Prints what `verify` found."""
    tokens = facts["tokens"]
    console.print(
        f"[bold]{facts['model_type']}[/] in {facts['dtype']} on {facts['device']}: "
        f"{facts['sequences']:,} sequences, {tokens['scored']:,} scored of "
        f"{tokens['replicated']:,} tokens, {tokens['distinct']:,} distinct"
    )
    table = Table("packed against replicated", "worst difference", "limit", "")
    for name, check in facts["checks"].items():
        difference = "not finite" if check["difference"] is None else f"{check['difference']:.2e}"
        limit = "not finite" if check["limit"] is None else f"{check['limit']:.2e}"
        where = f"\n[dim]{check['parameter']}[/]" if "parameter" in check else ""
        verdict = "[green]ok[/]" if check["passed"] else "[bold red]differs[/]"
        table.add_row(name + where, difference, limit, verdict)
    console.print(table)
    table = Table("cost, forward and backward", "replicated, eager", "packed", "saved")
    sides = facts["replicated"], facts["packed"]
    rows = [("tokens", [tokens["replicated"], tokens["distinct"]], "{:,}")]
    rows.append(("seconds", [side["seconds"] for side in sides], "{:.2f}"))
    if None not in (peaks := [side["peak_bytes"] for side in sides]):
        rows.append(("peak memory, GiB", [peak / _GIB for peak in peaks], "{:.2f}"))
    for name, values, form in rows:
        ratio = f"{values[0] / values[1]:.2f}x" if facts["passed"] and values[1] > 0 else "-"
        table.add_row(name, *(form.format(value) for value in values), ratio)
    console.print(table)
    console.print("[bold green]PASS[/]" if facts["passed"] else "[bold red]FAIL[/]")


# ---- the model -----------------------------------------------------------------------------------


def build(setting: Setting, attention: str) -> Any:
    """The model with an attention implementation; equal weights every time."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    import prefixtree.integrations.transformers  # noqa: F401  registers "prefixtree"

    options = {"dtype": getattr(torch, setting.dtype), "attn_implementation": attention}
    # also where weights are loaded: those a folder does not have are made up
    torch.manual_seed(setting.seed)
    logging.disable_progress_bar()
    try:
        if setting.model.is_dir():
            model = AutoModelForCausalLM.from_pretrained(
                setting.model, local_files_only=True, **options
            )
        else:
            config = _load_config(setting.model)
            text = config.get_text_config()
            # the usual 0.02 leaves a small random model's attention uniform and its gradients
            # next to nothing, where a wrong mask would hardly show
            text.initializer_range = max(text.initializer_range, text.hidden_size**-0.5)
            model = AutoModelForCausalLM.from_config(config, **options)
    except (UnsupportedError, torch.OutOfMemoryError):
        raise
    except Exception as problem:
        raise InputError(f"--model {setting.model}: {_first_line(problem)}") from None
    model.to(setting.device).eval()
    if setting.gradient_checkpointing:
        # transformers checkpoints in training mode alone
        model.train()
        # renamed in transformers 5.23, where the old name warns
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable()
        else:
            model.gradient_checkpointing_enable()
    return model


def _load_config(path: Path) -> Any:
    from transformers import AutoConfig

    if not path.exists():
        raise InputError(f"--model {path}: does not exist; expected a folder or a config.json")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as problem:
        raise InputError(f"--model {path}: {_first_line(problem)}") from None


def _first_line(problem: Exception) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(problem).__name__


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as problem:
        raise InputError(f"--device {device}: {_first_line(problem)}") from None


def _check_vocabulary(rollouts: Rollouts, config: Any, model: Path) -> None:
    size = config.get_text_config().vocab_size
    for sequence, line in zip(rollouts.sequences, rollouts.lines, strict=True):
        if sequence.max() >= size:
            raise InputError(
                f"{rollouts.source}:{line}: has the token id {sequence.max()}, but the vocabulary "
                f"of {model} ends at {size - 1}; is it the model these rollouts were tokenized for?"
            )


def _warm_up(model: Any, packed: bool, rollouts: Rollouts, objective: Objective) -> None:
    """The shortest scored sequence once: what is compiled or loaded once is not timed."""
    lengths = [
        len(s) if o.any() else math.inf
        for s, o in zip(rollouts.sequences, objective.scored, strict=True)
    ]
    i = int(np.argmin(lengths))
    sequences, masks = [rollouts.sequences[i]], rollouts.loss_masks
    if packed:
        forest = pack(PrefixForest.from_sequences(sequences))
        run_packed(model, forest, objective.take(i), None if masks is None else [masks[i]])
    else:
        run_replicated(model, sequences, objective.take(i))


def _cost(run: Run) -> dict[str, Any]:
    return {
        "seconds": run.seconds,
        "peak_bytes": run.peak_bytes,
        "loss": run.loss if math.isfinite(run.loss) else None,
    }
