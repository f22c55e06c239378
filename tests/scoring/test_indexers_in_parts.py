"""Steps and kept trunks of models whose indexers choose keys: parts export an indexer's keys
too."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from prefixtree import UnsupportedError, prepare
from prefixtree.kernels.chosen import from_bits, to_bits
from prefixtree.parallel import attention
from prefixtree.parallel.attention import PartMask
from prefixtree.parallel.ledger import Exchange, Ledger
from prefixtree.scoring import group_refusals
from prefixtree.scoring.kept_runs import check_kept
from prefixtree.sparse import indexers, paths
from tests.scoring import kept_cases
from tests.scoring.steps_cases import compare, logprobs_in_steps, run
from tests.support.family_configs import INDEXED
from tests.support.float64 import Float64
from tests.support.full import each_once, mostly
from tests.support.hooks import limit
from tests.support.hybrid_cases import (
    checkpointed_in_float64,
    in_float64,
    logprobs_alone,
    worst,
)
from tests.support.models import (
    build,
    cases,
    errors,
    make_objective,
    ragged_objective,
    ragged_packed,
)
from tests.support.ties import LowestFirst

BLOCKS, COMPRESSED = "minimax_m3_vl_text", "deepseek_v4"
SERVED = cases(name for name in INDEXED if name != COMPRESSED)
FEW = cases(["glm_moe_dsa", BLOCKS])
# ReLUs of 2 heads leave scores of exactly 0; of blocks, those that a query has to see tie
TIES = {"index_n_heads": 2}, {"index_local_blocks": 4}


# ---- what is computed ----------------------------------------------------------------------------


@pytest.mark.parametrize("ties", mostly([False, True], [True]))
@pytest.mark.parametrize("family", mostly(SERVED, ["glm_moe_dsa"]))
def test_steps_in_float64(family: str, ties: bool) -> None:
    """Against each sequence alone through eager; those with ties are recomputed."""
    changes: dict[str, Any] = TIES[family == BLOCKS] if ties else {}
    objective = make_objective(ragged_objective().sequences, plain=True)
    weights = [x[:, 0].double() for x in objective.weights]

    def loss(rows: list[torch.Tensor]) -> torch.Tensor:
        return sum((p * w).sum() + p.square().sum() for p, w in zip(rows, weights, strict=True))

    with Float64(), LowestFirst():
        eager = in_float64(family, "eager", **changes)
        expected = logprobs_alone(eager, objective.sequences)
        loss(expected).backward()
        model = prepare(in_float64(family, **changes))
        if ties:
            checkpointed_in_float64(model)
        found = logprobs_in_steps(model, ragged_packed(), 24)
        loss(found).backward()
    logprob, gradient = worst(found, model, expected, eager)
    assert logprob < 1e-12 and gradient < 1e-12


@pytest.mark.parametrize(
    "family, checkpointed, again",
    mostly([("glm_moe_dsa", True, False), (BLOCKS, False, True)], [(BLOCKS, False, True)]),
)
def test_kept_trunks_in_float64(
    family: str, checkpointed: bool, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = TIES[family == BLOCKS]
    with LowestFirst():
        found = kept_cases.worst_in_float64(family, checkpointed, again, monkeypatch, **changes)
    assert max(found) < 1e-12


@pytest.mark.parametrize("family", mostly(FEW, ["glm_moe_dsa"]))
def test_any_chunks_of_own_tokens_give_their_keys(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "CHUNK", 100)
    compare(build(family))


def test_keys_of_indexers_are_exported_and_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One head's, without gradients, of the layers that have an indexer; none of short paths."""
    model, longest = prepare(build("glm_moe_dsa")), ragged_packed().mask.host.deepest
    index = {module for module in model.modules() if hasattr(module, "index_topk")}
    ledgers: set[Ledger] = set()
    shapes, import_rows = {}, Exchange.import_rows

    def noted(self: Exchange, *own: torch.Tensor) -> Any:
        ledgers.add(self.ledger)
        if len(own) == 1:
            shapes[self.key[0]] = own[0].shape[1:]
            assert not own[0].requires_grad
        return import_rows(self, *own)

    monkeypatch.setattr(Exchange, "import_rows", noted)
    run(model)
    kept_cases.run(model)
    assert len(index) == 2 and shapes == dict.fromkeys(index, (16,))
    assert len(ledgers) == 2 and all(ledger.held_bytes() == (0, 0) for ledger in ledgers)
    for module in index:
        module.index_topk = longest
    shapes.clear()
    compare(model)
    assert not shapes


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_triton_scores_the_queries_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of one tile."""
    chunks, inner = [], indexers.Products.spans

    def noted(self: Any, *sizes: int) -> Any:
        for rows in inner(self, *sizes):
            chunks.append(self._host.is_subset)
            yield rows

    packed = copy.copy(ragged_packed())
    packed.mask = packed.mask.with_options(backend="triton")
    limit(monkeypatch, "scores of an indexer", 1)
    monkeypatch.setattr(indexers.Products, "spans", noted)
    compare(build("deepseek_v32"), packed=packed)
    assert any(chunks)


# ---- the checks can fail -------------------------------------------------------------------------


def _errors(family: str, monkeypatch: pytest.MonkeyPatch, *mistake: Any) -> Any:
    """Those of steps and of kept trunks, beside one forward."""
    model = build(family)
    expected = run(model, max_step_tokens=None)
    objective = ragged_objective()
    alone = kept_cases.one_by_one(model, objective, kept_cases.plan_of(objective))
    monkeypatch.setattr(*mistake)
    return errors(run(model), expected), errors(kept_cases.run(model), alone)


_KEYS, _ATTEND = PartMask.index_keys, attention.part_attention


def _own_keys_alone(self: PartMask, indexer: Any, own: torch.Tensor) -> torch.Tensor:
    keys = torch.zeros_like(_KEYS(self, indexer, own))
    return keys.index_copy(0, torch.from_numpy(self.part.own_rows).long(), own)


def _own_rows_first(*rows: Any, chosen: torch.Tensor | None = None, **options: Any) -> Any:
    part = rows[3]
    host = part.mask.host
    if chosen is not None:
        wrong = from_bits(chosen, 0, host.deepest).roll(part.num_tokens, -1)
        # each query must see something
        wrong[torch.arange(host.num_queries), host.query_positions(chosen.device)] = True
        chosen = to_bits(wrong, chosen.shape[1])
    return _ATTEND(*rows, chosen=chosen, **options)


_MISTAKES = {
    "keys of ancestors left out": (PartMask, "index_keys", _own_keys_alone),
    "a choice of other rows": (attention, "part_attention", _own_rows_first),
}


@pytest.mark.parametrize("mistake, family", each_once(_MISTAKES, FEW))
def test_another_choice_turns_it_red(
    family: str, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for found in _errors(family, monkeypatch, *_MISTAKES[mistake]):
        print(family, found)
        assert found.logprob > 1e-2


# ---- what is refused -----------------------------------------------------------------------------


def test_compressed_keys_are_refused() -> None:
    model = build(COMPRESSED)
    with pytest.raises(UnsupportedError, match="would cut the windows of compressed keys"):
        run(model)
    with pytest.raises(UnsupportedError, match="would cut the windows of compressed keys"):
        check_kept(model)


def test_heads_that_do_not_divide_group_by_group_are_refused_before_a_forward() -> None:
    config = build(BLOCKS).config
    packed, heads = ragged_packed(), config.num_key_value_heads
    group_refusals.check_mode("ulysses", config, packed, config.num_attention_heads // heads)
    with pytest.raises(ValueError, match=f"of each of {heads} groups of heads.*do not divide"):
        group_refusals.check_mode("ulysses", config, packed, config.num_attention_heads)
