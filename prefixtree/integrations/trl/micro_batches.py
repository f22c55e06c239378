"""What the cut of a generation batch into micro-batches decides under TRL, said once as the trainer
is made: how much is shared, and, with some settings, the loss itself.
"""

from __future__ import annotations

import math
import warnings
from typing import Any


def warn_of_micro_batches(args: Any) -> None:
    """Warns the caller's caller of settings that cut groups, and of losses that depend on the cut.

    Args:
        args: the trainer's `GRPOConfig`.
    """
    for message in (cut_groups(args), cut_losses(args)):
        if message:
            warnings.warn(message, stacklevel=3)


def cut_groups(args: Any) -> str:
    """How often a prompt is computed where micro-batches cut groups, and the settings under which
    they do not; "" where every group is whole.

    All micro-batches of all processes are runs of `per_device_train_batch_size` neighbours among
    the rows of a generation batch, groups are runs of `num_generations`.
    """
    rows, group = args.per_device_train_batch_size, args.num_generations
    if rows % group == 0:
        return ""
    # per group: a run begins where a group or a micro-batch does
    times = 1 + group / rows - group / math.lcm(rows, group)
    steps, generation = args.gradient_accumulation_steps, args.steps_per_generation
    whole = math.ceil(rows / group) * group
    # the smallest that leaves an optimiser step as it is, if one does
    fitting = [n for n in range(whole, rows * steps + 1, group) if rows * steps % n == 0]
    whole = fitting[0] if fitting else whole
    settings = {
        "per_device_train_batch_size": whole,
        "gradient_accumulation_steps": max(1, rows * steps // whole),
    }
    if generation != steps:
        settings["steps_per_generation"] = max(1, rows * generation // whole)
    advice = " and ".join(f"{name}={value}" for name, value in settings.items())
    changed = whole * settings["gradient_accumulation_steps"]
    note = "" if changed == rows * steps else f" ({changed} completions per step and process)"
    return (
        f"micro-batches cut the groups of num_generations={group}: with "
        f"per_device_train_batch_size={rows} every prompt is computed {times:.3g} times per "
        f"iteration, for {group / times:.3g} completions each. To compute it once, set {advice}"
        f"{note}; memory follows the distinct tokens of a micro-batch"
    )


def cut_losses(args: Any) -> str:
    """Settings whose loss depends on which rows make up a micro-batch; "" where there are none."""
    bonus = args.entropy_coef != 0.0 or args.use_adaptive_entropy
    found = [
        setting
        for setting, used in (
            (f"loss_type={args.loss_type!r}", args.loss_type == "bnpo"),
            (f"entropy_coef={args.entropy_coef}", bonus),
            (f"top_entropy_quantile={args.top_entropy_quantile}", args.top_entropy_quantile < 1.0),
        )
        if used
    ]
    if not found or args.steps_per_generation == 1:
        return ""
    return (
        f"with {', '.join(found)} TRL's loss depends on which rows make up a micro-batch, and "
        "PrefixTreeGRPOTrainer keeps rows together that GRPOTrainer's shuffle scatters: losses and "
        "gradients differ from its own. steps_per_generation=1, one micro-batch per generation, "
        "and without these settings every other loss_type, do not depend on it"
    )
