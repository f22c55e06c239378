"""Micro-batches of a plan: empty steps, losses that do not depend on it, costs, refusals."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from prefixtree import ForestError, PrefixForest, pack, plan_micro_batches, plan_recomputation
from prefixtree.planning import costs
from prefixtree.planning.costs import CostModel
from prefixtree.planning.model_cost import LayerCost, model_cost
from prefixtree.planning.steps import plan_steps
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.support.full import mostly
from tests.support.models import attentions, build, ragged_sequences, run_replicated
from tests.support.models import make_objective as objective_of
from tests.support.step_ranks import LIGHT
from tests.support.strategies import batches_of, indices_of, many_trees

# ---- empty steps and what moves between processes ------------------------------------------------


def test_more_ranks_than_sequences():
    plan = plan_micro_batches([[1, 2, 3], [4, 5]], 3, num_ranks=5, min_micro_batches=2)
    assert sorted(len(step) for rank in indices_of(plan) for step in rank) == [0] * 8 + [1, 1]
    assert plan.stats.empty_steps == 8
    empty = next(batch for rank in plan for batch in rank if batch.is_empty)
    assert empty.sequence_indices.dtype == np.int64
    assert (empty.num_tokens, empty.cost) == (0, 0)
    assert empty.packed.num_tokens == 1
    assert len(empty.packed.edges().token) == 0


def test_take_gives_what_belongs_to_the_packed_sequences():
    plan = plan_micro_batches([[1, 2, 3], [4, 5]], 3, min_micro_batches=3)
    first, second, empty = plan[0]
    masks = [torch.tensor([0, 1, 1]), torch.tensor([0, 1])]
    assert first.take(["a", "b"]) + second.take(["a", "b"]) == ["a", "b"]
    assert first.take(masks)[0] is masks[0]
    assert torch.equal(empty.take(masks)[0], torch.tensor([0]))
    assert empty.take([np.ones(3), np.ones(2)])[0].tolist() == [0]
    assert empty.take([[1, 1, 1], [1, 1]]) == [[0]]
    assert empty.take([0.5, 0.25]) == [0]
    assert float(empty.take(torch.tensor([0.5, 0.25]))[0]) == 0
    assert len(empty.take(masks)) == empty.packed.forest.num_sequences


def test_an_empty_step_takes_zeros_whatever_the_values_are():
    """A value times 0 is NaN where it is NaN or infinite."""
    empty = plan_micro_batches([[1, 2, 3], [4, 5]], 3, min_micro_batches=3)[0][2]
    nan, inf = float("nan"), float("inf")
    weights = torch.tensor([nan, 1.0], requires_grad=True)
    for values in (
        *([nan, 1.0], [inf, 1.0], np.array([nan, 1.0]), np.array([-inf, 1.0]), weights),
        *([torch.tensor([nan] * 3), torch.ones(2)], [np.full(3, inf), np.ones(2)]),
        *([[nan] * 3, [1.0] * 2], [[[nan, inf]] * 3, [[1.0, 2.0]] * 2]),
        *([True, False], [torch.tensor([True] * 3), torch.tensor([True] * 2)]),
    ):
        (zero,) = empty.take(values)
        assert not np.any(np.asarray(zero.detach() if torch.is_tensor(zero) else zero)), values
        assert not getattr(zero, "requires_grad", False)
    # what has no zero
    for entry in (None, "a", {"reward": 1.0}):
        assert empty.take([entry, entry]) == [None]
    assert empty.take([[], []]) == [[0]]


@pytest.mark.parametrize("values", [[1], [1, 2, 3], [], 5, None, {0: 1, 1: 2}, "ab"])
def test_what_is_taken_has_an_entry_per_planned_sequence(values):
    plan = plan_micro_batches([[1, 2, 3], [4, 5]], 3, min_micro_batches=3)
    for batch in (*plan[0], pickle.loads(pickle.dumps(plan[0][1]))):
        with pytest.raises(ForestError, match=r"values must (hold|be a list of) one entry per"):
            batch.take(values)
        with pytest.raises(ForestError, match="values must hold one entry per sequence"):
            batch.take(batch.take([1, 2]))
        assert len(batch.take([1, 2])) == 1


def test_what_stands_for_a_micro_batch_is_named():
    plan = plan_micro_batches([[1, 2, 3], [4, 5]], 9)
    forest, (batch,) = plan.forest, plan[0]
    expected = {
        forest: r"got PrefixForest; pack\(forest\)",
        plan: r"got MicroBatchPlan; batch\.packed is one, for batch in plan\[rank\]",
        plan[0]: r"got _RankMicroBatches; batch\.packed",
    }
    for given, message in expected.items():
        for call in (
            lambda given: sequence_logprobs(None, given),
            lambda given: plan_recomputation(None, given),
            lambda given: plan_steps(given, 9),
        ):
            with pytest.raises(TypeError, match=f"takes a packed forest, {message}"):
                call(given)
    # which plans on the host
    with pytest.raises(TypeError, match=r"got MicroBatch; batch\.packed is the micro-batch's"):
        plan_steps(batch, 9)
    with pytest.raises(TypeError, match=r"a PrefixForest, got MicroBatch; batch\.packed is"):
        pack(batch)


@pytest.mark.parametrize(
    "options", mostly([{}, {"max_step_tokens": 20, "import_cost": LIGHT}], [{}])
)
def test_a_micro_batch_takes_its_own_of_the_plan(options):
    """The bits of `batch.packed` with what `take` gives, an empty step too."""
    its, model = _OBJECTIVE, build("qwen3")
    plan = plan_micro_batches(its.sequences, 60, min_micro_batches=9)
    assert plan[0][-1].is_empty and len(plan[0][0].sequence_indices) < plan.num_sequences
    arrays = [np.full(len(s), t) for s, t in zip(its.sequences, its.temperatures, strict=True)]
    for batch in pickle.loads(pickle.dumps(plan[0])):
        for temperature in (0.7, its.temperatures, torch.tensor(its.temperatures), arrays):
            own = 0.7 if isinstance(temperature, float) else batch.take(temperature)
            own = 1.0 if batch.is_empty else own
            given = batch.packed, own, batch.take(its.loss_masks)
            expected = sequence_logprobs(model, *given, **options).logprobs
            whole = batch, temperature, its.loss_masks
            for a, b in zip(
                sequence_logprobs(model, *whole, **options).logprobs, expected, strict=True
            ):
                assert torch.equal(a, b)
        assert batch.on("cpu") is batch.on(torch.device("cpu"))
        assert plan_recomputation(model, batch, 1 << 40).modes[0] == "nothing"


def test_what_a_micro_batch_took_is_not_taken_again():
    """One rule: with a micro-batch, what has an entry per sequence has one per planned sequence."""
    its, model = _OBJECTIVE, build("qwen3")
    batch = plan_micro_batches(its.sequences, 60)[0][0]
    for given in (
        {"loss_mask": batch.take(its.loss_masks)},
        {"temperature": batch.take(its.temperatures)},
        {"loss_mask": its.loss_masks[:1]},
    ):
        (name,) = given
        message = rf"{name} must hold one entry per sequence: expected {len(its.sequences)}, got "
        message += rf"\d+: of a plan, {name} is that of all sequences .*not what batch.take gave"
        with pytest.raises(ForestError, match=message):
            sequence_logprobs(model, batch, **given)


def test_a_plan_is_made_of_ranks():
    plan = plan_micro_batches([[1, 2, 3], [4, 5]], 3)
    for read in (lambda b: b.packed, lambda b: b.take([1, 2]), lambda b: b.sequence_indices):
        with pytest.raises(AttributeError, match=r"a rank.*write `for batch in plan\[rank\]`"):
            for row in plan:
                read(row)
    same = copy.deepcopy(plan[0]), pickle.loads(pickle.dumps(plan[0]))
    assert all(len(row) == 2 and row[0].packed.num_tokens == 3 for row in same)
    assert not hasattr(plan[0], "packed") and isinstance(plan[0], tuple) and plan[:1] == (plan[0],)


def test_an_empty_step_scores_nothing_and_has_zero_gradients():
    plan = plan_micro_batches(ragged_sequences(), 200, min_micro_batches=9)
    empty = plan[0][-1]
    assert empty.is_empty
    model = build("qwen3")
    mask = [np.ones(n) for n in plan.forest.sequence_lengths]
    scores = sequence_logprobs(model, empty.packed, loss_mask=empty.take(mask), return_entropy=True)
    assert scores.entropy is not None
    assert [p.shape for p in scores.logprobs] == [p.shape for p in scores.entropy] == [(0,)]
    loss = torch.cat(scores.logprobs).sum() + torch.cat(scores.entropy).sum()
    assert loss.item() == 0
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    # every parameter takes part, so that reductions over ranks match
    assert all(g is not None and not g.any() for g in gradients)


def test_a_micro_batch_in_another_process_has_its_part_of_the_forest_alone():
    sequences = many_trees(4, 100, 4)
    plan = plan_micro_batches(sequences, 400)
    batch = plan[0][3]
    data = pickle.dumps(batch)
    assert len(data) < 30_000 < len(pickle.dumps(plan.forest))
    same = pickle.loads(data)
    assert same.sequence_indices.tolist() == batch.sequence_indices.tolist()
    assert (same.num_tokens, same.cost) == (batch.num_tokens, batch.cost)
    assert torch.equal(same.packed.input_ids, batch.packed.input_ids)
    whole = pickle.loads(pickle.dumps(plan))
    assert indices_of(whole) == indices_of(plan)
    empty = plan_micro_batches([[1, 2]], 2, min_micro_batches=2)[0][1]
    assert pickle.loads(pickle.dumps(empty)).packed.num_tokens == 1


def test_packed_is_made_once():
    batch = plan_micro_batches([[1, 2], [1, 3]], 10)[0][0]
    assert "packed" not in vars(batch)
    assert batch.packed is batch.packed


# ---- losses that do not depend on the plan -------------------------------------------------------

_SEQUENCES = ragged_sequences()
_OBJECTIVE = objective_of(_SEQUENCES)
# (max_tokens, num_ranks, groups, min_micro_batches)
_PLANS = [(1000, 1, None, 1), (60, 2, None, 4), (45, 3, [i % 5 for i in range(12)], 1)]
_CONSTANT = 64.0


def _reference_loss(normalization: str, terms: list[Any], masks: list[torch.Tensor]) -> Any:
    """The textbook's, over all sequences at once."""
    sums = torch.stack([(t * m).sum() for t, m in zip(terms, masks, strict=True)])
    counts = torch.tensor([float(m.sum()) for m in masks])
    if normalization == "token-mean":
        return sums.sum() / counts.sum()
    if normalization == "sequence-mean":
        return (sums / counts.clamp(min=1)).mean()
    return (sums / _CONSTANT).mean()


@pytest.mark.parametrize(
    "normalization", mostly(["token-mean", "sequence-mean", "constant"], ["token-mean"])
)
def test_the_accumulated_gradient_does_not_depend_on_the_plan(normalization):
    """Against every sequence alone through the eager model, one loss over all of them."""
    masks = copy.deepcopy(_OBJECTIVE.loss_masks)
    assert masks is not None
    masks[4][:] = 0  # a sequence that nothing is scored on
    tensors = [torch.from_numpy(mask) for mask in masks]
    advantages = torch.linspace(-1, 2, len(_SEQUENCES))

    reference = build("qwen3", "eager")
    terms = []
    for tokens, advantage in zip(_SEQUENCES, advantages, strict=True):
        ids = torch.from_numpy(tokens)
        log_p = reference(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        terms.append(-advantage * log_p.gather(1, ids[1:, None])[:, 0])
    expected = _reference_loss(normalization, terms, [m[1:] for m in tensors])
    expected.backward()

    constant = _CONSTANT if normalization == "constant" else None
    cuts = set()
    for max_tokens, num_ranks, groups, min_micro_batches in _PLANS:
        plan = plan_micro_batches(_SEQUENCES, max_tokens, num_ranks, groups, min_micro_batches)
        cuts.add((plan.num_ranks, plan.num_micro_batches, plan.stats.packed_tokens))
        weights = torch.from_numpy(plan.loss_weights(normalization, masks, constant=constant))
        model = build("qwen3")
        total = 0.0
        for rank in plan:
            for batch in rank:
                scored = batch.take(tensors)
                scores = sequence_logprobs(model, batch.packed, loss_mask=scored)
                # no special case for empty steps
                loss: Any = sum(
                    w * (-a * p * m[1:]).sum()
                    for w, a, p, m in zip(
                        batch.take(weights),
                        batch.take(advantages),
                        scores.logprobs,
                        scored,
                        strict=True,
                    )
                )
                # what reducing by the mean over the ranks does to the sum over ranks
                (loss / num_ranks).backward()
                total += loss.item() / num_ranks
        assert total == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
        for (name, ours), theirs in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            torch.testing.assert_close(
                ours.grad, theirs.grad, rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert len(cuts) == len(_PLANS)


def test_scores_of_a_plan_are_those_of_every_sequence_alone():
    """Temperatures and entropies too, through `take`."""
    plan = plan_micro_batches(_SEQUENCES, 45, num_ranks=2)
    model = build("qwen3")
    expected = run_replicated(build("qwen3", "eager"), _OBJECTIVE)
    found: dict[int, torch.Tensor] = {}
    for batch in batches_of(plan):
        scores = sequence_logprobs(
            model,
            batch.packed,
            temperature=batch.take(_OBJECTIVE.temperatures),
            loss_mask=batch.take(_OBJECTIVE.loss_masks),
        )
        found |= dict(zip(batch.sequence_indices.tolist(), scores.logprobs, strict=True))
    assert len(batches_of(plan)) > 2
    for i, logprobs in enumerate(expected.logprobs):
        torch.testing.assert_close(found[i].detach(), logprobs, rtol=1e-4, atol=1e-5)


def test_denominators():
    sequences = [[1, 2, 3], [1, 2], [1, 2, 3, 4], [5]]
    masks = [[1, 1, 0], [1, 0], [0, 1, 1, 1], [1]]
    plan = plan_micro_batches(sequences, 4, num_ranks=2)
    assert plan.num_sequences == 4
    assert plan.num_loss_tokens() == 2 + 1 + 3 + 0
    # the first token of a sequence has no predictor
    forms = (masks, [np.array(m, bool) for m in masks], [torch.tensor(m) for m in masks])
    for given_masks in forms:
        assert plan.num_loss_tokens(given_masks) == 1 + 0 + 3 + 0
    assert plan.num_loss_tokens([*forms[2][:2], *forms[0][2:]]) == 4
    # DDP divides by the two ranks
    assert plan.loss_weights("token-mean", masks).tolist() == [2 / 4] * 4
    assert plan.loss_weights("token-mean", masks, rank_reduction="sum").tolist() == [1 / 4] * 4
    assert plan.loss_weights("sequence-mean", masks).tolist() == [2 / 4, 0, 2 / 12, 0]
    assert plan.loss_weights("constant", constant=8).tolist() == [2 / 32] * 4
    assert plan.loss_weights("constant", constant=2**70).tolist() == [2**-71] * 4
    assert plan.loss_weights().tolist() == [2 / 6] * 4


# ---- the cost model ------------------------------------------------------------------------------


def _weights_a_token_meets(model: Any) -> float:
    """Counted in the model: matrices outside embedding and head, experts by how many are active."""
    text = model.config.get_text_config()
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    outside = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    total = 0.0
    for name, weight in model.named_parameters():
        # biases are left out
        if weight.ndim > 1 and id(weight) not in outside:
            share = text.num_experts_per_tok / experts if ".experts." in name else 1
            total += weight.numel() * share
    return total


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "gemma2", "qwen3_moe"])
def test_coefficients_are_those_of_the_model(model_type):
    model = build(model_type)
    config = model.config
    costs = CostModel.from_config(config)
    head = 8 * config.hidden_size * config.vocab_size
    assert costs.linear == 6 * _weights_a_token_meets(model) + head
    layers = attentions(model)
    assert len(layers) == config.num_hidden_layers
    sliding = sum(getattr(layer, "sliding_window", None) is not None for layer in layers)
    per_layer = 3.5 * 2 * config.num_attention_heads * 2 * layers[0].head_dim
    assert costs.attention == per_layer * (len(layers) - sliding)
    assert costs.windowed == per_layer * sliding
    assert costs.window == (config.sliding_window if sliding else None)
    assert (sliding > 0) == (model_type != "llama")
    checkpointed = CostModel.from_config(config, gradient_checkpointing=True, scored_share=0)
    assert checkpointed.linear == 8 * _weights_a_token_meets(model)
    assert checkpointed.attention == costs.attention / 3.5 * 4.5


def test_latent_attention():
    config = build("deepseek_v3").config
    per_pair = config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
    costs = CostModel.from_config(config)
    assert costs.attention == 7 * per_pair * config.num_hidden_layers


def test_every_window_counts_with_its_layers(monkeypatch):
    config = build("qwen3").config
    cost = model_cost(config)
    layers = tuple(
        LayerCost("", 0, per_pair, w) for per_pair, w in ((2, 4), (3, None), (5, 9), (7, 4))
    )
    monkeypatch.setattr(costs, "model_cost", lambda config: replace(cost, layers=layers))
    by_window = CostModel.from_config(config)
    assert by_window.attention == 7 * 3
    assert dict(zip(by_window.window, by_window.windowed, strict=True)) == {
        4: 7 * (2 + 7),
        9: 7 * 5,
    }
    want = [
        sum(
            by_window.linear + 7 * (3 * (p + 1) + 9 * min(p + 1, 4) + 5 * min(p + 1, 9))
            for p in run
        )
        for run in (range(3), range(3, 20))
    ]
    assert by_window.cost(np.array([0, 3]), np.array([3, 17])).tolist() == want


def test_cost_of_runs_adds_up():
    model = CostModel(linear=3, attention=2, windowed=5, window=4)
    depth, length = np.array([0, 3, 7]), np.array([3, 4, 1])
    expected = [
        sum(3 + 2 * (p + 1) + 5 * min(p + 1, 4) for p in range(d, d + n))
        for d, n in zip(depth, length, strict=True)
    ]
    assert model.cost(depth, length).tolist() == expected


@pytest.mark.parametrize(
    "arguments",
    [
        {"linear": -1.0},
        {"attention": float("nan")},
        {"linear": 0, "attention": 0},
        {"window": 4},
        {"windowed": 1.0},
        {"windowed": 1.0, "window": 0},
        {"windowed": (1.0, 2.0), "window": 4},
        {"windowed": (1.0, 2.0), "window": (4, 0)},
        {"windowed": (1.0, 0.0), "window": (4, 8)},
        {"windowed": (), "window": ()},
    ],
)
def test_costs_that_make_no_sense(arguments):
    with pytest.raises(
        ValueError, match=r"linear must be|attention must|costs must|windowed goes with"
    ):
        CostModel(**arguments)


def test_a_config_without_sizes():
    class Config:
        hidden_size = 8

    with pytest.raises(ValueError, match=r"does not say num_hidden_layers.*CostModel\(linear="):
        CostModel.from_config(Config())


# ---- refusals ------------------------------------------------------------------------------------


def test_a_sequence_beyond_the_budget_is_named():
    message = (
        r"sequences\[1\] has 5 tokens, max_tokens is 4; a sequence is never cut: raise max_tokens "
        "to at least 6, or drop or shorten it"
    )
    with pytest.raises(ForestError, match=message):
        plan_micro_batches([[1], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]], 4)


@pytest.mark.parametrize("name", ["max_tokens", "num_ranks", "min_micro_batches"])
@pytest.mark.parametrize("value", [0, -1, 1.5, None, True])
def test_counts_are_integers_from_1(name, value):
    arguments = {"max_tokens": 10, name: value}
    with pytest.raises(ValueError, match=f"{name} must be an integer >= 1, got {value}"):
        plan_micro_batches([[1, 2]], **arguments)
    assert plan_micro_batches([[1, 2]], np.int64(10)).max_tokens == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sequences": []}, "sequences is empty"),
        ({"sequences": [[1], []]}, r"sequences\[1\] is empty"),
        ({"groups": [1]}, "groups must name one group per sequence: got 1 groups for 2 sequences"),
        ({"groups": [[1], [2]]}, "groups must be hashable"),
        ({"namespaces": [1]}, "namespaces must name one namespace per sequence"),
    ],
)
def test_input_that_does_not_match(arguments, message):
    with pytest.raises(ForestError, match=message):
        plan_micro_batches(**{"sequences": [[1, 2], [3]], "max_tokens": 10, **arguments})


@pytest.mark.parametrize("num_groups", [1, 3, 4, 5])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_a_world_size_that_does_not_divide_the_groups(num_groups, num_ranks):
    """Whole groups on ranks, every sequence once, equally many steps; idle ranks are named."""
    sequences = [[group, 9, row] for group in range(num_groups) for row in range(4)]
    groups = [s[0] for s in sequences]
    plan = plan_micro_batches(sequences, 6, num_ranks, groups)
    found = [[i for step in rank for i in step] for rank in indices_of(plan)]
    assert sorted(i for rank in found for i in rank) == list(range(len(sequences)))
    assert sum(len({groups[i] for i in rank}) for rank in found) == num_groups
    assert len({len(rank) for rank in plan}) == 1
    idle = sum(not rank for rank in found)
    assert idle == max(0, num_ranks - num_groups)
    words = {0: "", 1: "(1 rank has no sequence)"}.get(idle, f"({idle} ranks have no sequence)")
    assert words in str(plan.stats) and ("no sequence" in str(plan.stats)) == (idle > 0)


@pytest.mark.parametrize(("num_ranks", "ranks"), [(1, "1 rank"), (2, "2 ranks")])
def test_a_rank_beyond_the_plan_is_named(num_ranks, ranks):
    plan = plan_micro_batches([[1, 2], [3]], 10, num_ranks)
    message = f"rank {num_ranks} of a plan for {ranks}: plan with num_ranks= the number of"
    with pytest.raises(IndexError, match=message):
        plan[num_ranks]
    assert plan[-1] is plan[num_ranks - 1] and list(reversed(plan)) == [*plan][::-1]


def test_namespaces_belong_to_sequences():
    forest = PrefixForest.from_sequences([[1, 2], [3]])
    with pytest.raises(ValueError, match="give namespaces= with sequences"):
        plan_micro_batches(forest, 10, namespaces=[1, 2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"normalization": "mean"}, "normalization must be 'token-mean'"),
        ({"normalization": "constant"}, "constant= goes with"),
        ({"constant": 3}, "constant= goes with"),
        ({"normalization": "constant", "constant": 0}, "constant must be above 0"),
        ({"rank_reduction": "max"}, "rank_reduction must be 'mean' or 'sum'"),
        ({"loss_mask": [[1, 1]]}, "loss_mask must hold one entry per sequence: expected 2, got 1"),
        ({"loss_mask": [[1, 1], [1, 1]]}, r"loss_mask\[1\] must have the sequence's length 1"),
        ({"loss_mask": [[1, 0], [1]]}, "no token is scored"),
    ],
)
def test_weights_that_cannot_be(arguments, message):
    plan = plan_micro_batches([[1, 2], [3]], 10)
    with pytest.raises(ValueError, match=message):
        plan.loss_weights(**arguments)
