"""Facts about layers as far as they were measured (`recorder`): bytes that they hold and work with.

Layers of one kind share what is known of them, so one micro-batch whose layers have different modes
tells of all modes. Later ones are only watched: a peak above the plan widens the margin.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd import Variable

from prefixtree.models.changes import changing
from prefixtree.models.layers import layers_of
from prefixtree.planning.model_cost import model_cost
from prefixtree.recompute.layers import MODES, Mode
from prefixtree.recompute.memory import LayerMemory, ModelMemory
from prefixtree.recompute.plan import PartWork, RecomputePlan, Work, added_by_rows, layer_tokens
from prefixtree.recompute.recorder import Meter, NotMeasuredError, Recorder, Run, norm_of

# a forward of this many times the measured tokens measures layers anew
_MORE = 2
_Bytes = tuple[float, float]


@dataclass(frozen=True)
class MeasuredPlan(RecomputePlan):
    """A plan whose forward and backward are measured."""

    # the part that runs
    work: Work | PartWork | None = field(default=None, compare=False)
    # whether nothing was known of the layers before
    first: bool = False


# ---- facts ---------------------------------------------------------------------------------------


class _Line:
    """Bytes for a number of tokens, a line through the fewest and the most measured tokens."""

    # `fixed` bytes do not grow with the tokens, as far as one number of tokens tells

    def __init__(self, fixed: float = 0.0) -> None:
        self._fixed = fixed
        self._points: dict[int, float] = {}

    @property
    def most_tokens(self) -> int:
        return max(self._points)

    def add(self, tokens: int, size: float) -> None:
        self._points[tokens] = max(0.0, float(size))
        ends = {min(self._points), max(self._points)}
        self._points = {at: self._points[at] for at in ends}

    def line(self) -> _Bytes:
        """[bytes per token, bytes whatever the number of tokens]."""
        (few, a), (many, b) = min(self._points.items()), max(self._points.items())
        if many < _MORE * few or b <= a:
            fixed = min(self._fixed, b / 2)
            return (b - fixed) / many, fixed
        slope = (b - a) / (many - few)
        return slope, max(0.0, a - slope * few)


class Learnt:
    """Facts about a model's layers, as it trains.

    Attributes:
        kinds: of each layer; equal for layers that hold as much.
        frozen: the number of first layers that no gradient reaches.
        margin: bytes by which a plan was exceeded.
        cost: of a token.
        tokens: of the largest measured micro-batch; 0 if there were only probes.
    """

    def __init__(self, causal_lm: Any, element_bytes: int) -> None:
        layers = layers_of(causal_lm)
        self.kinds = kinds_of(layers)
        self.frozen = 0
        self.margin = 0.0
        self.tokens = 0
        self._element_bytes = element_bytes
        # from the configuration, as weights may be quantised or sharded
        self.cost = model_cost(causal_lm.config, element_bytes)
        if len(self.cost.layers) != len(layers):
            raise NotMeasuredError(
                f"what the layers of {causal_lm.config.model_type} compute is not known one by one"
            )
        self._tied = _tied(causal_lm)
        # gradients of weights on their way
        trained = ((p.nbytes for p in x.parameters() if p.requires_grad) for x in layers)
        self._fixed = dict(zip(self.kinds, (max(x, default=0) for x in trained), strict=True))
        self._lines: dict[Hashable, _Line] = {}
        # a forward before its backward: bytes that were there, and bytes that it may come to
        self._watched: tuple[float, float, float] | None = None

    # ---- measurements ----------------------------------------------------------------------------

    def add(self, run: Run, work: Work | PartWork | None = None) -> None:
        """Adds the measurements of a run: of `work` if it imported rows, or of a whole forest."""
        count = len(run.modes)
        self.frozen = run.frozen if run.frozen < count else len(self.kinds)
        rows = {m: added_by_rows(self.cost, work, m) for m in MODES}
        for place, kind in enumerate(self.kinds[:count]):
            tokens, mode = int(run.tokens[place]), run.modes[place]
            held, working = run.held[place], run.working[place]
            if place < run.frozen:
                self._add((kind, None), tokens, working)
                continue
            output_bytes = self.cost.hidden * self._element_bytes * tokens
            of_held, of_working = (x[place] for x in rows[mode])
            # a layer holds at least its output
            self._add((kind, mode, "held"), tokens, max(output_bytes, held - of_held))
            fixed = self._fixed[kind]
            self._add((kind, mode, "working"), tokens, working - of_working, fixed)
        fewest_tokens = int(run.tokens.min())
        self._add("before", fewest_tokens, run.before)
        if len(run.held) > count:
            self._add("norm", fewest_tokens, run.working[count])

    def _add(self, name: Hashable, tokens: int, size: float, fixed: float = 0.0) -> None:
        self._lines.setdefault(name, _Line(fixed)).add(tokens, size)

    def knows(self, modes: Sequence[Mode]) -> bool:
        """Whether each kind of layers was measured in each of these modes."""
        return bool(self._lines) and not any(
            self._missing(kind, mode) for kind in set(self.kinds[self.frozen :]) for mode in modes
        )

    def _missing(self, kind: Hashable, mode: Mode) -> bool:
        return (kind, mode, "held") not in self._lines

    def tells(self, modes: Sequence[Mode], tokens: int) -> bool:
        """Whether a run of layers in these modes would tell something new."""
        lines = self._lines
        pairs = list(zip(self.kinds, modes, strict=True))[self.frozen :]
        return any(
            self._missing(*pair) or lines[*pair, "held"].most_tokens * _MORE < tokens
            for pair in pairs
        )

    # ---- modes to measure ------------------------------------------------------------------------

    def first_modes(self, compiled: bool) -> tuple[Mode, ...]:
        """The safest modes that tell of all: layers recompute all, but the last of each kind."""
        # bytes that these keep are free again when others recompute; each mode of compiled layers
        # is another graph, so the least one waits until a plan may want it
        modes: list[Mode] = ["all"] * len(self.kinds)
        for kind in dict.fromkeys(self.kinds):
            places = [i for i, other in enumerate(self.kinds) if other == kind]
            if len(places) > 1:
                modes[places[-1]] = "nothing"
            if len(places) > 2 and not compiled:
                modes[places[-2]] = "all_but_attention"
        return tuple(modes)

    def needs_at_most(self, tokens: int) -> int:
        """A bound of the bytes that `first_modes` take of a model of which nothing is known."""
        # hidden states of all layers, and 40 times as many numbers per layer that is alive
        # layers of Qwen3-0.6B, 8B and 30B-A3B keep 31 to 37 times as many, recomputed ones included
        alive = 1 + len(set(self.kinds))
        return (len(self.kinds) + 40 * alive) * self.cost.hidden * self._element_bytes * tokens

    def more_modes(
        self, plan: Sequence[Mode], compiled: bool, fits: Callable[[Sequence[Mode]], bool]
    ) -> tuple[Mode, ...]:
        """A plan's modes, with an unknown mode in one layer of each kind as far as that fits."""
        modes = list(plan)
        if compiled and set(modes) == {"nothing"}:
            return tuple(modes)
        taken: set[int] = set()
        for kind in dict.fromkeys(self.kinds[self.frozen :]):
            for mode in MODES[::-1]:
                places = [
                    place
                    for place in range(self.frozen, len(modes))
                    if self.kinds[place] == kind and place not in taken
                ]
                if not self._missing(kind, mode) or not places:
                    continue
                tried = [*modes]
                tried[places[-1]] = mode
                if fits(tried):
                    modes = tried
                    taken.add(places[-1])
        return tuple(modes)

    # ---- the memory ------------------------------------------------------------------------------

    def memory(self) -> ModelMemory | None:
        """The memory model of the known layers; None if nothing is known of a kind of layers."""
        # a mode that was not measured counts as the most that it may take: a layer that recomputes
        # all has all its activations when its backward begins
        by_kind: dict[Hashable, dict[Mode, LayerMemory]] = {}
        for kind in dict.fromkeys(self.kinds[self.frozen :]):
            known = {m: self._layer(kind, m) for m in MODES if not self._missing(kind, m)}
            if not known:
                return None
            by_kind[kind] = self._all_modes(known)
        layers: dict[Mode, tuple[LayerMemory, ...]] = {}
        for mode in MODES:
            layers[mode] = tuple(
                LayerMemory((0.0, 0.0), self._line((kind, None)))
                if place < self.frozen
                else by_kind[kind][mode]
                for place, kind in enumerate(self.kinds)
            )
        cost = self.cost
        return ModelMemory(
            layers=layers,
            before=self._line("before")[0],
            # the norm's input in float32, and its output
            after=(4 + cost.element_bytes) * cost.hidden,
            cost=cost,
            norm=self._line("norm")[0],
            tied=self._tied,
            frozen=self.frozen,
        )

    def _line(self, name: Hashable) -> _Bytes:
        return self._lines[name].line() if name in self._lines else (0.0, 0.0)

    def _layer(self, kind: Hashable, mode: Mode) -> LayerMemory:
        return LayerMemory(self._line((kind, mode, "held")), self._line((kind, mode, "working")))

    def _all_modes(self, known: dict[Mode, LayerMemory]) -> dict[Mode, LayerMemory]:
        if "all" in known:
            of_all = known["all"]
        else:
            of_mode = next(iter(known.values()))
            output_bytes = self.cost.hidden * self._element_bytes
            of_all = LayerMemory((output_bytes, 0.0), _sum(of_mode.held, of_mode.working))
        most_of_nothing = LayerMemory(_sum(of_all.held, of_all.working), of_all.working)
        of_nothing = known.get("nothing", most_of_nothing)
        middle = LayerMemory(of_nothing.held, of_all.working)
        return {"all": of_all, "all_but_attention": middle, "nothing": most_of_nothing, **known}

    # ---- forwards that run -----------------------------------------------------------------------

    @contextmanager
    def measuring(self, causal_lm: Any, meter: Meter, plan: MeasuredPlan) -> Iterator[None]:
        """Measures a forward while open; the facts are known after its backward."""
        assert plan.work is not None
        tokens = np.broadcast_to(layer_tokens(self.cost, plan.work), (len(self.kinds),))

        def done(recorder: Recorder) -> None:
            if (run := recorder.run(tokens, plan.modes)) is not None:
                self.add(run, plan.work)
                self.tokens = max(self.tokens, int(tokens.max()))

        with Recorder(causal_lm, meter, done).open():
            yield

    @contextmanager
    def watching(self, causal_lm: Any, meter: Meter, planned: float) -> Iterator[None]:
        """Watches a forward, while open, that was planned to take so many additional bytes."""
        # after its backward, or before the next forward, the margin grows if it took more
        # the last forward may have died in its backward
        self.look(meter)
        self._watched = meter.bytes, meter.most, planned

        def end(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(begin)

        def begin(gradient: torch.Tensor) -> None:
            Variable._execution_engine.queue_callback(partial(self.look, meter))

        with changing(causal_lm) as changes:
            if (norm := norm_of(causal_lm)) is not None:
                changes.hook(norm.register_forward_hook, end)
            yield

    def look(self, meter: Meter) -> None:
        """Compares the peak with the plan, unless others took more before and hide it."""
        if self._watched is not None:
            start, most, planned = self._watched
            self._watched = None
            if meter.most > most:
                self.margin = max(self.margin, meter.most - start - planned)

    def exceeded(self, used: float, planned: float) -> None:
        """Grows the margin after a forward that ran out of memory."""
        self._watched = None
        self.margin = max(self.margin + planned / 20, used - planned)


def _sum(one: _Bytes, other: _Bytes) -> _Bytes:
    return one[0] + other[0], one[1] + other[1]


def _tied(causal_lm: Any) -> int:
    """Bytes of the weight that lm_head and embedding share."""
    head = causal_lm.get_output_embeddings()
    weight = None if head is None else head.weight
    if weight is None or weight is not causal_lm.get_input_embeddings().weight:
        return 0
    return int(weight.nbytes)


def kinds_of(layers: Sequence[nn.Module]) -> tuple[Hashable, ...]:
    """Names kinds of layers: class, configured type and parameters. Equal ones hold as much."""
    # a layer that no gradient reaches may hold less
    return tuple(
        (
            type(layer).__name__,
            getattr(layer, "layer_type", None),
            tuple(
                (name, tuple(p.shape), p.dtype, p.requires_grad)
                for name, p in layer.named_parameters()
            ),
        )
        for layer in layers
    )


_learnt: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Learnt]] = weakref.WeakKeyDictionary()


def learnt_of(causal_lm: Any, element_bytes: int, *facts: Hashable) -> Learnt:
    """Finds what is known of layers as they are now, by facts such as dtypes and device."""
    kinds = kinds_of(layers_of(causal_lm))
    experts = getattr(causal_lm.config, "_experts_implementation", None)
    state = kinds, element_bytes, experts, *facts
    of_model = _learnt.setdefault(causal_lm, {})
    if state not in of_model:
        of_model[state] = Learnt(causal_lm, element_bytes)
    return of_model[state]


@contextmanager
def learning(
    learnt: Learnt, causal_lm: Any, meter: Meter, plan: RecomputePlan, planned: float
) -> Iterator[None]:
    """Measures or watches a forward while open; it may take `planned` additional bytes."""
    start = meter.bytes
    try:
        with (
            learnt.measuring(causal_lm, meter, plan)
            if isinstance(plan, MeasuredPlan)
            else learnt.watching(causal_lm, meter, planned)
        ):
            yield
    except torch.OutOfMemoryError as problem:
        used = meter.most - start
        learnt.exceeded(used, planned)
        problem.add_note(
            f"recompute='auto' planned {planned / 2**30:.1f} GiB for this forward and its backward "
            f"beside what was there, and {used / 2**30:.1f} GiB were taken; the next plan leaves "
            f"{learnt.margin / 2**30:.1f} GiB more"
        )
        raise
