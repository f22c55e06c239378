"""`ScoreOptions`: how rows of logits are scored, one value from the call to the operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prefixtree._numbers import integer
from prefixtree.kernels.lm_head.eager import LogitRule
from prefixtree.kernels.lm_head.logit_statistics import check_statistics
from prefixtree.kernels.lm_head.measures import Measure


@dataclass(frozen=True)
class ScoreOptions:
    """How rows of logits are scored: the columns are log p, the entropy, the statistics and
    those of a measure.

    Attributes:
        with_entropy: whether the entropy is computed too.
        statistics: names of `lm_head.logit_statistics`, which have no gradients.
        chunk_size: rows whose logits are in memory at once. Default: with the Triton kernels, as
            many as keep the logits near 512 MiB; without them, rows x vocabulary is near 2^26 (2^22
            on a CPU).
        rule: the family's change to the logits.
        measure: a function of the logits. Default: none.

    Raises:
        TypeError: a measure that is no function.
        ValueError: a statistic that is not known; a chunk_size that is no integer >= 1.
    """

    with_entropy: bool = False
    statistics: Sequence[str] = ()
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
