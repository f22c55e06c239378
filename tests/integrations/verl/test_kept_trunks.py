"""Trees larger than a micro-batch: trunks are kept, and updates stay those of verl's own engine.

That most other updates here run so as well, on one rank and on two, the first tests say.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from verl.utils import tensordict_utils as tu

import prefixtree as pt
from prefixtree.errors import ForestError, UnsupportedError
from prefixtree.integrations.core import trunks
from prefixtree.integrations.verl import batches as batches_module
from prefixtree.integrations.verl.batches import rows_of, split
from prefixtree.integrations.verl.metrics import work_of
from prefixtree.planning.costs import ImportCost
from tests.integrations.verl.cases import CASES, TRUNK_CASES
from tests.integrations.verl.compare import check_same, difference
from tests.integrations.verl.runs import (
    actor_loss,
    batch_of,
    critic_loss,
    jagged,
    make_worker,
    parameters,
    rollouts,
    run,
    run_ranks,
)
from tests.support.hooks import lose_kept, lose_keys, place
from tests.support.tight_memory import tighten

SETTINGS = replace(CASES["grpo"], algorithm="ppo")
# a token of a kept trunk counts little beside an own one
LIGHT = ImportCost(token_bytes=1e9)
AUTO = {"attn_implementation": "prefixtree", "prefixtree_recompute": "auto"}


def update(
    worker: Any, rows: dict[str, list[Any]], tokens: int
) -> tuple[list[Any], dict[str, Any], int]:
    """One update: what it leaves, its metrics, and how many tokens ran forward."""
    is_actor = worker.engine.model_output == "log_probs"
    worker.set_loss_fn(actor_loss(SETTINGS) if is_actor else critic_loss())
    response = [torch.full((len(r),), -4.0) for r in rows["responses"]]
    count = len(response)
    data = batch_of(
        rows,
        old_log_probs=jagged(response),
        advantages=jagged([r * 0 + 1 for r in response]),
        values=jagged([r * 0 for r in response]),
        returns=jagged([r * 0 + i % 3 for i, r in enumerate(response)]),
        temperature=1.0,
        global_token_num=None,
        global_batch_size=count,
        max_token_len_per_gpu=tokens,
    )
    seen: list[int] = []
    embedding = worker.engine.module.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda m, args, out: seen.append(out.shape[1]))
    metrics = tu.get(worker.train_batch(data), "metrics")
    hook.remove()
    return [metrics["grad_norm"], *parameters(worker).values()], metrics, sum(seen)


def cut(data: Any, **options: Any) -> Any:
    return split(data, rows_of(data), None, **options)


def distinct_tokens(rows: dict[str, list[Any]]) -> int:
    sequences = [torch.cat(p) for p in zip(rows["prompts"], rows["responses"], strict=True)]
    return pt.PrefixForest.from_sequences(sequences).num_tokens


@contextmanager
def cut_trees() -> Iterator[None]:
    """As if kept trunks were not served."""
    refusal = UnsupportedError("not here")
    with patch.object(trunks, "check_kept", side_effect=refusal):
        yield


@pytest.mark.usefixtures("unprobed")
def test_every_distinct_token_is_computed_once(models: Path) -> None:
    rows = rollouts(8, groups=3, size=6)
    distinct = distinct_tokens(rows)
    ends = {}
    # nothing is recomputed, so that a token runs forward once; the budget cuts a tree
    settings = replace(SETTINGS, checkpointing=False)
    for way in ("kept", "cut"):
        worker = make_worker("prefixtree", models / "qwen3", settings)
        if way == "cut":
            with cut_trees():
                ends[way] = update(worker, rows, 40)
        else:
            ends[way] = update(worker, rows, 40)
    assert ends["kept"][2] == distinct < 0.9 * ends["cut"][2]
    assert ends["kept"][1]["prefixtree/tokens_computed"] == [[distinct]]
    assert ends["cut"][1]["prefixtree/tokens_computed"] == [[ends["cut"][2]]]
    assert difference(ends["kept"][0], ends["cut"][0]) < 1e-6
    assert ends["kept"][0][0] > 0.1


@pytest.mark.parametrize("name", [name for name in TRUNK_CASES if "grpo" in name])
def test_sequences_longer_than_the_budget(name: str, models: Path) -> None:
    settings = TRUNK_CASES[name]
    stock = run(settings.beside, models, settings)
    packed = run("prefixtree", models, settings)
    differences = check_same(stock, packed, settings)
    print("DIFF", name, {k: f"{v:.1e}" for k, v in differences.items()})


def test_two_ranks_with_other_numbers_of_trunks(models: Path) -> None:
    """Of actors and critics."""
    name = "ppo, long sequences"
    found = run_ranks(models, [name])
    for results in found:
        differences = check_same(
            results[name, "alone"], results[name, "prefixtree"], TRUNK_CASES[name]
        )
        print("DIFF", {k: f"{v:.1e}" for k, v in differences.items()})
        # old log-probabilities or values, and two updates
        expected = {"trunks": 3, "trunks of critics": 3}
        assert results[name, "prefixtree"]["exchanges"] == expected


@pytest.mark.usefixtures("unprobed")
def test_the_comparison_turns_red_where_a_trunk_loses_its_gradient(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of keys, or of the values of its tokens."""
    rows = rollouts(8, groups=3, size=6)

    def ends(kind: str) -> list[Any]:
        worker = make_worker("prefixtree", models / "qwen3", SETTINGS, kind)
        found, metrics, _ = update(worker, rows, 40)
        assert metrics["prefixtree/tokens_computed"] == [[distinct_tokens(rows)]]
        return found

    actor, critic = ends("language_model"), ends("value_model")
    with monkeypatch.context() as patched:
        lose_kept(patched)
        assert difference(critic, ends("value_model")) > 1e-3
    lose_keys(monkeypatch)
    assert difference(actor, ends("language_model")) > 1e-3
    assert difference(critic, ends("value_model")) > 1e-3


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize("kind", ["language_model", "value_model"])
def test_auto_recomputes_what_does_not_fit(
    kind: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trunks and micro-batches are planned together; what comes out is that of cut trees."""
    rows = rollouts(8, groups=3, size=6)
    with cut_trees():
        cut, _, _ = update(make_worker("prefixtree", models / "qwen3", SETTINGS, kind), rows, 40)
    plans = tighten(monkeypatch)
    auto = replace(SETTINGS, model_options={"override_config": AUTO})
    kept, metrics, _ = update(make_worker("prefixtree", models / "qwen3", auto, kind), rows, 40)
    assert len(plans) == 1
    assert metrics["prefixtree/tokens_computed"] == [[distinct_tokens(rows)]]
    # the norm of the gradient is the first
    assert difference(kept, cut) < 1e-6 * max(1, cut[0])
    lose_keys(monkeypatch)
    wrong, _, _ = update(make_worker("prefixtree", models / "qwen3", auto, kind), rows, 40)
    assert difference(kept, wrong) > 1e-3


# ---- the plan ------------------------------------------------------------------------------------


def test_trunks_are_kept_where_that_computes_less() -> None:
    rows = rollouts(3, groups=4, size=4)
    data = batch_of(rows, max_token_len_per_gpu=60)
    kept = cut(data, import_cost=LIGHT)
    assert kept.trunks is not None
    forest = kept.trunks.forest
    work, alone = work_of(kept), work_of(cut(data))
    assert work.packed == forest.num_tokens < alone.packed
    assert work.replicated == alone.replicated
    assert sorted(i for b in kept for i in b.sequence_indices.tolist()) == list(range(16))
    # a batch that fits, and a batch that shares nothing, have no trunks to keep
    for other in (
        batch_of(rows, max_token_len_per_gpu=10_000),
        batch_of(rollouts(3, groups=4, size=4, shared=False), max_token_len_per_gpu=60),
        batch_of(rows, use_dynamic_bsz=False, micro_batch_size_per_gpu=4),
    ):
        assert not hasattr(cut(other, import_cost=LIGHT), "trunks")
    # small trunks leave a GPU idle, and a second forward of trunks may cost more than cut trees
    with patch.object(*place("budget of a small trunk"), 10.0):
        assert not hasattr(cut(data, import_cost=LIGHT), "trunks")
    heavy = replace(LIGHT, graph_bytes=1e10)
    assert cut(data, import_cost=heavy, has_backward=False).trunks.stats.again


def test_sequences_that_fit_no_trunks_either() -> None:
    data = batch_of(rollouts(3, groups=4, size=4), max_token_len_per_gpu=10)
    assert cut(data, import_cost=LIGHT).trunks.stats.peak <= 10
    heavy = ImportCost(token_bytes=1.0)
    with pytest.raises(ValueError, match="more than max_token_len_per_gpu=10; raise"):
        cut(data, import_cost=heavy)


def test_a_rank_that_cannot_keep_its_trunks_cuts_trees_with_all() -> None:
    data = batch_of(rollouts(3, groups=4, size=4), max_token_len_per_gpu=60)
    with patch.object(trunks, "plan_trunks", side_effect=ForestError("no")):
        batches = cut(data, import_cost=LIGHT)
    assert not hasattr(batches, "trunks")


@pytest.mark.parametrize("count", [6, 9, 16])
def test_ranks_get_as_many_micro_batches(count: int) -> None:
    """This rank needs fewer than another, and its sequences are divided further."""
    data = batch_of(rollouts(3, groups=4, size=4), max_token_len_per_gpu=60)
    real = batches_module.largest

    def another(numbers: list[int], group: Any) -> list[int]:
        found = real(numbers, group)
        return [max(count, found[0]), *found[1:]] if len(numbers) == 2 else found

    with patch.object(batches_module, "largest", another):
        batches = cut(data, import_cost=LIGHT)
    assert len(batches) == count and batches.trunks is not None
    assert all(len(batch.sequence_indices) for batch in batches)
    assert work_of(batches).packed == batches.trunks.forest.num_tokens


@pytest.mark.parametrize(
    "options",
    [
        {"engine": {"strategy": "fsdp"}, "model": "qwen3_tied"},
        {"engine": {"pad_to_length": True, "pad_to_length_bucket": 32}},
    ],
    ids=["fsdp1", "padded"],
)
def test_settings_with_which_trees_are_cut(options: dict[str, Any], models: Path) -> None:
    settings = replace(SETTINGS, **options)
    worker = make_worker("prefixtree", models / settings.model, settings)
    assert worker.engine._import_cost(as_trained=True) is None
    assert worker.engine._import_cost(as_trained=False) is None
