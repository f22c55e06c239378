"""A keyword that is nearly one of a function's is named in its error."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import prefixtree
from prefixtree import PrefixForest, pack, plan_micro_batches

SEQUENCES = [[1, 2, 3], [1, 2, 4], [1, 2, 4]]
NAMESPACES = ["a", "a", "b"]
FOREST = PrefixForest.from_sequences(SEQUENCES)
IDS, MASK = np.array(SEQUENCES), np.ones((3, 3), int)


def test_a_mistyped_keyword_names_the_nearest() -> None:
    packed, plan = pack(FOREST), plan_micro_batches(SEQUENCES, 9)
    calls: dict[str, Callable[[], Any]] = {
        "'loss_masks'; did you mean loss_mask=?": lambda: packed.edges(loss_masks=[]),
        "'group'; did you mean groups=?": lambda: plan_micro_batches(SEQUENCES, 9, group=[]),
        "'normalisation'; did you mean normal": lambda: plan.loss_weights(normalisation="x"),
        "'name_spaces'; did you mean namesp": lambda: FOREST.from_sequences([], name_spaces=[]),
        "'temperatures'; did you mean temper": lambda: prefixtree.sequence_logprobs(
            None, packed, temperatures=1
        ),
    }
    for message, call in calls.items():
        with pytest.raises(TypeError, match=re.escape(message)):
            call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: PrefixForest.from_sequences(SEQUENCES, kees=NAMESPACES),
        lambda: PrefixForest.from_padded(IDS, MASK, kees=NAMESPACES),
        lambda: plan_micro_batches(SEQUENCES, 9, kees=NAMESPACES),
    ],
)
def test_a_keyword_that_never_was_is_pythons_own_error(call: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'kees'"):
        call()


def test_signatures_are_those_of_the_functions() -> None:
    for call in (PrefixForest.from_sequences, PrefixForest.from_padded, plan_micro_batches):
        assert "namespaces" in inspect.signature(call).parameters
