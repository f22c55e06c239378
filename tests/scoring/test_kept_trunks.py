"""`kept_trunks`: micro-batches that compute their trunks once, against each sequence alone."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from prefixtree import (
    ImportCost,
    PrefixForest,
    UnsupportedError,
    import_cost,
    kept_trunks,
    plan_micro_batches,
)
from prefixtree.models.compiled import compile_layers
from prefixtree.planning.micro_batches import batches_with_trunks
from prefixtree.planning.trunks import plan_trunks
from tests.scoring.kept_cases import (
    compare,
    linear,
    one_by_one,
    plan_of,
    run,
    run_of,
    taken,
)
from tests.support.full import each_once, mostly
from tests.support.hooks import wrap
from tests.support.models import (
    Objective,
    assert_same,
    build,
    cases,
    counted,
    errors,
    gradients,
    make_objective,
    ragged_objective,
    run_eager,
    same_bits,
)
from tests.support.step_ranks import LIGHT, loss_of


def chains(seed: int, count: int = 9) -> list[np.ndarray]:
    """Random sequences that share: each goes on from a place in an earlier one."""
    rng = np.random.default_rng(seed)
    found = [rng.integers(3, 90, rng.integers(4, 30))]
    while len(found) < count:
        parent = found[rng.integers(len(found))]
        kept = parent[: rng.integers(0, len(parent) + 1)]
        found.append(np.concatenate([kept, rng.integers(3, 90, rng.integers(1, 14))]))
    return found


# ---- what is computed ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", mostly(range(3), [2]))
def test_random_forests_in_float64_against_every_sequence_alone(seed: int) -> None:
    """Trunks nested and cut, edges of trunks in losses of several micro-batches."""
    objective = make_objective(chains(seed), seed)
    model = build("qwen3").double()
    expected = run_eager(model, objective)
    longest = max(len(s) for s in objective.sequences)
    used = 0
    for max_tokens in (max(9, longest // 2), longest, 2 * longest):
        plan = plan_of(objective, max_tokens)
        used += plan.stats.trunks.trunks
        for mode in (None, "again"):
            got = run(model, objective, plan, linear, recompute_trunks=mode)
            assert errors(got, expected).largest < 2e-6
    assert used >= 3


@pytest.mark.parametrize("model_type, seed", each_once(cases(["qwen3", "nemotron_h"]), range(2)))
def test_micro_batches_that_are_given(model_type: str, seed: int) -> None:
    """In any order, so that trunks lie on several paths and wait while others run."""
    rng = np.random.default_rng(seed)
    objective = make_objective(chains(seed, 12), seed)
    forest = PrefixForest.from_sequences(objective.sequences)
    of = np.arange(12) % 4
    rng.shuffle(of)
    given = [np.flatnonzero(of == at) for at in range(4)]
    model = build(model_type)
    expected = run_eager(model, objective)
    for max_tokens in (1000, int(forest.sequence_lengths.max()) + 20):
        batches = batches_with_trunks(plan_trunks(forest, max_tokens, LIGHT, given))
        assert batches.trunks is not None and batches.trunks.stats.trunks
        got = run(model, objective, [batches], linear)
        assert_same(got, expected, 2e-5)


def test_several_trunks_are_alive_at_once() -> None:
    """A trunk that imports from a trunk, and one that a micro-batch alone needs."""
    plan = plan_of(ragged_objective(), 17)
    spans = plan[0].trunks.spans
    trunks = [span for span in spans if span.is_trunk]
    assert any(a.first < b.first <= b.last < a.last for a in trunks for b in trunks)
    assert any(span.first == span.last for span in trunks)
    assert max(len(s) for s in ragged_objective().sequences) > 17
    compare(build("qwen3"), plan=plan)


def test_a_micro_batch_whose_tokens_are_all_in_trunks() -> None:
    rng = np.random.default_rng(0)
    chain = rng.integers(3, 90, 60)
    objective = make_objective([chain[:end] for end in (8, 20, 33, 45, 60)])
    plan = plan_of(objective, 17)
    own = [span.first for span in plan[0].trunks.spans if not span.is_trunk]
    assert 0 < len(own) < len(plan[0])
    compare(build("qwen3"), objective, plan=plan)


@pytest.mark.usefixtures("unprobed")
def test_every_token_is_computed_once() -> None:
    plan, model = plan_of(ragged_objective()), build("qwen3")
    tokens: list[int] = []
    mlp = model.model.layers[0].mlp
    mlp.register_forward_pre_hook(lambda _, args: tokens.append(len(args[0][0])))
    run(model, plan=plan)
    assert sum(tokens) == plan.forest.num_tokens == plan.stats.packed_tokens
    assert sum(batch.num_tokens for batch in plan[0]) > 1.3 * sum(tokens)


@pytest.mark.usefixtures("unprobed")
def test_a_part_that_scores_nothing_has_its_backward_in_its_turn() -> None:
    """Where ranks are in lockstep, one that left it out would leave others waiting."""
    rng = np.random.default_rng(0)
    trunk = rng.integers(3, 90, 12)
    sequences = [np.concatenate([trunk, rng.integers(3, 90, 8)]) for _ in range(4)]
    # of the second micro-batch the trunk's tokens alone
    masks = [np.arange(20) < (20 if i < 2 else 12) for i in range(4)]
    objective = replace(make_objective(sequences), loss_masks=masks)
    plan, model = plan_of(objective), build("qwen3")
    assert [s.tolist() for s in plan[0].trunks.sequences] == [[0, 1], [2, 3]]
    runs: list[str] = []
    layer = model.model.layers[0]
    layer.register_forward_hook(lambda *_: runs.append("forward"))
    layer.register_full_backward_hook(lambda *_: runs.append("backward"))
    compare(model, objective, plan=plan)
    # the trunk, and in each turn a part and its backward
    assert runs[:6] == ["forward", "forward", "backward", "forward", "backward", "backward"]


# masks and autocast are in test_ways.py
@pytest.mark.full
def test_without_a_loss_mask_and_with_one_that_scores_little() -> None:
    objective = make_objective(ragged_objective().sequences, plain=True)
    compare(build("qwen3"), objective)
    masks = [np.arange(len(s)) >= max(1, len(s) - 2) for s in objective.sequences]
    compare(build("qwen3"), replace(objective, loss_masks=masks))


@pytest.mark.parametrize("modes", [("all_but_attention", "all"), ("all", "nothing")])
@pytest.mark.parametrize("model_type", mostly(cases(["qwen3", "falcon_h1"]), ["qwen3"]))
def test_trunks_that_recompute_otherwise(model_type: str, modes: tuple[str, str]) -> None:
    recompute, trunks = modes
    compare(build(model_type), recompute=recompute, recompute_trunks=trunks)


def test_exported_rows_on_the_host() -> None:
    cost = replace(LIGHT, on_host=True)
    plan = plan_of(ragged_objective(), import_cost=cost)
    assert plan.stats.trunks.on_host
    compare(build("qwen3"), plan=plan, recompute="all", recompute_trunks="again")


# dynamo's own look at .grad of its inputs
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    "backend, recompute, trunks, graphs",
    mostly(
        [
            ("eager", "all", "again", 2),
            ("aot_eager", None, None, 1),
            ("aot_eager", "all", "again", 2),
            ("aot_eager", "all_but_attention", "all", 2),
            ("aot_eager", "nothing", "all_but_attention", 2),
        ],
        [("eager", "all", "again", 2)],
    ),
)
def test_compiled_layers(
    backend: str,
    recompute: Any,
    trunks: Any,
    graphs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph per mode, and one without gradients; the same bits. No compiler runs an exchange more
    often than eager layers do, or leaves one out."""
    calls: Counter[str] = Counter()

    def note(name: str, real: Any, *given: Any) -> Any:
        calls[name] += 1
        return real(*given)

    for name in ("exported rows", "imported rows", "returned gradients of rows"):
        wrap(monkeypatch, name, partial(note, name))
    model = build("qwen3", num_hidden_layers=2, layer_types=("full_attention",) * 2).double()
    options = {"recompute": recompute, "recompute_trunks": trunks}
    expected, in_eager = run(model, **options), calls.copy()
    torch._dynamo.reset()
    counters.clear()
    calls.clear()
    compile_layers(model, backend=backend)
    assert same_bits(run(model, **options), expected)
    assert calls == in_eager and len(calls) == 3
    assert counters["stats"]["unique_graphs"] == graphs and not counters["graph_break"]
    # other parts, of other sizes
    run(model, make_objective(ragged_objective().sequences[:7], 1), **options)
    assert counters["stats"]["unique_graphs"] == graphs
    torch._dynamo.reset()


@pytest.mark.full
def test_autocast() -> None:
    model, plan = build("qwen3"), plan_of(ragged_objective())
    exact = one_by_one(model, ragged_objective(), plan)
    found = []
    for mode in ("alone", "nothing", "all", "again"):
        with torch.autocast("cpu", torch.bfloat16):
            if mode == "alone":
                one = one_by_one(model, ragged_objective(), plan)
                assert errors(one, exact).gradient > 3e-3
                continue
            recompute = "all" if mode == "again" else mode
            found.append(run(model, plan=plan, recompute=recompute, recompute_trunks=mode))
            # no further from float32 than micro-batches in forwards of their own
            assert errors(found[-1], exact).gradient < 1.5 * errors(one, exact).gradient
    assert all(same_bits(found[0], other) for other in found[1:])


def test_without_gradients() -> None:
    model, plan, objective = build("qwen3").eval(), plan_of(ragged_objective()), ragged_objective()
    found: dict[int, Any] = {}
    with counted([model]) as forwards, torch.inference_mode():
        per_sequence = objective.temperatures, objective.loss_masks
        with kept_trunks(model, plan[0], *per_sequence, return_entropy=True) as scored:
            for batch, scores in scored:
                assert not scores.logprobs[0].requires_grad
                pairs = zip(scores.logprobs, scores.entropy, strict=True)
                found |= dict(zip(batch.sequence_indices.tolist(), pairs, strict=True))
        assert forwards() == len(plan[0].trunks.spans)
    expected = replace(one_by_one(model, objective, plan), gradients={})
    assert_same(replace(run_of(model, found), gradients={}), expected)


def test_accumulation_over_blocks_and_two_epochs_of_one_plan() -> None:
    model, plan = build("qwen3"), plan_of(ragged_objective())
    once = run(model, plan=plan)
    with kept_trunks(model, plan[0], *_given(ragged_objective()), return_entropy=True) as scored:
        for batch, scores in scored:
            loss_of(taken(ragged_objective(), batch), scores).backward()
    twice = {name: 2 * gradient for name, gradient in once.gradients.items()}
    assert_same(replace(once, gradients=gradients(model)), replace(once, gradients=twice))


def test_two_backwards_within_a_turn_are_added() -> None:
    model, plan, objective = build("qwen3"), plan_of(ragged_objective()), ragged_objective()
    expected = run(model, loss=linear)
    model.zero_grad(set_to_none=True)
    with kept_trunks(model, plan[0], *_given(objective), return_entropy=True) as scored:
        for batch, scores in scored:
            loss = linear(taken(objective, batch), scores)
            (0.25 * loss).backward(retain_graph=True)
            (0.75 * loss).backward()
    assert_same(replace(expected, gradients=gradients(model)), expected)


def test_empty_micro_batches_and_ranks() -> None:
    model, objective = build("qwen3"), ragged_objective()
    plan = plan_of(objective, num_ranks=2, min_micro_batches=9)
    expected = run(model, loss=linear)
    model.zero_grad(set_to_none=True)
    empty = 0
    for rank in range(2):
        # as a data loader's worker sends it
        batches = pickle.loads(pickle.dumps(plan[rank]))
        with kept_trunks(model, batches, *_given(objective), return_entropy=True) as scored:
            for batch, scores in scored:
                empty += batch.is_empty
                linear(taken(objective, batch), scores).backward()
    assert empty
    assert_same(replace(expected, gradients=gradients(model)), expected)


def test_what_waits_is_what_the_plan_says() -> None:
    """Bytes of exported keys and values and of their gradients, turn after turn."""
    model, plan = build("qwen3"), plan_of(ragged_objective(), 17)
    cost = import_cost(model, "nothing")
    token = cost.layers * (cost.row_bytes + cost.gradient_row_bytes)
    most = 0
    with kept_trunks(model, plan[0]) as scored:
        for _, scores in scored:
            torch.cat(scores.logprobs).sum().backward()
            most = max(most, sum(scored._run.ledger.held_bytes()))
    assert 0.8 * token * plan.stats.trunks.alive_tokens < most
    assert most <= token * plan.stats.trunks.alive_tokens
    assert scored._run.ledger.held_bytes() == (0, 0)


def test_the_same_bits_every_time() -> None:
    model = build("qwen3")
    assert same_bits(run(model), run(model))


def _given(objective: Objective) -> tuple[Any, Any]:
    return objective.temperatures, objective.loss_masks


# ---- what is refused -----------------------------------------------------------------------------


def test_gradients_that_a_layer_does_not_take_are_missed(monkeypatch) -> None:
    ran: list[Any] = []

    def own_alone(backward: Any, *rows: Any) -> None:
        # that of the first micro-batch, and of no trunk
        if not ran:
            backward(*rows)
        ran.append(rows)

    wrap(monkeypatch, "backward of parts", own_alone)
    with pytest.raises(RuntimeError, match="did not reach the attention of 3 layers"):
        run(build("qwen3"))


def test_a_backward_that_is_missing_or_late() -> None:
    model, plan = build("qwen3"), plan_of(ragged_objective())
    with (
        pytest.raises(RuntimeError, match="no backward of the scores of micro-batch 0 ran"),
        kept_trunks(model, plan[0]) as scored,
    ):
        sum(torch.cat(scores.logprobs).sum() for _, scores in scored).backward()
    kept = []
    with (
        pytest.raises(RuntimeError, match="ran after the next one was asked for"),
        kept_trunks(model, plan[0]) as scored,
    ):
        for _, scores in scored:
            loss = torch.cat(scores.logprobs).sum()
            loss.backward(retain_graph=True)
            kept.append(loss)
            kept[0].backward(retain_graph=True)


def _asked_for(loss: torch.Tensor, model: nn.Module) -> None:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    assert not any(gradient is not None for gradient in found)


def _given_inputs(loss: torch.Tensor, model: nn.Module) -> None:
    loss.backward(inputs=list(model.parameters()))


@pytest.mark.parametrize("ask", [_asked_for, _given_inputs])
def test_gradients_that_are_asked_for_by_name(ask: Any) -> None:
    """There are none; those of scores are right."""
    model, plan = build("qwen3"), plan_of(ragged_objective())
    with (
        pytest.raises(RuntimeError, match=r"no backward .* \(torch.autograd.grad and backward"),
        kept_trunks(model, plan[0]) as scored,
    ):
        for _, scores in scored:
            ask(torch.cat(scores.logprobs).sum(), model)
    assert not gradients(model)
    model.zero_grad(set_to_none=True)
    expected = run(model, loss=linear)
    model.zero_grad(set_to_none=True)
    given = _given(ragged_objective())
    with kept_trunks(model, plan[0], *given, return_entropy=True) as scored:
        for batch, scores in scored:
            rows = [*scores.logprobs, *(scores.entropy or ())]
            loss = linear(taken(ragged_objective(), batch), scores)
            found = torch.autograd.grad(loss, rows, allow_unused=True, retain_graph=True)
            loss.backward()
            assert any(gradient is not None for gradient in found)
    assert_same(replace(expected, gradients=gradients(model)), expected)


def test_a_block_that_is_left_early() -> None:
    model, plan = build("qwen3"), plan_of(ragged_objective())
    count = len(plan[0])
    with (
        pytest.raises(RuntimeError, match=f"{count - 1} of {count} micro-batches were not scored"),
        kept_trunks(model, plan[0]) as scored,
    ):
        for _, scores in scored:
            torch.cat(scores.logprobs).sum().backward()
            break
    # an error of the loop's own comes out as it is, and no backward of a trunk runs
    ran: list[Any] = []
    expected = run(model)
    with pytest.raises(KeyError), kept_trunks(model, plan[0]) as scored:
        for _, scores in scored:
            torch.cat(scores.logprobs).sum().backward()
            hook = model.model.embed_tokens.weight.register_hook(ran.append)
            raise KeyError
    assert not ran
    hook.remove()
    with pytest.raises(RuntimeError, match="within their with block"):
        next(scored)
    # nothing is left behind
    assert_same(run(model), expected)


def test_the_last_turn_ends_with_the_block() -> None:
    """A loop that asks for no further micro-batch, such as one over zip."""
    model, plan = build("qwen3"), plan_of(ragged_objective())
    expected = run(model, loss=linear)
    model.zero_grad(set_to_none=True)
    with kept_trunks(model, plan[0], *_given(ragged_objective()), return_entropy=True) as scored:
        for _, (batch, scores) in zip(range(len(plan[0])), scored, strict=False):
            linear(taken(ragged_objective(), batch), scores).backward()
    assert_same(replace(expected, gradients=gradients(model)), expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.eval(), "training of the model became False"),
        (lambda m: m.model.norm.weight.detach().mul_(2), "model.norm.weight changed"),
        (lambda m: m.model.norm.weight.requires_grad_(False), "requires_grad of model.norm.weight"),
        (lambda m: torch.optim.AdamW(m.parameters(), fused=True).step(), "changed within the bl"),
    ],
)
def test_what_changed_within_the_block_is_refused_by_name(change: Any, words: str) -> None:
    model, plan = build("qwen3"), plan_of(ragged_objective())
    with pytest.raises(RuntimeError, match=words), kept_trunks(model, plan[0]) as scored:
        for _, scores in scored:
            torch.cat(scores.logprobs).sum().backward()
            change(model)
    with (
        pytest.raises(RuntimeError, match="gradients were enabled when the block"),
        kept_trunks(model.train(), plan[0]) as scored,
    ):
        for _, scores in scored:
            torch.cat(scores.logprobs).sum().backward()
            torch.set_grad_enabled(False)
    torch.set_grad_enabled(True)


def test_plans_and_arguments_that_do_not_fit() -> None:
    model, sequences = build("qwen3"), ragged_objective().sequences
    cut = plan_micro_batches(sequences, 60)
    plan = plan_of(ragged_objective())
    for batches in (cut[0], plan[0][:2], list(plan[0])):
        with (
            pytest.raises(ValueError, match=r"be plan\[rank\] of a plan that keeps trunks"),
            kept_trunks(model, batches),
        ):
            pass
    with (
        pytest.raises(ValueError, match="temperature must hold one entry per sequence: exp"),
        kept_trunks(model, plan[0], temperature=[1.0, 2.0]),
    ):
        pass
    with pytest.raises(TypeError, match="did you mean recompute="):
        kept_trunks(model, plan[0], recomput="all")
    with pytest.raises(ValueError, match="give one of both"):
        plan_micro_batches(sequences, 60, trunks=True, reuse=True)


def test_models_that_are_not_verified() -> None:
    plan = plan_of(ragged_objective())

    def refused(model: nn.Module, words: str) -> None:
        with pytest.raises(UnsupportedError, match=words), kept_trunks(model, plan[0]):
            pass

    model = copy.deepcopy(build("qwen3"))
    model.model.layers[0].mlp._is_hooked = True
    refused(model, "is tensor or expert parallel")


def test_the_cost_of_a_model() -> None:
    model = build("qwen3").train()
    kept, little, again = (
        import_cost(model, "nothing", trunks) for trunks in ("nothing", "all", "again")
    )
    all_of_it = import_cost(model, "all").token_bytes
    assert kept.token_bytes == little.token_bytes > all_of_it and kept.kept_copies == 1
    assert kept.graph_bytes > 3 * little.graph_bytes > again.graph_bytes == 0
    assert kept.trunk_weight > 1 > little.trunk_weight > again.trunk_weight == again.weight
    assert ImportCost().trunk_weight == pytest.approx(0.79 + 0.557, abs=1e-3)
    # the least that "auto" may take, also without gradients
    with torch.no_grad():
        assert import_cost(model, "auto") == replace(again, kept_copies=0, token_bytes=all_of_it)
