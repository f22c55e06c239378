"""Run in the processes of test_megatron.py."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.megatron_cpu import stand_in, stub_transformer_engine

stand_in()
stub_transformer_engine()


def on_rank(rank: int, folder: Path) -> dict[str, Any]:
    """Runs of both engines, what the models were, and on a rank alone the messages of refusals."""
    import tests.integrations.verl.cpu_platform  # noqa: F401
    from tests.integrations.verl.runs import save_model

    ranks = dist.get_world_size()
    paths = {kind: folder / kind for kind in ("qwen3", "qwen3_tied", "qwen3_moe")}
    if rank == 0:
        for kind in paths:
            save_model(kind, folder)
    dist.barrier()
    cases = CASES if ranks == 1 else PARALLEL
    results: dict[str, Any] = {name: _compared(case, paths) for name, case in cases.items()}
    if ranks == 1:
        path = paths["qwen3"]
        results["refusals"] = {name: _refused(name, s, path) for name, s in REFUSED.items()}
        results["not packed"] = _not_packed(paths["qwen3"])
        results["fused"] = _fused(paths["qwen3"])
    return results


@dataclass(frozen=True)
class Case:
    """One comparison: the role, the model, changes to the batch and to McoreEngineConfig, and the
    mode of router replay."""

    role: str = "actor"
    model: str = "qwen3"
    batch: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    replay: str | None = None


CASES = {
    "actor": Case(),
    "actor, tied": Case(model="qwen3_tied"),
    "actor, fixed size": Case(batch={"use_dynamic_bsz": False}),
    "actor, experts": Case(model="qwen3_moe"),
    "critic": Case("critic"),
    # last, as verl patches Megatron's routers for the rest of the process
    "actor, R3": Case(model="qwen3_moe", replay="R3"),
    "actor, R2": Case(model="qwen3_moe", replay="R2"),
}
_TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
_STAGES = {"pipeline_model_parallel_size": 2}
#: On two ranks.
PARALLEL = {
    "actor, TP 2 + SP": Case(engine=_TENSOR),
    "critic, TP 2 + SP": Case("critic", engine=_TENSOR),
    "actor, PP 2": Case(engine=_STAGES),
    "critic, PP 2": Case("critic", engine=_STAGES),
    "actor, PP 2, R2": Case(model="qwen3_moe", engine=_STAGES, replay="R2"),
}


def _compared(case: Case, paths: dict[str, Path]) -> dict[str, Any]:
    """Engine -> what it gave."""
    from megatron.core import parallel_state
    from verl.workers.config import EngineRouterReplayConfig

    from tests.integrations.verl import megatron_runs as runs

    found = {}
    for vendor in ("stock", "prefixtree"):
        options, batch = dict(case.engine), dict(case.batch)
        if case.replay is not None:
            options["router_replay"] = EngineRouterReplayConfig(mode=case.replay)
            options["pad_bshd_to_minibatch_max"] = False
            batch |= runs.replaying(case.replay, alone=vendor == "stock")
        engine = runs.make_engine(vendor, case.role, paths[case.model], **options)
        inferred = runs.infer(engine, **batch)
        metrics = engine.infer_batch(runs.make_batch(**batch)).get("metrics", {})
        recorded = None
        if case.replay == "R2":
            # the update has other weights, with which routers would choose otherwise
            recorded = runs.recorded(engine, **batch)
            runs.turn_routers(engine)
            batch["routed_experts"] = recorded
        gradients, trained = runs.train(engine, case.role, **batch)
        layers = engine.module[0].module.decoder.layers
        found[vendor] = {
            "scores": inferred,
            "gradients": gradients,
            "metrics": runs.values_of(trained),
            "engine": type(engine).__name__,
            "attention": type(layers[0].self_attention).__name__,
            "layers": len(layers),
            "packing": {n: v for n, v in metrics.items() if n.startswith("prefixtree/")},
        }
        if recorded is not None:
            found[vendor]["routes"] = [route.sort(-1).values for route in recorded.unbind()]
        if case.replay is not None and vendor == "prefixtree":
            without = {**batch, "enable_routing_replay": False}
            found[vendor]["not replayed"] = runs.train(engine, case.role, **without)[0]
        parallel_state.destroy_model_parallel()
    return found


def _refused(name: str, setting: tuple[int, str, Any], path: Path) -> str:
    from tests.integrations.verl import megatron_runs as runs

    role = "critic" if "critic" in name else "actor"
    config = runs.configs("prefixtree", role, path)
    for one in (setting, *BESIDE.get(name, ())):
        _set(config, one)
    try:
        runs.ENGINES["prefixtree", role](*config)._build_tf_config()
    except NotImplementedError as error:
        return str(error)
    return "not refused"


def _not_packed(path: Path) -> tuple[bool, list[str]]:
    from megatron.core import parallel_state

    from prefixtree.integrations.verl.megatron import PackedMegatronActorEngine
    from tests.integrations.verl import megatron_runs as runs

    config = runs.configs("prefixtree", "actor", path)
    config[0].hf_config._attn_implementation = "eager"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = PackedMegatronActorEngine(*config)
    parallel_state.destroy_model_parallel()
    return engine.packs, [str(w.message) for w in caught]


def _fused(path: Path) -> tuple[list[bool], list[str]]:
    """Whether use_fused_kernels stays on in both configurations of an engine, and its warnings."""
    from megatron.core import parallel_state

    from prefixtree.integrations.verl.megatron import PackedMegatronActorEngine
    from tests.integrations.verl import megatron_runs as runs

    config = runs.configs("prefixtree", "actor", path)
    for at in (0, 1):
        _set(config, (at, "use_fused_kernels", True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = PackedMegatronActorEngine(*config)
    parallel_state.destroy_model_parallel()
    on = [bool(c.use_fused_kernels) for c in (engine.model_config, engine.engine_config)]
    return on, [str(w.message) for w in caught]


#: Name -> (0 for the model's or 1 for the engine's configuration, setting, value).
REFUSED: dict[str, tuple[int, str, Any]] = {
    "vanilla_mbridge": (1, "vanilla_mbridge", True),
    "context_parallel_size": (1, "context_parallel_size", 2),
    "use_megatron_fsdp": (1, "use_megatron_fsdp", True),
    "router_replay.mode=R2 of a critic": (1, "router_replay.mode", "R2"),
    "R2 with virtual_pipeline_model_parallel_size": (1, "router_replay.mode", "R2"),
    "mtp": (0, "mtp.enable", True),
    "lora": (0, "lora", {"rank": 8}),
    "calculate_per_token_loss": (
        1,
        "override_transformer_config",
        {"calculate_per_token_loss": True},
    ),
    "override_transformer_config.recompute_granularity says what is recomputed": (
        0,
        "hf_config.prefixtree_recompute",
        "auto",
    ),
    "takes images": (0, "hf_config.vision_config", object()),
}


#: What a setting is refused together with.
BESIDE = {
    "R2 with virtual_pipeline_model_parallel_size": [
        (1, "virtual_pipeline_model_parallel_size", 2),
    ],
}


def _set(config: tuple[Any, ...], setting: tuple[int, str, Any]) -> None:
    at, name, value = setting
    *path, last = name.split(".")
    owner = config[at]
    for part in path:
        owner = getattr(owner, part)
    # verl freezes its configurations
    object.__setattr__(owner, last, value)


def largest(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, relative to the largest entry of b where that is above 1e-6."""
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-6))
