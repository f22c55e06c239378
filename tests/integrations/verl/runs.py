"""Training runs through verl's TrainingWorker, with verl's own engines or with prefixtree's.

`run` does what verl's trainer does in one step (old log-probabilities, reference, values,
advantages, updates) and returns everything that came back. It is called in the tests' process for
one rank and by `rank.py` for two. The data are groups of multi-turn rollouts that branch.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)
from verl.trainer.config import CheckpointConfig
from verl.trainer.ppo import core_algos
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    FSDPActorConfig,
    FSDPCriticConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss, value_loss
from verl.workers.utils.padding import (
    response_from_nested,
    response_to_nested,
)

from tests.integrations.verl.cases import TWO_RANKS, Settings
from tests.integrations.verl.cpu_platform import VARLEN
from tests.integrations.verl.image_runs import (
    VISION,
    patches_taken_back,
    save_vision_model,
    shown,
    vision_config,
)
from tests.integrations.verl.mask_runs import mask_logits, with_masks
from tests.integrations.verl.replay_runs import force_routes, with_routes
from tests.support import spawn
from tests.support.family_configs import TINY
from tests.support.hybrid_configs import HYBRIDS

# of ranks; the platform before what asks for it
PRELOAD = ("tests.integrations.verl.cpu_platform", "tests.integrations.verl.rank")
VOCABULARY = 96
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "eos_token_id": 1,
    "initializer_range": 0.2,  # logits far from uniform
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def save_model(kind: str, folder: Path) -> Path:
    """A tiny model with random weights ("qwen3", "qwen3_moe", of a family with recurrent layers or
    with a vision encoder; "_tied" behind it: with tied embeddings) and a tokenizer."""
    config: Any
    path = folder / kind
    family = kind.removesuffix("_tied")
    tied = family != kind
    if kind in VISION:
        save_vision_model(vision_config(kind, VOCABULARY), path)
        return _save_tokenizer(path)
    if (hybrid := HYBRIDS.get(family.removesuffix("_text"))) is not None:
        sizes = {**TINY, **hybrid.get("text_config", hybrid), "vocab_size": VOCABULARY}
        lists = {name: list(value) for name, value in sizes.items() if isinstance(value, tuple)}
        more = {"eos_token_id": 1, "initializer_range": 0.2, "tie_word_embeddings": tied}
        config = AutoConfig.for_model(family, **{**sizes, **lists, **more})
    elif family == "qwen3_moe":
        config = Qwen3MoeConfig(
            **_SIZES,
            **_EXPERTS,
            architectures=["Qwen3MoeForCausalLM"],
            tie_word_embeddings=tied,
        )
    else:
        config = Qwen3Config(**_SIZES, architectures=["Qwen3ForCausalLM"], tie_word_embeddings=tied)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return _save_tokenizer(path)


def _save_tokenizer(path: Path) -> Path:
    words = {f"w{i}": i for i in range(2, VOCABULARY)} | {"<pad>": 0, "<eos>": 1}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w2")),
        eos_token="<eos>",
        pad_token="<pad>",
    ).save_pretrained(path)
    return path


# ---- data ----------------------------------------------------------------------------------------


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    """[n] each -> jagged [B, n]."""
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def rollouts(seed: int, groups: int, size: int, shared: bool = True) -> dict[str, list[Any]]:
    """Groups of `size` rollouts: a prompt, a first answer that some share, a tool's output that
    is masked, a second answer. Unless `shared`, prompts differ within a group too."""
    rng = np.random.default_rng(seed)

    def draw(low: int, high: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(2, VOCABULARY, rng.integers(low, high)))

    out: dict[str, list[Any]] = {"prompts": [], "responses": [], "response_mask": [], "uid": []}
    system = draw(4, 9)
    for group in range(groups):
        prompt = torch.cat([system, draw(3, 12)])
        firsts = [(draw(2, 6), draw(1, 5)) for _ in range(2)]
        for i in range(size):
            answer, tool = firsts[i % 2]
            second = draw(1, 7)
            out["prompts"].append(prompt if shared else draw(5, 20))
            out["responses"].append(torch.cat([answer, tool, second]))
            mask = [torch.ones_like(answer), torch.zeros_like(tool), torch.ones_like(second)]
            out["response_mask"].append(torch.cat(mask))
            out["uid"].append(f"{seed}-{group}")
    return out


def batch_of(rows: dict[str, list[Any]], **extra: Any) -> Any:
    """verl's TensorDict of rollouts, jagged; in `extra` tensors and lists are per sample."""
    pairs = list(zip(rows["prompts"], rows["responses"], strict=True))
    ids = [torch.cat(pair) for pair in pairs]
    masks = [
        torch.cat([torch.zeros_like(p), m])
        for p, m in zip(rows["prompts"], rows["response_mask"], strict=True)
    ]
    tensors = {
        "prompts": jagged(rows["prompts"]),
        "responses": jagged(rows["responses"]),
        "response_mask": jagged(rows["response_mask"]),
        "input_ids": jagged(ids),
        "position_ids": jagged([torch.arange(len(i)) for i in ids]),
        "loss_mask": jagged(masks),
    }
    per_sample = {k: v for k, v in extra.items() if isinstance(v, (torch.Tensor, list))}
    rest = {k: v for k, v in extra.items() if k not in per_sample}
    tensors |= per_sample
    if "routed_experts" in rows:
        tensors["routed_experts"] = jagged(rows["routed_experts"])
    if "extra_fields" in rows:
        tensors["extra_fields"] = rows["extra_fields"]
    if "position_ids" in rows:
        tensors["position_ids"] = jagged(rows["position_ids"])
        # as verl does where it gets a batch
        tensors["position_ids"]._ragged_idx = 2
        tensors["multi_modal_inputs"] = rows["multi_modal_inputs"]
    return tu.get_tensordict(tensors, rest)


# ---- workers -------------------------------------------------------------------------------------


FULL = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def worker_config(
    vendor: str,
    path: Path,
    settings: Settings,
    model_type: str = "language_model",
    forward_only: bool = False,
) -> TrainingWorkerConfig:
    """verl's configuration of one worker, for an engine of "stock" or "prefixtree"."""
    packs = vendor == "prefixtree"
    theirs = "eager" if vendor == "alone" else "sdpa"
    if vendor == "undivided":
        engine = {k: v for k, v in settings.engine.items() if k not in TWO_RANKS}
        settings = replace(settings, engine=engine)
    ranks = settings.engine.get("ulysses_sequence_parallel_size", 1)
    stock = theirs if ranks == 1 else VARLEN
    ours = {"attn_implementation": "prefixtree"}
    if settings.recompute:
        ours["prefixtree_recompute"] = settings.recompute
    model_config = HFModelConfig(
        path=str(path),
        **{
            "external_lib": "prefixtree.integrations.verl" if packs else None,
            "override_config": ours if packs else {"attn_implementation": stock},
            "enable_gradient_checkpointing": settings.checkpointing,
            # verl's own needs flash-attn for it, or what stands for it among several ranks
            "use_remove_padding": packs or ranks > 1,
            **settings.model_options,
        },
    )
    options: dict[str, Any] = {
        "strategy": "fsdp2",
        "mixed_precision": FULL,
        "use_torch_compile": False,
        "forward_only": forward_only,
        "model_dtype": "fp32",
        "use_dynamic_bsz": settings.tokens is not None,
        "max_token_len_per_gpu": settings.tokens,
        "infer_max_token_len_per_gpu": settings.tokens,
        "micro_batch_size_per_gpu": settings.size,
        "infer_micro_batch_size_per_gpu": settings.size,
        **settings.engine,
    }
    optimizer = FSDPOptimizerConfig(
        optimizer=settings.optimizer,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        clip_grad=1.0,
        total_training_steps=8,
    )
    return TrainingWorkerConfig(
        model_type=model_type,
        model_config=model_config,
        engine_config=FSDPEngineConfig(**options),
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(
            save_contents=["model", "hf_model"], load_contents=["model"]
        ),
    )


def make_worker(vendor: str, *args: Any, **kwargs: Any) -> TrainingWorker:
    """verl's TrainingWorker, in this process; arguments as for `worker_config`."""
    os.environ["VERL_ENGINE_VENDOR"] = vendor
    torch.manual_seed(7)  # a critic's head is drawn as it is made
    worker = TrainingWorker(worker_config(vendor, *args, **kwargs))
    worker.reset()
    is_first = worker.engine_config.strategy == "fsdp"
    kind = FullyShardedDataParallel if is_first else FSDPModule
    assert isinstance(worker.engine.module, kind), type(worker.engine.module)
    if (together := worker.engine.ulysses_sequence_parallel_size) > 1:
        assert dist.get_world_size(worker.engine.ulysses_parallel_group) == together
    adapted = [n for n, _ in worker.engine.module.named_parameters() if "lora_" in n]
    assert bool(adapted) == (worker.model_config.lora_rank > 0)
    return worker


def actor_loss(settings: Settings, entropy_coeff: float = 0.02) -> Any:
    """verl's PPO loss with KL and entropy as the algorithm wants them."""
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=4,
        use_dynamic_bsz=True,
        use_kl_loss=settings.algorithm == "grpo",
        kl_loss_coef=0.1,
        entropy_coeff=entropy_coeff,
        clip_ratio=0.05,  # some ratios are clipped
        clip_ratio_low=0.05,
        clip_ratio_high=0.05,
        loss_agg_mode=settings.loss_agg_mode,
    )
    return partial(ppo_loss, config=config)


def critic_loss() -> Any:
    """verl's value loss."""
    config = FSDPCriticConfig(strategy="fsdp2", use_dynamic_bsz=True, cliprange_value=0.3)
    return partial(value_loss, config=config)


def parameters(worker: TrainingWorker) -> dict[str, torch.Tensor]:
    """All parameters, whole; with FSDP1 this rank's shards that hold anything."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in worker.engine.module.named_parameters()
        if p.numel()
    }


# ---- a training step -----------------------------------------------------------------------------


def run(vendor: str, folder: Path, settings: Settings, rank: int = 0, world: int = 1) -> Any:
    """Old log-probabilities to the fourth update, as verl's trainer goes about it.

    Returns:
        {"infer": {name: [response values per row]}, "metrics": {name: [one an update]},
        "parameters": {role: {name: tensor}}, "start": the same before the updates}
    """
    if vendor == "stock" and settings.model in VISION:
        with patches_taken_back():
            return _run(vendor, folder, settings, rank, world)
    if vendor == "alone" or (settings.routes and vendor != "prefixtree"):
        settings = replace(settings, tokens=None, size=1)
    return _run(vendor, folder, settings, rank, world)


def _run(vendor: str, folder: Path, settings: Settings, rank: int, world: int) -> Any:
    path = folder / settings.model
    together = settings.engine.get("ulysses_sequence_parallel_size", 1)
    # as verl's dispatch has it
    rank, world = rank // together, world // together
    # ranks that have the same batch, and do not know it, count it twice
    batches = world * together if vendor == "undivided" else world
    shared = settings.even or rank < world - 1
    rows = rollouts(10 + rank, groups=4, size=4, shared=shared)
    if settings.model in VISION:
        sees = settings.images == "all" or (settings.images == "first" and rank == 0)
        rows = shown(rows, path, sees)
    if settings.routes:
        rows = with_routes(rows)
    if settings.masks:
        rows = with_masks(rows, VOCABULARY, everywhere=shared)
    count = len(rows["uid"])
    temperature: Any = 0.7
    if settings.temperatures:
        temperature = torch.linspace(0.6, 1.4, count)
    common = {"temperature": temperature, "global_token_num": None}

    actor = make_worker(vendor, path, settings)
    actor.set_loss_fn(actor_loss(settings))
    if settings.routes and vendor != "prefixtree":
        force_routes(actor, rows)
    if settings.masks and vendor != "prefixtree":
        mask_logits(actor, rows)
    roles = {"actor": actor}
    infer = {}
    out = infer_with(actor, rows, calculate_entropy=True, **common)
    infer["old_log_probs"], infer["entropy"] = out["log_probs"], out["entropy"]
    batch = batch_of(rows, old_log_probs=jagged(infer["old_log_probs"]), **common)
    if settings.algorithm == "grpo":
        other = make_worker(vendor, path, settings, forward_only=True)
        _perturb(other)
        if settings.masks and vendor != "prefixtree":
            mask_logits(other, rows)
        infer["ref_log_prob"] = infer_with(other, rows, **common)["log_probs"]
        batch["ref_log_prob"] = jagged(infer["ref_log_prob"])
    else:
        critic = make_worker(vendor, path, settings, "value_model")
        critic.set_loss_fn(critic_loss())
        _perturb(critic)
        roles["critic"] = critic
        infer["values"] = infer_with(critic, rows, **common)["values"]
        batch["values"] = jagged(infer["values"])
    _advantages(batch, rows, settings, 100 * rank)
    start = {role: parameters(worker) for role, worker in roles.items()}
    metrics: dict[str, list[Any]] = {}
    for role, worker in roles.items():
        # two mini-batches
        data = batch.clone()
        tu.assign_non_tensor(
            data,
            calculate_entropy=True,
            global_batch_size=count * batches // 2,
            mini_batch_size=count * batches // 2,
            epochs=settings.epochs,
            seed=3,
            dataloader_kwargs={"shuffle": False},
        )
        trained = of_collecting_rank(worker, worker.train_mini_batch(data))
        out = tu.get(trained, "metrics")
        metrics |= {f"{role}: {name}": value for name, value in out.items()}
    end = {role: parameters(worker) for role, worker in roles.items()}
    return {"infer": infer, "metrics": metrics, "parameters": end, "start": start}


def of_collecting_rank(worker: TrainingWorker, output: Any) -> Any:
    """The result of the one rank, of those with the same data, whose output verl collects.

    verl's dispatch gives what it collected to all of them with the next batch.
    """
    together = worker.engine.ulysses_sequence_parallel_size
    if together == 1:
        return output
    assert (output is not None) == (dist.get_rank() % together == 0)
    outputs = [None] * dist.get_world_size()
    dist.all_gather_object(outputs, output)
    return outputs[dist.get_rank() // together * together]


def run_ranks(folder: Path, names: list[str], ranks: int = 2) -> list[dict[Any, Any]]:
    """The results of each rank (`rank.py`), all named cases with both engines."""
    return spawn.run_ranks(PRELOAD[-1], folder, ranks, arguments=[names], preload=PRELOAD)


def infer_with(worker: TrainingWorker, rows: dict[str, list[Any]], **extra: Any) -> dict[str, Any]:
    data = batch_of(rows, compute_loss=False, **extra)
    out = of_collecting_rank(worker, worker.infer_batch(data))
    names = [n for n in ("log_probs", "entropy", "values") if n in out]
    mask = jagged(rows["response_mask"])
    found = {n: [t.clone() for t in response_from_nested(out[n], mask).unbind()] for n in names}
    if "routed_experts" in rows:
        # what follows a token without routes is nobody's
        pairs = {n: zip(values, rows["response_mask"], strict=True) for n, values in found.items()}
        found = {n: [value * scored for value, scored in each] for n, each in pairs.items()}
    return found


def _perturb(worker: TrainingWorker) -> None:
    """Other weights than the actor's, the same for both engines."""
    with torch.no_grad():
        for name, p in sorted(worker.engine.module.named_parameters()):
            generator = torch.Generator().manual_seed(sum(name.encode()))
            noise = 0.05 * torch.randn(p.shape, generator=generator)
            local = p
            if hasattr(p, "device_mesh"):
                from torch.distributed.tensor import distribute_tensor

                noise = distribute_tensor(noise, p.device_mesh, p.placements).to_local()
                # offloaded, it is on the CPU, whatever its mesh is of
                local = p.to_local()
            local.add_(noise.to(local.device))


def _advantages(batch: Any, rows: dict[str, list[Any]], settings: Settings, seed: int) -> None:
    mask_nested = batch["response_mask"]
    mask = mask_nested.to_padded_tensor(0)
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.zeros(mask.shape)
    last = torch.tensor([len(r) - 1 for r in rows["responses"]])
    rewards[torch.arange(len(last)), last] = torch.randn(len(last), generator=generator)
    if settings.algorithm == "grpo":
        advantages, returns = core_algos.compute_grpo_outcome_advantage(
            rewards, mask, np.array(rows["uid"])
        )
    else:
        values = batch["values"].to_padded_tensor(0)
        advantages, returns = core_algos.compute_gae_advantage_return(
            rewards, values, mask, gamma=0.99, lam=0.95
        )
    batch["advantages"] = response_to_nested(advantages, mask_nested)
    batch["returns"] = response_to_nested(returns, mask_nested)
