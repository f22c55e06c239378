"""Context parallelism beside pipeline stages, on four ranks: two stages, and two parts of a forest
on each. The reference has data-parallel ranks with equal data in the place of the parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import parallel_state

from prefixtree.errors import UnsupportedError
from prefixtree.integrations.megatron import context_parallel, tree_logprobs
from tests.integrations.megatron import router_runs
from tests.integrations.megatron.pipeline_ranks import (
    ALONE,
    DISTINCT,
    FIXED,
    GROUPS,
    LAYERS,
    LONGEST,
    replicated,
    replicated_row,
    run,
    scored,
    stages,
)
from tests.integrations.megatron.router_runs import BIAS, Z, losses
from tests.integrations.megatron.runs import NEWEST, Case, latent, packed_of
from tests.integrations.megatron.test_one_process import FULL
from tests.support.megatron_cpu import in_float64

#: Name -> the case, and its virtual stages.
CASES: dict[str, tuple[Case, int | None]] = {
    "CP 2, PP 2": (Case(LAYERS), None),
    "CP 2, PP 2, latent attention, tied, recompute": (
        Case(LAYERS | latent() | FULL, tied=True),
        None,
    ),
    "CP 2, PP 2, router losses": (Case(FIXED | losses("aux_loss", **Z, **BIAS)), None),
    "CP 2, PP 2, virtual stages": (Case(FIXED), 2),
}
if not NEWEST:
    del CASES["CP 2, PP 2, latent attention, tied, recompute"], CASES["CP 2, PP 2, router losses"]
_SIZES = {"pipeline_model_parallel_size": 2}


def other_positions() -> Any:
    """The second stage takes the order of its tokens for their depths."""
    at_depths = context_parallel.ForestParams.at_depths

    def in_order(self: Any, table: Any) -> Any:
        if not parallel_state.get_pipeline_model_parallel_rank():
            return at_depths(self, table)
        return table[torch.arange(len(self.local.position_ids)).clamp(max=len(table) - 1)]

    return patch.object(context_parallel.ForestParams, "at_depths", in_order)


def _run(case: Case, virtual: int | None, plain: bool) -> dict[str, torch.Tensor]:
    """Gradients of this stage, its routers' biases and counts, and on the last stage the loss."""
    places = router_runs.positions_of(GROUPS[0])
    experts = "num_moe_experts" in (case.config or {})
    positions = router_runs.restarting(places) if experts and plain else contextlib.nullcontext()
    with in_float64(), positions:
        chunks = stages(case, virtual, (lambda spec: spec) if plain else None)
        if not plain:
            # a part is half of them
            found, loss = run(chunks, scored, len(GROUPS), DISTINCT + DISTINCT % 2, whole=True)
        elif experts:
            found, loss = run(chunks, replicated_row, len(GROUPS), len(places), whole=True)
        else:
            found, loss = run(chunks, replicated, len(ALONE), LONGEST, whole=True)
        copies = parallel_state.get_data_parallel_world_size()
        found |= {name: x / copies for name, x in found.items() if "tokens_per_expert" in name}
        known = router_runs.router_results(chunks[0])
        found |= {name: x for name, x in known.items() if "bias" in name}
    return found | {"loss": torch.tensor(loss)} if loss else found


def results(
    errors: Callable[[Any, Any], dict[str, Any]], mistakes: dict[str, Callable[[], Any]]
) -> dict[str, Any]:
    """The errors of each case, and of the first with each mistake."""
    found: dict[str, Any] = {}
    for virtual in (None, 2):
        cases = {name: case for name, (case, stages) in CASES.items() if stages == virtual}
        sizes = {**_SIZES, "virtual_pipeline_model_parallel_size": virtual}
        parallel_state.initialize_model_parallel(**sizes)
        expected = {name: _run(case, virtual, plain=True) for name, case in cases.items()}
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**sizes, context_parallel_size=2)
        for name, case in cases.items():
            found[name] = errors(_run(case, virtual, plain=False), expected[name])
            found[name]["has loss"] = "loss" in expected[name]
            if name == "CP 2, PP 2":
                for mistake, planted in mistakes.items():
                    with planted():
                        wrong = errors(_run(case, virtual, plain=False), expected[name])
                    found[f"CP 2, PP 2: {mistake}"] = wrong
        if virtual:
            found["unequal shares"] = _unequal(cases["CP 2, PP 2, virtual stages"])
        parallel_state.destroy_model_parallel()
    return found


def _unequal(case: Case) -> str:
    try:
        tree_logprobs(stages(case, 2)[0], packed_of(GROUPS[0]))
    except UnsupportedError as error:
        return str(error)
    return "served"
