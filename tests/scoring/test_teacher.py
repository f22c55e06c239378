"""A teacher's distributions on a packed forest beside each sequence alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import prefixtree as pt
from prefixtree.errors import ForestError, UnsupportedError
from prefixtree.models import checks
from prefixtree.scoring import teacher as module
from prefixtree.scoring.logprobs import sequence_logprobs
from prefixtree.scoring.teacher import Teacher
from tests.scoring import kept_cases
from tests.support.full import mostly
from tests.support.models import (
    AdaptedHead,
    build,
    gradients,
    pack_sequences,
    ragged_objective,
    ragged_packed,
    with_random_lora,
)
from tests.support.step_ranks import LIGHT

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]


@pytest.mark.parametrize("case", ["gemma2", "qwen3_5", "adapter", "tied", "bfloat16"])
def test_each_sequence_alone(case):
    """Softcaps, a recurrence, another lm_head, masks, and several temperatures of one edge. Values
    are those of the token, so that a shift by a row is seen; the student is another model."""
    made = {"tied": ("llama", {"tie_word_embeddings": True})}.get(case, ("qwen3", {}))
    family, changes = (case, {}) if case in ("gemma2", "qwen3_5") else made
    teacher = build(family, seed=5, **changes).eval()
    if case == "adapter":
        teacher.lm_head = AdaptedHead(teacher.lm_head)
    objective, packed = ragged_objective(), ragged_packed()
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=case == "bfloat16")
    with autocast:
        of_teacher = Teacher(teacher, packed, objective.loss_masks)
    head, calls = teacher.lm_head, []
    hook = head.register_forward_hook(lambda module, args, output: calls.append(output))

    def value(logits: Any, edges: Any) -> Any:
        log_p = of_teacher.log_p(edges)
        return torch.cat([log_p.gather(1, edges.token[:, None]), log_p[:, :2]], 1)

    temperatures = [0.6 + 0.2 * (i % 3) for i in range(len(objective.sequences))]
    with torch.no_grad():
        found = sequence_logprobs(
            build("llama"), packed, temperatures, objective.loss_masks, measure=value
        )
    hook.remove()
    assert sum(map(len, calls)) >= len(packed.edges(objective.loss_masks).token)
    # under the autocast of its forward, which has ended
    assert {logits.dtype for logits in calls} == {
        torch.bfloat16 if case == "bfloat16" else torch.float32
    }
    alone = copy.deepcopy(teacher)
    alone.set_attn_implementation("eager")
    for i, tokens in enumerate(objective.sequences):
        ids = torch.as_tensor(tokens)[None]
        with torch.no_grad(), autocast:
            logits = alone(ids, use_cache=False).logits[0, :-1].float()
        log_p = (logits / temperatures[i]).log_softmax(-1)
        expected = torch.cat([log_p.gather(1, ids[0, 1:, None]), log_p[:, :2]], 1)
        scored = torch.as_tensor(objective.loss_masks[i])[1:].bool()
        tolerance = 0.1 if case == "bfloat16" else 5e-5 if case == "qwen3_5" else 1e-5
        torch.testing.assert_close(
            found.measured[i], expected * scored[:, None], rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("options", [{}, {"max_step_tokens": 60}], ids=str)
def test_the_scored_model_without_its_adapters(options):
    """Beside a copy as teacher, with gradients."""
    found = []
    for is_copy in (False, True):
        model = with_random_lora(build("qwen3"), "q_proj")
        with model.disable_adapter():
            of_teacher = Teacher(copy.deepcopy(model) if is_copy else model, ragged_packed())
        scores = sequence_logprobs(
            model, ragged_packed(), measure=of_teacher.divergence(), **options
        )
        torch.cat(scores.measured).sum().backward()
        found.append([torch.cat(scores.measured), *gradients(model).values()])
    assert found[0][0].max() > 0.01
    for same, beside_copy in zip(*found, strict=True):
        torch.testing.assert_close(same, beside_copy)


def test_the_scored_model_with_an_adapter_on_its_head_is_no_teacher():
    model = with_random_lora(build("llama"), "lm_head")
    of_itself = Teacher(model, ragged_packed()).divergence()
    with pytest.raises(UnsupportedError, match="the Teacher is the scored model"):
        sequence_logprobs(model, ragged_packed(), measure=of_itself)
    # the next call is whole again
    sequence_logprobs(model, ragged_packed())


def test_what_a_teacher_must_be(monkeypatch):
    teacher = build("llama").eval()
    forward = teacher.forward

    def all_logits(*args: Any, logits_to_keep: Any = None, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    teacher.forward = all_logits
    with pytest.raises(UnsupportedError, match="forward"):
        Teacher(teacher, ragged_packed())
    monkeypatch.setattr(checks, "foreign_module", lambda function, known=(): None)
    with pytest.raises(UnsupportedError, match="a teacher's forward must honour logits_to_keep"):
        Teacher(teacher, ragged_packed())
    del teacher.forward
    # nothing is left changed
    assert "forward" not in vars(teacher.lm_head)
    routed = pt.PrefixForest.from_sequences([[3, 4]], routes=[np.array([[[0, 1]], [[1, 2]]])])
    with pytest.raises(UnsupportedError, match="a Teacher replays no recorded routes: give it"):
        Teacher(teacher, pt.pack(routed))
    teacher.set_attn_implementation("sdpa")
    with pytest.raises(UnsupportedError, match="attn_implementation"):
        Teacher(teacher, ragged_packed())


def test_sharded_teachers_that_are_refused(monkeypatch):
    """FSDP2 gathers the weights of a linear lm_head; tensor parallelism leaves them in parts."""
    teacher = build("llama", tie_word_embeddings=False).eval()
    weight: Any = teacher.lm_head.weight
    weight.placements = ()
    with pytest.raises(UnsupportedError, match=r"is divided \(a DTensor\) in its forward"):
        Teacher(teacher, ragged_packed())
    del weight.placements
    teacher.lm_head = AdaptedHead(teacher.lm_head)
    monkeypatch.setattr(module, "FSDPModule", torch.nn.Module)
    with pytest.raises(UnsupportedError, match=r"its lm_head \(AdaptedHead\) is not linear"):
        Teacher(teacher, ragged_packed())


@pytest.mark.parametrize("beta", [-0.1, 1e-9, 1 - 1e-9, 1.5, float("nan")])
def test_betas_that_are_refused(beta):
    """In float32 there is no mixture so near to either."""
    with pytest.raises(ValueError, match="beta"):
        Teacher.divergence(object.__new__(Teacher), beta)


# ---- whose rows are read -------------------------------------------------------------------------


def _by_hand(of_teacher: Teacher) -> Any:
    def kl(logits: Any, edges: Any) -> Any:
        t, s = of_teacher.log_p(edges), logits.log_softmax(-1)
        return (t.exp() * (t - s)).sum(-1, keepdim=True)

    return kl


def _compiled(of_teacher: Teacher) -> Any:
    torch._dynamo.reset()
    return torch.compile(_by_hand(of_teacher), backend="eager", dynamic=True, fullgraph=True)


_MEASURES: dict[str, Callable[[Teacher], Any]] = {
    "divergence": Teacher.divergence,
    "by hand": _by_hand,
    "compiled": _compiled,
}


class _Distilled:
    """A student's divergences to a teacher at the masks of the ragged objective."""

    def __init__(self, kind: str = "divergence") -> None:
        self.student, self.teacher = build("llama"), build("qwen3", seed=5).eval()
        self.masks, self.measure = ragged_objective().loss_masks, _MEASURES[kind]

    def of(self, *given: Any) -> Teacher:
        return Teacher(self.teacher, *given)

    def scores(self, of_teacher: Teacher, packed: Any, masks: Any, **options: Any) -> list[Any]:
        measure = self.measure(of_teacher)
        scores = sequence_logprobs(
            self.student, packed, 0.7, masks, measure=measure, chunk_size=7, **options
        )
        return scores.measured

    def kept(self, of_teacher: Teacher) -> list[Any]:
        plan, found = kept_cases.plan_of(ragged_objective()), {}
        assert len(plan[0]) > 1
        measure = self.measure(of_teacher)
        with (
            torch.no_grad(),
            pt.kept_trunks(self.student, plan[0], 0.7, self.masks, measure=measure) as scored,
        ):
            for batch, scores in scored:
                found |= zip(batch.sequence_indices.tolist(), scores.measured, strict=True)
        return [found[i] for i in sorted(found)]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's, where it compiles
@pytest.mark.parametrize("kind", mostly(_MEASURES, {*_MEASURES} - {"compiled"}))
def test_an_edge_finds_its_row(kind):
    """Of a teacher of the same edges the bits of rows by number; of one that has more of them, in
    one forward, in steps, with kept trunks and by micro-batch, the same rows up to the rounding of
    other rows beside them."""
    case, packed, masks = _Distilled(kind), ragged_packed(), ragged_objective().loss_masks
    plan = kept_cases.plan_of(ragged_objective())
    exact = case.of(packed, masks)
    expected = case.scores(exact, packed, masks)
    assert sum(float(e.detach().sum()) for e in expected) > 1

    def assert_same(found: list[Any], of: list[Any] = expected) -> None:
        for a, b in zip(found, of, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    by_number, (_, rows) = (
        copy.copy(exact),
        packed.edges(masks).predictor.unique(return_inverse=True),
    )
    by_number._rows = SimpleNamespace(of=lambda edges: rows[edges.edge])
    for a, b in zip(case.scores(by_number, packed, masks), expected, strict=True):
        assert torch.equal(a, b)
    whole = case.of(pack_sequences([*ragged_objective().sequences[::-1], [3, 3, 4]]))
    # each has graphs of its own, which take seconds
    others = () if kind == "compiled" else (case.of(packed), case.of(pt.pack(plan.forest), masks))
    for of_teacher in (whole, *others):
        assert_same(case.scores(of_teacher, packed, masks))
        assert_same(case.scores(of_teacher, packed, masks, max_step_tokens=24, import_cost=LIGHT))
        assert_same(case.kept(of_teacher))
        for batch in plan[0]:
            given = batch.packed, batch.take(masks)
            assert_same(case.scores(of_teacher, *given), batch.take(expected))
            assert_same(case.scores(of_teacher, batch, masks), batch.take(expected))


@pytest.mark.parametrize("kind", ["divergence", "by hand"])
def test_an_edge_without_a_row_is_refused(kind):
    """What was another token's row, or an IndexError."""
    case, packed, masks = _Distilled(kind), ragged_packed(), ragged_objective().loss_masks
    first, second, *_ = kept_cases.plan_of(ragged_objective())[0]
    fewer = [np.where(np.arange(len(m)) < len(m) - 2, m, 0) for m in masks]
    left_out = (
        r"\d+ of \d+ scored edges \(the first: token \d+ \(id \d+\) of sequence \d+\) have no "
    )
    left_out += "row in the Teacher, whose loss_mask leaves them out: give it the loss_mask of"
    with pytest.raises(ForestError, match=left_out):
        case.scores(case.of(packed, fewer), packed, masks)
    with pytest.raises(ForestError, match=left_out):
        case.kept(case.of(packed, fewer))
    another = (
        r"have no row in the Teacher, which is of another packed forest: .* pack\(plan\.forest\)"
    )
    of_first = case.of(first, masks)
    with pytest.raises(ForestError, match=another):
        case.scores(of_first, second, masks)
    with pytest.raises(ForestError, match=another):
        case.kept(of_first)
    with pytest.raises(ForestError, match=another):
        case.scores(of_first, packed, masks, max_step_tokens=24, import_cost=LIGHT)
    # other tokens in a forest of the same form
    moved = [s - 1 for s in ragged_objective().sequences]
    with pytest.raises(ForestError, match=another):
        case.scores(case.of(pack_sequences(moved), masks), packed, masks)
    nothing = [m * 0 for m in masks]
    assert not any(m.any() for m in case.scores(case.of(packed, nothing), packed, nothing))


def test_a_teacher_of_namespaces_serves_those_without():
    """Rows of one path are equal, wherever it stands."""
    case, sequences = _Distilled(), [s.tolist() for s in ragged_objective().sequences]
    apart = pt.PrefixForest.from_sequences(sequences, namespaces=range(len(sequences)))
    expected = case.scores(case.of(ragged_packed()), ragged_packed(), None)
    for teacher, student in ((pt.pack(apart), ragged_packed()), (ragged_packed(), pt.pack(apart))):
        for a, b in zip(case.scores(case.of(teacher), student, None), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
