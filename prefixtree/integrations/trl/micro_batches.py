"""Warnings about TRL's micro-batches, each given once.

The cut of the data into micro-batches decides how much is shared and, for GRPO with some settings,
the loss. What the settings tell is said when the trainer is made, and what only the batches tell,
after the first of them.
"""

from __future__ import annotations

import math
import warnings
from typing import Any


def warn_of_micro_batches(args: Any, aux_loss: bool = False, together: int = 1) -> None:
    """Warns of settings that cut groups, and of losses that depend on the cut.

    The warnings point at the caller's caller.

    Args:
        args: the trainer's `GRPOConfig`.
        aux_loss: whether the loss has the load-balancing loss of experts. Default: False.
        together: as for `cut_groups`. Default: 1.
    """
    for message in (cut_groups(args, together), cut_losses(args, aux_loss)):
        if message:
            warnings.warn(message, stacklevel=3)


def cut_groups(args: Any, together: int = 1) -> str:
    """The warning for micro-batches that cut groups; "" where every group is whole.

    It says how often a prompt is computed, and which settings keep groups whole. Each micro-batch
    of each process is a run of `per_device_train_batch_size` neighbouring rows of the generation
    batch; each group is a run of `num_generations` rows.

    Args:
        args: the trainer's `GRPOConfig`.
        together: neighbouring micro-batches that compute once what their rows share. Default: 1.
    """
    rows, group = args.per_device_train_batch_size, args.num_generations
    run = rows * together
    if run % group == 0:
        return ""
    # per group: a run begins where a group or a micro-batch does
    times = 1 + group / run - group / math.lcm(run, group)
    steps, generation = args.gradient_accumulation_steps, args.steps_per_generation
    whole = math.ceil(rows / group) * group
    # the smallest size that keeps the rows of an optimiser step, if there is one
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


def sharing_advice(args: Any) -> str:
    """Advice for micro-batches of the first step that turn out to share nothing."""
    rows, group = args.per_device_train_batch_size, args.num_generations
    if rows % group:
        return (
            "to compute a prompt once for its completions, set per_device_train_batch_size to a "
            f"multiple of num_generations={group} (it is {rows})"
        )
    return (
        "prompts are short beside the completions, and completions share no turns: TRL's own "
        "trainer is as fast here"
    )


def cut_losses(args: Any, aux_loss: bool = False) -> str:
    """The warning for settings whose loss depends on the rows of a micro-batch; "" without them."""
    found = [
        setting
        for setting, used in (
            (f"loss_type={args.loss_type!r}", args.loss_type == "bnpo"),
            (f"entropy_coef={args.entropy_coef}", args.entropy_coef != 0.0),
            ("use_adaptive_entropy=True", args.use_adaptive_entropy),
            (f"top_entropy_quantile={args.top_entropy_quantile}", args.top_entropy_quantile < 1.0),
            ("the load-balancing loss of experts (router_aux_loss_coef)", aux_loss),
        )
        if used
    ]
    if not found or args.steps_per_generation == 1:
        return ""
    return (
        f"with {', '.join(found)} TRL's loss depends on which rows make up a micro-batch, and "
        "PrefixTreeGRPOTrainer keeps rows together that GRPOTrainer's shuffle scatters: losses and "
        "gradients differ from those of GRPOTrainer. They do not depend on the micro-batches with "
        "steps_per_generation=1 (one micro-batch per generation), or with another loss_type and "
        "without these settings"
    )
