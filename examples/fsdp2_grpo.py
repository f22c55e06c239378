"""GRPO with FSDP2 in plain torch: sharded parameters, packed micro-batches, checkpoints, resume.

A rollout is one line of a file: `{"token_ids": [..], "loss_mask": [..], "group": .., "reward": ..}`
(`prefixtree report` reads the same file). Without a file the rollouts are made up. `--replicated`
computes every rollout in full: the same training, but slower.

    torchrun --nproc-per-node 2 examples/fsdp2_grpo.py --tiny       # two processes on a CPU
    accelerate launch --config_file examples/configs/fsdp2_loop.yaml examples/fsdp2_grpo.py --tiny
    accelerate launch --config_file examples/configs/fsdp2_loop.yaml examples/fsdp2_grpo.py \
        --model Qwen/Qwen3-0.6B --rollouts rollouts.jsonl

If a run is killed, the same command goes on after the last checkpoint, with any number of ranks.

The loop calls torch's `fully_shard` itself, and accelerate is only its launcher. On a CPU
accelerate gives DDP in place of FSDP2 without saying so. On GPUs its policy for bfloat16 casts
log-probabilities to bfloat16, which `sequence_logprobs` refuses.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, get_cosine_schedule_with_warmup

from prefixtree import PackedForest, plan_micro_batches, sequence_logprobs

# updates on the same rollouts, clipping of the ratio, weight of the KL term
EPOCHS, CLIP, KL = 2, 0.2, 0.01
TINY = {"steps": 6, "tasks": 3, "max_tokens": 128, "save_every": 2, "learning_rate": 1e-3}
TINY_MODEL = str(Path(__file__).parent / "configs" / "qwen3-tiny.json")

# ---- rollouts ------------------------------------------------------------------------------------


def next_rollouts(step: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rollouts of one step, the same on every rank: here a real loop asks its inference engine.

    They depend on the step alone, so that a resumed run sees what the killed one would have seen.
    """
    if options.rollouts is None:
        return make_rollouts(np.random.default_rng(step), options.tasks)
    rows = read_rollouts(options.rollouts)
    groups = list(dict.fromkeys(row["group"] for row in rows))
    taken = {groups[(step * options.tasks + i) % len(groups)] for i in range(options.tasks)}
    return [row for row in rows if row["group"] in taken]


def read_rollouts(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; a ValueError for one that lacks something."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        row = json.loads(line)
        needed = ("token_ids", "loss_mask", "group", "reward")
        if missing := [name for name in needed if name not in row]:
            raise ValueError(
                f"{path}, line {number}, has no {', '.join(missing)}: expected "
                f"{', '.join(needed)}. Rewards are compared within a group, which is what the "
                "responses to one prompt have in common: a number or a text"
            )
        rows.append(row)
    return rows


def make_rollouts(draw: np.random.Generator, tasks: int) -> list[dict[str, Any]]:
    """Two turns per rollout: 4 share the prompt, and 2 of these also the first turn and a reply."""

    def words(low: int, high: int) -> list[int]:
        return draw.integers(1, 128, draw.integers(low, high)).tolist()

    rows = []
    for task in range(tasks):
        prompt = words(20, 40)
        for _ in range(2):
            turn, reply = words(4, 9), words(6, 12)
            for last in (words(4, 9), words(4, 9)):
                mask = [0] * len(prompt) + [1] * len(turn) + [0] * len(reply) + [1] * len(last)
                reward = float(np.mean([token % 2 == 0 for token in turn + last]))
                tokens = prompt + turn + reply + last
                row = {"token_ids": tokens, "loss_mask": mask, "group": task, "reward": reward}
                rows.append(row)
    return rows


def make_model(options: argparse.Namespace, device: torch.device) -> Any:
    """The model in float32, each of its layers sharded over the ranks."""
    attention = "sdpa" if options.replicated else "prefixtree"
    if options.model.endswith(".json"):
        torch.manual_seed(0)  # random weights, which must be the same on every rank
        config = AutoConfig.from_pretrained(options.model)
        config.vocab_size = 128 if options.tiny else config.vocab_size
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    else:
        model = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=torch.float32, attn_implementation=attention
        )
    # gradient_checkpointing_enable in older transformers
    model.activation_checkpointing_enable({"use_reentrant": False})
    policy = MixedPrecisionPolicy()
    if device.type == "cuda":
        # outputs in float32: log-probabilities rounded to bfloat16 would make every ratio wrong
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in (*model.get_decoder().layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return model.train()


# ---- the method ----------------------------------------------------------------------------------


class MicroStep(NamedTuple):
    """A micro-batch. The last three are its rollouts' [n - 1] entries, one after another."""

    packed: PackedForest
    sequences: list[torch.Tensor]
    masks: list[torch.Tensor]
    mask: torch.Tensor
    advantage: torch.Tensor
    weight: torch.Tensor


def score(model: Any, step: MicroStep, replicated: bool) -> torch.Tensor:
    """log p of tokens 1 to n - 1 of every rollout of a micro-batch; 0 where the mask is 0."""
    if not replicated:
        return torch.cat(sequence_logprobs(model, step.packed, loss_mask=step.masks).logprobs)
    # padding comes after the scored tokens, so that the causal mask is enough
    ids = pad_sequence(step.sequences, batch_first=True).to(step.mask.device)
    logprobs = model(ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    picked = logprobs.gather(2, ids[:, 1:, None])[..., 0]
    rows = zip(picked, step.sequences, strict=True)
    return torch.cat([row[: len(s) - 1] for row, s in rows]) * step.mask


def plan_steps(
    rollouts: list[dict[str, Any]], options: argparse.Namespace, device: torch.device
) -> tuple[list[MicroStep], dict[str, float]]:
    """This rank's micro-batches, and the facts of the batch."""
    sequences = [torch.tensor(row["token_ids"]) for row in rollouts]
    masks = [torch.tensor(row["loss_mask"]) for row in rollouts]
    rewards = np.array([row["reward"] for row in rollouts])
    groups = np.array([row["group"] for row in rollouts])
    advantages = np.zeros(len(rewards))
    for group in np.unique(groups):
        own = groups == group
        advantages[own] = (rewards[own] - rewards[own].mean()) / (rewards[own].std() + 1e-6)
    # every rank plans for all and takes its row: the same number of steps, some perhaps empty
    plan = plan_micro_batches(sequences, options.max_tokens, dist.get_world_size(), groups)
    weights = plan.loss_weights("sequence-mean", masks)
    steps = []
    for batch in plan[dist.get_rank()]:
        kept = batch.take(masks)
        lengths = torch.tensor([len(mask) - 1 for mask in kept])
        each = [torch.tensor(batch.take(values)).float() for values in (advantages, weights)]
        given = [torch.cat([m[1:] for m in kept]), *(x.repeat_interleave(lengths) for x in each)]
        packed = batch.packed.to(device)
        steps.append(MicroStep(packed, batch.take(sequences), kept, *torch.stack(given).to(device)))
    shared = plan.stats.replicated_tokens / plan.stats.packed_tokens
    empty = plan.stats.empty_steps
    return steps, {"reward": rewards.mean(), "sharing": shared, "empty steps": empty}


def train_on(
    steps: list[MicroStep], policy: Any, reference: Any, optimizer: Any, schedule: Any, options: Any
) -> dict[str, float]:
    """The optimizer steps on one batch of rollouts; loss and gradient norm of each."""
    with torch.no_grad():
        olds, refs = (
            [score(model, step, options.replicated) for step in steps]
            for model in (policy, reference)
        )
    facts = {}
    for epoch in range(EPOCHS):
        total = torch.zeros((), device=olds[0].device)
        for step, old, ref in zip(steps, olds, refs, strict=True):
            new = score(policy, step, options.replicated)
            ratio = torch.exp(new - old)
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            surrogate = -torch.minimum(ratio * step.advantage, clipped * step.advantage)
            k3 = torch.exp(ref - new) - (ref - new) - 1
            # the weights are those of the whole batch: a sum over micro-batches, a mean over ranks
            loss = (step.weight * step.mask * (surrogate + KL * k3)).sum()
            loss.backward()  # in an empty step too: the other ranks wait for it
            total += loss.detach() / dist.get_world_size()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        facts |= {f"loss {epoch}": float(total), f"gradient {epoch}": float(norm.full_tensor())}
    return facts


def state_of(policy: Any, optimizer: Any, schedule: Any) -> dict[str, Any]:
    """All that changes, as shards; the rollouts of a step need no state."""
    model, optim = sharded.get_state_dict(policy, optimizer)
    return {"model": model, "optimizer": optim, "schedule": schedule.state_dict()}


def save(folder: Path, step: int, *trained: Any) -> None:
    """Every rank writes its shards; the folder gets its name when all have done so."""
    part = folder / "checkpoint.part"
    if dist.get_rank() == 0:
        shutil.rmtree(part, ignore_errors=True)
    dist.barrier()
    dcp.save(state_of(*trained), checkpoint_id=part)
    if dist.get_rank() == 0:
        part.rename(folder / f"checkpoint-{step:06d}")
        for old in sorted(folder.glob("checkpoint-*"))[:-2]:
            shutil.rmtree(old)


def resume(folder: Path, policy: Any, optimizer: Any, schedule: Any) -> int:
    """Loads the last checkpoint, if there is one; the number of steps that are done."""
    found = sorted(folder.glob("checkpoint-*"))
    if not found:
        return 0
    state = state_of(policy, optimizer, schedule)
    dcp.load(state, checkpoint_id=found[-1])
    sharded.set_state_dict(
        policy, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    schedule.load_state_dict(state["schedule"])
    return int(found[-1].name.removeprefix("checkpoint-"))


# ---- training ------------------------------------------------------------------------------------


def train(options: argparse.Namespace, device: torch.device) -> None:
    """Trains from the last checkpoint on, and saves the model."""
    policy, reference = make_model(options, device), make_model(options, device)
    reference.requires_grad_(False)
    # a large epsilon for random weights: Adam would blow rounding noise up to full steps
    epsilon = 1e-4 if options.tiny else 1e-8
    optimizer = torch.optim.AdamW(policy.parameters(), options.learning_rate, eps=epsilon)
    total = options.steps * EPOCHS
    schedule = get_cosine_schedule_with_warmup(optimizer, total // 10, total)
    options.output.mkdir(parents=True, exist_ok=True)
    done = resume(options.output, policy, optimizer, schedule)
    log = print if dist.get_rank() == 0 else lambda *line, **how: None
    sizes = [(p.to_local().numel(), p.numel()) for p in policy.parameters()]
    own, whole = (sum(column) for column in zip(*sizes, strict=True))
    held = f"rank 0 holds {own:,} of {whole:,} parameters"
    ranks = f"{dist.get_world_size()} ranks, {device.type}"
    log(f"{type(policy).__name__} on {ranks}; {held}; {done} steps are done", flush=True)
    for step in range(done, options.steps):
        steps, facts = plan_steps(next_rollouts(step, options), options, device)
        facts |= train_on(steps, policy, reference, optimizer, schedule, options)
        line = "  ".join(f"{name} {value:.5g}" for name, value in facts.items())
        log(f"step {step + 1}  {line}", flush=True)
        if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            save(options.output, step + 1, policy, optimizer, schedule)
    whole_state = sharded.StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = sharded.get_model_state_dict(policy, options=whole_state)
    if dist.get_rank() == 0:
        # this names tied weights once
        state = {name: state[name] for name, _ in policy.named_parameters()}
        policy.save_pretrained(options.output / "model", state_dict=state)
    # a rank that left while another still writes can bring gloo's threads down with it
    dist.barrier()


def main(arguments: list[str] | None = None) -> None:
    """Joins the launcher's ranks, or is the only one without a launcher, and trains."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="name, path, or config.json")
    parser.add_argument("--rollouts", type=Path, help="JSON lines; default: made up")
    parser.add_argument("--output", type=Path, default=Path("fsdp2-grpo"))
    parser.add_argument("--replicated", action="store_true", help="compute every rollout in full")
    parser.add_argument("--tiny", action="store_true", help="random weights; seconds on a CPU")
    parser.add_argument("--steps", type=int, default=100, help="batches of rollouts")
    parser.add_argument("--tasks", type=int, default=8, help="groups of rollouts per step")
    parser.add_argument("--max-tokens", type=int, default=16384, help="distinct, per micro-batch")
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    if parser.parse_known_args(arguments)[0].tiny:
        parser.set_defaults(model=TINY_MODEL, **TINY)
    options = parser.parse_args(arguments)
    if options.rollouts is not None:
        # before a model is loaded
        read_rollouts(options.rollouts)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **alone)
    try:
        train(options, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
