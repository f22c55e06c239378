"""Log-probabilities and entropies of a linear lm_head, chunk by chunk of rows x vocabulary.

Legend: E rows to score, V vocabulary, d hidden size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from prefixtree._numbers import integer
from prefixtree.errors import UnsupportedError
from prefixtree.kernels import runtime
from prefixtree.kernels.lm_head import eager
from prefixtree.kernels.lm_head.eager import (
    LogitRule,
    VocabularySlice,
    check_statistics,
    write_statistics,
)
from prefixtree.kernels.lm_head.measures import BoundMeasure, Measure, MeasuredEdges


@dataclass(frozen=True)
class ScoreOptions:
    """The way in which rows of logits are scored, and the result's columns."""

    # columns are log p, the entropy, the statistics (without gradients) and those of a measure

    with_entropy: bool = False
    statistics: Sequence[str] = ()
    # rows whose logits are in memory at once; None: with the Triton kernels as many as keep the
    # logits near 512 MiB, without them rows x vocabulary near 2^26 (2^22 on a CPU)
    chunk_size: int | None = None
    rule: LogitRule = field(default_factory=LogitRule)
    measure: Measure | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "statistics", check_statistics(self.statistics))
        if self.chunk_size is not None:
            rows = integer("chunk_size", self.chunk_size, 1, or_none=True)
            object.__setattr__(self, "chunk_size", rows)
        if self.measure is not None and not callable(self.measure):
            raise TypeError(
                "measure must be a function of logits [r, V] and edges that returns [r, C], got "
                f"{type(self.measure).__name__}"
            )

    @property
    def with_gradients(self) -> int:
        """The number of columns before the statistics."""
        return 1 + self.with_entropy

    @property
    def columns(self) -> int:
        """The number of columns before those of a measure."""
        return self.with_gradients + len(self.statistics)


# logits held at once, in addition to float32 copies of them. On a CPU these are blocks of 16 MiB,
# which malloc reuses. Larger blocks come fresh from the operating system for every operation,
# measured 4x slower
_CHUNK, _CPU_CHUNK = 1 << 26, 1 << 22
# bytes of logits at once if no copies of them are held: each chunk's part of the weight's gradient,
# [V, d], is added to a float32 sum, which takes as long as a product of 400 rows (1.2 ms on an H200
# with V 151,936 and d 4,096)
_FUSED_BYTES = 1 << 29

#: int64 [E] twice, `MeasuredEdges.edge` and `.scored_edge`; and `.source`.
EdgeNumbers = tuple[torch.Tensor, torch.Tensor, Any]


def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    temperature: torch.Tensor,
    options: ScoreOptions,
    vocabulary: VocabularySlice | None = None,
    accumulate: torch.dtype = torch.float32,
    numbers: EdgeNumbers | None = None,
) -> torch.Tensor:
    """Computes log softmax(rule(hidden weight^T + bias) / temperature) at targets, and the entropy.

    The logits are computed in hidden's dtype (under autocast in its dtype), as an eager lm_head
    does; everything after them, and the sum of the weight's gradient, in `accumulate`, float32 or
    float64. The backward computes the logits again, chunk by chunk.

    hidden is [E, d], weight [V, d], bias [V], target int64 [E], and temperature float32 [E] divides
    the logits. Returns [E, 1], or [E, 2] with the entropy, in nats; then a column per statistic,
    and those of a measure.

    With a `vocabulary`, weight and bias are a rank's part. All ranks then give the same hidden
    states, targets, temperatures and chunk, and get the same scores. The gradient of hidden is
    whole on every rank, that of the weight is the rank's own. It takes no statistics and no
    measure.
    """
    if vocabulary is not None and options.measure is not None:
        raise UnsupportedError(
            "a measure needs whole rows of logits, and this lm_head is spread over ranks"
        )
    if vocabulary is not None and options.statistics:
        raise ValueError(
            "statistics need whole rows of logits, and this lm_head is spread over ranks: gather "
            f"its output, or ask for none of {', '.join(options.statistics)}"
        )
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    # ranks exchange sums per chunk, so all of them cut the rows alike
    width = weight.shape[0] if vocabulary is None else vocabulary.widest
    rows = options.chunk_size or chunk_rows(width, hidden.device)
    fused = _scorer(hidden, vocabulary, accumulate) not in (eager, vocabulary)
    if fused and options.chunk_size is None:
        rows = max(1, _FUSED_BYTES // (weight.shape[0] * dtype.itemsize))
    measure, columns = _bound(options, target, temperature, numbers, accumulate), 0
    if measure is not None:
        columns = measure.check(weight.shape[0])
    scores, statistics, measured = _LinearLogprobs.apply(
        *(hidden, weight, bias, target, temperature, options, rows, dtype, vocabulary, accumulate),
        *(measure, columns),
    )
    return torch.cat([scores, statistics, measured], 1) if options.statistics or columns else scores


def _bound(
    options: ScoreOptions,
    target: torch.Tensor,
    temperature: torch.Tensor,
    numbers: EdgeNumbers | None,
    dtype: torch.dtype,
) -> BoundMeasure | None:
    if options.measure is None:
        return None
    all_edges = torch.arange(len(target), device=target.device)
    edge, scored_edge, source = (all_edges, all_edges, None) if numbers is None else numbers
    edges = MeasuredEdges(
        edge.to(target.device), scored_edge.to(target.device), target, temperature, source
    )
    return BoundMeasure(options.measure, edges, options.rule, dtype)


def chunk_rows(vocabulary: int, device: torch.device) -> int:
    """The default number of rows per chunk."""
    return max(1, (_CPU_CHUNK if device.type == "cpu" else _CHUNK) // vocabulary)


def lm_head_logprobs(
    lm_head: Callable[[torch.Tensor], torch.Tensor],
    vocabulary: int,
    hidden: torch.Tensor,
    target: torch.Tensor,
    temperature: torch.Tensor,
    options: ScoreOptions,
    numbers: EdgeNumbers | None = None,
) -> torch.Tensor:
    """Computes `linear_logprobs` for an lm_head with an adapter, quantised or sharded."""

    measure = _bound(options, target, temperature, numbers, torch.float32)
    if measure is not None:
        measure.check(vocabulary)

    def score(h: torch.Tensor, t: torch.Tensor, temp: torch.Tensor, at: int) -> torch.Tensor:
        raw_logits = lm_head(h)
        z = options.rule.apply(raw_logits.float()) / temp[:, None]
        logp = F.log_softmax(z, -1)
        columns = [logp.gather(1, t[:, None])[:, 0]]
        if options.with_entropy:
            columns.append(-(logp.exp() * logp.clamp(min=eager.LEAST)).sum(-1))
        statistics = z.new_empty(len(z), len(options.statistics))
        write_statistics(raw_logits, t, temp, options.rule, options.statistics, statistics)
        results = [torch.stack(columns, -1), statistics]
        if measure is not None:
            results.append(measure.of(raw_logits, at))
            # the second call for this chunk is in its backward
            measure.check_repeated()
        return torch.cat(results, 1)

    rows = options.chunk_size or chunk_rows(vocabulary, hidden.device)
    # an empty batch still runs the lm_head once, so that wrappers see it take part
    parts = zip(hidden.split(rows), target.split(rows), temperature.split(rows), strict=True)
    # values that are compared must all be computed again
    with set_checkpoint_early_stop(measure is None):
        scores = [
            checkpoint(score, *part, i * rows, use_reentrant=False) for i, part in enumerate(parts)
        ]
    return torch.cat(scores)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        temperature: torch.Tensor,
        options: ScoreOptions,
        rows: int,
        dtype: torch.dtype,
        vocabulary: VocabularySlice | None,
        accumulate: torch.dtype,
        measure: BoundMeasure | None,
        columns: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        out = hidden.new_empty(hidden.shape[0], options.with_gradients, dtype=accumulate)
        statistics = out.new_empty(len(out), len(options.statistics))
        measured = out.new_empty(len(out), columns)
        # a temperature for all rows may come expanded
        target, temperature = target.contiguous(), temperature.to(accumulate).contiguous()
        kernels = _scorer(hidden, vocabulary, accumulate)
        with torch.autocast(hidden.device.type, enabled=False):
            weights = weight.to(dtype), None if bias is None else bias.to(dtype)
            for at in range(0, hidden.shape[0], rows):
                part = slice(at, at + rows)
                logits = F.linear(hidden[part].to(dtype), *weights)
                row_arguments = (target[part], temperature[part], options.rule)
                # statistics first: the logits are overwritten as they are scored
                write_statistics(logits, *row_arguments, options.statistics, statistics[part])
                if measure is None:
                    kernels.score(logits, *row_arguments, out[part])
                else:
                    measure.score(kernels, logits, at, (*row_arguments, out[part]), measured[part])
                # freed before the next chunk's are made
                del logits
        ctx.save_for_backward(hidden, weight, bias, target, temperature, out)
        ctx.rule, ctx.rows, ctx.dtype, ctx.vocabulary = options.rule, rows, dtype, vocabulary
        ctx.measure = measure
        ctx.mark_non_differentiable(statistics)
        return out, statistics, measured

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad: torch.Tensor, _: Any, of_measured: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, target, temperature, out = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad = grad.to(out.dtype).contiguous()
        dhidden = torch.empty_like(hidden) if need_hidden else None
        dweight = torch.zeros_like(weight, dtype=out.dtype) if need_weight else None
        dbias = torch.zeros_like(bias, dtype=out.dtype) if need_bias else None
        vocabulary = ctx.vocabulary
        kernels = _scorer(hidden, vocabulary, out.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            weights = weight.to(ctx.dtype), None if bias is None else bias.to(ctx.dtype)
            for at in range(0, hidden.shape[0], ctx.rows):
                part = slice(at, at + ctx.rows)
                h = hidden[part].to(ctx.dtype)
                dx = F.linear(h, *weights)
                row_arguments = (target[part], temperature[part], ctx.rule, out[part], grad[part])
                # dx holds the logits until here, and then their gradient
                if ctx.measure is None:
                    kernels.gradient(dx, *row_arguments, dx)
                else:
                    ctx.measure.gradients(kernels, dx, at, row_arguments, of_measured[part])
                if dbias is not None:
                    dbias += dx.sum(0, dtype=out.dtype)
                if dhidden is not None and vocabulary is None:
                    dhidden[part] = dx @ weights[0]
                elif dhidden is not None:
                    dhidden_part = torch.zeros_like(h, dtype=out.dtype)
                    _add_product(dhidden_part, dx, weights[0])
                    dhidden[part] = vocabulary.summed(dhidden_part)
                if dweight is not None:
                    _add_product(dweight, dx.t(), h)
                # freed before the next chunk's is made
                del dx
        if ctx.measure is not None:
            ctx.measure.check_repeated()
        return (
            dhidden,
            None if dweight is None else dweight.to(weight.dtype),
            None if dbias is None else dbias.to(bias.dtype),
            *[None] * 9,
        )


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Adds a b to total (float32, or a's dtype), without rounding a b if torch can."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.device.type == "cpu":
        # on most CPUs products of half precision are not faster
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
    elif not torch.compiler.is_compiling() and _adds_in_float32(total.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


@cache
def _adds_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch adds half-precision products to a float32 sum; newer versions do."""
    ones, total = torch.ones(8, 8, device=device, dtype=dtype), torch.ones(8, 8, device=device)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (TypeError, RuntimeError):
        return False
    return bool((total == 9).all())


def _scorer(
    hidden: torch.Tensor, vocabulary: VocabularySlice | None, accumulate: torch.dtype
) -> ModuleType | VocabularySlice:
    """Chooses whose `score` and `gradient` serve a call; Triton's compute in float32 alone."""
    if vocabulary is not None:
        return vocabulary
    return _kernels_for(hidden) if accumulate == torch.float32 else eager


def _kernels_for(hidden: torch.Tensor) -> ModuleType:
    """Chooses the module that scores a chunk's logits: Triton kernels on a GPU, else torch."""
    # the compiler fuses torch's operations, and a tensor subclass knows them
    if not hidden.is_cuda or type(hidden) is not torch.Tensor or torch.compiler.is_compiling():
        return eager
    return _compiled_for(hidden.device)


@cache
def _compiled_for(device: torch.device) -> ModuleType:
    """Imports the Triton kernels if they compile here; warns if they should and do not."""
    is_served = torch.version.hip is None and runtime.capability(device) >= (8, 0)
    if not is_served or find_spec("triton") is None:
        return eager
    try:
        from prefixtree.kernels.lm_head import kernels as fused

        one, none = torch.ones(1, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        fused.score(one[None].half(), none, one, LogitRule(), one.clone()[None])
    except Exception as problem:  # Triton, its compiler and the driver raise errors of any type
        warnings.warn(
            "prefixtree: Triton cannot compile here, so torch's operations score the logits: "
            f"slower, with the same results ({type(problem).__name__}: {problem})",
            stacklevel=2,
        )
        return eager
    return fused
