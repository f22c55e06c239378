"""Comparisons of verl's engines with prefixtree's: which model, algorithm, batches and settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Settings:
    """One comparison: everything that both engines are given.

    Attributes:
        algorithm: "grpo" (reference, KL and entropy loss) or "ppo" (critic, entropy loss).
        tokens: max_token_len_per_gpu, or None for a fixed size of micro-batches.
        size: micro_batch_size_per_gpu where tokens is None.
        recompute: prefixtree_recompute of ours. Default: not set.
        temperatures: a temperature a sample, unlike within a group.
        even: ranks get rollouts alike; otherwise the last one's share nothing.
        same_steps: both engines make the same micro-batches, so that every metric must agree;
            otherwise those are left out that verl averages over micro-batches.
        images: whose rollouts hold images, "all" ranks' or the "first" one's, or None.
        routes: whether batches have recorded experts, and the actor's engine replays them.
        masks: whether rollouts have sampling masks; with `even`, on all ranks in every batch.
        beside: the engine to compare with: verl's ("stock"), verl's on ranks that compute the same
            batch each, as it hands no states on ("undivided"), or each sequence "alone".
        epochs: of two updates each. A second one has the weights of the first.
        tolerance: of parameters and metrics.
        score_tolerance: of log-probabilities, entropies and values.
    """

    model: str = "qwen3"
    algorithm: str = "grpo"
    tokens: int | None = 60
    size: int = 4
    checkpointing: bool = True
    recompute: str = ""
    temperatures: bool = False
    even: bool = True
    same_steps: bool = False
    images: str | None = None
    routes: bool = False
    masks: bool = False
    beside: str = "stock"
    optimizer: str = "SGD"
    lr: float = 0.1
    weight_decay: float = 0.0
    epochs: int = 1
    tolerance: float = 1e-5
    score_tolerance: float = 1e-5
    loss_agg_mode: str = "token-mean"
    engine: dict[str, Any] = field(default_factory=dict)
    model_options: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Settings] = {
    "grpo": Settings(),
    "grpo, a temperature a sample": Settings(
        temperatures=True, loss_agg_mode="seq-mean-token-mean"
    ),
    "grpo, one micro-batch": Settings(tokens=10000, same_steps=True, checkpointing=False),
    "grpo, ranks unlike": Settings(even=False, tokens=50),
    "grpo, fixed size": Settings(tokens=None, size=2, loss_agg_mode="seq-mean-token-sum"),
    "grpo, experts": Settings(model="qwen3_moe"),
    "grpo, padded to buckets": Settings(
        engine={"pad_to_length": True, "pad_to_length_bucket": 32},
        same_steps=True,
        tokens=10000,
        checkpointing=False,
    ),
    "grpo, gradients reduced every time": Settings(
        engine={"use_no_sync_for_gradient_accumulation": False, "reshard_after_forward": False}
    ),
    "grpo, offloaded": Settings(
        engine={"param_offload": True, "optimizer_offload": True}, optimizer="AdamW", lr=1e-3
    ),
    "grpo, offload policy": Settings(engine={"offload_policy": True}),
    "grpo, lora": Settings(model_options={"lora_rank": 4, "lora_alpha": 8}, lr=1.0),
    # Adam divides by the gradient's own size: where that is rounding, so is the step
    "grpo, AdamW": Settings(optimizer="AdamW", lr=1e-3, epochs=2),
    "ppo": Settings(algorithm="ppo"),
    "ppo, fsdp1": Settings(algorithm="ppo", model="qwen3_tied", engine={"strategy": "fsdp"}),
    "ppo, fsdp1, original parameters": Settings(
        algorithm="ppo", model="qwen3_tied", engine={"strategy": "fsdp", "use_orig_params": True}
    ),
    "ppo, tied": Settings(
        algorithm="ppo", model="qwen3_tied", tokens=None, size=8, same_steps=True
    ),
    "ppo, experts": Settings(algorithm="ppo", model="qwen3_moe", tokens=None, size=4),
}
#: Ranks that compute each forest together.
TWO_RANKS = {"ulysses_sequence_parallel_size": 2}
# on four ranks, two of which have the same data and compute each forest together
SEQUENCE_PARALLEL_CASES: dict[str, Settings] = {
    "grpo, two ranks a forest": Settings(
        model="qwen3_moe", engine=TWO_RANKS, tokens=30, recompute="auto"
    ),
    "grpo, two ranks a forest, lora": Settings(
        model_options={"lora_rank": 4, "lora_alpha": 8},
        lr=1.0,
        engine={**TWO_RANKS, "pad_to_length": True, "pad_to_length_bucket": 32},
        tokens=10000,
        same_steps=True,
    ),
    "ppo, two ranks a forest": Settings(algorithm="ppo", engine=TWO_RANKS, tokens=None),
    "ppo, two ranks a forest, fsdp1": Settings(
        algorithm="ppo",
        model="qwen3_tied",
        engine={**TWO_RANKS, "strategy": "fsdp"},
        checkpointing=False,
    ),
}
# a budget below the longest sequence, which verl's own engine refuses
TRUNK_CASES: dict[str, Settings] = {
    "grpo, long sequences": Settings(tokens=20, beside="alone", even=False),
    "ppo, long sequences": Settings(algorithm="ppo", tokens=20, beside="alone", even=False),
    "grpo, long sequences, lora, nothing recomputed": Settings(
        tokens=24,
        beside="alone",
        model_options={"lora_rank": 4, "lora_alpha": 8},
        checkpointing=False,
        lr=1.0,
        engine={"use_no_sync_for_gradient_accumulation": False},
    ),
}
# models with recurrent layers, of a newer transformers than verl asks for
HYBRID_CASES: dict[str, Settings] = {
    "grpo, nemotron_h": Settings(model="nemotron_h"),
    # a state of this small model takes as many bytes as a token that is recomputed
    "grpo, nemotron_h, long sequences": Settings(
        model="nemotron_h", beside="alone", tokens=24, even=False, checkpointing=False
    ),
    # on these rollouts verl's own float32 scores are 5e-5 from float64, the packed ones 6e-6
    "grpo, qwen3_5_text": Settings(model="qwen3_5_text", score_tolerance=1e-4),
    # a critic is a token classifier, which neither of the two has
    "ppo, qwen3_next": Settings(algorithm="ppo", model="qwen3_next", score_tolerance=5e-5),
    # of all linear layers; PEFT refuses that of Mamba's out_proj. Parameters are 5e-6 or 1.1e-5
    # apart, by the kind of CPU
    "grpo, qwen3_5_text, lora": Settings(
        model="qwen3_5_text",
        model_options={"lora_rank": 4, "lora_alpha": 8},
        lr=1.0,
        tolerance=5e-5,
        score_tolerance=1e-4,
    ),
    "grpo, nemotron_h, lora": Settings(
        model="nemotron_h",
        model_options={
            "lora_rank": 4,
            "lora_alpha": 8,
            "target_modules": ["in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "up_proj"],
        },
        lr=1.0,
    ),
    # without a reference, which FSDP1 offloads, and torch then asks for an accelerator
    "ppo, qwen3_next, fsdp1": Settings(
        algorithm="ppo",
        model="qwen3_next_tied",
        engine={"strategy": "fsdp"},
        score_tolerance=5e-5,
    ),
    # with a vision encoder, where verl's own engine fails (ImportError in its patch)
    **{
        f"grpo, {model}, {'images' if images else 'text'}": Settings(
            model=model,
            beside="alone",
            images=images,
            tokens=120,
            # gradients of norm 40: what rounding leaves grows 30 to 370 times in a step of 0.3
            lr=0.03,
            score_tolerance=1e-4,
            tolerance=1e-4,
        )
        for model in ("qwen3_5", "qwen3_5_moe")
        for images in (None, "all")
    },
}
# on two ranks that compute each forest together
HYBRID_SEQUENCE_PARALLEL_CASES: dict[str, Settings] = {
    "grpo, nemotron_h, two ranks a forest": Settings(
        model="nemotron_h", beside="undivided", engine=TWO_RANKS
    ),
    "ppo, qwen3_next, two ranks a forest": Settings(
        algorithm="ppo",
        model="qwen3_next",
        beside="undivided",
        engine=TWO_RANKS,
        score_tolerance=5e-5,
    ),
}

# log p and entropies over what the sampler kept; the other engine's logits are masked by a hook
MASK_CASES: dict[str, Settings] = {
    "grpo, masks": Settings(masks=True, tokens=40),
    "grpo, masks, fixed size, AdamW": Settings(
        masks=True, tokens=None, size=8, optimizer="AdamW", lr=1e-3, tolerance=2e-5
    ),
    # one rank has none in its second mini-batch
    "grpo, masks, ranks unlike": Settings(masks=True, tokens=40, even=False),
    "grpo, masks, long sequences": Settings(masks=True, tokens=20, beside="alone"),
    "grpo, masks, two ranks a forest": Settings(
        masks=True, beside="undivided", engine=TWO_RANKS, tokens=40
    ),
}

# routes of a rollout engine, which verl's own FSDP engines ignore: beside each sequence alone,
# whose routers are made to choose them
_REPLAY: dict[str, Any] = {"routes": True, "beside": "alone"}
_MOE = _REPLAY | {"model": "qwen3_moe"}
REPLAY_CASES: dict[str, Settings] = {
    "grpo, routes": Settings(**_MOE),
    # 2.7e-5 apart on two ranks, of 3.7e-3 moved: of a gradient that is rounding Adam makes a step
    "grpo, routes, AdamW": Settings(
        **_MOE,
        optimizer="AdamW",
        lr=1e-3,
        epochs=2,
        recompute="auto",
        checkpointing=False,
        tolerance=1e-4,
    ),
    "grpo, routes, lora": Settings(**_MOE, model_options={"lora_rank": 4, "lora_alpha": 8}, lr=1.0),
    "grpo, routes, long sequences": Settings(**_MOE, tokens=20, even=False),
    "grpo, routes, two ranks a forest": Settings(
        routes=True, beside="undivided", model="qwen3_moe", engine=TWO_RANKS, tokens=30
    ),
    # a critic, which has no routes
    "ppo, routes, fsdp1": Settings(
        **_REPLAY, model="qwen3_moe_tied", algorithm="ppo", engine={"strategy": "fsdp"}
    ),
}
