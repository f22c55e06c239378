"""Recorded experts of rollouts, and a stock engine whose routers are made to choose them."""

from __future__ import annotations

from typing import Any

import torch

# of save_model("qwen3_moe")
LAYERS, EXPERTS, CHOSEN = 2, 4, 2


def with_routes(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Rollouts with the experts of each token, int16 [n, layers, k], by token, place and layer.

    As verl's agent loop has it: zeros from the last sampled token on. Every other rollout ends with
    a tool's answer, which nothing scores.
    """
    masks = [mask.clone() for mask in rows["response_mask"]]
    for mask in masks[::2]:
        mask[-3:] = 0
    routes = []
    for prompt, response, mask in zip(rows["prompts"], rows["responses"], masks, strict=True):
        ids = torch.cat([prompt, response])
        place = torch.arange(len(ids))
        first = torch.stack([(ids * 3 + place + 5 * at) % EXPERTS for at in range(LAYERS)], 1)
        route = torch.stack([first, (first + 1) % EXPERTS], -1).to(torch.int16)
        scored = mask.nonzero()
        route[len(prompt) + int(scored.max()) if len(scored) else 0 :] = 0
        routes.append(route)
    return rows | {"response_mask": masks, "routed_experts": routes}


def force_routes(worker: Any, rows: dict[str, list[Any]]) -> None:
    """Has the routers of a stock engine that runs each sequence alone choose the recorded experts.

    Where none are recorded they choose by themselves.
    """
    tokens = zip(rows["prompts"], rows["responses"], strict=True)
    ids = [tuple(torch.cat(pair).tolist()) for pair in tokens]
    recorded = dict(zip(ids, rows["routed_experts"], strict=True))
    running: dict[str, torch.Tensor] = {}

    def see(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        (row,), (mask,) = kwargs["input_ids"], kwargs["attention_mask"]
        whole = torch.zeros(len(row), LAYERS, CHOSEN, dtype=torch.long)
        whole[mask.bool()] = recorded[tuple(row[mask.bool()].tolist())].long()
        running["routes"] = whole

    def choose(layer: int) -> Any:
        def hook(router: Any, args: Any, output: Any) -> Any:
            logits, scores, chosen = output
            experts = running["routes"][:, layer]
            unrecorded = experts[:, :1] == experts[:, 1:]
            experts = torch.where(unrecorded, chosen, experts)
            weights = logits.softmax(-1, torch.float).gather(-1, experts)
            if router.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights.to(scores.dtype), experts

        return hook

    modules = [*worker.engine.module.modules()]
    model = next(m for m in modules if type(m).__name__.endswith("Qwen3MoeForCausalLM"))
    model.register_forward_pre_hook(see, with_kwargs=True)
    routers = [m for m in modules if type(m).__name__.endswith("Qwen3MoeTopKRouter")]
    assert len(routers) == LAYERS
    for layer, router in enumerate(routers):
        router.register_forward_hook(choose(layer))
