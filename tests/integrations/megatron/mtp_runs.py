"""Layers of multi-token prediction: a forest, and Megatron's own loss one sequence at a time."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from megatron.core import tensor_parallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from prefixtree import SequenceScores
from prefixtree.integrations.megatron import tree_logprobs, tree_spec
from tests.integrations.megatron.runs import (
    Case,
    Errors,
    Result,
    build,
    errors,
    gradients,
    make_sequences,
    packed_of,
    wrapped,
)
from tests.support.megatron_cpu import DEVICE, in_float64, on_cpu

LAYERS = {"mtp_num_layers": 2}


def make_weights(sequences: list[list[int]]) -> list[torch.Tensor]:
    """A weight per scored token, a third of them 0."""
    generator = torch.Generator().manual_seed(5)
    weights = [torch.rand(len(s) - 1, generator=generator, dtype=torch.float64) for s in sequences]
    return [(w * (w > 1 / 3)).to(DEVICE) for w in weights]


def run_forest(ddp: Any, sequences: list[list[int]], weights: list[torch.Tensor]) -> Result:
    """The model's loss, and the layers' with Megatron's scale and mean, from scored edges."""
    config = ddp.module.config
    masks = [[1, *(w > 0).long().tolist()] for w in weights]
    scores = tree_logprobs(ddp, packed_of(sequences), loss_mask=masks, mtp=True)
    assert isinstance(scores, SequenceScores) and scores.mtp is not None
    loss = -sum((w * x).sum() for w, x in zip(weights, scores.logprobs, strict=True))
    scale = config.mtp_loss_scaling_factor / config.mtp_num_layers
    for number, of_layer in enumerate(scores.mtp, 1):
        for w, x in zip(weights, of_layer, strict=True):
            loss = loss - scale * (w * x).sum() / w[number:].sum().clamp(min=1)
    loss.backward()
    ahead = [x.detach() for of_layer in scores.mtp for x in of_layer]
    return Result([x.detach() for x in scores.logprobs], ahead, gradients(ddp))


def run_replicated(ddp: Any, sequences: list[list[int]], weights: list[torch.Tensor]) -> Result:
    """Megatron's forward with labels, which adds its loss of the layers to the backward."""
    model, kept = ddp.module, list[torch.Tensor]()
    hook = model.mtp.register_forward_hook(lambda block, args, output: kept.append(output.detach()))
    columns: list[list[torch.Tensor]] = [[] for _ in range(1 + model.config.mtp_num_layers)]
    for sequence, w in zip(sequences, weights, strict=True):
        count = len(sequence)
        ids = torch.tensor([sequence], device=DEVICE)
        mask = torch.cat([w, w.new_zeros(1)])[None]
        causal = torch.ones(1, 1, count, count, dtype=torch.bool, device=DEVICE).triu(1)
        places = torch.arange(count, device=DEVICE)[None]
        losses = ddp(ids, places, causal, labels=ids.roll(-1, 1), loss_mask=mask)
        (losses * mask).sum().backward()
        for number, hidden in enumerate(kept.pop().chunk(len(columns))):
            columns[number].append(_log_p(model, hidden, ids, number) * (w > 0))
    hook.remove()
    return Result(columns[0], [x for column in columns[1:] for x in column], gradients(ddp))


@torch.no_grad()
def _log_p(model: Any, hidden: torch.Tensor, ids: torch.Tensor, number: int) -> torch.Tensor:
    """Log-probabilities [n - 1] of tokens that hidden states `number` + 1 tokens before predict."""
    tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if tied else None
    logits = model.output_layer(hidden, weight=weight)[0][:, 0]
    whole = tensor_parallel.gather_from_tensor_model_parallel_region(logits)
    targets = ids[0, 1 + number :]
    found = whole[: len(targets)].log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return torch.cat([found.new_zeros(min(number, ids.shape[1] - 1)), found])


def compared(case: Case) -> Errors:
    """`entropy` is the layers' log-probabilities; every parameter has a gradient."""
    sequences = make_sequences()
    weights = make_weights(sequences)
    with in_float64():
        expected = run_replicated(wrapped(build(case, lambda spec: spec)), sequences, weights)
        assert all(g.any() for g in expected.gradients.values())
        return errors(run_forest(wrapped(build(case)), sequences, weights), expected)


def updated(case: Case, steps: int = 2) -> tuple[float, float]:
    """The largest difference of a parameter after Megatron's Adam, and the least of the largest
    that a parameter moved."""
    sequences = make_sequences()
    weights = make_weights(sequences)
    settings = OptimizerConfig(
        # an epsilon under which a gradient that is rounding makes no step
        **{"optimizer": "adam", "lr": 1e-3, "adam_eps": 1e-3, "weight_decay": 0.1},
        # clipping asks for CUDA's tensors
        **{"clip_grad": 0.0, "params_dtype": case.dtype},
    )
    found, moved = [], []
    for run, spec in ((run_forest, tree_spec), (run_replicated, lambda spec: spec)):
        with in_float64(), patch.object(torch, "tensor", on_cpu(torch.tensor)):
            ddp = wrapped(build(case, spec), whole=True)
            optimizer = get_megatron_optimizer(settings, [ddp])
            start = [p.detach().clone() for p in ddp.parameters()]
            for _ in range(steps):
                ddp.zero_grad_buffer()
                optimizer.zero_grad()
                run(ddp, sequences, weights)
                assert optimizer.step()[0]
        found.append([p.detach() for p in ddp.parameters()])
        moved += [float((p - q).abs().max()) for p, q in zip(found[-1], start, strict=True)]
    return max(float((p - q).abs().max()) for p, q in zip(*found, strict=True)), min(moved)
