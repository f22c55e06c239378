"""Run on each of two ranks: tensor, sequence and expert parallelism, and planted mistakes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import parallel_state
from packaging.version import Version

from prefixtree.integrations.megatron import batch_packing, context_parallel, scoring
from prefixtree.integrations.megatron.version import installed
from prefixtree.kernels.lm_head.eager import VocabularySlice
from tests.integrations.megatron import mtp_runs, replay_runs, router_runs, state_runs
from tests.integrations.megatron.router_runs import BIAS, Z, losses
from tests.integrations.megatron.runs import Case, build, compared, latent, moe
from tests.integrations.megatron.state_runs import DELTA, MAMBA
from tests.integrations.megatron.test_latent_attention import YARN
from tests.integrations.megatron.test_one_process import FULL, SELECTIVE
from tests.integrations.megatron.test_routers import RECOMPUTED

SP = {"sequence_parallel": True}
TENSOR = {
    "TP": Case(),
    "TP, tied": Case(tied=True),
    "TP, pack_batches": Case(way="pack_batches"),
    "TP + SP": Case(SP),
    "TP + SP, tied": Case(SP, tied=True),
    "TP + SP, pack_batches": Case(SP, way="pack_batches"),
    "TP + SP, pack_batches, tied": Case(SP, way="pack_batches", tied=True),
    "TP, scored batches": Case(way="scored batches"),
    "TP + SP, scored batches, tied, recompute": Case(SP | FULL, way="scored batches", tied=True),
    "TP + SP, recompute": Case(SP | FULL),
    "TP + SP, recompute core attention": Case(SP | SELECTIVE),
    "TP + SP, hybrid": Case(SP, model="hybrid"),
    "TP + SP, hybrid, pack_batches": Case(SP, model="hybrid", way="pack_batches"),
    "TP + SP, learnt sinks": Case(SP | {"softmax_type": "learnable"}),
    "TP + SP, float32": Case(SP, dtype=torch.float32),
    "TP + SP, float32, pack_batches": Case(SP, dtype=torch.float32, way="pack_batches"),
    "TP + SP, measure, float32": Case(SP, dtype=torch.float32, way="measure"),
    "TP + SP, sampling masks, float32": Case(SP, dtype=torch.float32, masked=True),
    "TP, measure, tied, float32": Case(dtype=torch.float32, way="measure", tied=True),
    "TP + SP, experts": Case(SP | moe()),
    "TP + SP, latent attention, pack_batches": Case(SP | latent(), way="pack_batches"),
    "TP + SP, latent attention, yarn, recompute": Case(SP | latent(**YARN) | FULL),
}
EXPERT = {
    "EP": Case(moe()),
    "EP, pack_batches": Case(moe(), way="pack_batches"),
}
#: Before 0.19 a z loss is refused there.
PER_TOKEN = losses("aux_loss", **(Z if Version(installed()) >= Version("0.19") else {}))
ROUTERS = {
    "TP + SP, three losses, bias": Case(
        SP | losses("aux_loss", "seq_aux_loss", "global_aux_loss", **BIAS)
    ),
    "TP + SP, aux, z, pack_batches": Case(SP | losses("aux_loss", **Z), way="pack_batches"),
    "TP + SP, z, hybrid, all recomputed": Case(SP | losses(**Z) | FULL, model="hybrid"),
    "TP + SP, aux, z, bias, experts recomputed": Case(
        SP | losses("aux_loss", **Z, **BIAS) | RECOMPUTED
    ),
    "TP + SP, latent attention, seq aux, bias": Case(
        SP | latent() | losses("seq_aux_loss", **BIAS)
    ),
    "TP + SP, aux, a loss per token": Case(SP | PER_TOKEN | {"calculate_per_token_loss": True}),
}
STATES = {
    "TP + SP, gated delta rule": Case(SP | DELTA),
    "TP + SP, gated delta rule, pack_batches": Case(SP | DELTA, way="pack_batches"),
    "TP + SP, Mamba, recompute": Case(SP | MAMBA | FULL, model="hybrid"),
}
REPLAY = {"TP + SP, recorded routes": Case(SP | moe())}
MTP = {
    "TP, several tokens ahead": Case(mtp_runs.LAYERS),
    "TP, several tokens ahead, tied": Case(mtp_runs.LAYERS, tied=True),
}
EXPERT_ROUTERS = {
    "EP, global aux, z, bias": Case(losses("global_aux_loss", **Z, **BIAS)),
}


@contextlib.contextmanager
def packed_positions() -> Iterator[None]:
    """Rotary positions of the packed order in the place of depths."""

    def in_order(self: Any, table: Any) -> Any:
        return table[torch.arange(self.local.packed.num_tokens).clamp(max=len(table) - 1)]

    with patch.object(context_parallel.ForestParams, "at_depths", in_order):
        yield


@contextlib.contextmanager
def gathered_as_if_parts(module: Any) -> Iterator[None]:
    """Sums gradients over ranks that are whole already, where hidden states are gathered."""
    gather = module.gather_from_sequence_parallel_region

    def wrong(hidden: torch.Tensor, tensor_parallel_output_grad: bool, group: Any) -> torch.Tensor:
        return gather(hidden, tensor_parallel_output_grad=True, group=group)

    with patch.object(module, "gather_from_sequence_parallel_region", wrong):
        yield


def unsummed_vocabulary() -> Any:
    """No sums over the parts of the vocabulary."""
    return patch.object(VocabularySlice, "summed", lambda self, partial: partial)


def no_gradient_of_copies() -> Any:
    """The hidden states that `pack_batches` copies out lose their gradient."""
    gather = batch_packing.gather
    return patch.object(
        batch_packing, "gather", lambda values, index: gather(values.detach(), index)
    )


MISTAKES: dict[str, tuple[Case, Callable[[], Any]]] = {
    "packed positions": (Case(SP), packed_positions),
    "gather": (Case(SP), lambda: gathered_as_if_parts(scoring)),
    "gather, pack_batches": (
        Case(SP, way="pack_batches"),
        lambda: gathered_as_if_parts(batch_packing),
    ),
    "unsummed vocabulary": (Case(SP), unsummed_vocabulary),
    "unsummed measures": (
        Case(SP, dtype=torch.float32, way="measure"),
        lambda: patch.object(
            scoring, "copy_to_tensor_model_parallel_region", lambda hidden, group: hidden
        ),
    ),
    "copies": (Case(SP, way="pack_batches"), no_gradient_of_copies),
}


def on_rank(rank: int, folder: Path) -> dict[str, Any]:
    """Errors of each case, and what the models were."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    results: dict[str, Any] = {name: vars(compared(case)) for name, case in TENSOR.items()}
    for name, (case, mistake) in MISTAKES.items():
        with mistake():
            results[f"mistake: {name}"] = compared(case).worst
    results |= {name: router_runs.compared(case) for name, case in ROUTERS.items()}
    results |= {name: vars(state_runs.compared(case)) for name, case in STATES.items()}
    results |= {name: vars(replay_runs.compared(case)) for name, case in REPLAY.items()}
    results |= {name: vars(mtp_runs.compared(case)) for name, case in MTP.items()}
    results["records"] = replay_runs.recorded(Case(SP | moe()))
    model = build(TENSOR["TP + SP"])
    results["shape of the output layer"] = tuple(model.output_layer.weight.shape)
    results["sequence parallel"] = bool(model.output_layer.sequence_parallel)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    results |= {name: vars(compared(case)) for name, case in EXPERT.items()}
    results |= {name: router_runs.compared(case) for name, case in EXPERT_ROUTERS.items()}
    experts = build(EXPERT["EP"]).decoder.layers[0].mlp.experts
    results["local experts"] = experts.num_local_experts
    return results
