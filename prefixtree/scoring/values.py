"""`sequence_values`: the values of critics and reward models over a packed forest.

Legend: n tokens of a sequence, t own tokens of this process, C labels, d hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from prefixtree.errors import UnsupportedError, refuse, with_hints
from prefixtree.kernels.lm_head.logprobs import ScoreOptions
from prefixtree.models.changes import changing
from prefixtree.models.checks import (
    check_forest,
    check_module,
    every_layer_attends,
    foreign_module,
    transformer_of,
    warn_past_ddp,
)
from prefixtree.models.layers import device_of
from prefixtree.models.prepared import prepare_layers
from prefixtree.models.rows_alone import check_layers
from prefixtree.packing.layout import PackedForest
from prefixtree.packing.mask import TreeMask
from prefixtree.planning.micro_batch import MicroBatch, packed_of
from prefixtree.scoring.edges import ScoredUnits
from prefixtree.scoring.forward import recomputed
from prefixtree.scoring.lm_head import check_rows_alone, is_linear
from prefixtree.scoring.local import LocalTokens, PartCall, Rows, whole_tokens
from prefixtree.scoring.refusals import VALUES, check_steps
from prefixtree.wings import CallWing, load

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from prefixtree.planning.costs import ImportCost
    from prefixtree.recompute.choose import GroupShare, Recompute


@with_hints
def sequence_values(
    model: nn.Module,
    packed: PackedForest | MicroBatch,
    *,
    recompute: Recompute = None,
    group: ProcessGroup | None = None,
    max_step_tokens: int | None = None,
    import_cost: ImportCost | None = None,
) -> list[torch.Tensor]:
    """Computes the values at every token of every sequence; shared prefixes run once.

        values = pt.sequence_values(critic, packed)                       # [n, 1] per sequence
        rewards = torch.stack([v[-1, 0] for v in pt.sequence_values(reward_model, packed)])

    Values are differentiable. The gradients are those of the replicated batch, up to rounding: a
    shared token gets the sum over its copies.

    Args:
        model: a token or sequence classifier of transformers (`AutoModelForTokenClassification`,
            `AutoModelForSequenceClassification`) with attn_implementation="prefixtree", wrapped
            (DDP, FSDP2, PEFT) or not. The score layer of a sequence classifier is read at every
            token, where transformers reads it at the last one.
        packed: the packed forest, on the model's device; or a MicroBatch, which is moved there.
        recompute: as in `sequence_logprobs`.
        group: the process group whose ranks compute this forest together, as in
            `sequence_logprobs`. Default: this process computes it alone.
        max_step_tokens: the number of own tokens that one step may hold, as in `sequence_logprobs`.
            Default: the forest in one forward.
        import_cost: the bytes of own and imported tokens, for max_step_tokens. Default: read from
            the model.

    Returns:
        One tensor [n, C] per sequence, float32 (float64 of a model in float64), where C is
        `config.num_labels`.

    Raises:
        TypeError: `packed` that is no PackedForest and no MicroBatch, or a model that is no module.
        UnsupportedError: a model that does not give a value per token exactly, with the reason.
        ForestError: a forest without token ids; a path that fits no steps of max_step_tokens.
        ValueError: tokens that the model does not have; an unknown `recompute`, or a plan for
            another model; ranks of a group that differ; max_step_tokens below 1; an import_cost
            without max_step_tokens.
        torch.OutOfMemoryError: as `sequence_logprobs`.
    """
    packed = packed_of(packed, "sequence_values", lambda: device_of(transformer_of(model)))
    check_module(model)
    check_steps(max_step_tokens, import_cost)
    if group is not None and load("groups").num_ranks(group) == 1:
        group = None
    divided = None if group is None else "the ranks of a group"

    def check() -> tuple[Any, None]:
        return checked_classifier(model, packed, divided), None

    dividing = None
    if max_step_tokens is not None:
        dividing = load("steps").Dividing(model, max_step_tokens, import_cost, recompute)
    local: LocalTokens
    if group is None:
        classifier, _ = check()
        local = whole_tokens(packed, classifier)
    else:
        groups, divide = load("groups"), dividing and dividing.in_group
        options = {
            "recompute": recompute,
            "max_step_tokens": max_step_tokens,
            "import_cost": import_cost,
        }
        how = check, groups.values_of_rank, options
        classifier, local = groups.part_of_rank(model, packed, group, *how, divide=divide)
    forward = ValuesForward(model, classifier, packed, local.of_steps, local.share)
    rows = None
    if dividing is not None:
        steps = local.steps or partial(dividing.alone, classifier, packed)
        rows = load("steps").rows_in_steps(model, classifier, forward, recompute, steps)
    if rows is None:
        rows = (forward.values(local.mask, local.inputs, recompute),)
    (values,) = local.gathered(rows)
    return packed.unpack(values)


class ValuesForward:
    """Calls a model over a packed forest, or a part of one, for values: a `PartForward`.

    Args:
        inputs: keywords of a forward over the whole forest.
        share: the part of a rank. Default: no ranks divide the forest.
    """

    options = ScoreOptions()
    wings: Mapping[str, CallWing] = MappingProxyType({})

    def __init__(
        self,
        model: nn.Module,
        classifier: Any,
        packed: PackedForest,
        inputs: dict[str, Any],
        share: GroupShare | None = None,
    ) -> None:
        prepare_layers(classifier)
        self.packed, self.inputs = packed, inputs
        self._model, self._classifier, self._share = model, classifier, share

    @cached_property
    def units(self) -> ScoredUnits:
        """The tokens of the forest: each gets a row."""
        packed, lengths = self.packed, self.packed.forest.sequence_lengths
        every = np.arange(len(lengths))
        return ScoredUnits(
            np.arange(packed.num_tokens), lambda: packed.copy_index(every)[0], lengths.tolist()
        )

    def values(self, mask: TreeMask, inputs: dict[str, Any], recompute: Recompute) -> torch.Tensor:
        """Runs one forward over tokens: [t, C], float32 or wider."""
        arguments = self._model, self._classifier
        # runs a forward of its own, which the other ranks run at the same point
        check_layers(*arguments, self.packed.device)
        _, recomputing = recomputed(*arguments, self.packed, 0, recompute, share=self._share)
        with recomputing:
            return _values_of_tokens(*arguments, mask, inputs)

    def __call__(self, part: PartCall) -> Rows:
        # a part gives a row for all of its own tokens, a dummy for none
        return (self.values(part.mask, part.inputs, part.recompute)[: len(part.rows)],)


def _values_of_tokens(
    model: nn.Module, classifier: Any, mask: TreeMask, inputs: dict[str, Any]
) -> torch.Tensor:
    warn_past_ddp(model)
    with every_layer_attends(model, mask), _values_of_all_tokens(classifier):
        values = getattr(model(**inputs), "logits", None)
    expected = 1, mask.num_queries, classifier.config.num_labels
    if not isinstance(values, torch.Tensor) or values.shape != expected:
        got = list(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
        raise UnsupportedError(
            f"{type(classifier).__name__} returned {got}, expected one row of values per token, "
            f"{list(expected)}; use a token classifier"
        )
    return values.squeeze(0).to(torch.promote_types(values.dtype, torch.float32))


def checked_classifier(model: nn.Module, packed: PackedForest, divided: str | None = None) -> Any:
    """The classifier inside wrappers and adapters, checked; `divided` as in `check_model`."""
    classifier = transformer_of(model)
    if classifier.get_output_embeddings() is not None:
        raise UnsupportedError(
            f"values need a token or sequence classifier, and {type(classifier).__name__} has a "
            "language-model head: load it with AutoModelForTokenClassification, or use "
            "sequence_logprobs or kept_trunks"
        )
    check_forest(model, classifier, packed, divided, sees=False)
    refuse(VALUES, packed.forest)
    return classifier


@contextmanager
def _values_of_all_tokens(classifier: Any) -> Iterator[None]:
    """A context in which a classifier returns its score layer's output before it is pooled.

    The values are the model's output, as sharding wrappers follow the tensors that a forward
    returns.
    """
    score = getattr(classifier, "score", None)
    if not isinstance(score, nn.Module):
        yield
        return
    if (origin := foreign_module(classifier.forward)) is not None:
        raise UnsupportedError(
            f"{type(classifier).__name__}.forward is not transformers' but comes from {origin}: "
            "what it does to the values of its score layer would be lost; use transformers' class"
        )
    forward, outputs = classifier.forward, list[torch.Tensor]()

    def keep(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        outputs.append(output)
        if not is_linear(module):
            check_rows_alone(module, module.forward, args[0][0], "the score layer")

    def whole(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if len(outputs) != 1:
            raise UnsupportedError(
                f"{type(classifier).__name__} called its score layer {len(outputs)} times in one "
                "forward, expected once"
            )
        if output.logits.shape != outputs[0].shape:
            # pooled
            output.logits = outputs[0]
        return output

    with changing(classifier) as changes:
        changes.hook(score.register_forward_hook, torch.compiler.disable(keep))
        changes.set(classifier, forward=torch.compiler.disable(whole, recursive=False))
        yield
