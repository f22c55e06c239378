"""`CompiledPartMask`: its operators, as torch checks them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from prefixtree import PrefixForest, pack
from prefixtree.kernels.attention.operator import TREE_ATTENTION
from prefixtree.parallel.attention import PartMask
from prefixtree.parallel.compiled import CompiledPartMask
from prefixtree.planning.parts import Parts


class Ones:
    """Others' rows are ones, and own ones come back without a copy where there are no others."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def import_rows(self, *own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not self.part.num_imported:
            return own
        rows = [x.new_ones(self.part.num_rows, *x.shape[1:]) for x in own]
        for x, y in zip(rows, own, strict=True):
            x[self.part.own_rows] = y
        return tuple(rows)

    def give_back(self, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # written in place, as the ledger does
        return tuple(x.mul_(2)[self.part.own_rows] for x in gradients)


def arguments_of(owned: str, sinks: bool) -> tuple[Any, ...]:
    """Those of the operator of a part that owns some tokens, or all."""
    packed = pack(PrefixForest.from_sequences([[1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 5, 7]]))
    owner = {"all": [0] * packed.num_tokens, "some": [1, 1, *[0] * (packed.num_tokens - 2)]}[owned]
    part = Parts(packed, owner, 2)[0]
    mask = CompiledPartMask(PartMask(part, lambda _: Ones(part)), nn.Identity())
    shapes = (4, 8), (2, 8), (2, 6)
    rows = [torch.randn(part.num_tokens, *x, requires_grad=True) for x in shapes]
    sink = torch.randn(4, requires_grad=True) if sinks else None
    handles = mask.call, part.mask.handle
    return *rows, sink, *handles, part.num_rows, 0.3, 0, 0.0, False, "sdpa", True


@pytest.mark.parametrize("owned, sinks", [("some", True), ("all", False)])
def test_opcheck(owned: str, sinks: bool) -> None:
    """No output is an input, shapes and layouts are those that compiled code is told."""
    operators = torch.ops.prefixtree
    arguments = arguments_of(owned, sinks)
    torch.library.opcheck(operators.part_attention.default, arguments)
    q, k, v, sink, call, handle, num_rows, *options = arguments
    own = [x.detach().transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v)]
    torch.library.opcheck(operators.part_rows.default, (*own, call, num_rows))
    keys, values = operators.part_rows(*own, call, num_rows)
    attended = q.detach(), keys, values, None if sink is None else sink.detach()
    out, lse = TREE_ATTENTION(*attended, handle, *options, False, None)
    for gives in (True, False):
        given = torch.ones_like(out), None, *attended, out, lse, handle, *options, None
        torch.library.opcheck(
            operators.part_attention_backward.default, (*given, call, gives, len(q))
        )
