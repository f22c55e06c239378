"""`ForestParams`: a packed forest in the place of Megatron's `packed_seq_params`.

Legend: t tokens of this rank, P positions, D rotary dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from prefixtree.integrations.megatron.context_parallel import LocalForest

# Megatron compares the format with "thd" alone, and everything else takes its unpacked code, which
# is what a forest needs. TransformerEngine's attention raises for a format it does not know, so a
# layer that the checks did not see cannot read the forest as one sequence
_FORMAT = "prefixtree"


@dataclass
class ForestParams(PackedSeqParams):
    """A packed forest, which Megatron's models hand to every layer of a stage.

    Megatron makes its rotary table for positions 0 .. max_seqlen - 1 and applies row i to token i;
    `at_depths` picks the rows of the tokens' positions.

    Attributes:
        local: the tokens of the forest that this rank computes.
    """

    local: LocalForest | None = None
    _rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, repr=False)
    _latent: Any = field(default=None, repr=False)

    @classmethod
    def of(cls, local: LocalForest) -> ForestParams:
        """The parameters of one forward; every stage makes its own."""
        longest = int(local.packed.forest.sequence_lengths.max())
        return cls(qkv_format=_FORMAT, max_seqlen_q=longest, max_seqlen_kv=longest, local=local)

    def at_depths(self, table: Any) -> Any:
        """Rotary angles [P, 1, 1, D] of positions 0 .. P - 1 -> [t, 1, 1, D], those of the tokens.

        Layers share the result. None and tuples of tables are mapped too.

        Raises:
            RuntimeError: a table that ends before the longest sequence.
        """
        if table is None:
            return None
        if isinstance(table, tuple):
            return tuple(self.at_depths(t) for t in table)
        assert self.local is not None
        if id(table) not in self._rows:
            if len(table) < int(self.max_seqlen_q):
                raise RuntimeError(
                    f"a rotary table has {len(table)} rows, and the longest sequence "
                    f"{self.max_seqlen_q} tokens: something cut it for context parallelism"
                )
            # the table too, so that its id stays its own
            self._rows[id(table)] = table, table.index_select(0, self.local.position_ids)
        return self._rows[id(table)][1]

    def latent_rows(self, make: Callable[[], Any]) -> Any:
        """The rows of the tokens' positions in the rotary table of latent attention.

        Each layer makes an equal table, from the one configuration, so the first is everybody's.

        Args:
            make: gives a table [P, 1, 1, D]; or, as YaRN's, a pair of it and a factor.

        Returns:
            The same with t rows.
        """
        if self._latent is None:
            table = make()
            pair = isinstance(table, tuple)
            self._latent = (self.at_depths(table[0]), *table[1:]) if pair else self.at_depths(table)
        return self._latent
