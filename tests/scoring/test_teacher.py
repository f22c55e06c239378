"""A teacher's distributions on a packed forest beside each sequence alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from prefixtree.errors import UnsupportedError
from prefixtree.models import checks
from prefixtree.scoring import teacher as module
from prefixtree.scoring.logprobs import sequence_logprobs
from prefixtree.scoring.teacher import Teacher
from tests.support.models import AdaptedHead, build, ragged_objective, ragged_packed


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
    hook = head.register_forward_hook(lambda module, args, output: calls.append(len(output)))

    def value(logits: Any, edges: Any) -> Any:
        log_p = of_teacher.log_p(edges)
        return torch.cat([log_p.gather(1, edges.token[:, None]), log_p[:, :2]], 1)

    temperatures = [0.6 + 0.2 * (i % 3) for i in range(len(objective.sequences))]
    with torch.no_grad():
        found = sequence_logprobs(
            build("llama"), packed, temperatures, objective.loss_masks, measure=value
        )
    hook.remove()
    assert sum(calls) >= len(packed.edges(objective.loss_masks).token)
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
