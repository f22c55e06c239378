"""Run on each of two pipeline stages: Megatron's schedules, with and without virtual stages, over
two forests as two micro-batches, against every sequence as a micro-batch of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from prefixtree.integrations.megatron import pack_batches, tree_logprobs
from tests.integrations.megatron import router_runs
from tests.integrations.megatron.router_runs import BIAS, Z, losses
from tests.integrations.megatron.runs import (
    TEMPERATURE,
    Case,
    Weights,
    alone,
    build,
    columns,
    latent,
    logits_of,
    make_sequences,
    packed_of,
    thd,
    wrapped,
)
from tests.integrations.megatron.test_one_process import FULL
from tests.integrations.megatron.test_routers import RECOMPUTED
from tests.support.megatron_cpu import in_float64

LAYERS = {"num_layers": 4}
# Megatron exchanges the lengths of micro-batches in an order that two ranks alone mix up when
# virtual stages send both ways; and gloo's dispatcher of experts takes one length alone
FIXED = LAYERS | {"variable_seq_lengths": False}
CASES = {
    "1F1B": Case(LAYERS),
    "1F1B, tied": Case(LAYERS, tied=True),
    "1F1B, pack_batches": Case(LAYERS, way="pack_batches"),
    "1F1B, recompute": Case(LAYERS | FULL),
    "1F1B, latent attention": Case(LAYERS | latent()),
}
#: A recomputation has to see the counts of its own micro-batch.
ROUTERS = {
    "1F1B, router losses, experts recomputed": Case(
        FIXED | losses("aux_loss", **Z, **BIAS) | RECOMPUTED
    ),
}
INTERLEAVED = {
    "interleaved": Case(FIXED),
    "interleaved, pack_batches": Case(FIXED, way="pack_batches"),
}

GROUPS = [make_sequences(seed) for seed in (1, 2)]
WEIGHTS = [Weights.of(group, seed) for seed, group in enumerate(GROUPS)]
#: Distinct tokens of each group.
(DISTINCT,) = {packed_of(group).num_tokens for group in GROUPS}
#: To which single sequences are padded.
LONGEST = max(len(s) for group in GROUPS for s in group)
#: Every sequence with its part of the loss; an even number, as the interleaved schedule asks for.
ALONE = [
    (s, Weights([weights.logprobs[i]], [weights.entropy[i]]))
    for group, weights in zip(GROUPS, WEIGHTS, strict=True)
    for i, s in enumerate(group)
]


def _with_loss(loss: Any) -> tuple[Any, Callable[[Any], Any]]:
    # the schedule divides the loss in place
    return loss, lambda value: (value, {"loss": value.detach().clone()})


def _sent_on(output: Any) -> tuple[Any, Any]:
    return output, None


def scored(batches: Any, model: Any) -> Any:
    """A forward_step with scored edges. The schedule divides by the number of micro-batches."""
    at = next(batches)
    # stages take the parts of context-parallel ranks for equal shares, unless shapes are exchanged
    packed = packed_of(GROUPS[at], parallel_state.get_context_parallel_world_size())
    output = tree_logprobs(model, packed, TEMPERATURE, return_entropy=True)
    if isinstance(output, torch.Tensor):
        return _sent_on(output)
    return _with_loss(WEIGHTS[at].loss(output.logprobs, output.entropy) * len(GROUPS))


def shared(batches: Any, model: Any) -> Any:
    """A trainer's forward_step: a THD batch on every stage, logits from the last."""
    at = next(batches)
    inputs = thd(GROUPS[at])
    output = model(**inputs)
    if not model.module.post_process:
        return _sent_on(output)
    logits = logits_of(output, inputs, len(GROUPS[at]))
    both = [columns(x, s) for x, s in zip(logits, GROUPS[at], strict=True)]
    return _with_loss(WEIGHTS[at].loss(*zip(*both, strict=True)) * len(GROUPS))


def replicated(batches: Any, model: Any) -> Any:
    """One sequence, by Megatron's own attention."""
    sequence, weights = ALONE[next(batches)]
    output = alone(model, sequence, LONGEST)
    if not model.module.post_process:
        return _sent_on(output)
    logprobs, entropy = columns(output[0, : len(sequence)], sequence)
    return _with_loss(weights.loss([logprobs], [entropy]) * len(ALONE))


def replicated_row(batches: Any, model: Any) -> Any:
    """A group's sequences in one row, by Megatron's own attention and routers."""
    at = next(batches)
    output = router_runs.one_row(model, GROUPS[at])
    if not model.module.post_process:
        return _sent_on(output)
    return _with_loss(WEIGHTS[at].loss(*router_runs.scored(output, GROUPS[at])) * len(GROUPS))


def run(
    chunks: list[Any], step: Any, count: int, length: int, whole: bool = False
) -> tuple[dict[str, Any], float]:
    """Gradients of this stage, and on the last stage the loss; `whole` as in `wrapped`."""
    models = [wrapped(chunk, whole) for chunk in chunks]
    batches = [iter(range(count)) for _ in models]
    losses = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=batches if len(models) > 1 else batches[0],
        model=models,
        num_microbatches=count,
        seq_length=length,
        micro_batch_size=1,
        forward_only=False,
    )
    counts = [router_runs.router_counts(model.module) for model in models]
    finalize_model_grads(models)
    found = {
        f"{at}.{name}": p.main_grad.clone()
        for at, model in enumerate(models)
        for name, p in model.module.named_parameters()
    }
    for at, counted in enumerate(counts):
        found |= {f"{at}.{name}": count for name, count in counted.items()}
    return found, float(sum(loss["loss"] for loss in losses) / count) if losses else 0.0


def stages(case: Case, virtual: int | None, wrap: Any = None) -> list[Any]:
    more = {} if wrap is None else {"wrap": wrap}
    return [
        build(case, vp_stage=None if virtual is None else at, **more) for at in range(virtual or 1)
    ]


def compare(case: Case, virtual: int | None) -> dict[str, Any]:
    expected, loss = run(stages(case, virtual, lambda spec: spec), replicated, len(ALONE), LONGEST)
    chunks = stages(case, virtual)
    if case.way == "pack_batches":
        pack_batches(chunks)
    step = shared if case.way == "pack_batches" else scored
    # the trainer's padding is a sequence too
    padding = thd(GROUPS[0])["packed_seq_params"].cu_seqlens_q.diff()[len(GROUPS[0]) :].sum()
    length = DISTINCT + int(padding) * (case.way == "pack_batches")
    got, our_loss = run(chunks, step, len(GROUPS), length)
    return _errors(got, our_loss, expected, loss, chunks)


def _errors(got: Any, our_loss: float, expected: Any, loss: float, chunks: Any) -> dict[str, Any]:
    assert got.keys() == expected.keys() and all(g.any() for g in expected.values())
    return {
        "parameters": len(got),
        "loss": abs(our_loss - loss) / max(abs(loss), 1.0),
        "gradients": max(
            float((got[n] - expected[n]).abs().max() / expected[n].abs().max()) for n in got
        ),
        "layers": [len(chunk.decoder.layers) for chunk in chunks],
        "has loss": loss != 0.0,
    }


def compare_routers(case: Case) -> dict[str, Any]:
    """As `compare`, and the counts and biases of this stage's routers."""
    places = router_runs.positions_of(GROUPS[0])
    found = []
    for wrap, step, length, positions in (
        (lambda spec: spec, replicated_row, len(places), router_runs.restarting(places)),
        (None, scored, DISTINCT, contextlib.nullcontext()),
    ):
        with in_float64(), positions:
            chunks = stages(case, None, wrap)
            gradients, loss = run(chunks, step, len(GROUPS), length)
            routers = router_runs.router_results(chunks[0])
            found.append((gradients | routers, loss, len(routers)))
    (expected, loss, routers), (got, our_loss, _) = found
    return {"routers": routers} | _errors(got, our_loss, expected, loss, stages(case, None))


def on_rank(rank: int, folder: Path) -> dict[str, Any]:
    """Errors of each case on this stage."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    results = {name: compare(case, None) for name, case in CASES.items()}
    results |= {name: compare_routers(case) for name, case in ROUTERS.items()}
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2
    )
    results |= {name: compare(case, 2) for name, case in INTERLEAVED.items()}
    return results
