"""Replaces a model's output embedding by one that scores edges, so that scores stand in for logits.

transformers' tensor parallelism gives an lm_head that it cut along the vocabulary a forward of its
own, which multiplies by this rank's slice of the weight and mostly gathers the logits. Scores need
no gathered logits. Legend: P predictors, U scored edges, one per temperature, d hidden size, V
vocabulary, W rows of a slice.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from prefixtree.errors import UnsupportedError
from prefixtree.kernels.lm_head.eager import LogitRule, VocabularySlice
from prefixtree.kernels.lm_head.logprobs import ScoreOptions, linear_logprobs, lm_head_logprobs
from prefixtree.models.changes import changing
from prefixtree.models.checks import check_hook, foreign_module
from prefixtree.models.families import family_of
from prefixtree.models.low_precision import is_plain
from prefixtree.packing.copies import gather
from prefixtree.scoring.edges import DeviceEdges

# the author of the forward and what it wraps: a further wrapper might change logits
_COLWISE_FORWARD = ("transformers.distributed.tensor_parallel", "torch.nn.modules.linear")


@dataclass(frozen=True)
class SlicedHead:
    """The slice of an lm_head that this rank holds.

    Attributes:
        weight: [W, d], with the graph to the parameter.
        bias: [W] or None.
        vocabulary: which rows of the vocabulary these are.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    vocabulary: VocabularySlice


def sliced_head(lm_head: nn.Module, forward: Callable[..., Any]) -> SlicedHead | None:
    """Finds this rank's slice of an lm_head split along its rows by transformers; None for others.

    It is called inside the model's forward: FSDP2 has gathered its parameters there, and what is
    still sharded is tensor parallelism's.

    Args:
        forward: the forward of `lm_head` outside of scoring.
    """
    if not is_linear(lm_head) or foreign_module(forward, _COLWISE_FORWARD) is not None:
        return None
    weight: Any = lm_head.weight
    bias: Any = lm_head.bias
    if not _is_cut_by_rows(weight) or not (bias is None or _is_cut_by_rows(bias)):
        return None
    mesh, size = weight.device_mesh, weight.device_mesh.size()
    # as torch.chunk cuts: the last rank may have fewer rows, or none
    widest = -(-weight.shape[0] // size)
    if (size - 1) * widest >= weight.shape[0]:
        return None
    vocabulary = VocabularySlice(mesh.get_group(), mesh.get_local_rank() * widest, widest)
    return SlicedHead(weight.to_local(), None if bias is None else bias.to_local(), vocabulary)


def is_linear(lm_head: nn.Module) -> bool:
    """Whether the class and weight of a head compute nn.Linear; its own `forward` may differ.

    Sharding wrappers change the class to a subclass of the same forward.
    """
    if not isinstance(lm_head, nn.Linear) or type(lm_head).forward is not nn.Linear.forward:
        return False
    return is_plain(lm_head.weight)


def _is_cut_by_rows(parameter: Any) -> bool:
    if not hasattr(parameter, "placements"):
        return False
    from torch.distributed.tensor import Shard

    return tuple(parameter.placements) == (Shard(0),)


# ---- scores in the place of logits ---------------------------------------------------------------


@dataclass
class Handed:
    """The scores that an output layer gave to its model in the place of logits.

    Attributes:
        values: [U, columns], float32 (float64 for Megatron in float64), a copy that nobody else
            has.
        output: [1, U, columns], what the model returns in the place of logits.
        version: torch's version of `output` when it was handed over; None where torch keeps none.
        times: the number of calls of the output layer.
        treated: what the model made of `output` as if it were logits, until it is checked.
    """

    values: torch.Tensor | None = None
    output: torch.Tensor | None = None
    version: int | None = None
    times: int = 0
    treated: torch.Tensor | None = None

    def give(self, scores: torch.Tensor) -> torch.Tensor:
        """Makes the output [1, U, columns] of the output layer, before the hooks of its wrapper."""
        self.times += 1
        self.values = scores.detach()
        # no view: in-place arithmetic on one would lose the hooks of sharding wrappers
        self._hold(scores[None].clone())
        assert self.output is not None
        return self.output

    def keep(self, output: torch.Tensor) -> None:
        """Takes the output after its wrapper's hooks, which can follow only what they return."""
        self._check_dtype(output, "a wrapper of the output embedding")
        if self.output is not None and not self._is_unchanged(output):
            raise UnsupportedError(
                "a hook changed the output embedding's output, which are the scores here: what it "
                "does to logits cannot be done to log-probabilities; remove it while scoring"
            )
        self._hold(output)

    def check_treatment(self, causal_lm: Any, rule: LogitRule) -> None:
        """Refuses a model that treats logits not as `rule` does; waits for a GPU once per model."""
        treated, self.treated = self.treated, None
        if treated is None or self.values is None or _followed.get(causal_lm) == rule:
            return
        if rule == LogitRule() and self._is_unchanged(treated):
            return
        expected = rule.apply(self.values)[None]
        rounding = max(1e-5, 4 * torch.finfo(treated.dtype).eps)
        if treated.shape != expected.shape or not torch.allclose(
            treated.detach().float(), expected, rtol=rounding, atol=1e-6, equal_nan=True
        ):
            raise UnsupportedError(
                f"{type(causal_lm).__name__} changes its lm_head's output otherwise than is known "
                f"of its model type ({rule}): log-probabilities would be those of other logits. "
                "Use transformers' class, or name the attributes that its forward multiplies, "
                f"divides or caps logits by: allow_model_type({causal_lm.config.model_type!r}, "
                "scale=..., divisor=..., softcap=...)"
            )
        if treated.numel() > 0:
            _followed[causal_lm] = rule

    def returned(self, output: Any) -> torch.Tensor:
        """The scores [U, columns] in the outermost module's output; refuses changed ones."""
        scores = getattr(output, "logits", None)
        if not isinstance(scores, torch.Tensor):
            raise UnsupportedError(
                f"the wrapped model returned a {type(output).__name__} without logits; a wrapper's "
                "forward must return the model's output"
            )
        if self.values is None:
            raise UnsupportedError(
                "the model did not call its output embedding in the thread that called "
                "sequence_logprobs: call it without nn.DataParallel and without a wrapper that "
                "starts threads"
            )
        return self.unchanged(scores)

    def unchanged(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores [U, columns] of an output [1, U, columns]; refuses changed ones."""
        self._check_dtype(scores, "a wrapper")
        if not self._is_unchanged(scores):
            raise UnsupportedError(
                "a wrapper or a hook changed the model's logits on the way out, which are the "
                "scores here: what it does to logits cannot be done to log-probabilities; remove "
                "it while scoring"
            )
        return scores[0]

    def _hold(self, output: torch.Tensor) -> None:
        self.output = output
        self.version = None if output.is_inference() else output._version

    def _check_dtype(self, scores: torch.Tensor, who: str) -> None:
        assert self.values is not None
        if scores.dtype != self.values.dtype:
            raise UnsupportedError(
                f"{who} cast the log-probabilities to {scores.dtype}; keep outputs in "
                f"{str(self.values.dtype).removeprefix('torch.')} "
                "(FSDP2: MixedPrecisionPolicy(output_dtype=torch.float32) for the model, and for "
                "an output embedding that is wrapped by itself)"
            )

    def _is_unchanged(self, scores: torch.Tensor) -> bool:
        """Whether `scores` are those that were handed over."""
        assert self.output is not None and self.values is not None
        if scores.shape != self.output.shape:
            return False
        # the same memory, unwritten: without a look at values, which would wait for a GPU
        same = self.version is not None and scores.data_ptr() == self.output.data_ptr()
        return (same and scores._version == self.version) or torch.equal(scores[0], self.values)


# rules that models were seen to follow
_followed: weakref.WeakKeyDictionary[nn.Module, LogitRule] = weakref.WeakKeyDictionary()


def logit_rule(causal_lm: Any) -> LogitRule:
    """Finds how the model's forward turns its lm_head's output into logits.

    Raises:
        ValueError: a configured softcap or divisor of 0.
    """
    family = family_of(causal_lm.config)
    config = causal_lm.config.get_text_config()

    def configured(name: str | None) -> float | None:
        value = None if name is None else getattr(config, name, None)
        if value is not None and not float(value) > 0:
            raise ValueError(f"config.{name} divides the logits: it must be above 0, got {value}")
        return None if value is None else float(value)

    scale = 1.0
    if family.scale is not None:
        # models multiply by what they were made with, whatever their configuration says now
        owners = causal_lm, causal_lm.base_model, config
        owner = next((o for o in owners if hasattr(o, family.scale)), None)
        value = getattr(owner, family.scale, None)
        scale = scale if value is None else float(value)
    return LogitRule(scale / (configured(family.divisor) or 1.0), configured(family.softcap) or 0.0)


@contextmanager
def scoring_lm_head(
    causal_lm: Any,
    edges: DeviceEdges,
    options: ScoreOptions,
) -> Iterator[Handed]:
    """A context in which the output embedding scores `edges` and the model's logits are the scores.

    It holds for the thread that entered. Forwards of other threads run as without it, and another
    thread that wants to score the same model waits.
    """
    with changing(causal_lm) as changes:
        lm_head = causal_lm.get_output_embeddings()
        for hook in lm_head._forward_hooks.values():
            check_hook(hook, "the output embedding")
        lm_head_forward, lm_forward = lm_head.forward, causal_lm.forward
        plain = is_linear(lm_head) and "forward" not in vars(lm_head)
        thread = threading.get_ident()
        handed = Handed()
        is_scoring = False

        def score(hidden: torch.Tensor) -> torch.Tensor:
            _check_whole(hidden, lm_head.weight if plain else None)
            _check_rows(causal_lm, hidden, len(edges.predictors))
            rows = gather(hidden.squeeze(0), edges.to_predictors)
            rest = (edges.target, edges.temperature, options)
            # statistics and measures need whole rows
            slices = not (plain or options.statistics or options.measure)
            head = sliced_head(lm_head, lm_head_forward) if slices else None
            vocabulary = causal_lm.config.get_text_config().vocab_size
            numbers = None if options.measure is None else edges.numbers()
            if plain:
                _check_width(lm_head, lm_head.weight.shape[0], vocabulary)
                result = linear_logprobs(rows, lm_head.weight, lm_head.bias, *rest, numbers=numbers)
            elif head is not None:
                result = linear_logprobs(rows, head.weight, head.bias, *rest, head.vocabulary)
            else:
                _check_rows_of_logits(lm_head, lm_head_forward, hidden[0], vocabulary)
                whole = lm_head_forward, vocabulary, rows
                result = lm_head_logprobs(*whole, *rest, numbers=numbers)
            return handed.give(result)

        def own_score(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            nonlocal is_scoring
            if threading.get_ident() != thread:
                return lm_head_forward(hidden, *args, **kwargs)
            if is_scoring:
                # by a measure, whose teacher is this model
                _check_of_teacher(lm_head, plain)
                return lm_head_forward(hidden, *args, **kwargs)
            is_scoring = True
            try:
                return score(hidden)
            finally:
                is_scoring = False

        def keep(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            if threading.get_ident() == thread and not is_scoring:
                handed.keep(output)

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = lm_forward(*args, **kwargs)
            if threading.get_ident() != thread:
                return output
            if handed.times != 1 or not hasattr(output, "logits"):
                raise UnsupportedError(
                    f"{type(causal_lm).__name__} called its output embedding {handed.times} times "
                    f"in one forward and returned a {type(output).__name__}; expected once, and an "
                    "output with logits (config.return_dict)"
                )
            # the scores themselves: the family's forward changed them as if they were logits
            output.logits, handed.treated = handed.output, output.logits
            return output

        # each call makes new functions, which torch.compile(model) would trace anew each time; the
        # model's forward, called inside, is compiled
        changes.hook(lm_head.register_forward_hook, torch.compiler.disable(keep))
        changes.set(lm_head, forward=torch.compiler.disable(own_score))
        changes.set(causal_lm, forward=torch.compiler.disable(forward, recursive=False))
        yield handed


def _check_of_teacher(lm_head: nn.Module, plain: bool) -> None:
    """Refuses an adapter, which may have been off when the teacher was made, and is on now."""
    if not plain:
        raise UnsupportedError(
            f"the Teacher is the scored model, whose {type(lm_head).__name__} is no linear output "
            "embedding: give Teacher a copy"
        )


def _check_rows(causal_lm: Any, hidden: torch.Tensor, expected: int) -> None:
    if hidden.ndim != 3 or hidden.shape[:2] != (1, expected):
        raise UnsupportedError(
            f"{type(causal_lm).__name__} handed its output embedding hidden states of shape "
            f"{list(hidden.shape)} where logits_to_keep asked for {expected} tokens of one row: "
            "its forward does not honour logits_to_keep; use a class whose forward does "
            "(AutoModelForCausalLM)"
        )


def _check_whole(hidden: torch.Tensor, weight: torch.Tensor | None) -> None:
    """Refuses DTensors inside the forward: FSDP2's parameters are whole there, so they are TP's."""
    sharded = next((t for t in (weight, hidden) if hasattr(t, "placements")), None)
    if sharded is not None:
        raise UnsupportedError(
            "the output embedding is parallelised by torch's tensor parallelism (a DTensor with "
            f"placements {sharded.placements}), expected one that gives whole rows of logits: "
            'leave it out of parallelize_module\'s plan, or load the model with tp_plan="auto"'
        )


def _check_width(lm_head: nn.Module, width: int, vocabulary: int) -> None:
    """Refuses an lm_head that gives a part of the vocabulary, such as one that ranks share."""
    if width < vocabulary:
        raise UnsupportedError(
            f"the output embedding ({type(lm_head).__name__}) gives {width} logits per token, "
            f"expected the {vocabulary} of config.vocab_size: a softmax over a part of the "
            "vocabulary is another function; let it give whole rows "
            '("colwise_gather_output" in a tp_plan)'
        )


def _check_rows_of_logits(
    lm_head: nn.Module,
    forward: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    vocabulary: int,
) -> None:
    """Refuses an lm_head whose rows of logits are not whole, or depend on other tokens."""
    width = check_rows_alone(lm_head, forward, hidden, "the output embedding")
    if width is not None:
        _check_width(lm_head, width, vocabulary)


def check_rows_alone(
    head: nn.Module,
    forward: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    name: str,
) -> int | None:
    """Refuses a head whose output for a token depends on other tokens: a packed forest has others.

    Hidden states [P, d] -> the width of the head's output; None without a row.
    """
    if len(hidden) == 0:
        return None
    with torch.no_grad():
        row = hidden[:1]
        # a row three times as large, which would raise a scale that all rows share
        among_others = forward(torch.cat([row, -row, 3 * row.flip(-1), row]))[[0, -1]]
        alone = forward(row)
    # logits of -inf say nothing of the size of the others
    largest = alone.nan_to_num(0.0, 0.0, 0.0).abs().max()
    tolerance = max(4 * torch.finfo(alone.dtype).eps, 1e-4) * largest
    # NaN passes here: it shows in the scores
    if bool(((among_others - alone).abs() > tolerance).any()):
        raise UnsupportedError(
            f"{name} ({type(head).__name__}) gives a token other logits when other tokens stand "
            "beside it: a packed forest has no such neighbours; use one that treats every token "
            "alone"
        )
    return alone.shape[-1]
