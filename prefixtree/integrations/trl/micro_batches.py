"""Micro-batches of TRL: neighbouring rows of a generation, and warnings about the cut, each given
once.

TRL shuffles the rows of a generation batch, which scatters those that begin alike. Here whole
micro-batches are shuffled. The cut of the data into micro-batches decides how much is shared and,
with some settings, the loss. Warnings about settings come when the trainer is made, those about
batches after the first of them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from prefixtree.errors import UnsupportedError
from prefixtree.integrations.trl.images import PER_ROW

# the entry of a generation batch that numbers its rows; taken out before a loss is computed
ROW = "prefixtree_row"


class KeepsNeighbours:
    """A base before TRL's class: micro-batches hold neighbouring rows of a generation."""

    model: Any
    # TRL's: the micro-batches of the last generation, None before the first
    _buffered_inputs: list[dict[str, Any]] | None
    # the number in the generation of each block of micro-batches, in training order
    _blocks: Sequence[int] = ()

    def _micro_batches_together(self) -> int:
        """The number of micro-batches of neighbouring rows that are shuffled as one."""
        return 1

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        if self.model.training:
            batch[ROW] = torch.arange(len(batch["completion_ids"]))
        return batch

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        before = self._buffered_inputs
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)  # type: ignore[misc]
        shuffled = self._buffered_inputs
        if shuffled is None or shuffled is before:
            return inputs  # of an evaluation, or of a generation that is in order already
        (place,) = (i for i, batch in enumerate(shuffled) if batch is inputs)
        together = self._micro_batches_together()
        self._buffered_inputs, self._blocks = reunite(shuffled, together)
        return self._buffered_inputs[place]


def reunite(
    batches: list[dict[str, Any]], together: int = 1
) -> tuple[list[dict[str, Any]], list[int]]:
    """Turns micro-batches of shuffled rows into micro-batches of neighbouring rows.

    A block of micro-batches takes the place of the first of its rows in the shuffle, so its place
    is random without another draw. Its rows keep the order in which they were generated.

    Args:
        batches: micro-batches of equal size; every entry is a tensor [B, ...], or a tensor without
            dimensions or None for the whole micro-batch. Images are those of all rows, one after
            another, and num_images, B numbers, counts those of each row.
        together: the number of micro-batches in a block, a divisor of their number. Default: 1.
    """
    size = len(batches[0][ROW])
    # [blocks, rows]: the places of the rows of every run of neighbours
    places = torch.cat([batch[ROW] for batch in batches]).argsort().view(-1, size * together)
    blocks = places.amin(1).argsort()
    order = places[blocks].flatten()
    reunited: list[dict[str, Any]] = [{} for _ in batches]
    # images: a list of tensors, one per row
    batches = [split_pixel_values_by_grid(batch) for batch in batches]
    for key in batches[0].keys() - {ROW}:
        parts = [batch[key] for batch in batches]
        if all(isinstance(part, torch.Tensor) and part.ndim > 0 for part in parts):
            if any(len(part) != size for part in parts):
                raise UnsupportedError(
                    f"batch entry {key!r} must have one row per completion ({size}), got "
                    f"{[len(part) for part in parts]} rows in the micro-batches; install the TRL "
                    "version the adapter is tested with"
                )
            parts = list(torch.cat(parts)[order].split(size))
        elif key in PER_ROW and all(isinstance(part, list) for part in parts):
            rows = [row for part in parts for row in part]
            moved = [rows[i] for i in order.tolist()]
            parts = [moved[at : at + size] for at in range(0, len(moved), size)]
        elif not all(part is None or isinstance(part, torch.Tensor) for part in parts):
            raise UnsupportedError(
                f"batch entry {key!r} is a {type(parts[0]).__name__}: only tensors are known"
            )
        for batch, part in zip(reunited, parts, strict=True):
            batch[key] = part
    return [unsplit_pixel_values_by_grid(batch) for batch in reunited], blocks.tolist()


# ---- warnings ------------------------------------------------------------------------------------


def warn_of_micro_batches(args: Any, aux_loss: bool = False, together: int = 1) -> None:
    """Warns, at the caller's caller, of cut groups and of losses that depend on the cut."""
    for message in (cut_groups(args, together), cut_losses(args, aux_loss)):
        if message:
            warnings.warn(message, stacklevel=3)


def cut_groups(args: Any, together: int = 1) -> str:
    """The warning for micro-batches that cut groups; "" where every group is whole.

    It says how often a prompt is computed, and which settings keep groups whole. Each micro-batch
    of each process is a run of `per_device_train_batch_size` neighbouring rows of the generation
    batch; each group is a run of `num_generations` rows.
    """
    rows, group = args.per_device_train_batch_size, args.num_generations
    run = rows * together
    if run % group == 0:
        return ""
    # counted per group: a run begins where a group or a micro-batch does
    times = 1 + group / run - group / math.lcm(run, group)
    steps, generation = args.gradient_accumulation_steps, args.steps_per_generation
    whole_rows = math.ceil(rows / group) * group
    # the smallest size that keeps the rows of an optimiser step, if there is one
    fitting = [n for n in range(whole_rows, rows * steps + 1, group) if rows * steps % n == 0]
    whole_rows = fitting[0] if fitting else whole_rows
    settings = {
        "per_device_train_batch_size": whole_rows,
        "gradient_accumulation_steps": max(1, rows * steps // whole_rows),
    }
    if generation != steps:
        settings["steps_per_generation"] = max(1, rows * generation // whole_rows)
    advice = " and ".join(f"{name}={value}" for name, value in settings.items())
    changed = whole_rows * settings["gradient_accumulation_steps"]
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
    # RLOO has none of the first four
    given = vars(args)
    settings = [
        setting.format(**given)
        for setting, used in (
            ("loss_type={loss_type!r}", given.get("loss_type") == "bnpo"),
            ("entropy_coef={entropy_coef}", given.get("entropy_coef", 0.0) != 0.0),
            ("use_adaptive_entropy=True", given.get("use_adaptive_entropy", False)),
            (
                "top_entropy_quantile={top_entropy_quantile}",
                given.get("top_entropy_quantile", 1.0) < 1.0,
            ),
            ("the load-balancing loss of experts (router_aux_loss_coef)", aux_loss),
        )
        if used
    ]
    if not settings or args.steps_per_generation == 1:
        return ""
    return (
        f"with {', '.join(settings)} TRL's loss depends on which rows make up a micro-batch, and "
        "this trainer keeps rows together that TRL's shuffle scatters: losses and gradients differ "
        "from those of TRL's trainer. They do not depend on the micro-batches with "
        "steps_per_generation=1 (one micro-batch per generation), or with another loss_type and "
        "without these settings"
    )
