"""Old names of public things work for one release, warn with the new name, and give the same."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import prefixtree
from prefixtree import CostModel, PrefixForest, pack, plan_micro_batches, plotting
from prefixtree.cli import app
from prefixtree.integrations import dualkv

SEQUENCES = [[1, 2, 3], [1, 2, 4], [1, 2, 4]]
NAMESPACES = ["a", "a", "b"]
FOREST = PrefixForest.from_sequences(SEQUENCES)
IDS, MASK = np.array(SEQUENCES), np.ones((3, 3), int)
CU = torch.tensor([0, 2, 5])


def attend(**mask: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, 1, 4, generator=generator) for _ in range(3))
    context = torch.randn(3, 1, 4, generator=generator)
    return dualkv.flash_attn_dualkv_varlen_func(
        q, context, context, k, v, None, None, None, 3, None, **mask
    )


def forest_of(**given: Any) -> PrefixForest:
    arrays = ("node_parent", "node_start", "node_length", "node_subtree_end", "sequence_node")
    return PrefixForest(**{name: getattr(FOREST, name) for name in arrays}, **given)


# what it gives, by the old and by the new name, and what the warning says of them
RENAMED: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "forest.depth": (
        lambda: FOREST.depth,
        lambda: FOREST.num_levels,
        r"PrefixForest\.depth is now num_levels;",
    ),
    "forest.node_depth": (
        lambda: FOREST.node_depth.tolist(),
        lambda: FOREST.node_position.tolist(),
        r"PrefixForest\.node_depth is now node_position;",
    ),
    "PrefixForest(node_depth=)": (
        lambda: forest_of(node_depth=FOREST.node_position).node_position.tolist(),
        lambda: forest_of(node_position=FOREST.node_position).node_position.tolist(),
        r"\(node_depth=\) is now node_position=;",
    ),
    "from_sequences(keys=)": (
        lambda: PrefixForest.from_sequences(SEQUENCES, keys=NAMESPACES).node_parent.tolist(),
        lambda: PrefixForest.from_sequences(SEQUENCES, namespaces=NAMESPACES).node_parent.tolist(),
        r"PrefixForest\.from_sequences\(keys=\) is now namespaces=;",
    ),
    "from_padded(keys=)": (
        lambda: PrefixForest.from_padded(IDS, MASK, keys=NAMESPACES).num_tokens,
        lambda: PrefixForest.from_padded(IDS, MASK, namespaces=NAMESPACES).num_tokens,
        r"PrefixForest\.from_padded\(keys=\) is now namespaces=;",
    ),
    "plan_micro_batches(keys=)": (
        lambda: plan_micro_batches(SEQUENCES, 9, keys=NAMESPACES).stats,
        lambda: plan_micro_batches(SEQUENCES, 9, namespaces=NAMESPACES).stats,
        r"plan_micro_batches\(keys=\) is now namespaces=;",
    ),
    "CostModel.cost(depth=)": (
        lambda: CostModel().cost(depth=np.array([3]), length=np.array([2])).tolist(),
        lambda: CostModel().cost(position=np.array([3]), length=np.array([2])).tolist(),
        r"CostModel\.cost\(depth=\) is now position=;",
    ),
    "dualkv_plan": (
        lambda: dualkv.dualkv_plan(CU, 3).subtree_end.tolist(),
        lambda: dualkv.dualkv_mask(CU, 3).subtree_end.tolist(),
        r"dualkv_plan is now prefixtree\.integrations\.dualkv\.dualkv_mask;",
    ),
    "flash_attn_dualkv_varlen_func(plan=)": (
        lambda: attend(plan=dualkv.dualkv_mask(CU, 3)).tolist(),
        lambda: attend(mask=dualkv.dualkv_mask(CU, 3)).tolist(),
        r"flash_attn_dualkv_varlen_func\(plan=\) is now mask=;",
    ),
    "prefixtree.view.plot_forest": (
        lambda: importlib.import_module("prefixtree.view").plot_forest,
        lambda: plotting.plot_forest,
        r"prefixtree\.view\.plot_forest is now prefixtree\.plotting\.plot_forest;",
    ),
    "prefixtree.view.plot_mask": (
        lambda: importlib.import_module("prefixtree.view").plot_mask,
        lambda: plotting.plot_mask,
        r"prefixtree\.view\.plot_mask is now prefixtree\.plotting\.plot_mask;",
    ),
}


@pytest.mark.parametrize("name", RENAMED)
def test_an_old_name_warns_and_gives_the_same(name: str) -> None:
    old, new, said = RENAMED[name]
    with pytest.warns(DeprecationWarning, match=said) as caught:
        found = old()
    # at the line that has to change
    assert [w.filename for w in caught] == [__file__]
    assert all("will be removed in prefixtree 0.3" in str(w.message) for w in caught)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found == new()


@pytest.mark.parametrize(
    ("call", "both"),
    [
        (PrefixForest.from_sequences, {"sequences": SEQUENCES, "namespaces": [1, 2, 3]}),
        (
            PrefixForest.from_padded,
            {"input_ids": IDS, "attention_mask": MASK, "namespaces": [1, 2, 3]},
        ),
        (
            plan_micro_batches,
            {"sequences": SEQUENCES, "max_tokens": 9, "namespaces": [1, 2, 3]},
        ),
    ],
)
def test_the_old_and_the_new_name_together_are_refused(
    call: Callable[..., Any], both: dict[str, Any]
) -> None:
    with pytest.raises(TypeError, match=r"got namespaces= and its old name keys=; leave out keys="):
        call(**both, keys=[1, 2, 3])


def test_the_old_name_beside_a_positional_argument_is_refused() -> None:
    with (
        pytest.warns(DeprecationWarning),
        pytest.raises(TypeError, match="multiple values for argument 'namespaces'"),
    ):
        PrefixForest.from_sequences(SEQUENCES, NAMESPACES, keys=NAMESPACES)


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
        lambda: forest_of(kees=1),
        lambda: attend(kees=None),
    ],
)
def test_a_keyword_that_never_was_is_pythons_own_error(call: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'kees'"):
        call()


def test_names_that_never_were_are_missing() -> None:
    for module in ("prefixtree.view", "prefixtree.integrations.dualkv"):
        with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'nothing'"):
            importlib.import_module(module).nothing  # noqa: B018
    with pytest.raises(AttributeError):
        FOREST.nothing  # noqa: B018


def test_signatures_show_the_new_names_alone() -> None:
    for call in (PrefixForest.from_sequences, PrefixForest.from_padded, plan_micro_batches):
        names = inspect.signature(call).parameters
        assert "namespaces" in names and "keys" not in names
    names = inspect.signature(PrefixForest).parameters
    assert "node_position" in names and "node_depth" not in names


def test_an_old_attribute_cannot_be_set() -> None:
    with pytest.raises(AttributeError):
        FOREST.depth = 3  # type: ignore[misc]


def test_an_old_option_of_the_command_line_is_said_on_stderr() -> None:
    size = "--branching 2 --node 3 --heads 2 1 --head-dim 16 --device cpu --repeats 1 --json"
    old, new = (
        CliRunner().invoke(app, ["bench", option, "5", *size.split()])
        for option in ("--depth", "--levels")
    )
    assert (old.exit_code, new.exit_code) == (0, 0)
    assert "--depth is now --levels; the old name will be removed" in old.stderr
    assert "--depth" not in new.stderr
    tokens = [json.loads(result.stdout)["tokens"] for result in (old, new)]
    assert tokens[0] == tokens[1] and tokens[0]["distinct"] == 3 * 31
    assert "--depth" not in CliRunner().invoke(app, ["bench", "--help"]).stdout
