"""Run on each of four ranks: context parallelism beside data and tensor parallelism, by Megatron's
schedule and reductions, and planted mistakes. On two ranks, which are one group, without tensor
parallelism and stages.

The reference has no context parallelism: its data-parallel ranks have the same losses as those of a
forest's group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

from prefixtree import PrefixForest, pack
from prefixtree.errors import ForestError, UnsupportedError
from prefixtree.integrations.megatron import tree_logprobs, tree_outputs
from prefixtree.packing.layout import PackedForest
from prefixtree.parallel.states import LayerStates
from prefixtree.planning.part_states import KEYS
from tests.integrations.megatron import context_stages, router_runs, state_runs
from tests.integrations.megatron.replay_runs import routes_of
from tests.integrations.megatron.router_runs import BIAS, Z, losses
from tests.integrations.megatron.runs import (
    NEWEST,
    TEMPERATURE,
    Case,
    Weights,
    alone,
    build,
    columns,
    latent,
    moe,
    packed_of,
    wrapped,
)
from tests.integrations.megatron.state_runs import DELTA, MAMBA
from tests.integrations.megatron.test_one_process import FULL
from tests.support.hooks import own_gradients_alone
from tests.support.megatron_cpu import DEVICE, in_float64
from tests.support.megatron_states import stand_in_for_kernels

SP = {"sequence_parallel": True}
PER_TOKEN = {"calculate_per_token_loss": True}
ROUTERS = losses("aux_loss", "global_aux_loss", **BIAS, **Z)
NORM_RECOMPUTED = {
    "recompute_granularity": "selective",
    "recompute_modules": ["gdn_norm_out"],
}
#: Two ranks with parts, and two with other data.
DATA = {
    "CP 2, DP 2": Case(),
    "CP 2, DP 2, window, recompute, a loss per token": Case(
        {"window_size": (6, 0)} | FULL | PER_TOKEN
    ),
    "CP 2, DP 2, latent attention, router losses": Case(latent() | ROUTERS),
    "CP 2, DP 2, gated delta rule": Case(DELTA),
    "CP 2, DP 2, Mamba, recompute": Case(MAMBA | FULL, model="hybrid"),
}
TENSOR = {
    "CP 2, TP 2 + SP, hybrid, tied": Case(SP, model="hybrid", tied=True),
    "CP 2, TP 2 + SP, router losses, recompute": Case(SP | ROUTERS | FULL),
    "CP 2, TP 2 + SP, gated delta rule, its norm recomputed": Case(
        SP | DELTA | {"linear_num_key_heads": 4} | NORM_RECOMPUTED
    ),
    "CP 2, TP 2 + SP, Mamba": Case(SP | MAMBA, model="hybrid"),
}
#: Experts on the ranks of a group with parts.
EXPERT = {"CP 2, DP 2, EP 2, router losses": Case(ROUTERS)}
if not NEWEST:
    del (
        DATA["CP 2, DP 2, window, recompute, a loss per token"],
        EXPERT["CP 2, DP 2, EP 2, router losses"],
    )
    TENSOR.clear()
SEQUENCES = router_runs.make_sequences()
TOKENS = sum(len(s) - 1 for s in SEQUENCES)


def _has_states(case: Case) -> bool:
    return bool({*DELTA, *MAMBA} & {*(case.config or {})})


def weights() -> Weights:
    """Ranks 0 and 1 have one loss, 2 and 3 another: with data parallelism those of two groups, with
    tensor parallelism those of ranks with two parts of one forest."""
    return Weights.of(SEQUENCES, seed=5 + dist.get_rank() // 2)


def with_loss(logprobs: Any, entropy: Any, config: Any) -> tuple[Any, Callable[[Any], Any]]:
    """As a trainer gives it to Megatron's schedule."""
    loss = weights().loss(logprobs, entropy)
    if not config.calculate_per_token_loss:
        return loss, lambda value: (value, {"loss": value.detach().clone()})
    # this rank's share of the tokens
    group = parallel_state.get_context_parallel_group()
    share = TOKENS // group.size() + (group.rank() < TOKENS % group.size())
    tokens = torch.tensor(share, dtype=torch.int, device=DEVICE)
    return loss, lambda value: (value, tokens, {"loss": value.detach().clone()})


def forest(_: Any, model: Any) -> Any:
    scores = tree_logprobs(model, packed(model), TEMPERATURE, return_entropy=True)
    assert not isinstance(scores, torch.Tensor)
    return with_loss(scores.logprobs, scores.entropy, model.config)


def packed(model: Any) -> PackedForest:
    config = model.config
    return packed_of(
        SEQUENCES, config.tensor_model_parallel_size if config.sequence_parallel else None
    )


def replicated(_: Any, model: Any) -> Any:
    """By Megatron's own attention: each sequence alone; in one row where routers look at all."""
    if model.config.num_moe_experts:
        output = router_runs.one_row(model, SEQUENCES)
        return with_loss(*router_runs.scored(output, SEQUENCES), model.config)
    multiple = model.config.tensor_model_parallel_size
    logits = [alone(model, s, multiple)[0, : len(s)] for s in SEQUENCES]
    both = [columns(x, s) for x, s in zip(logits, SEQUENCES, strict=True)]
    return with_loss(*zip(*both, strict=True), model.config)


def reference(case: Case) -> Case:
    """Without context parallelism. Megatron multiplies routers' losses by the size of the group,
    also the one that it has divided by all ranks."""
    config = dict(case.config or {})
    if "moe_aux_loss_coeff" in config:
        aux, of_all = config["moe_aux_loss_coeff"]
        config["moe_aux_loss_coeff"] = [aux, 2 * of_all]
    return replace(case, config=config)


def run(case: Case, step: Any, wrap: Callable[[Any], Any] | None = None) -> dict[str, torch.Tensor]:
    """Gradients, the loss, and what routers know, after one step of Megatron's schedule."""
    get_moe_metrics_tracker().metrics.clear()
    places = router_runs.positions_of(SEQUENCES)
    in_one_row = wrap and "num_moe_experts" in (case.config or {})
    positions = router_runs.restarting(places) if in_one_row else contextlib.nullcontext()
    made = state_runs.build if _has_states(case) else build
    with in_float64(), positions, stand_in_for_kernels():
        model = made(case, *([wrap] if wrap else []))
        ddp = wrapped(model, whole=True)
        (logged,) = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=None,
            model=[ddp],
            num_microbatches=1,
            seq_length=len(places),
            micro_batch_size=1,
            forward_only=False,
        )
        # the reference has more data-parallel ranks, with the same tokens
        copies = parallel_state.get_data_parallel_world_size()
        counts = {k: x / copies for k, x in router_runs.router_counts(model).items()}
        tokens = None
        if model.config.calculate_per_token_loss:
            size = parallel_state.get_context_parallel_world_size()
            rank = parallel_state.get_context_parallel_rank()
            share = TOKENS // size + (rank < TOKENS % size)
            tokens = torch.tensor(share, dtype=torch.int, device=DEVICE)
        finalize_model_grads([ddp], tokens)
        found = {name: p.main_grad.clone() for name, p in model.named_parameters()}
        routers = router_runs.router_results(model)
        # logged by each group, where the others are parts of one sum
        if "load_balancing_loss" in routers:
            routers["load_balancing_loss"] /= copies
        return found | counts | routers | {"loss": logged["loss"]}


def errors(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    assert got.keys() == expected.keys() and all(x.any() for x in expected.values())
    off = {name: float((got[name] - x).abs().max() / x.abs().max()) for name, x in expected.items()}
    at = max(off, key=lambda name: off[name])
    return {"worst": off[at], "at": at}


def exported_keys_without_gradient() -> Any:
    """Importers give nothing back."""

    return patch.object(*own_gradients_alone(lambda kind, _: kind == KEYS))


def summed_over_ranks() -> Any:
    """The gradient of a score is the sum of what ranks give it."""
    return patch.object(torch.Tensor, "register_hook", lambda *_: None)


def tails_without_gradient() -> Any:
    """A convolution gives nothing back for the tokens above its own that another rank has."""

    return patch.object(*own_gradients_alone(lambda kind, _: kind != KEYS))


def decay_without_gradient() -> Any:
    rule = LayerStates.delta_rule

    def cut(self: Any, query: Any, key: Any, value: Any, g: Any, beta: Any) -> torch.Tensor:
        return rule(self, query, key, value, g.detach(), beta)

    return patch.object(LayerStates, "delta_rule", cut)


#: Name -> the case that shows it, and the mistake.
MISTAKES: dict[str, tuple[str, Callable[[], Any]]] = {
    "exported keys without gradient": ("CP 2, DP 2", exported_keys_without_gradient),
    "gradients of scores summed over ranks": ("CP 2, DP 2", summed_over_ranks),
    "tails without gradient": ("CP 2, DP 2, gated delta rule", tails_without_gradient),
    "decay without gradient": ("CP 2, DP 2, gated delta rule", decay_without_gradient),
}
ON_STAGES: dict[str, Callable[[], Any]] = {
    "exported keys without gradient": exported_keys_without_gradient,
    "other positions": context_stages.other_positions,
}


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except (UnsupportedError, ForestError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "served"


def refused() -> dict[str, str]:
    """What ranks say; none of them waits for another."""
    model, rank = build(Case()), parallel_state.get_context_parallel_rank()
    other = SEQUENCES[: len(SEQUENCES) - rank]
    masks = [[1] * len(s) for s in SEQUENCES]
    masks[-1][3] = 1 - rank
    wrong = [[1000], *SEQUENCES] if rank else SEQUENCES
    found = {
        "other forests": refusal(lambda: tree_logprobs(model, packed_of(other))),
        "other masks": refusal(lambda: tree_logprobs(model, packed_of(SEQUENCES), 1.0, masks)),
        "a rank refuses": refusal(lambda: tree_logprobs(model, packed_of(wrong))),
    }
    model.config.context_parallel_size = 4
    found["another size"] = refusal(lambda: tree_logprobs(model, packed_of(SEQUENCES)))
    return found


def outputs() -> dict[str, torch.Tensor]:
    """Of `tree_outputs`, in packed order, and their gradient; of a forest of one token too."""
    found = {}
    for few in ([[1, 2, 3], [1, 2, 4], [5]], [[7]]):
        model = build(Case())
        output = tree_outputs(model, packed_of(few))
        output.square().sum().backward()
        gradient = model.embedding.word_embeddings.weight.grad
        # ranks have parts of it
        dist.all_reduce(gradient, group=parallel_state.get_context_parallel_group())
        found |= {f"{len(few)} outputs": output.detach(), f"{len(few)} gradients": gradient}
    return found


def routed() -> dict[str, torch.Tensor]:
    """Scores of a forest with recorded routes, and the gradient of the first router."""
    model = build(Case(moe()))
    forest = PrefixForest.from_sequences(SEQUENCES, routes=routes_of(SEQUENCES))
    scores = tree_logprobs(model, pack(forest).to(DEVICE))
    assert not isinstance(scores, torch.Tensor)
    logprobs = torch.cat(scores.logprobs)
    logprobs.square().sum().backward()
    gradient = model.decoder.layers[0].mlp.router.weight.grad
    dist.all_reduce(gradient, group=parallel_state.get_context_parallel_group())
    return {"routed scores": logprobs.detach(), "gradient of a router": gradient}


def on_rank(rank: int, folder: Path) -> dict[str, Any]:
    """Errors of each case, and what ranks refuse."""
    results: dict[str, Any] = {}
    are_four = dist.get_world_size() == 4
    for cases, tensor, experts in ((DATA, 1, 1), (TENSOR, 2, 1), (EXPERT, 1, 2)):
        if tensor == 2 and not are_four:
            continue
        sizes = {"tensor_model_parallel_size": tensor, "expert_model_parallel_size": experts}
        parallel_state.initialize_model_parallel(**sizes)
        plain = {name: reference(case) for name, case in cases.items()}
        expected = {name: run(case, replicated, lambda s: s) for name, case in plain.items()}
        wanted = outputs() | routed() if cases is DATA else {}
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**sizes, context_parallel_size=2)
        for name, case in cases.items():
            results[name] = errors(run(case, forest), expected[name])
            for mistake, (of_case, planted) in MISTAKES.items():
                if name == of_case:
                    with planted():
                        results[mistake] = errors(run(case, forest), expected[name])
        if cases is DATA:
            results["outputs"] = errors(outputs() | routed(), wanted)
            results["refused"] = refused()
        parallel_state.destroy_model_parallel()
    return results | (context_stages.results(errors, ON_STAGES) if are_four else {})
