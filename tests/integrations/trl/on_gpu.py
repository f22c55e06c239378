"""Activation offloading on one GPU, with TRL's streams: parameters and peaks of DPO and SFT.

    python -m tests.integrations.trl.on_gpu

In float32 the parameters are compared with those of TRL's trainer, which offloads too, and in both
dtypes with those of the adapter's trainer without offloading, whose own runs differ by `noise`. A
line per run; the exit code is 1 where one differs by more.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset

from tests.integrations.trl.runs import moved, save_model, tiny_config, worst_parameter
from tests.integrations.trl.sample_runs import DPO, SFT, Maker, letters

_SIZES = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    # activations stay small enough for rounding
    "initializer_range": 0.04,
}


def long_samples(maker: Maker) -> Dataset:
    """Samples of 3,000 tokens, most of which all share."""
    system = {"role": "system", "content": letters("system", 3000, 3000)}
    return Dataset.from_list(
        [{**row, "prompt": [system, *row["prompt"][1:]]} for row in maker.data(4)]
    )


def trained(kind: type, maker: Maker, folder: Path, **arguments: Any) -> tuple[Any, float]:
    """The model of a run of two steps, on the CPU, and the run's peak in MiB."""
    gc.collect()
    run = maker.make(
        kind,
        folder,
        use_cpu=False,
        max_length=None,
        options={"train_dataset": long_samples(maker)},
        **arguments,
    )
    torch.cuda.reset_peak_memory_stats()
    run.train()
    peak = torch.cuda.max_memory_allocated() / 2**20
    return SimpleNamespace(model=run.model.cpu()), peak


def main() -> int:
    folder = save_model(Path(tempfile.mkdtemp()), tiny_config(**_SIZES))
    bad = 0
    for name, maker in {"DPO": DPO, "SFT": SFT}.items():
        for bf16 in (False, True):
            for checkpointing in (False, True):
                arguments = {"bf16": bf16, "gradient_checkpointing": checkpointing}
                plain, peak = trained(maker.ours, maker, folder, **arguments)
                again, _ = trained(maker.ours, maker, folder, **arguments)
                arguments["activation_offloading"] = True
                ours, less = trained(maker.ours, maker, folder, **arguments)
                noise, found = (worst_parameter(run, plain)[0] for run in (again, ours))
                theirs, beside = 0.0, 0.0
                if not bf16:
                    stock, beside = trained(maker.stock, maker, folder, **arguments)
                    theirs = worst_parameter(ours, stock)[0]
                fine = found <= 2 * noise + 1e-6 and theirs < 1e-5 and moved(ours, folder) > 1e-3
                bad += not fine
                print(
                    f"{name} bf16={bf16} checkpointing={checkpointing}: parameters moved by "
                    f"{moved(ours, folder):.1e}, with and without offloading {found:.1e} apart "
                    f"(noise {noise:.1e}), from TRL's {theirs:.1e}; peaks {peak:.0f} MiB, "
                    f"offloaded {less:.0f}, TRL's {beside:.0f}: {'fine' if fine else 'BAD'}",
                    flush=True,
                )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
