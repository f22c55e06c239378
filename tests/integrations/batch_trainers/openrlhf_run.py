"""What test_openrlhf_sft.py runs on every rank: OpenRLHF's SFT command, on CPUs.

The command's arguments, data set, batches, sampler, Actor, loss, loop, evaluation, saving and
strategy are OpenRLHF's, and the engine is DeepSpeed's. These stand in for what wants a GPU or is
not installed: float32, which OpenRLHF does not offer, for bfloat16; torch's AdamW and gloo's sums
for DeepSpeed's, which would be compiled; gloo's mesh and the CPU's memory for CUDA's; torch's
loader for torchdata's, whose state is for checkpoints; names of flash-attn and pylatexenc, which
are imported and not called. One process reads a data set, in the place of eight.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

from prefixtree.integrations.batch_trainers import use_openrlhf
from prefixtree.scoring import batches
from tests.integrations.batch_trainers.stand_ins import Finder

ARGUMENTS: dict[str, Any] = {
    "ds.attn_implementation": "eager",
    # two micro-batches a step on each of two ranks
    "train.micro_batch_size": 4,
    "train.batch_size": 16,
    "train.max_epochs": 1,
    "data.output_key": "output",
    "adam.lr": 1e-2,
    # Adam divides by what is nearly nothing otherwise
    "adam.eps": 1e-2,
}
TURNS = ("--data.multiturn", "--data.apply_chat_template", "--data.input_key", "messages")


@dataclass(frozen=True)
class Case:
    """A run of the command.

    Attributes:
        model: the folder of the model, below the one of all.
        flags: beside ARGUMENTS.
        wrong: what makes the packed log-probabilities wrong.
    """

    model: str
    flags: tuple[str, ...] = ()
    wrong: Callable[[torch.Tensor], torch.Tensor] | None = None


CASES = {
    "dense": Case("qwen3"),
    "experts": Case("qwen3_moe", ("--model.aux_loss_coef", "0.1")),
    "LoRA, turns": Case("qwen3", ("--ds.lora.rank", "2", *TURNS)),
    "a row without its gradient": Case("qwen3", wrong=lambda p: torch.cat([p[:1].detach(), p[1:]])),
    "a column off": Case("qwen3", wrong=lambda p: p.roll(1, 1)),
}


def put_stand_ins() -> None:
    """What this module's docstring lists."""
    Finder("flash_attn", "pylatexenc", "torchdata")
    import openrlhf.datasets
    from openrlhf.utils import utils
    from openrlhf.utils.deepspeed import deepspeed

    made: Any = deepspeed.get_train_ds_config

    def config(*, optim_config: Any, **options: Any) -> Any:
        if optim_config is not None:
            optim_config["params"]["torch_adam"] = True
        return made(**{**options, "param_dtype": "float32"}, optim_config=optim_config)

    deepspeed.get_train_ds_config = config
    deepspeed.init_device_mesh = lambda device, *args, **names: init_device_mesh(
        "cpu", *args, **names
    )
    deepspeed.StatefulDataLoader = torch.utils.data.DataLoader
    utils.convert_to_torch_dtype = lambda name: torch.float32
    openrlhf.datasets.SFTDataset = partial(openrlhf.datasets.SFTDataset, num_processors=None)
    # as an attribute, the module's name is torch itself
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    cpu: Any = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu


def run(case: Case, folder: Path, packed: bool) -> dict[str, Any]:
    """What the command logged, the weights it saved, and how many tokens stood for one."""
    from openrlhf.utils.deepspeed.deepspeed import DeepspeedStrategy

    logs: list[dict[str, float]] = []
    ratios: list[float] = []
    reduce, score = DeepspeedStrategy.all_reduce, batches.batch_logprobs

    def log(self: Any, data: Any, op: str = "mean") -> Any:
        found = reduce(self, data, op)
        if isinstance(data, dict):
            logs.append(found)
        return found

    def count(*args: Any, **kwargs: Any) -> Any:
        scores = score(*args, **kwargs)
        forest = scores.packed.forest
        ratios.append(forest.num_replicated_tokens / forest.num_tokens)
        return (
            scores if case.wrong is None else replace(scores, logprobs=case.wrong(scores.logprobs))
        )

    out = folder / f"out-{packed}"
    arguments = {
        **ARGUMENTS,
        "model.model_name_or_path": folder / case.model,
        "data.dataset": folder / "train.jsonl",
        "eval.dataset": folder / "eval.jsonl",
        "ckpt.output_dir": out,
    }
    flags = [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeepspeedStrategy, "all_reduce", log)
        patch.setattr(batches, "batch_logprobs", count)
        patch.setattr(sys, "argv", ["train_sft", *flags, *case.flags])
        if "--data.multiturn" in case.flags:
            at = sys.argv.index("--data.output_key")
            del sys.argv[at : at + 2]
        runpy.run_module("openrlhf.cli.train_sft", run_name="__main__")
    assert bool(ratios) == packed
    torch.distributed.barrier()
    weights: dict[str, torch.Tensor] = {}
    for file in out.glob("*.safetensors"):
        weights |= load_file(file)
        torch.distributed.barrier()
        if os.environ["RANK"] == "0":
            file.unlink()
    torch.distributed.barrier()
    return {"logs": logs, "weights": weights, "ratios": ratios}


def on_rank(rank: int, folder: Path) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Every case as it is and packed."""
    put_stand_ins()
    stock = {case.model + str(case.flags): case for case in CASES.values()}
    as_it_is = {key: run(case, folder, packed=False) for key, case in stock.items()}
    use_openrlhf()
    return {
        name: (as_it_is[case.model + str(case.flags)], run(case, folder, packed=True))
        for name, case in CASES.items()
    }
