"""Real weights in three ways: each sequence alone in float64, alone in float32 or bfloat16, and
packed; and how far the latter two are from the first.

No reference uses prefixtree. transformers' Llama takes its norms and its softmax in float32 in
float64 too; with both in float64 every figure was the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    BitsAndBytesConfig,
)

import prefixtree as pt
from prefixtree.testing.reference import FaithfulSums
from tests.support.real import chats, folder

TARGETS = ["q_proj", "v_proj", "down_proj"]
# fewer for those that have a reference of their own
SEQUENCES = {"all weights": (0, 1, 2), "LoRA": (0, 2), "QLoRA": (0, 2), "values": (0, 2)}
MAX_STEP_TOKENS, MICRO_BATCH = 200, 300


class Far(NamedTuple):
    """How far a run is from float64.

    Attributes:
        scores: the largest difference of a log-probability, an entropy or a value.
        parameter: of the gradients, of one parameter the norm of the difference over the norm.
        whole: likewise, of all parameters as one vector.
        worst: the name of that parameter.
    """

    scores: float
    parameter: float
    whole: float
    worst: str = ""


@dataclass(frozen=True)
class Run:
    """Log-probabilities and entropies [n - 1, 2] per sequence, or values [n, 2]; and gradients."""

    rows: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]


# ---- models --------------------------------------------------------------------------------------


def load(kind: str, dtype: torch.dtype, attention: str) -> Any:
    """A model with the pretrained weights, of a kind of `SEQUENCES`; what it adds is drawn in
    float32, the same for every dtype."""
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": attention}
    auto: Any = AutoModelForCausalLM
    if kind == "values":
        auto = AutoModelForTokenClassification
        options["config"] = AutoConfig.from_pretrained(folder(), num_labels=2)
        options["config"].classifier_dropout = 0.0
    if kind == "QLoRA":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32
        )
        options["device_map"] = "cpu"
    model = auto.from_pretrained(folder(), **options)
    if kind == "QLoRA" and dtype == torch.float64:
        model = model.dequantize()
    generator = torch.Generator().manual_seed(1)
    if kind == "values":
        nn.init.normal_(model.score.weight, 0, 0.02, generator)
        nn.init.zeros_(model.score.bias)
    if kind.endswith("LoRA"):
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=TARGETS))
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                # small beside the weights; B starts at 0, where A has no gradient
                nn.init.normal_(parameter, 0, 0.02, generator)
    # in evaluation mode, 4-bit layers on a CPU lose gradients
    return (model.to(dtype) if dtype != torch.float32 else model).train()


# ---- runs ----------------------------------------------------------------------------------------


def faithful(dtype: torch.dtype) -> Any:
    """As in `verify`: on a CPU torch sums some gradients in bfloat16."""
    return FaithfulSums() if dtype == torch.bfloat16 else nullcontext()


def tokens_of(kind: str) -> list[torch.Tensor]:
    return [torch.from_numpy(chats().sequences[i]) for i in SEQUENCES[kind]]


def weights_of(kind: str) -> list[torch.Tensor]:
    """Of tokens in the loss: [n, 2] each, of entropies a tenth."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([1.0, 1.0 if kind == "values" else 0.1])
    return [torch.randn(len(t), 2, generator=generator) * scale for t in tokens_of(kind)]


def backward(rows: torch.Tensor, weights: torch.Tensor) -> None:
    (rows * weights[: len(rows)].to(rows)).sum().backward()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """In float32, which is far more exact than what is compared."""
    found = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def rows_alone(model: Any, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    """One sequence through transformers alone."""
    logits = model(input_ids=tokens[None], use_cache=False, **options).logits[0]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if logits.shape[1] == 2:
        return logits
    log_p = logits[:-1].log_softmax(-1)
    taken = log_p.gather(1, tokens[1:, None])[:, 0]
    return torch.stack([taken, -(log_p.exp() * log_p).sum(-1)], -1)


def alone(kind: str, dtype: torch.dtype, hidden: tuple[int, int, int] | None = None) -> Run:
    """Each sequence alone, with eager attention.

    hidden: a sequence, one of its tokens, and a key that this token does not see, by mistake.
    """
    model = load(kind, dtype, "eager")
    rows = []
    with faithful(dtype):
        for i, (tokens, weights) in enumerate(zip(tokens_of(kind), weights_of(kind), strict=True)):
            options = {}
            if hidden is not None and hidden[0] == i:
                mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)
                mask[hidden[1:]] = -torch.inf
                options["attention_mask"] = mask[None, None]
            rows.append(rows_alone(model, tokens, **options))
            backward(rows[-1], weights)
    return Run([r.detach().double() for r in rows], gradients(model))


def packed(way: str, kind: str, dtype: torch.dtype) -> Run:
    """All sequences through prefixtree, in a way of `WAYS`."""
    model = load(kind, dtype, "prefixtree")
    forest = pt.PrefixForest.from_sequences([t.numpy() for t in tokens_of(kind)])
    with faithful(dtype):
        found = dict(WAYS[way](model, forest, weights_of(kind)))
    return Run([found[i] for i in sorted(found)], gradients(model))


Rows = Iterator[tuple[int, torch.Tensor]]


def _backward_of_all(found: list[torch.Tensor], weights: list[torch.Tensor]) -> Rows:
    loss: Any = sum(
        (rows * w[: len(rows)].to(rows)).sum() for rows, w in zip(found, weights, strict=True)
    )
    loss.backward()
    yield from enumerate(rows.detach().double() for rows in found)


def _rows(scores: Any) -> list[torch.Tensor]:
    pairs = zip(scores.logprobs, scores.entropy, strict=True)
    return [torch.stack(pair, -1) for pair in pairs]


def _one_forward(model: Any, forest: Any, weights: list[torch.Tensor], **options: Any) -> Rows:
    scores = pt.sequence_logprobs(model, pt.pack(forest), return_entropy=True, **options)
    return _backward_of_all(_rows(scores), weights)


def _steps(model: Any, forest: Any, weights: list[torch.Tensor]) -> Rows:
    return _one_forward(model, forest, weights, max_step_tokens=MAX_STEP_TOKENS)


def _compiled(model: Any, forest: Any, weights: list[torch.Tensor]) -> Rows:
    pt.compile_layers(model)
    return _one_forward(model, forest, weights)


def _values(model: Any, forest: Any, weights: list[torch.Tensor]) -> Rows:
    return _backward_of_all(pt.sequence_values(model, pt.pack(forest)), weights)


def _kept_trunks(model: Any, forest: Any, weights: list[torch.Tensor]) -> Rows:
    cost = pt.import_cost(model)
    plan = pt.plan_micro_batches(forest, MICRO_BATCH, trunks=True, import_cost=cost)
    assert plan.stats.trunks.trunks > 0 and len(plan[0]) > 1
    with pt.kept_trunks(model, plan[0], return_entropy=True) as scored:
        for batch, scores in scored:
            indices, rows = batch.sequence_indices.tolist(), _rows(scores)
            found = _backward_of_all(rows, [weights[i] for i in indices])
            yield from ((indices[at], of) for at, of in found)


WAYS: dict[str, Callable[[Any, Any, list[torch.Tensor]], Rows]] = {
    "one forward": _one_forward,
    "steps": _steps,
    "kept trunks": _kept_trunks,
    "compiled layers": _compiled,
    "values": _values,
}


# ---- comparison ----------------------------------------------------------------------------------


# a reference is a gigabyte with its model: one at a time, as tests come by kind
@lru_cache(maxsize=1)
def exact(kind: str) -> Run:
    """Each sequence alone in float64."""
    return alone(kind, torch.float64)


@cache
def replicated(kind: str, dtype: torch.dtype) -> Far:
    """Each sequence alone in a dtype."""
    return distance(alone(kind, dtype), exact(kind))


def distance(run: Run, reference: Run) -> Far:
    """How far a run is from float64; both have the same parameters and finite values."""
    assert run.gradients.keys() == reference.gradients.keys()
    assert all(x.isfinite().all() for x in (*run.rows, *run.gradients.values()))
    gap, of_gap, of_all, worst = 0.0, 0.0, 0.0, ""
    for name, wanted in reference.gradients.items():
        missed, norm = float((run.gradients[name] - wanted).norm()), float(wanted.norm())
        of_gap, of_all = of_gap + missed**2, of_all + norm**2
        if missed / norm > gap:
            gap, worst = missed / norm, name
    rows, wanted = torch.cat(run.rows), torch.cat(reference.rows)
    return Far(float((rows - wanted).abs().max()), gap, (of_gap / of_all) ** 0.5, worst)
