"""verl's Megatron engines on a CPU, its own and prefixtree's.

Its own engine runs padded batches, as Megatron's attention for CPUs takes no packed ones. What
needs CUDA or packages that are not here is left out: the optimizer, offloading, and verl's function
that makes the model, for which Megatron-Bridge's is called with the same provider.
"""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from verl.trainer.config import CheckpointConfig
from verl.workers.config import (
    HFModelConfig,
    McoreActorConfig,
    McoreCriticConfig,
    McoreEngineConfig,
    McoreOptimizerConfig,
)
from verl.workers.engine.megatron.transformer_impl import (
    MegatronEngineWithLMHead,
    MegatronEngineWithValueHead,
)
from verl.workers.utils.losses import ppo_loss, value_loss

from prefixtree.integrations.verl.megatron import (
    PackedMegatronActorEngine,
    PackedMegatronCriticEngine,
)
from tests.integrations.verl.runs import batch_of, jagged, rollouts
from tests.support.megatron_cpu import ON_CPU, with_norms

EXPERTS = 4
ENGINES = {
    ("stock", "actor"): MegatronEngineWithLMHead,
    ("stock", "critic"): MegatronEngineWithValueHead,
    ("prefixtree", "actor"): PackedMegatronActorEngine,
    ("prefixtree", "critic"): PackedMegatronCriticEngine,
}


def _layer_spec(config: Any) -> Any:
    from megatron.bridge.models.gpt_provider import local_layer_spec

    return with_norms(local_layer_spec(config))


def configs(vendor: str, role: str, path: Path, **engine: Any) -> tuple[Any, ...]:
    """The configurations that verl gives an engine."""
    packs = vendor == "prefixtree"
    model = HFModelConfig(
        path=str(path),
        model_type="value_model" if role == "critic" else "language_model",
        override_config={"attn_implementation": "prefixtree" if packs else "eager"},
        use_remove_padding=False,
    )
    overrides = {name: value for name, value in ON_CPU.items() if name not in ("bf16", "fp16")}
    overrides |= {"transformer_layer_spec": _layer_spec, "attention_backend": "auto"}
    overrides |= {"moe_permute_fusion": False, "moe_grouped_gemm": False}
    options = McoreEngineConfig(
        use_remove_padding=False, override_transformer_config=overrides, **engine
    )
    # verl takes half precision alone
    object.__setattr__(options, "dtype", "float32")
    return model, options, McoreOptimizerConfig(lr=1e-3), CheckpointConfig()


def make_engine(vendor: str, role: str, path: Path, **engine: Any) -> Any:
    """An engine with its model in Megatron's DDP."""
    # Megatron keeps the backend of the last model in the environment
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = ENGINES[vendor, role](*configs(vendor, role, path, **engine))
    made._build_tf_config()
    if role == "critic":
        from verl.models.mcore.bridge import make_value_model

        torch.manual_seed(3)
        made.provider.register_pre_wrap_hook(
            make_value_model(made.provider.hidden_size, made.provider.sequence_parallel)
        )
    (model,) = made.provider.provide_distributed_model(
        wrap_with_ddp=False, bf16=False, fp16=False, use_cpu_initialization=True
    )
    made.tf_config = model.config
    missing = ["output_layer.weight"] if role == "critic" else []
    made.bridge.load_hf_weights([model], str(path), allowed_mismatched_params=missing)
    if vendor == "stock":
        # padding stands at the end, where causal attention does not see it; Megatron's attention
        # for CPUs takes no mask of padding
        model.register_forward_pre_hook(
            lambda module, args, kwargs: (args, kwargs | {"attention_mask": None}),
            with_kwargs=True,
        )
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=False)
    made.module = [DistributedDataParallel(model.config, ddp, model)]
    made.module[0].train()
    return made


def make_batch(**extra: Any) -> Any:
    """Groups of rollouts that branch, with what verl's losses read."""
    rows = rollouts(10, groups=3, size=4)
    generator = torch.Generator().manual_seed(4)

    def random(scale: float) -> Any:
        return jagged([torch.randn(len(r), generator=generator) * scale for r in rows["responses"]])

    return batch_of(
        rows,
        old_log_probs=random(0.3),
        advantages=random(1.0),
        values=random(1.0),
        returns=random(1.0),
        temperature=0.75,
        global_token_num=None,
        max_token_len_per_gpu=120,
        use_fused_kernels=False,
        global_batch_size=12,
        calculate_entropy=True,
        **{"use_dynamic_bsz": True, "micro_batch_size_per_gpu": 4, **extra},
    )


def replaying(mode: str, alone: bool) -> dict[str, Any]:
    """What a batch has for router replay. verl's engine replays rows of packed batches, which are
    those of its padded ones where a micro-batch is one sequence (`alone`)."""
    found: dict[str, Any] = {"enable_routing_replay": True}
    if alone:
        found |= {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}
    if mode == "R3":
        found["routed_experts"] = jagged([_routes(ids) for ids in make_batch()["input_ids"]])
    return found


def _routes(ids: torch.Tensor) -> torch.Tensor:
    """By token, place and layer, as a rollout engine records them: int16 [n - 1, layers, k]."""
    place = torch.arange(len(ids))
    first = torch.stack([(ids * 3 + place + 5 * layer) % EXPERTS for layer in range(2)], 1)
    return torch.stack([first, (first + 1) % EXPERTS], -1)[:-1].to(torch.int16)


def recorded(engine: Any, **extra: Any) -> torch.Tensor:
    """The experts that a forward of old log-probabilities records; every stage has those of all."""
    output = engine.infer_batch(make_batch(**extra)).get("model_output", {})
    found = [output.get("routed_experts")] * dist.get_world_size()
    dist.all_gather_object(found, output.get("routed_experts"))
    return next(routes for routes in found if routes is not None)


def turn_routers(engine: Any) -> None:
    """Routers that choose otherwise, the same in both engines."""
    with torch.no_grad():
        for name, parameter in engine.module[0].named_parameters():
            if "router" in name:
                parameter.copy_(parameter.flip(0))


def loss_of(role: str) -> Any:
    """verl's PPO loss, or its value loss."""
    common: dict[str, Any] = {"strategy": "megatron", "use_dynamic_bsz": True}
    if role == "critic":
        return partial(value_loss, config=McoreCriticConfig(**common, cliprange_value=0.3))
    config = McoreActorConfig(
        **common, rollout_n=4, entropy_coeff=0.02, clip_ratio=0.1, use_kl_loss=False
    )
    return partial(ppo_loss, config=config)


def infer(engine: Any, **extra: Any) -> dict[str, torch.Tensor]:
    """Outputs of a forward, as verl's `infer_batch` gives them; rows are responses' tokens."""
    batch = make_batch(**extra)
    outputs = engine.infer_batch(batch).get("model_output", {})
    prompts, responses = (batch[n].offsets().diff().tolist() for n in ("prompts", "responses"))
    return {
        name: torch.cat(
            [
                row[p - 1 : p + r - 1]
                for row, p, r in zip(value.unbind(), prompts, responses, strict=True)
            ]
        )
        for name, value in outputs.items()
        # compared whole
        if name != "routed_experts"
    }


def train(engine: Any, role: str, **extra: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Gradients after one mini-batch, and verl's metrics."""
    engine.module[0].zero_grad_buffer()
    output = engine.forward_backward_batch(make_batch(**extra), loss_of(role))
    finalize_model_grads(engine.module)
    named = engine.module[0].module.named_parameters()
    return {name: p.main_grad.clone() for name, p in named}, output.get("metrics", {})


def values_of(metrics: dict[str, Any]) -> dict[str, float]:
    """verl's metrics of a mini-batch as numbers; those of one micro-batch each are left out."""
    return {name: float(m.aggregate()) for name, m in metrics.items() if hasattr(m, "aggregate")}
