"""One rank of the runs of test_updates.py: `python -m tests.integrations.verl.rank RANK
WORLD_SIZE FOLDER CASES...`.

Runs every case with both engines and saves what they computed, or the traceback, a case.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist


def steps(rank: int) -> dict[str, Any]:
    """How ranks with unlike data agree on micro-batches, and that they cannot."""
    from prefixtree import PrefixForest, plan_micro_batches
    from prefixtree.integrations.verl.batches import sequences_of, split
    from tests.integrations.verl.runs import batch_of, rollouts

    # the first rank needs few for its forest, the second, which shares nothing, many
    rows = rollouts(10, groups=4, size=4, shared=rank == 0)
    data = batch_of(rows, max_token_len_per_gpu=60)
    together = split(data, None)
    forest = PrefixForest.from_sequences(sequences_of(data))
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
            found[name] = split(data, None)
        except ValueError as error:
            found[name] = str(error)
    return found


@contextmanager
def counted_exchanges() -> Iterator[Counter[str]]:
    """How often verl's engine exchanged heads among ranks; ours borrowed keys, tails of recurrent
    layers, or kept trunks."""
    from verl.models.transformers import monkey_patch

    from prefixtree.integrations.verl import engine
    from prefixtree.parallel.ranks import RankExchange
    from prefixtree.parallel.state_heads import StatesOfRanks

    calls: Counter[str] = Counter()

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        return call

    heads = monkey_patch.gather_heads_scatter_seq
    with (
        patch.object(monkey_patch, "gather_heads_scatter_seq", counted("heads", heads)),
        patch.object(RankExchange, "borrow", counted("keys", RankExchange.borrow)),
        patch.object(StatesOfRanks, "conv", counted("tails", StatesOfRanks.conv)),
        patch.object(engine, "kept_trunks", counted("trunks", engine.kept_trunks)),
        patch.object(engine, "kept_values", counted("trunks of critics", engine.kept_values)),
    ):
        yield calls


def main(rank: int, world: int, folder: Path, names: list[str]) -> None:
    """Runs all cases on this rank."""
    torch.set_num_threads(1)
    os.environ.update(
        VERL_PLATFORM="cpu",
        WORLD_SIZE=str(world),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    store = dist.FileStore(os.environ["RANKS_STORE"], world)
    # verl would ask for "cpu:gloo" and the platform's backend for the same device
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    from tests.integrations.verl.cases import (
        CASES,
        HYBRID_CASES,
        HYBRID_SEQUENCE_PARALLEL_CASES,
        SEQUENCE_PARALLEL_CASES,
        TRUNK_CASES,
    )
    from tests.integrations.verl.cpu_platform import register_engines
    from tests.integrations.verl.distillation_runs import RANK_CASES, run_distillation
    from tests.integrations.verl.runs import run
    from tests.integrations.verl.vision_cases import VISION_CASES

    register_engines()
    cases = CASES | HYBRID_CASES | SEQUENCE_PARALLEL_CASES | VISION_CASES | TRUNK_CASES
    cases |= HYBRID_SEQUENCE_PARALLEL_CASES
    results: dict[Any, Any] = {"steps": steps(rank)}
    for name in names:
        distils = RANK_CASES.get(name)
        case: Any = distils or cases[name]
        vendors = (case.beside, "prefixtree", *(["lost"] if distils and distils.red else []))
        for vendor in dict.fromkeys(vendors):
            run_one: Any = run if distils is None else run_distillation
            try:
                with counted_exchanges() as calls:
                    results[name, vendor] = run_one(vendor, folder, case, rank, world)
                results[name, vendor]["exchanges"] = dict(calls)
            except Exception:
                results[name, vendor] = traceback.format_exc()
    # in one go: others wait for the name
    torch.save(results, folder / f"rank{rank}.part")
    (folder / f"rank{rank}.part").rename(folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
