"""The keys that indexers choose in the runs of a comparison.

A choice of the k best keys has no rounding error: two scores that nearly tie change places, and all
that follows differs by more than any dtype explains. So a run of single sequences takes the keys
that the packed run chose, and what it would have chosen is compared by its scores.

Legend: n tokens of a sequence, T packed tokens, W words of bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from prefixtree.kernels.chosen import from_bits
from prefixtree.models.family_table import INDEXED, layer_types_of
from prefixtree.packing.layout import PackedForest


class PackedChoices:
    """Keys that the indexers of a packed run choose. Made before the run, read behind it.

    Args:
        model: that runs packed, prepared. packed: the forest.

    Attributes:
        bits: per indexer int32 [T, W] on the CPU; W is 0 where every query chose all keys.
        tokens: int64 [n] per sequence, its packed tokens.
    """

    def __init__(self, model: Any, packed: PackedForest) -> None:
        self.bits: list[torch.Tensor] = []
        indices = torch.arange(packed.num_tokens, device=packed.device)
        self.tokens = [tokens.cpu() for tokens in packed.unpack(indices)]
        for number, indexer in enumerate(_indexers_of(model)):
            self.bits.append(torch.empty(0))
            indexer.register_forward_hook(self._keeper(number))

    def _keeper(self, number: int) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, bits: torch.Tensor) -> None:
            # a checkpoint's second forward chooses the same
            self.bits[number] = bits[0].cpu()

        return keep

    def of_sequence(self, indexer: int, sequence: int) -> torch.Tensor:
        """bool [n, n], which keys each query of a sequence attends to."""
        tokens, bits = self.tokens[sequence], self.bits[indexer]
        n = len(tokens)
        if not bits.shape[1]:
            return torch.ones(n, n, dtype=torch.bool).tril()
        return from_bits(bits[tokens], 0, n)


class Replay:
    """Runs of single sequences whose indexers take what a packed run chose.

    Args:
        model: that runs the sequences, with eager attention. It keeps the changes.
        packed: what to take.

    Attributes:
        margins: how far the packed run's choices are from what this run would have chosen.
    """

    def __init__(self, model: Any, packed: PackedChoices) -> None:
        self._packed, self._sequence, self.margins = packed, 0, Margins()
        for number, indexer in enumerate(_indexers_of(model)):
            indexer.forward = self._followed(number, indexer.forward)

    def watched(
        self, watch: Callable[[Sequence[Any]], Iterable[Any]]
    ) -> Callable[[Sequence[Any]], Iterator[Any]]:
        """Goes over the sequences as `watch` does, and knows which one runs."""

        def over(sequences: Sequence[Any]) -> Iterator[Any]:
            for i, sequence in enumerate(watch(sequences)):
                self._sequence = i
                yield sequence

        return over

    def _followed(self, number: int, original: Callable[..., torch.Tensor]) -> Any:
        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            with _Scores() as seen:
                own: torch.Tensor = original(*args, **kwargs)
            at = number, self._sequence
            taken = self._packed.of_sequence(*at).to(own.device)
            visible = torch.ones_like(taken).tril()
            chosen = torch.zeros_like(taken).scatter(-1, own[0].long(), True) & visible
            self.margins.note(at, taken, chosen, seen.scores[0])
            # where a query sees fewer keys than it may choose, those behind it fill up
            order = 2 * taken.int() + (~visible).int()
            return order.topk(own.shape[-1], -1).indices[None].to(own.dtype)

        return forward


class Margins:
    """How far choices are from the best.

    The margin of a query is the score of the best key that it left out, less that of the worst that
    it took, over its largest score: 0 where it took the best, whichever of equal ones. It is
    infinite where a query took another number of keys, or one that it does not see.
    """

    def __init__(self) -> None:
        # by indexer and sequence, which a checkpoint's second forward notes again
        self._of: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}

    def note(
        self,
        at: tuple[int, int],
        taken: torch.Tensor,
        best: torch.Tensor,
        scores: torch.Tensor,
    ) -> None:
        """Adds the queries of a sequence.

        Args:
            at: which indexer, which sequence.
            taken, best: bool [n, n], query by key: what was chosen, and what these scores choose.
            scores: [n, n].
        """
        visible = torch.ones_like(taken).tril()
        scores = scores.float()
        largest = scores.masked_fill(~visible, 0).abs().amax(-1)
        worst = scores.masked_fill(~taken, math.inf).amin(-1)
        left = scores.masked_fill(taken | ~visible, -math.inf).amax(-1)
        above = (left - worst).clamp_min(0)
        margin = torch.where(above == 0, 0.0, above / largest)
        wrong = (taken & ~visible).any(-1) | (taken.sum(-1) != best.sum(-1))
        margin = margin.masked_fill(wrong, math.inf)
        self._of[at] = int((taken != best).any(-1).sum()), margin.cpu()

    @property
    def count(self) -> int:
        """Queries, over all indexers and sequences."""
        return sum(len(margin) for _, margin in self._of.values())

    @property
    def differ(self) -> int:
        """Those that took other keys than the best."""
        return sum(differ for differ, _ in self._of.values())

    @property
    def largest(self) -> float:
        """Margin of the worst query."""
        return float(torch.cat([margin for _, margin in self._of.values()]).max())


def chooses_keys(config: Any) -> bool:
    """Whether a model of this configuration has indexers that choose keys one by one."""
    return INDEXED in layer_types_of(config.get_text_config())


def _indexers_of(model: nn.Module) -> list[Any]:
    return [m for name, m in model.named_modules() if name.rpartition(".")[2] == "indexer"]


class _Scores(TorchFunctionMode):
    """Inside, keeps the scores of which the best were asked for."""

    scores: torch.Tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.topk:
            self.scores = args[0]
        return func(*args, **(kwargs or {}))
