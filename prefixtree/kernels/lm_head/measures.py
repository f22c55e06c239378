"""Measures: a caller's functions of an edge's logits, as divergences to a teacher or top-k.

The forward keeps no object of the vocabulary's size. The backward computes a chunk's logits again
and calls the function again, under autograd. The divergence to a teacher is such a function too;
the Triton kernels of log p compute it and its gradient in their own passes over a chunk.

Legend: U scored edges, one per temperature, r of them in a block, R in a chunk, V vocabulary, C
columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from prefixtree.errors import UnsupportedError
from prefixtree.kernels.lm_head import eager
from prefixtree.kernels.lm_head.eager import LogitRule
from prefixtree.kernels.operators import uncompiled

# logits in float32 that a measure gets at once; under autograd it holds some eight times as many
_BLOCK = 1 << 25
# a multiple of this number of rows begins at 16 bytes, whatever the vocabulary: kernels that are
# compiled for such addresses take every block
_ALIGNED = 8
# columns of `TeacherRows.kept`
NUM_KEPT = 5
# irrational steps, so that no two logits are equal
_STEPS = 0.6180339887498949, 0.7548776662466927, 0.5698402909980532


@dataclass(frozen=True)
class MeasuredEdges:
    """The scored edges whose logits a measure gets.

    Numbers belong to one forest and one loss mask. `tokens_in`, `Teacher` and
    `SequenceScores.of_edges` compare forests, and find the same edges in another one.

    Attributes:
        edge: int64 [r], rows of `packed.edges(loss_mask)`.
        scored_edge: int64 [r], rows of `SequenceScores.measured_edges`; equal to `edge` if one
            temperature serves all, without sampling masks.
        token: int64 [r], the token ids that the edges score.
        temperature: float32 [r], by which the logits are divided already.
        source: all edges of the call in their forest (`scoring.forest_edges.ForestEdges`), by which
            they are found in others. None for edges that were made by hand.
    """

    edge: torch.Tensor
    scored_edge: torch.Tensor
    token: torch.Tensor
    temperature: torch.Tensor
    source: Any = None

    @uncompiled
    def tokens_in(self, packed: Any) -> torch.Tensor:
        """Finds the packed tokens that these edges score.

        `packed.pack_values(values)[edges.tokens_in(packed)]` are the values of these tokens.

        Args:
            packed: the packed forest that is scored, or another one with its scored edges: that of
                a whole plan, say, while one micro-batch is scored.

        Returns:
            int64 [r], on the edges' device.

        Raises:
            ForestError: a forest without one of the scored edges, or with one more than once.
            ValueError: edges that were made by hand.
        """
        of_all: torch.Tensor = source_of(self).tokens_in(packed, self.edge.device)
        return of_all[self.scored_edge]


def source_of(edges: MeasuredEdges) -> Any:
    """Returns all edges of the call to which these belong; ValueError if made by hand."""
    if edges.source is None:
        raise ValueError(
            "these MeasuredEdges were made by hand and do not say of which forest they are: take "
            "those that a measure is called with"
        )
    return edges.source


#: (logits [r, V], edges) -> [r, C]. The logits are float32, after the family's scale and softcap,
#: divided by the temperature; r may be 0.
Measure = Callable[[torch.Tensor, MeasuredEdges], torch.Tensor]


def measure_bytes(rows: int, vocabulary: int) -> int:
    """The bytes of sixteen tensors of a block's size, which add to the chunk's logits."""
    return 16 * 4 * min(_BLOCK, rows * vocabulary)


def _some(edges: MeasuredEdges, which: Any) -> MeasuredEdges:
    columns = "edge", "scored_edge", "token", "temperature"
    return replace(edges, **{name: getattr(edges, name)[which] for name in columns})


@dataclass(frozen=True)
class TeacherRows:
    """A teacher's part in a chunk, for the kernels."""

    # of the `Divergence`
    beta: float
    # [R, V], of the teacher's lm_head, contiguous; and the rule from it to logits
    output: torch.Tensor
    rule: LogitRule
    # float32 [R, 5], written by the forward for the backward: the row's sum in the gradient; of the
    # model's and of the teacher's logits, the largest and the log of the sum of exponentials less
    # it
    kept: torch.Tensor
    # float32 [R, 1], written with the divergences, in the backward too; their gradient, None in the
    # forward
    value: torch.Tensor
    grad: torch.Tensor | None = None


@dataclass(frozen=True)
class Divergence:
    """The generalised Jensen-Shannon divergence to a teacher, a measure [r, 1], in nats.

    beta is 0 for KL(teacher || model) and 1 for KL(model || teacher). Between them are the
    divergences to the mixture beta teacher + (1 - beta) model, weighed likewise.
    """

    beta: float
    # edges -> output of the teacher's lm_head, [r, V], no gradients
    output: Callable[[MeasuredEdges], torch.Tensor]
    # turns that output into logits
    rule: LogitRule
    # both distributions are of this many first tokens; None: of all
    vocabulary: int | None = None

    def __call__(self, logits: torch.Tensor, edges: MeasuredEdges) -> torch.Tensor:
        t, s = self.log_p(edges), logits[:, : self.vocabulary].log_softmax(-1)
        sizes = t.shape[-1], s.shape[-1]
        if sizes[0] != sizes[1] or self.vocabulary not in (None, sizes[1]):
            part = "" if self.vocabulary is None else f" of the first {self.vocabulary}"
            raise ValueError(
                f"the teacher gives {sizes[0]} logits per token and the model {sizes[1]}{part}: "
                "they must have one vocabulary; if their lm_heads are padded otherwise, name the "
                f"common part: divergence(vocabulary={min(sizes)})"
            )
        # less terms that sum to 0, so that equal logits have a gradient of exactly 0
        apart = s.exp() - t.exp()
        if self.beta == 0:
            terms = _times(t.exp(), t - s) + apart
        elif self.beta == 1:
            terms = _times(s.exp(), s - t) - apart
        else:
            # -inf - -inf would be NaN, and so would its gradient
            t, s = (x.clamp(min=torch.finfo(x.dtype).min / 2) for x in (t, s))
            m = torch.logaddexp(t + math.log(self.beta), s + math.log1p(-self.beta))
            terms = self.beta * t.exp() * (t - m) + (1 - self.beta) * s.exp() * (s - m)
        return terms.sum(-1, keepdim=True)

    def log_p(self, edges: MeasuredEdges) -> torch.Tensor:
        """Computes the teacher's log-probabilities, as `Teacher.log_p`."""
        with torch.no_grad():
            x = self.output(edges)[:, : self.vocabulary]
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            return (self.rule.apply(x) / edges.temperature[:, None]).log_softmax(-1)

    def rows(
        self,
        edges: MeasuredEdges,
        value: torch.Tensor,
        kept: torch.Tensor | None = None,
        grad: torch.Tensor | None = None,
    ) -> TeacherRows:
        """Makes the `TeacherRows` of a chunk's edges; the backward gives `kept` and `grad`."""
        if kept is None:
            kept = value.new_empty(len(value), NUM_KEPT)
        output = self.output(edges)[:, : self.vocabulary].contiguous()
        return TeacherRows(self.beta, output, self.rule, kept, value, grad)


def _times(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Computes p x; 0 where p is 0, whatever x."""
    return p * x.masked_fill(p == 0, 0)


class BoundMeasure:
    """A measure with the edges of one forward, [U]; `dtype` is that of values and of its logits."""

    def __init__(
        self, measure: Measure, edges: MeasuredEdges, rule: LogitRule, dtype: torch.dtype
    ) -> None:
        self._measure, self._edges, self._rule, self._dtype = measure, edges, rule, dtype
        # the forward's values, by the first edge of a block; whether the backward's differ
        self._found: dict[int, torch.Tensor] = {}
        self._differs: torch.Tensor | None = None
        # `TeacherRows.kept` of a chunk, by its first edge
        self._kept: dict[int, torch.Tensor] = {}

    def score(
        self, kernels: Any, x: torch.Tensor, at: int, rest: tuple[Any, ...], out: torch.Tensor
    ) -> None:
        """Writes log p of a chunk, by `kernels.score`, and the measure's values, out [R, C].

        x [R, V] is the lm_head's output, overwritten; `at` the chunk's first edge; `rest` the
        arguments of `score` after x.
        """
        measure = self._measure
        if (
            not isinstance(measure, Divergence)
            or kernels is eager
            # the kernels take the model's logits whole
            or measure.vocabulary not in (None, x.shape[1])
        ):
            self.write(x, at, out)
            kernels.score(x, *rest)
            return
        teacher = measure.rows(self._at(at, len(x)), out)
        kernels.score(x, *rest, teacher)
        self._kept[at] = teacher.kept
        self._compare(out, at, False)

    def gradients(
        self, kernels: Any, x: torch.Tensor, at: int, rest: tuple[Any, ...], grad: torch.Tensor
    ) -> None:
        """Replaces x by the gradient of log p (by `kernels.gradient`), the entropy and the values.

        x [R, V] is the lm_head's output; `at` the chunk's first edge; `rest` the arguments of
        `gradient` between x and the tensor that it writes; grad [R, C] of the values.
        """
        grad = grad.to(self._dtype)
        if isinstance(self._measure, Divergence) and at in self._kept and kernels is not eager:
            value = torch.empty_like(grad, memory_format=torch.contiguous_format)
            edges = self._at(at, len(x))
            teacher = self._measure.rows(edges, value, self._kept[at], grad.contiguous())
            kernels.gradient(x, *rest, x, teacher)
            self._compare(value, at, True)
            return
        if self._kept.pop(at, None) is not None:
            # the forward ran through kernels that are not here now, and values of a whole chunk
            # cannot be compared with those of a block
            self._found.pop(at)
        target, temperature, rule, out, of_out = rest
        for block in self.blocks(*x.shape):
            of_values = self.gradient(x[block], at + block.start, grad[block])
            values = target[block], temperature[block], rule, out[block], of_out[block]
            kernels.gradient(x[block], *values, x[block])
            if of_values is not None:
                x[block] += of_values

    def blocks(self, rows: int, vocabulary: int) -> Iterator[slice]:
        """Cuts the rows of a chunk into those that a measure gets at once."""
        rows_at_once = max(1, _BLOCK // vocabulary)
        rows_at_once = max(_ALIGNED, rows_at_once // _ALIGNED * _ALIGNED)
        return (slice(at, min(at + rows_at_once, rows)) for at in range(0, rows, rows_at_once))

    def of(self, x: torch.Tensor, at: int) -> torch.Tensor:
        """Computes the values [r, C] of x [r, V], for the edges from `at` on; differentiable."""
        # the second call for a block, in the backward, is compared with the first
        edges = self._at(at, len(x))
        if self._rule != LogitRule():
            x = self._rule.apply(x.to(self._dtype))
        # one pass from half precision
        z = (x / edges.temperature[:, None].to(self._dtype)).to(self._dtype)
        values = self._call(z, edges)
        self._compare(values.detach(), at, values.requires_grad)
        return values

    def _at(self, at: int, rows: int) -> MeasuredEdges:
        return _some(self._edges, slice(at, at + rows))

    def _compare(self, values: torch.Tensor, at: int, is_again: bool) -> None:
        """Compares the values of a block's second call with those of the first."""
        first_values = self._found.get(at)
        if first_values is None:
            # values may be a view of the logits, which would then stay in memory
            self._found[at] = values.clone()
        elif is_again:
            differs = ~torch.isclose(
                values, first_values, rtol=1e-3, atol=1e-4, equal_nan=True
            ).all()
            self._differs = differs if self._differs is None else self._differs | differs

    def write(self, x: torch.Tensor, at: int, out: torch.Tensor) -> None:
        """Writes out [r, C], block by block."""
        for block in self.blocks(*x.shape):
            out[block] = self.of(x[block], at + block.start)

    def gradient(self, x: torch.Tensor, at: int, grad: torch.Tensor) -> torch.Tensor | None:
        """Computes the gradient [r, V] of x for grad [r, C]; None if x changes no value."""
        with torch.enable_grad():
            # rounded once, when it is added to others
            leaf = x.detach().to(self._dtype, copy=True).requires_grad_()
            values = self.of(leaf, at)
        if not values.requires_grad:
            return None
        return torch.autograd.grad(values, leaf, grad)[0]

    def check_repeated(self) -> None:
        """Raises a RuntimeError after a backward in which the function gave other values."""
        if self._differs is not None and bool(self._differs):
            raise RuntimeError(
                "the measure gave other values in the backward than in the forward, so gradients "
                "would be those of another loss: it draws, or a tensor that it reads has changed "
                "since; draw and copy before the call"
            )

    def check(self, vocabulary: int) -> int:
        """Finds C with made-up logits; refuses values that are drawn or mix edges or tensors."""
        device = self._edges.edge.device
        steps = torch.tensor(_STEPS, dtype=torch.float64)[:, None]
        made_up = 8 * (steps * torch.arange(1, vocabulary + 1) % 1) - 4
        z = made_up.to(device, self._dtype)
        probes = _some(self._edges, [0, -1]) if len(self._edges.edge) else self._edges
        count = len(probes.edge)
        if count == 0:
            return self._probed(z[:0], probes).shape[1]
        if isinstance(self._measure, Divergence):
            # it treats rows alone, so only the vocabulary is left to check
            return self._call(z[:2], probes).shape[1]
        generators = _generators(device)
        values = self._probed(z[:2], probes)
        if any(not torch.equal(a, b) for a, b in zip(generators, _generators(device), strict=True)):
            raise UnsupportedError(
                "the measure draws random numbers, and the backward would draw others: draw them "
                "before the call, and index them by edges.edge"
            )
        # as many rows, since products of another number of rows may round otherwise
        beside_another = self._probed(z[::2], probes)
        alone = self._probed(z[1:2], _some(probes, slice(1, 2)))
        is_same = torch.allclose(values[0], beside_another[0], 1e-3, 1e-5, equal_nan=True)
        if not is_same or not torch.allclose(values[1], alone[0], 0.1, 0.05, equal_nan=True):
            raise UnsupportedError(
                "the measure gives an edge another value when other edges stand beside it, or when "
                "it is called again: edges come in chunks, so it must treat each row alone and "
                "draw nothing; reduce over tokens outside"
            )
        return values.shape[1]

    def _probed(self, z: torch.Tensor, edges: MeasuredEdges) -> torch.Tensor:
        """Computes the values at these logits, and refuses other tensors that need a gradient."""
        if not torch.is_grad_enabled():
            return self._call(z, edges)
        leaf = z.clone().requires_grad_()
        # not the leaf itself, which in-place arithmetic would refuse
        values = self._call(leaf * 1, edges)
        leaves = [t for t in _leaves(values.grad_fn) if t is not leaf]
        if leaves:
            raise UnsupportedError(
                f"the measure uses a tensor of shape {list(leaves[0].shape)} that requires a "
                "gradient, and only the logits get one: compute it under torch.no_grad(), detach "
                "it, or compute that part of the loss from the values"
            )
        return values.detach()

    def _call(self, z: torch.Tensor, edges: MeasuredEdges) -> torch.Tensor:
        # the same in every forward and backward, whatever surrounds them
        with torch.autocast(z.device.type, enabled=False):
            values: Any = self._measure(z, edges)
        if not isinstance(values, torch.Tensor):
            returned = f"a {type(values).__name__}"
        elif values.ndim != 2 or len(values) != len(z) or not values.is_floating_point():
            returned = f"{list(values.shape)} of {values.dtype}"
        else:
            return values.to(self._dtype)
        raise ValueError(
            f"a measure must return floating point numbers [r, C] for the r edges of its logits "
            f"[r, V] (add [:, None] to one number per edge), got {returned} for {list(z.shape)}"
        )


def _generators(device: torch.device) -> list[torch.Tensor]:
    """Reads the states of the generators that a draw would move."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def _leaves(node: Any) -> list[torch.Tensor]:
    """Lists the tensors to which a graph adds gradients."""
    seen, stack, leaves = set[Any](), [node], list[torch.Tensor]()
    while stack:
        at = stack.pop()
        if at is None or at in seen:
            continue
        seen.add(at)
        if hasattr(at, "variable"):
            leaves.append(at.variable)
        stack += [parent for parent, _ in at.next_functions]
    return leaves
