"""The token sequences of a file of rollouts: one per rollout, or one per assistant turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prefixtree._numbers import entries, integer, integers
from prefixtree.errors import InputError
from prefixtree.rollouts.image_messages import (
    FIRST_IMAGE,
    ImageBatch,
    RolloutImage,
    image_numbers,
)


@dataclass(frozen=True)
class Rollouts:
    """Token sequences of a file, in its order, one list entry per sequence.

    Attributes:
        source: the file's name, for messages.
        sequences: int64 [n] token ids, one array per sequence. Those of image k are 2**30 + k,
            so that two prefixes are equal only if their images are.
        loss_masks: bool [n], one array per sequence; all true for a rollout without a mask where
            other rollouts have one. None where no rollout has one.
        groups: one group per sequence, None for a rollout without one. None where no rollout has
            one.
        ids: one name per sequence; "line 7" for a rollout without a name.
        lines: the line (entry of an array, row) each sequence came from, counted from 1.
        origins: the rollout each sequence came from, counted from 0. A line may hold a pair. They
            are the `rollouts` of `MicroBatchPlan.token_weights`.
        turn_ends: per sequence, int64, the number of tokens up to the end of each assistant turn.
            They come from the field `turn_ends` or from the runs of ones in `loss_mask`; None where
            the line has neither.
        routes: per sequence, integers [n or n - 1, layers, k], the experts of a mixture that were
            recorded; None for a rollout without them.
        messages: per sequence, the chat messages it came from or that the line holds beside its
            token ids, or None. None where no rollout has messages.
        turns: per sequence, (tokens, loss mask, sampled) of each assistant turn, where the chat
            template rewrites earlier turns as the conversation goes on; otherwise None.
        sampled: per sequence, bool [n], true for the tokens that the policy sampled, where the loss
            mask leaves out earlier turns that it sampled as well; otherwise None.
        problems: one message per line that was left out, with the reason.
        images: the distinct images of the file, by number.
        placeholder: the token id that stands for an image in the model's input; None where no
            tokenizer was given, or it has none.
    """

    source: str
    sequences: list[np.ndarray]
    loss_masks: list[np.ndarray] | None
    groups: list[str | int | None] | None
    ids: list[str]
    lines: list[int]
    origins: list[int]
    turn_ends: list[np.ndarray | None]
    routes: list[np.ndarray | None]
    messages: list[list[dict[str, Any]] | None] | None
    turns: list[list[tuple[np.ndarray, np.ndarray, np.ndarray]] | None]
    sampled: list[np.ndarray | None]
    problems: tuple[str, ...] = ()
    images: tuple[RolloutImage, ...] = ()
    placeholder: int | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    def take(self, indices: Sequence[int]) -> Rollouts:
        """Selects the sequences at `indices`, in that order.

        Raises:
            ValueError: indices that are no list of integers.
            IndexError: a sequence that does not exist.
        """
        indices = integers("indices", entries("indices", indices, "a list of integers")).tolist()
        kept: dict[str, Any] = {
            name: [values[i] for i in indices]
            for name, values in vars(self).items()
            if isinstance(values, list)
        }
        return replace(self, **kept)

    def first(self, count: int) -> Rollouts:
        """Selects the first `count` sequences, or all where there are fewer.

        Raises:
            ValueError: a count that is no integer >= 0.
        """
        return self.take(range(min(integer("count", count, 0), len(self))))

    def image_batch(self) -> ImageBatch | None:
        """Processes the images of the sequences, each distinct one once; None where there are none.

        Raises:
            InputError: an image whose file is gone, or is another one by now.
        """
        import torch

        numbers = [image_numbers(sequence) for sequence in self.sequences]
        if not any(numbers):
            return None
        assert self.placeholder is not None
        by_number = {
            n: self.images[n].processed() for n in sorted({n for row in numbers for n in row})
        }
        processed = [by_number[n] for row in numbers for n in row]
        return ImageBatch(
            sequences=[
                np.where(sequence >= FIRST_IMAGE, self.placeholder, sequence)
                for sequence in self.sequences
            ],
            pixel_values=[pixels for pixels, _ in processed],
            image_grid_thw=torch.stack([grid for _, grid in processed]),
            counts=[len(row) for row in numbers],
            placeholder=self.placeholder,
        )

    def first_groups(self, count: int) -> Rollouts:
        """Selects the sequences of the first `count` groups, or all, in order of appearance.

        Raises:
            InputError: a rollout without a group.
            ValueError: a count that is no integer >= 0.
        """
        count = integer("count", count, 0)
        if self.groups is None or None in self.groups:
            line = self.lines[0 if self.groups is None else self.groups.index(None)]
            raise InputError(
                f"{self.source}:{line}: has no group; choosing tasks needs a group on every rollout"
            )
        chosen = set(list(dict.fromkeys(self.groups))[:count])
        return self.take([i for i, group in enumerate(self.groups) if group in chosen])


def expand_turns(rollouts: Rollouts, *, strict: bool = False) -> Rollouts:
    """Cuts rollouts into one sequence per assistant turn: the rollout up to the turn's end.

    Trainers that step turn by turn compute these sequences. They stand in the order of the rollouts
    and their turns, with loss masks cut likewise.

    Args:
        rollouts: as `read_rollouts` returns them.
        strict: whether to raise at a rollout whose turns are unknown. Default: False: leave it out
            and keep the reason in `Rollouts.problems`.

    Raises:
        InputError: no turn at all, or, with `strict`, a rollout whose turns are unknown.
    """
    origin: list[int] = []
    sequences: list[np.ndarray] = []
    masks: list[np.ndarray | None] = []
    ends: list[np.ndarray | None] = []
    sampled: list[np.ndarray | None] = []
    routes: list[np.ndarray | None] = []
    problems = list(rollouts.problems)
    for i, turn_ends in enumerate(rollouts.turn_ends):
        where = f"{rollouts.source}:{rollouts.lines[i]}:"
        turns = rollouts.turns[i]
        if turns is not None:
            origin += [i] * len(turns)
            sequences += [tokens for tokens, _, _ in turns]
            masks += [mask for _, mask, _ in turns]
            ends += [None] * len(turns)
            sampled += [written for _, _, written in turns]
            # of other tokens than the template's
            routes += [None] * len(turns)
        elif turn_ends is None:
            note(
                f"{where} has neither turn_ends nor loss_mask; one of them must tell its "
                "assistant turns",
                problems,
                strict,
            )
        elif len(turn_ends) == 0:
            note(
                f"{where} has no assistant turn: turn_ends is empty, or loss_mask is all 0",
                problems,
                strict,
            )
        else:
            origin += [i] * len(turn_ends)
            lengths = turn_ends.tolist()
            sequences += [rollouts.sequences[i][:end] for end in lengths]
            loss_masks = rollouts.loss_masks
            masks += [None if loss_masks is None else loss_masks[i][:end] for end in lengths]
            ends += [turn_ends[: k + 1] for k in range(len(lengths))]
            sampled += [None] * len(lengths)
            route = rollouts.routes[i]
            routes += [None if route is None else route[:end] for end in lengths]
    require_some(origin, rollouts.source, problems, "assistant turn")
    first = {i: k for k, i in reversed(list(enumerate(origin)))}
    expanded = rollouts.take(origin)
    return replace(
        expanded,
        sequences=sequences,
        loss_masks=complete_masks(masks, sequences),
        ids=[
            f"{name} turn {k - first[i]}"
            for k, (i, name) in enumerate(zip(origin, expanded.ids, strict=True))
        ],
        turn_ends=ends,
        routes=routes,
        turns=[None] * len(origin),
        sampled=sampled,
        problems=tuple(problems),
    )


def complete_masks(
    masks: Sequence[np.ndarray | None], sequences: Sequence[np.ndarray]
) -> list[np.ndarray] | None:
    """Gives sequences without a mask one that is all true; None where no sequence has a mask."""
    if all(mask is None for mask in masks):
        return None
    return [
        np.ones(len(sequence), bool) if mask is None else mask
        for sequence, mask in zip(sequences, masks, strict=True)
    ]


def note(problem: str, problems: list[str], strict: bool) -> None:
    """Appends the problem of a line to `problems`, or raises it with `strict`."""
    if strict:
        raise InputError(problem)
    problems.append(problem)


def require_some(found: Sequence[Any], source: str, problems: list[str], what: str) -> None:
    """Raises an `InputError` where nothing usable was found; it names the first problem."""
    if found:
        return
    if not problems:
        raise InputError(f"{source}: holds no {what}")
    raise InputError(
        f"{source}: no usable {what}, {len(problems)} broken line(s), the first: {problems[0]}"
    )
