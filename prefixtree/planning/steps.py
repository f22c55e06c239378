"""`plan_steps`: divides a packed forest into steps that are computed one after another.

A step is a run of packed tokens. It imports the tokens above its first one, which earlier steps
computed. So a trunk is computed once however many steps it takes. Forwards run in the order of the
steps and backwards in the reverse order: the exports of a step get their gradients before its own
backward. A sequence may be longer than a step. Legend: T packed tokens.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from prefixtree import loops
from prefixtree.errors import ForestError
from prefixtree.packing.arguments import at_least_one, check_packed
from prefixtree.packing.layout import PackedForest
from prefixtree.planning.costs import CostModel, ImportCost, run_flops
from prefixtree.planning.parts import Parts

# a step may end early by at most this share of its room
_SLACK = 0.5


@dataclass(frozen=True)
class StepStats:
    """Tokens, memory and work of steps.

    Attributes:
        max_step_tokens: the budget, in own tokens.
        import_weight: own tokens that an imported token counts as.
        own_tokens: tokens that each step computes.
        imported_tokens: tokens that each step imports.
        own_exported_tokens: own tokens of each step that any later step imports.
        exported_tokens: tokens that any later step imports.
        exported_bytes: bytes of these keys and values in all layers, if all are kept from the
            forwards to the backwards.
        again: FLOPs of a second forward of the exported tokens alone, over those of an update of
            the forest in one piece: the cost of the least repetition.
        second_forward: FLOPs of the forwards that a backward of
            `sequence_logprobs(max_step_tokens=)` repeats: those of all steps but the last. Layers
            that are checkpointed in one forward repeat one of all tokens.
        on_host: whether imported rows wait on the host until their layer runs.
        states: the most tokens whose recurrent states wait at once for later steps.
        state_weight: own tokens that the states after a token count as.
    """

    max_step_tokens: int
    import_weight: float
    own_tokens: tuple[int, ...]
    imported_tokens: tuple[int, ...]
    own_exported_tokens: tuple[int, ...]
    exported_tokens: int
    exported_bytes: int
    again: float
    second_forward: float = 0.0
    on_host: bool = False
    states: int = 0
    state_weight: float = 0.0

    @property
    def peak(self) -> float:
        """The most that a step holds, in own tokens; at most max_step_tokens."""
        weighed = np.array(self.own_tokens) + self.import_weight * np.array(self.imported_tokens)
        return float(weighed.max()) + self.state_weight * self.states

    def held_bytes(self, import_cost: ImportCost) -> int:
        """Computes the most bytes of imported and exported rows that wait on the device at once.

        In the backward of a step these are the keys, values and gradients of its imports, and the
        gradients of its exports. In its forward they are the keys and values of both. With
        `on_host` there are none.

        Args:
            import_cost: the bytes per row.

        Returns:
            Bytes, in all layers, in addition to the activations of one step.
        """
        if self.on_host:
            return 0
        states = self.states * import_cost.held_state_bytes
        row, gradient = import_cost.row_bytes, import_cost.gradient_row_bytes
        imported, exported = np.array(self.imported_tokens), np.array(self.own_exported_tokens)
        forward = (imported + exported) * row
        backward = imported * (row + gradient) + exported * gradient
        return import_cost.layers * int(np.maximum(forward, backward).max()) + states

    def __str__(self) -> str:
        tokens = sum(self.own_tokens)
        return (
            f"{tokens:,} tokens in {len(self.own_tokens):,} steps of at most "
            f"{self.max_step_tokens:,}: a step imports at most {max(self.imported_tokens):,} "
            f"tokens, {self.import_weight:.2f} each; {self.exported_tokens:,} tokens are exported "
            f"({self.exported_tokens / tokens:.1%}, {self.exported_bytes / 2**30:,.2f} GiB)"
            f"{f', and states behind {self.states:,} at once' * bool(self.state_weight)}"
            f"{' and imported from the host' if self.on_host else ''}, "
            f"{self.again:.1%} of the work if computed again"
        )


class Steps(Parts):
    """A packed forest divided into steps, which import from earlier ones; see `plan_steps`.

    No token may belong to an earlier step than a token above it, whoever makes it.
    """

    # tokens, memory and work; only of `plan_steps`
    stats: StepStats

    def _init(
        self, packed: PackedForest, start: np.ndarray, part: np.ndarray, num_parts: int
    ) -> None:
        super()._init(packed, start, part, num_parts)
        for bad in np.flatnonzero(self._pieces[:, 2] > self._importer)[:1]:
            token, _, exporter = self._pieces[bad].tolist()
            importer = int(self._importer[bad])
            raise ForestError(
                f"step {importer} imports packed token {token} from step {exporter}, which comes "
                "later; expected every token in the step of the tokens above it, or in a later one"
            )


def plan_steps(
    packed: PackedForest,
    max_step_tokens: int,
    cost_model: CostModel | None = None,
    *,
    import_cost: ImportCost | None = None,
) -> Steps:
    """Divides a packed forest into steps that fit a budget, and computes every token in one step.

    A step ends early at the end of a branch, by up to half of its room, if this saves the next step
    at least as many imported tokens as the step leaves unused. Steps are in the order of forwards.

    Args:
        max_step_tokens: the budget of a step, in own tokens. An imported token counts
            `import_cost.weight`, the bytes of its keys, values and their gradients over those of an
            own token. States that wait for later steps count `import_cost.state_weight` per token.
            A sequence may be longer.
        cost_model: FLOPs per token and visible pair, for the stats.

    Raises:
        ForestError: a path that fits no steps, because of the bytes that they import, or a packed
            forest whose mask holds a subset of the queries.
        ValueError: an import_cost without token_bytes.
    """
    check_packed(packed, "plan_steps")
    max_step_tokens = at_least_one("max_step_tokens", max_step_tokens)
    cost_model = CostModel() if cost_model is None else cost_model
    import_cost = ImportCost() if import_cost is None else import_cost
    weight, host = import_cost.weight, packed.mask.host
    room = max_step_tokens
    while True:
        start, stuck = loops.parts.cut_steps(host.position, host.predictor, room, weight, _SLACK)
        if stuck >= 0:
            break
        states = _most_states(host.predictor, start)
        taken = math.ceil(import_cost.state_weight * states)
        if room + taken <= max_step_tokens:
            break
        # steps leave room for the states; smaller ones may need more of them
        room = max_step_tokens - taken
        if room < 1:
            raise ForestError(
                f"max_step_tokens {max_step_tokens} leaves no room beside the states behind "
                f"{states} tokens, which count {import_cost.state_weight:.1f} each by their bytes: "
                f"take more than {taken + 1}"
            )
    if stuck >= 0:
        above = int(host.position[stuck])
        left = f" ({room} beside the states that wait)" * (room < max_step_tokens)
        raise ForestError(
            f"max_step_tokens {max_step_tokens}{left} is too little for packed token {stuck}, "
            f"whose path has {above + 1} tokens: a step that begins there imports {above}, which "
            f"count {weight:.2f} each by their bytes, {weight * above:.1f} in all; the least "
            f"max_step_tokens that works for this forest is {_least_budget(packed, room, weight)}"
            f"{' and what the states take' * (room < max_step_tokens)}"
        )
    steps = Steps.__new__(Steps)
    steps._init(packed, start, np.arange(len(start)), len(start))
    steps.stats = _stats(steps, max_step_tokens, cost_model, import_cost)
    return steps


def _most_states(predictor: np.ndarray, start: np.ndarray) -> int:
    """The most tokens whose states wait at once, after their step, for later steps."""
    tokens = np.arange(len(predictor))
    step = np.searchsorted(start, tokens, side="right") - 1
    going = predictor >= 0
    before = predictor[going]
    crossing = step[before] < step[going]
    last = np.full(len(predictor), -1)
    # ascending, so that the last one stays
    last[before[crossing]] = step[going][crossing]
    exported = np.flatnonzero(last >= 0)
    change = np.zeros(len(start) + 1, np.int64)
    np.add.at(change, step[exported], 1)
    np.add.at(change, last[exported] + 1, -1)
    return int(np.cumsum(change).max(initial=0))


def plan_any_steps(
    packed: PackedForest,
    max_step_tokens: int,
    cost_model: CostModel | None = None,
    *,
    import_cost: ImportCost | None = None,
) -> Steps:
    """Plans steps as `plan_steps`; with imported rows on the host if a path does not fit."""
    # its ForestError names the least budget with imported rows on the host
    import_cost = ImportCost() if import_cost is None else import_cost
    if not import_cost.on_host:
        with suppress(ForestError):
            return plan_steps(packed, max_step_tokens, cost_model, import_cost=import_cost)
        import_cost = replace(import_cost, on_host=True)
    return plan_steps(packed, max_step_tokens, cost_model, import_cost=import_cost)


def _least_budget(packed: PackedForest, too_little: int, weight: float) -> int:
    """The least budget that reaches every token. A larger one reaches no fewer."""
    host = packed.mask.host
    low, high = too_little, math.ceil(weight * (host.deepest - 1)) + 1
    while high - low > 1:
        middle = (low + high) // 2
        stuck = loops.parts.cut_steps(host.position, host.predictor, middle, weight, _SLACK)[1]
        low, high = (middle, high) if stuck >= 0 else (low, middle)
    return high


def _stats(
    steps: Steps, max_step_tokens: int, cost_model: CostModel, import_cost: ImportCost
) -> StepStats:
    border, exported = steps.exported_runs()
    own_tokens = steps.num_own_tokens
    exporter = np.searchsorted(steps.runs[0], border[:-1][exported], side="right") - 1
    own_exported = np.zeros(len(steps), np.int64)
    np.add.at(own_exported, steps.runs[1][exporter], np.diff(border)[exported])
    flops = run_flops(steps.packed, border, cost_model)
    exported_tokens = int(np.diff(border)[exported].sum())
    linear = cost_model.linear * exported_tokens
    # a forward is a third of an update in matrix products and 1 of 3.5 in attention
    again = linear / 3 + (float(flops[exported].sum()) - linear) / 3.5
    linear = cost_model.linear * int(own_tokens[:-1].sum())
    all_but_last = float(run_flops(steps.packed, steps.runs[0], cost_model)[:-1].sum())
    second = linear / 3 + (all_but_last - linear) / 3.5
    return StepStats(
        max_step_tokens=max_step_tokens,
        import_weight=import_cost.weight,
        own_tokens=tuple(own_tokens.tolist()),
        imported_tokens=tuple((steps.num_rows - own_tokens).tolist()),
        own_exported_tokens=tuple(own_exported.tolist()),
        exported_tokens=exported_tokens,
        exported_bytes=exported_tokens * import_cost.row_bytes * import_cost.layers,
        again=again / float(flops.sum()),
        second_forward=second,
        on_host=import_cost.on_host,
        states=_most_states(steps.packed.mask.host.predictor, steps.runs[0][:-1]),
        state_weight=import_cost.state_weight,
    )
