"""Forests that the ranks of a group compute together, against one process that computes them."""

from __future__ import annotations

import re

import pytest
import torch

from prefixtree import tree_attention
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.support.full import mostly
from tests.support.group_bad_calls import BAD
from tests.support.group_cases import (
    BALANCED,
    CASES,
    HALF,
    QUICK,
    TEMPERATURES,
    WIDE_CASES,
    WIDE_QUICK,
    Case,
    objective_of,
    packed_of,
)
from tests.support.group_checks import Results, check, check_exchanges, check_values, run_alone
from tests.support.group_ranks import (
    MISTAKES,
    QUICK_VALUES,
    VALUES,
    documented_names,
    rows_in_bfloat16,
)
from tests.support.models import (
    Run,
    assert_same,
    build,
    errors,
    gradients,
    numbers_and_logprob,
    pack_sequences,
    ragged_packed,
    run_packed,
)
from tests.support.spawn import run_ranks

pytestmark = [
    # PEFT asks transformers under the old name of the property
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of each of two ranks."""
    return run_ranks("tests.support.group_ranks", tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def wide_results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The same of four."""
    return run_ranks("tests.support.group_ranks", tmp_path_factory.mktemp("four"), 4)


@pytest.mark.parametrize("name", mostly(CASES, QUICK))
def test_two_ranks(results, name):
    check(results, name, CASES[name])
    check_exchanges(results, name, CASES[name])


@pytest.mark.parametrize("name", mostly(WIDE_CASES, WIDE_QUICK))
def test_four_ranks(wide_results, name):
    check(wide_results, name, WIDE_CASES[name])
    check_exchanges(wide_results, name, WIDE_CASES[name])


def test_a_kv_head_of_several_ranks_gets_its_gradient_in_float32(wide_results):
    """In bfloat16 as near to float64 as one launch."""
    packed, (*qkv, dout) = rows_in_bfloat16()

    def attend(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in qkv]
        out = tree_attention(*leaves, packed.mask)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]

    exact, once = attend(torch.float64), attend(torch.bfloat16)
    tokens = torch.cat([result["heads in bfloat16"][4] for result in wide_results]).long()
    for number, (want, one) in enumerate(zip(exact, once, strict=True)):
        found = torch.empty_like(one)
        found[tokens] = torch.cat([result["heads in bfloat16"][number] for result in wide_results])
        ours, launch = ((x.double() - want).abs().mean() for x in (found, one))
        assert ours <= 1.05 * launch


@pytest.mark.parametrize(("name", "wrapper"), mostly(VALUES, QUICK_VALUES))
def test_values_per_token(results, wide_results, name, wrapper):
    """Of a reward model; also of a forest that is padded, so that every rank has a token."""
    check_values([r["values", name, wrapper] for r in (*results, *wide_results)], name)


def test_the_update_of_the_documentation(wide_results):
    """Two groups of two ranks under FSDP2, against one process with the whole batch."""
    names = documented_names()
    model, masks = names["model"], names["masks"]
    scores = sequence_logprobs(model, pack_sequences(names["rollouts"]), loss_mask=masks)
    scored = sum(int(mask[1:].sum()) for mask in masks)
    terms = zip(names["advantages"], scores.logprobs, strict=True)
    (-sum(advantage * p.sum() for advantage, p in terms) / scored).backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    names["make_optimizer"](model.parameters()).step()
    for result in wide_results:
        assert isinstance(result["documented"], dict), result["documented"]
        for name, parameter in model.named_parameters():
            moved = result["documented"][name] - before[name]
            expected = parameter.detach() - before[name]
            assert float((moved - expected).norm()) <= 1e-5 * max(1.0, float(expected.norm())), name
            assert float(expected.norm()) > 0, name


@pytest.mark.parametrize("mistake", MISTAKES)
def test_red_with_a_mistake(results, mistake):
    """Scores do not show it, gradients do."""
    (alone,) = run_alone(Case())
    for result in results:
        found = errors(Run(**result["mistake", mistake]["run"]), alone)
        assert max(found.logprob, found.entropy) <= 1e-5 and found.gradient > 0.1


def test_gradients_are_those_of_the_mean_of_the_ranks_losses(results):
    """One rank computes the objective, the other three times that."""
    (alone,) = run_alone(Case())
    doubled = {name: 2 * gradient for name, gradient in alone.gradients.items()}
    for result in results:
        found = Run(**result["losses of their own"]["run"])
        assert_same(found, Run(alone.logprobs, alone.entropy, doubled))


def test_a_load_balancing_loss_that_one_rank_adds(results):
    """No rank waits for the other's backward of router logits."""
    model, objective = BALANCED.model(), objective_of(BALANCED)
    packed = packed_of(BALANCED, objective)
    scores = sequence_logprobs(model, packed, objective.temperatures, output_router_logits=True)
    loss = torch.cat(scores.logprobs).sum() + BALANCED.balance * scores.aux_loss
    loss.backward()
    for result in results:
        assert isinstance(result["balanced by one"], dict), result["balanced by one"]
        for name, expected in gradients(model).items():
            difference = (result["balanced by one"][name] - expected).norm()
            assert difference <= 2e-5 * expected.norm(), name


def test_bfloat16_parameters(results):
    """No further from float32 than one process with its weights in bfloat16, and a little."""

    def all_of(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([gradients[name].float().flatten() for name in sorted(gradients)])

    objective = objective_of(HALF)
    packed, model = pack_sequences(objective.sequences), HALF.model()
    exact = all_of(run_packed(model, packed, objective).gradients)
    half = all_of(run_packed(model.bfloat16(), packed, objective).gradients)
    allowed = 1.2 * float((half - exact).norm() / exact.norm()) + 1e-3
    for result in results:
        assert isinstance(result["half"], dict), result["half"]
        found = all_of(result["half"]["run"]["gradients"])
        distance = float((found - exact).norm() / exact.norm())
        print(f"{distance:.1e}, at most {allowed:.1e}")
        assert 1e-4 < distance <= allowed


def test_runs_are_equal_to_the_bit(results):
    assert [result["bits"] for result in results] == [True, True]


def test_a_group_of_one_is_no_group(results):
    assert [result["group of one"] for result in results] == [True, True]


def test_statistics_without_gradients(results):
    names = ("is_top1", "log_sum_sq_probs")
    with torch.no_grad():
        scores = sequence_logprobs(
            build("llama"),
            ragged_packed(),
            TEMPERATURES,
            return_statistics=names,
            measure=numbers_and_logprob,
        )
    assert scores.measured_edges[:, 1].tolist() == list(range(len(scores.measured_edges)))
    others = {"measured": scores.measured, "edges": [scores.measured_edges]}
    expected = {"logprobs": scores.logprobs, **scores.statistics, **others}
    for result in results:
        for name, values in expected.items():
            torch.testing.assert_close(result["statistics"][name], values, atol=1e-5, rtol=1e-5)


def _differs(*parts: str) -> tuple[re.Pattern[str], ...]:
    """Of both ranks: these parts, and no others."""
    said = f"rank 1 of the group differs from its rank 0 in {', '.join(parts)}$"
    return (re.compile(said),) * 2


# on each rank
_APART = tuple(
    f"over ranks [{one}]. The group has ranks [{other}] too" for one, other in ((0, 1), (1, 0))
)
MESSAGES: dict[str, tuple[str | re.Pattern[str], ...]] = {
    "other order": _differs("the order of its sequences"),
    "other tokens": _differs("its token ids"),
    "other mask": _differs("loss_mask"),
    "other temperature": _differs("temperature"),
    "other sampling masks": _differs("ids of sampling_masks"),
    "other recompute": _differs(r"recompute \('nothing', on rank 0 'all'\)"),
    "other gradient mode": _differs(r"torch.is_grad_enabled\(\) \(False, on rank 0 True\)"),
    "other trained": _differs(
        r"requires_grad of model.layers.1.mlp.up_proj.weight \(False, on rank 0 True\)"
    ),
    "other checkpointing": _differs(
        *(
            rf"gradient_checkpointing of model{part} \(True, on rank 0 False\)"
            for part in ("", ".layers.0", ".layers.1", ".layers.2")
        )
    ),
    "unknown statistics": (
        "RuntimeError: rank 1 of the group refused this call",
        "ValueError: return_statistics",
    ),
    "other group_mode": _differs(r"group_mode \('ulysses', on rank 0 'parts'\)"),
    "unknown group_mode": ("group_mode must be one of 'parts', 'ulysses', got 'ring'",) * 2,
    "other dtype": _differs(
        r"dtype of model.embed_tokens.weight \(torch.bfloat16, on rank 0 torch.float32\)",
        *[".*"] * 3,
        r"\d+ more",
    ),
    "other heads": _differs(
        r"linear by its configuration .*, kv_heads by its configuration \(1, on rank 0 2\)"
    ),
    "averaged over others": _APART,
    "sharded over others": _APART,
    "odd heads": ("3 query heads and 3 kv heads do not divide among 2 ranks",) * 2,
    "one raises": (
        "RuntimeError: rank 1 of the group refused this call, so no rank computes it: ValueError: "
        "temperatures must be finite and above 0",
        "ValueError: temperatures must be finite and above 0",
    ),
    "odd heads of states": (
        "the 3 heads of a recurrent layer, which share 3 heads of keys (groups of Mamba-2), do not "
        "divide among 2 ranks",
    )
    * 2,
    "router loss": _differs(r"output_router_logits \(True, on rank 0 False\)"),
    "routes": _differs("its recorded routes"),
    "other pixels": _differs(*(f"the pixels of image {n}" for n in range(3))),
    "images of one rank": (
        "RuntimeError: rank 1 of the group refused this call",
        "ids of Images.sequences need sequence_logprobs(images=)",
    ),
    "a cut image": (
        "it is cut inside an image",
        "RuntimeError: rank 0 of the group refused this call, so no rank computes it: ForestError",
    ),
    "auto": (
        "RuntimeError: rank 1 of the group refused this call, so no rank computes it: OutOfMemory",
        "GiB for activations with every layer recomputed",
    ),
    "flash": ("backend 'flash' does not serve ranks of a group",) * 2,
    "DeepSpeed": ("DeepSpeed is not verified with group",) * 2,
    "ZeRO-3": ("DeepSpeed is not verified with group",) * 2,
    "DTensor": ("up_proj.weight is a DTensor with placements",) * 2,
    "plan": ("Linear is tensor or expert parallel, which is not verified with group",) * 2,
    "mesh": ('got DeviceMesh; of a device mesh take a dimension: mesh["cp"].get_group()',) * 2,
    "long longrope": ("the ranks of a group would show it a part of the forest",) * 2,
    "not a member": ("computed", "this rank is no member of group"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_on_every_rank(results, name):
    for result, message in zip(results, MESSAGES[name], strict=True):
        found = result["bad", name]
        assert message.search(found) if isinstance(message, re.Pattern) else message in found
