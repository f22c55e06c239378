"""A real AsyncGRPOTrainer on a CPU: its packing and loss, on our attention and on dense paths."""

from __future__ import annotations

import functools
import queue
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from datasets import Dataset
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.masking_utils import AttentionMaskInterface

from prefixtree.errors import UnsupportedError
from prefixtree.integrations.trl import tree_rows, use_tree_attention
from tests.integrations.trl.async_grpo import (
    TREE_ATTENTION,
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    RolloutSample,
    packing,
    register_tree_attention,
    trainer_module,
    tree_attention,
)
from tests.integrations.trl.runs import (
    parameters,
    reward,
    save_model,
    tiny_config,
    tiny_hybrid,
    tiny_mixture,
)

STEPS = 3


class Rollouts:
    """A worker whose queue was filled beforehand: groups of 4 that fork at several depths."""

    def __init__(self) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        draw = random.Random(0)
        for group in range(60):
            prompt = [draw.randrange(256) for _ in range(12)]
            fork = prompt + [draw.randrange(256) for _ in range(5)]
            for row in range(4):
                stem = prompt if row == 0 else fork
                ids = stem + [draw.randrange(256) for _ in range(draw.randint(1, 8))]
                mask = np.arange(len(ids)) >= len(prompt)
                mask[len(prompt) + 1 :][:1] = False
                self.rollout_buffer.put(
                    RolloutSample(
                        prompt=[],
                        completion=[],
                        input_ids=torch.tensor(ids),
                        completion_mask=torch.tensor(mask).long(),
                        old_log_probs=torch.tensor([-5.5 + draw.random() for _ in ids]),
                        advantage=[1.0, -0.5, 0.25, -0.75][row],
                        model_version=0,
                        group_id=group,
                        metrics={"reward": 0.5},
                    )
                )

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def update_model_version(self, model_version: int) -> None: ...

    def check_health(self, stale_after_s: float) -> None: ...


class NoTransfer:
    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def make(folder: Path, **arguments: Any) -> AsyncGRPOTrainer:
    settings: dict[str, Any] = {
        "output_dir": str(folder / "async"),
        "use_cpu": True,
        "bf16": False,
        "token_budget": 80,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "max_staleness": 100,
        "optim": "sgd",
        "learning_rate": 0.3,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return AsyncGRPOTrainer(
        model=str(folder),
        reward_funcs=reward,
        args=AsyncGRPOConfig(**{**settings, **arguments}),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "a"}]] * 8}),
        processing_class=AutoTokenizer.from_pretrained(folder),
        rollout_worker=Rollouts(),
        weight_transfer=NoTransfer(),
    )


def dense_paths(module: Any, query: Any, key: Any, value: Any, mask: Any, **kw: Any) -> Any:
    """The meaning of the keywords, by a softmax over the gathered path of every query."""
    rows, ends, index = (
        kw[name].tolist() for name in ("tree_cu_seqlens_q", "tree_cu_seqlens_k", "tree_kv_index")
    )
    groups = query.shape[1] // key.shape[1]
    key, value = (x[0].repeat_interleave(groups, 0) for x in (key, value))  # [H, T, D]
    out = []
    for s in range(len(rows) - 1):
        path, length = index[ends[s] : ends[s + 1]], rows[s + 1] - rows[s]
        scores = query[0, :, rows[s] : rows[s + 1]] @ key[:, path].transpose(1, 2) * kw["scaling"]
        sees = torch.ones(length, len(path), dtype=torch.bool).tril(len(path) - length)
        weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
        out.append(weights @ value[:, path])
    return torch.cat(out, 1).transpose(0, 1)[None], None


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leaves TRL's own attention behind."""
    # a metric's denominator, for which TRL asks CUDA
    monkeypatch.setattr(trainer_module, "get_peak_flops_per_device", lambda *args: None)
    yield
    register_tree_attention()


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"gradient_checkpointing": False},
        {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"token_budget": 0, "per_device_train_batch_size": 6},
    ],
    ids=["checkpointing", "plain", "reentrant", "fixed count"],
)
def test_a_run_is_that_of_dense_paths(
    folder: Path, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    masks: list[Any] = []
    mask_of = tree_rows.tree_row_mask
    monkeypatch.setattr(
        tree_rows, "tree_row_mask", lambda *args: masks.append(mask_of(*args)) or masks[-1]
    )
    ours = make(folder, **arguments)
    use_tree_attention(ours)
    ours.train()
    # one a micro-batch: layers and recomputations share it
    assert len(masks) == 2 * STEPS
    theirs = make(folder, **arguments)
    AttentionInterface.register(TREE_ATTENTION, dense_paths)
    theirs.train()
    assert len(masks) == 2 * STEPS
    start = parameters(AutoModelForCausalLM.from_pretrained(folder))
    a, b = parameters(ours.model), parameters(theirs.model)
    assert max(float((b[name] - start[name]).abs().max()) for name in b) > 1e-3
    worst = max((float((a[name] - b[name]).abs().max()), name) for name in b)
    print(f"parameters {worst}")
    assert worst[0] < 1e-5, worst
    for mine, other in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        assert mine.keys() == other.keys()
        for name in ("loss", "grad_norm", "ratio", "kl", "entropy", "clip_ratio/region_mean"):
            if name in other:
                assert mine[name] == pytest.approx(other[name], rel=1e-5, abs=1e-5), name
    assert ours.state.log_history[0]["batch/packing_ratio"] > 1.5


def test_under_autocast(folder: Path) -> None:
    """bf16, which RoPE leaves in float32."""
    losses = []
    for attention in (None, dense_paths):
        trainer = make(folder, bf16=True)
        if attention is None:
            use_tree_attention(trainer)
        else:
            AttentionInterface.register(TREE_ATTENTION, attention)
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert losses[0] == pytest.approx(losses[1], rel=0.05, abs=0.02)
    assert losses[0] != losses[1]


def test_the_trainer_must_be_made_before(folder: Path) -> None:
    """It registers its own attention as it is made; ours is whatever comes later."""
    first = make(folder)
    use_tree_attention(first)
    assert AttentionInterface()[TREE_ATTENTION] is tree_rows.tree_row_attention
    assert AttentionMaskInterface()[TREE_ATTENTION].__module__.startswith("prefixtree")
    make(folder)
    assert AttentionInterface()[TREE_ATTENTION] is not tree_rows.tree_row_attention


def test_where_trl_keeps_its_attention(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function that the trainer registered is judged: TRL 1.18 has no module `packing`."""
    trainer = make(folder)
    moved = functools.wraps(tree_attention)(lambda *args, **kwargs: None)
    moved.__module__ = "trl.trainer.async_grpo_trainer"
    AttentionInterface.register(TREE_ATTENTION, moved)
    monkeypatch.setitem(sys.modules, packing.__name__, None)
    use_tree_attention(trainer)
    assert AttentionInterface()[TREE_ATTENTION] is tree_rows.tree_row_attention
    use_tree_attention(trainer)

    def changed(module: Any, query: Any, *, tree_kv_index: Any, tree_depth: Any) -> None: ...

    changed.__module__ = moved.__module__
    AttentionInterface.register(TREE_ATTENTION, changed)
    with pytest.raises(
        UnsupportedError,
        match=r"of trl\.trainer\.async_grpo_trainer\.changed \(new tree_depth; gone tree_cu",
    ):
        use_tree_attention(trainer)
    for other in (dense_paths, None):
        AttentionInterface.register(TREE_ATTENTION, other)
        with pytest.raises(UnsupportedError, match="which is not TRL's attention for trees"):
            use_tree_attention(trainer)


def test_wrong_positions_are_seen(folder: Path) -> None:
    """Those of packed order, which RoPE would take silently."""
    trainer = make(folder)
    use_tree_attention(trainer)
    trainer.current_gradient_accumulation_steps = 1
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.compute_loss(trainer.model, batch).backward()
    batch["position_ids"] = torch.arange(batch["position_ids"].shape[1])[None]
    with pytest.raises(ValueError, match="position_ids are not the tokens' positions"):
        trainer.compute_loss(trainer.model, batch)


def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    trainer = make(folder)
    trainer.model.set_attn_implementation("sdpa")
    with pytest.raises(UnsupportedError, match="'sdpa', which is not TRL's attention for trees"):
        use_tree_attention(trainer)
    trainer = make(folder)
    trainer.args.torch_compile = True
    with pytest.raises(UnsupportedError, match="torch_compile=True"):
        use_tree_attention(trainer)
    trainer = make(folder)
    trainer.is_fsdp_enabled = True
    trainer.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    with pytest.raises(UnsupportedError, match="FSDP is not verified with AsyncGRPO"):
        use_tree_attention(trainer)
    dropout = save_model(tmp_path / "dropout", tiny_config(attention_dropout=0.1))
    with pytest.raises(UnsupportedError, match=r"config\.attention_dropout is 0\.1"):
        use_tree_attention(make(dropout))
    mixture = save_model(tmp_path / "mixture", tiny_mixture())
    with pytest.raises(UnsupportedError, match=r"set router_aux_loss_coef=0\.0"):
        use_tree_attention(make(mixture))
    use_tree_attention(make(mixture, router_aux_loss_coef=0.0))
    hybrid = save_model(tmp_path / "hybrid", tiny_hybrid("qwen3_5_text"))
    # TRL's keywords do not reach recurrent layers, and TRL says so
    with pytest.raises(ValueError, match="recurrent or convolutional layer would scan across"):
        make(hybrid)
