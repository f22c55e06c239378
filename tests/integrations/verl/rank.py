"""One rank of the runs of test_updates.py and others (`runs.run_ranks`).

Runs every case with both engines and returns what they computed, or the traceback, a case.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from verl.models.transformers import monkey_patch

from prefixtree import plan_micro_batches
from prefixtree.integrations.verl import engine
from prefixtree.integrations.verl.batches import rows_of, split
from prefixtree.parallel.states import LayerStates
from prefixtree.parallel.transport import Transport
from tests.integrations.verl.cases import (
    CASES,
    HYBRID_CASES,
    HYBRID_SEQUENCE_PARALLEL_CASES,
    MASK_CASES,
    REPLAY_CASES,
    SEQUENCE_PARALLEL_CASES,
    TRUNK_CASES,
)
from tests.integrations.verl.cpu_platform import register_engines
from tests.integrations.verl.distillation_runs import RANK_CASES, run_distillation
from tests.integrations.verl.runs import batch_of, rollouts, run
from tests.integrations.verl.vision_cases import VISION_CASES

ALL_CASES = CASES | HYBRID_CASES | SEQUENCE_PARALLEL_CASES | VISION_CASES | TRUNK_CASES
ALL_CASES |= HYBRID_SEQUENCE_PARALLEL_CASES | REPLAY_CASES | MASK_CASES


def steps(rank: int) -> dict[str, Any]:
    """How ranks with unlike data agree on micro-batches, and that they cannot."""
    # the first rank needs few for its forest, the second, which shares nothing, many
    rows = rollouts(10, groups=4, size=4, shared=rank == 0)
    data = batch_of(rows, max_token_len_per_gpu=60)
    together = split(data, rows_of(data), None)
    forest = rows_of(data).forest
    found: dict[str, Any] = {
        "alone": len(plan_micro_batches(forest, 60)[0]),
        "together": len(together),
        "samples": sorted(i for step in together for i in step.sequence_indices.tolist()),
    }
    few = {name: values[:3] for name, values in rows.items()} if rank == 0 else rows
    short = {name: [value[:3] for value in values] for name, values in few.items()}
    for name, data in (
        ("too few", batch_of(few, max_token_len_per_gpu=60)),
        ("too long", batch_of(short if rank == 0 else rows, max_token_len_per_gpu=10)),
    ):
        try:
            found[name] = split(data, rows_of(data), None)
        except ValueError as error:
            found[name] = str(error)
    return found


@contextmanager
def counted_exchanges() -> Iterator[Counter[str]]:
    """How often verl's engine exchanged heads among ranks; ours imported keys, tails of recurrent
    layers, or kept trunks."""
    calls: Counter[str] = Counter()

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        return call

    heads = monkey_patch.gather_heads_scatter_seq
    with (
        patch.object(monkey_patch, "gather_heads_scatter_seq", counted("heads", heads)),
        patch.object(Transport, "there", counted("keys", Transport.there)),
        patch.object(LayerStates, "conv", counted("tails", LayerStates.conv)),
        patch.object(engine, "kept_trunks", counted("trunks", engine.kept_trunks)),
        patch.object(engine, "kept_values", counted("trunks of critics", engine.kept_values)),
    ):
        yield calls


def on_rank(rank: int, folder: Path, names: list[str]) -> dict[Any, Any]:
    """Runs all cases on this rank."""
    world = dist.get_world_size()
    register_engines()
    results: dict[Any, Any] = {"steps": steps(rank)}
    for name in names:
        distils = RANK_CASES.get(name)
        case: Any = distils or ALL_CASES[name]
        vendors = (case.beside, "prefixtree", *(["lost"] if distils and distils.red else []))
        for vendor in dict.fromkeys(vendors):
            run_one: Any = run if distils is None else run_distillation
            try:
                with counted_exchanges() as calls:
                    results[name, vendor] = run_one(vendor, folder, case, rank, world)
                results[name, vendor]["exchanges"] = dict(calls)
            except Exception:
                results[name, vendor] = traceback.format_exc()
    return results
