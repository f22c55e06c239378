"""verl's `TrainingWorker` without Ray: this process's place, workers, batches, losses.

`join` comes first, before anything imports verl. Legend: S samples, n tokens of one, P of its
prompt, r of its response.
"""

from __future__ import annotations

import argparse
import importlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AttentionInterface

from benchmarks.lib.absent import stand_in
from benchmarks.lib.policy import Ranks
from benchmarks.lib.replicated import in_pieces, missing

# verl imports them for its controller and its servers
UNUSED = ("ray", "fastapi", "uvicorn", "pydantic", "datasets")
FULL = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def join(options: argparse.Namespace) -> Ranks:
    """Makes verl importable, and this process a rank: of torchrun, or alone.

    On GPUs --device becomes this rank's. On a CPU verl needs a platform for it and engines, which
    the caller has registered: see tests/integrations/verl/cpu_platform.py.
    """
    is_gpu = torch.device(options.device).type == "cuda"
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if "RANK" not in os.environ:
        os.environ.update(alone)
    if is_gpu:
        os.environ["VERL_PLATFORM"] = "nvidia"
        local = int(os.environ["LOCAL_RANK"])
        options.device = f"cuda:{local}"
        torch.cuda.set_device(local)
    else:
        # a kernel for GPUs that is imported wherever Triton is
        os.environ["VERL_DISABLE_FLASH_ATTN_CE"] = "1"
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not dist.is_initialized():
        # as verl's workers do
        backend = "cpu:gloo,cuda:nccl" if is_gpu else "gloo"
        more: dict[str, Any] = {"timeout": timedelta(minutes=4)}
        if count == 1:
            store = Path(tempfile.mkdtemp()) / "store"
            more |= {"store": dist.FileStore(str(store), 1), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, **more)
    # these ask whether Ray is installed
    for name in ("peft", "accelerate", "tensordict"):
        importlib.import_module(name)
    options.stand_ins = stand_in(UNUSED)
    return Ranks(options.device, count, rank)


# ---- the replicated attention of verl's engine ---------------------------------------------------


def varlen(kernel: str) -> str:
    """Registers a kernel with transformers for sequences that stand one after the other, as verl's
    `use_remove_padding` lays them; -> the name for attn_implementation.

    transformers has this for `flash_attention_2` where flash-attn is installed. Sequences begin
    where position_ids are 0, which is looked up once per micro-batch, not once per layer.

    Args:
        kernel: fa2 (flash-attn's, or that of torch) or fa4; elsewhere than on a GPU and in float32
            fa2 is torch's SDPA, a sequence at a time.
    """
    name = f"varlen_{kernel}"

    def function(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        *,
        position_ids: torch.Tensor,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        assert attention_mask is None and dropout == 0 and sliding_window is None
        assert scaling is None or np.isclose(scaling, query.shape[-1] ** -0.5)
        if torch.is_autocast_enabled(query.device.type):
            # as transformers does where rotary embeddings left float32
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = (x.to(dtype) for x in (query, key, value))
        runs = vars(position_ids).setdefault("runs", {})
        if query.dtype not in runs:
            starts = (position_ids[0] == 0).nonzero()[:, 0].tolist()
            lengths = np.diff([*starts, position_ids.shape[1]]).tolist()
            runs[query.dtype] = in_pieces(kernel, lengths, query.device, query.dtype)
        out = runs[query.dtype](*(x[0].transpose(0, 1) for x in (query, key, value)))
        return out[None], None

    AttentionInterface.register(name, function)
    return name


# ---- samples -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turns:
    """Samples to train on, a turn of an agent each: what came before it is the prompt.

    Attributes:
        sequences: token ids [n] each. masks: bool [n] each, what is scored: nothing of the prompt.
        groups: a label per sample. advantages: float32 [S].
        offsets: float [2, n] each: by how much old and reference log-probabilities are off.
    """

    sequences: list[np.ndarray]
    masks: list[np.ndarray]
    groups: list[Any]
    advantages: np.ndarray
    offsets: list[np.ndarray]

    @classmethod
    def of(cls, sequences: list[np.ndarray], masks: list[np.ndarray], groups: list[Any]) -> Turns:
        """With seeded random advantages and offsets: of -1, 0 or 1, and normal ones."""
        rng = np.random.default_rng(0)
        return cls(
            sequences,
            masks,
            groups,
            rng.normal(size=len(sequences)).astype(np.float32),
            [
                np.stack([rng.choice([-1.0, 0.0, 1.0], len(s)), rng.normal(0, 0.3, len(s))])
                for s in sequences
            ],
        )

    def take(self, indices: Sequence[int]) -> Turns:
        """Some of them."""
        return Turns(
            [self.sequences[i] for i in indices],
            [self.masks[i] for i in indices],
            [self.groups[i] for i in indices],
            self.advantages[list(indices)],
            [self.offsets[i] for i in indices],
        )

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each, [S]."""
        return np.array([len(s) for s in self.sequences])

    @property
    def num_prompt(self) -> list[int]:
        """P of each: tokens before the first that is scored."""
        return [int(np.argmax(mask)) for mask in self.masks]

    @property
    def response_masks(self) -> list[torch.Tensor]:
        """int64 [r] each."""
        pairs = zip(self.masks, self.num_prompt, strict=True)
        return [torch.from_numpy(mask[p:].astype(np.int64)) for mask, p in pairs]

    def beside(self, logprobs: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Old and reference log-probabilities that lie the offsets beside some, [r] each."""
        pairs = list(zip(logprobs, self.offsets, strict=True))
        old, reference = (
            [row + torch.from_numpy(both[i, -len(row) :]).float() for row, both in pairs]
            for i in range(2)
        )
        return old, reference

    def batch(self, **extra: Any) -> Any:
        """verl's TensorDict; in `extra` lists are of a tensor [r] per sample."""
        from verl.utils import tensordict_utils as tu

        ids = [torch.from_numpy(np.asarray(s, np.int64)) for s in self.sequences]
        prompts = self.num_prompt
        tensors = {
            "prompts": jagged([s[:p] for s, p in zip(ids, prompts, strict=True)]),
            "responses": jagged([s[p:] for s, p in zip(ids, prompts, strict=True)]),
            "response_mask": jagged(self.response_masks),
            "input_ids": jagged(ids),
            "position_ids": jagged([torch.arange(len(s)) for s in ids]),
            "loss_mask": jagged([torch.from_numpy(m.astype(np.int64)) for m in self.masks]),
        }
        tensors |= {name: jagged(v) for name, v in extra.items() if isinstance(v, list)}
        rest = {name: v for name, v in extra.items() if not isinstance(v, list)}
        return tu.get_tensordict(tensors, {"global_token_num": None, **rest})


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    """[n] each -> jagged [S, n]."""
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def dealt(turns: Turns, engine: str, ranks: Ranks) -> list[list[int]]:
    """The samples of every rank, balanced as the engine's trainer does it."""
    from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

    def workload(lengths: Any) -> np.ndarray:
        return calculate_workload(torch.as_tensor(np.asarray(lengths, np.int64))).numpy()

    if engine == "verl":
        cost = torch.as_tensor(workload(turns.lengths))
        return get_seqlen_balanced_partitions(cost, ranks.count, equal_size=True)
    from prefixtree.integrations.verl.balance import balance

    order = balance(turns.sequences, turns.groups, ranks.count, 1, workload).order
    size = len(turns) // ranks.count
    return [order[i : i + size] for i in range(0, len(order), size)]


# ---- workers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A worker, as one engine and precision have it.

    Attributes:
        engine: verl (its own) or prefixtree.
        attention: of verl's own engine: attn_implementation.
        remove_padding: of verl's own engine.
        dtype: bfloat16 (verl's mixed precision) or float32 throughout.
        max_tokens: of a micro-batch.
        optimizer, lr: torch's.
        is_gpu: otherwise nothing is compiled.
    """

    engine: str
    attention: str
    dtype: str
    max_tokens: int
    is_gpu: bool
    remove_padding: bool = True
    optimizer: str = "AdamW"
    lr: float = 1e-6


def make_worker(folder: Path, setting: Setting) -> Any:
    """verl's TrainingWorker with the weights of a folder, in this process."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import (
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
        TrainingWorkerConfig,
    )
    from verl.workers.engine_workers import TrainingWorker

    packs = setting.engine == "prefixtree"
    # what verl finds for its own name on a GPU is not registered for any vendor
    ours = "nvidia" if setting.is_gpu else "prefixtree"
    os.environ["VERL_ENGINE_VENDOR"] = ours if packs else "stock"
    model = HFModelConfig(
        path=str(folder),
        load_tokenizer=False,
        external_lib="prefixtree.integrations.verl" if packs else None,
        override_config={"attn_implementation": "prefixtree" if packs else setting.attention},
        enable_gradient_checkpointing=True,
        use_remove_padding=setting.remove_padding,
    )
    engine = FSDPEngineConfig(
        strategy="fsdp2",
        mixed_precision=FULL if setting.dtype == "float32" else None,
        model_dtype="fp32",
        use_torch_compile=setting.is_gpu,
        # the default of verl's configuration files, unlike that of the class
        use_no_sync_for_gradient_accumulation=False,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=setting.max_tokens,
        infer_max_token_len_per_gpu=setting.max_tokens,
    )
    optimizer = FSDPOptimizerConfig(
        optimizer=setting.optimizer,
        lr=setting.lr,
        weight_decay=0.01 if setting.optimizer == "AdamW" else 0.0,
        clip_grad=1.0,
        total_training_steps=100,
    )
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model,
            engine_config=engine,
            optimizer_config=optimizer,
            checkpoint_config=CheckpointConfig(save_contents=["model"], load_contents=["model"]),
        )
    )
    worker.reset()
    check_engine(worker, packs)
    return worker


def check_engine(worker: Any, packs: bool) -> None:
    """That the worker has the engine it was to have, sharded by FSDP2."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    expected = FSDPEngineWithLMHead
    if packs:
        from prefixtree.integrations.verl import PackedActorEngine as expected
    assert type(worker.engine) is expected, type(worker.engine)
    assert worker.engine.packs if packs else not hasattr(worker.engine, "packs")
    assert isinstance(worker.engine.module, FSDPModule)
    assert all(isinstance(p, DTensor) for p in worker.engine.module.parameters())


def policy_loss(entropy: float, kl: float, clip: float = 0.2) -> Any:
    """verl's PPO loss, a mean over the tokens of the mini-batch."""
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        use_dynamic_bsz=True,
        use_kl_loss=kl > 0,
        kl_loss_coef=kl,
        entropy_coeff=entropy,
        clip_ratio=clip,
        clip_ratio_low=clip,
        clip_ratio_high=clip,
        loss_agg_mode="token-mean",
    )
    return partial(ppo_loss, config=config)


def scores(worker: Any, turns: Turns, temperature: float) -> dict[str, list[torch.Tensor]]:
    """verl's `compute_log_prob`: log_probs and entropy, float32 [r] per sample, on the CPU."""
    from verl.workers.utils.padding import response_from_nested

    data = turns.batch(compute_loss=False, calculate_entropy=True, temperature=temperature)
    out = worker.infer_batch(data)
    mask = jagged(turns.response_masks)
    return {
        name: [t.float().cpu() for t in response_from_nested(out[name], mask).unbind()]
        for name in ("log_probs", "entropy")
    }


def train(
    worker: Any,
    turns: Turns,
    old: list[torch.Tensor],
    reference: list[torch.Tensor],
    temperature: float,
    count: int,
    updates: int = 1,
    epochs: int = 1,
    entropy: bool = False,
) -> dict[str, list[float]]:
    """verl's `update_actor`; -> its metrics, a number per update where they are numbers.

    Args:
        turns: of this rank. old, reference: log-probabilities [r] per sample.
        count: samples of all ranks. updates: mini-batches per epoch.
    """
    from verl.utils import tensordict_utils as tu

    pairs = zip(turns.response_masks, turns.advantages.tolist(), strict=True)
    data = turns.batch(
        old_log_probs=old,
        ref_log_prob=reference,
        advantages=[mask.float() * advantage for mask, advantage in pairs],
        calculate_entropy=entropy,
        temperature=temperature,
        global_batch_size=count // updates,
        mini_batch_size=count // updates,
        epochs=epochs,
        seed=3,
        dataloader_kwargs={"shuffle": False},
    )
    return tu.get(worker.train_mini_batch(data), "metrics")


def micro_batches(worker: Any, turns: Turns, setting: Setting) -> list[int]:
    """Tokens that the model computes in each micro-batch of this rank's samples."""
    from verl.workers.engine.utils import prepare_micro_batches

    data = turns.batch(use_dynamic_bsz=True, max_token_len_per_gpu=setting.max_tokens)
    group = worker.engine.get_data_parallel_group()
    if setting.engine == "verl":
        parts, _ = prepare_micro_batches(data=data, dp_group=group, same_micro_num_in_dp=True)
        return [part["input_ids"].values().numel() for part in parts]
    from prefixtree.integrations.verl.batches import rows_of, split

    return [batch.num_tokens for batch in split(data, rows_of(data), group)]


def attention_kinds(device: str) -> dict[str, str]:
    """attn_implementation for verl's own engine by the side's name, as far as there are kernels."""
    from transformers.utils import is_flash_attn_2_available

    name = torch.device(device).type
    kinds = {"verl": "flash_attention_2" if is_flash_attn_2_available() else varlen("fa2")}
    if missing("fa4", name) is None:
        kinds["verl_fa4"] = varlen("fa4")
    return kinds


def cross_entropy() -> str:
    """The code that verl's own engine computes log-probabilities with."""
    from verl.utils.torch_functional import FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE as HAS_KERNEL

    is_off = os.environ.get("VERL_DISABLE_FLASH_ATTN_CE") == "1"
    return "torch, row by row" if is_off or not HAS_KERNEL else "flash-attn's Triton kernel"
