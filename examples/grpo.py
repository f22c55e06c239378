"""GRPO in plain torch and transformers on multi-turn rollouts that fork, each distinct token once.

A tiny Qwen3 with random weights learns to fetch parcels (`prefixtree.demo.depot`, the game of
`prefixtree demo`). Rollouts fork at their turns, so the rollouts of a task form a tree, which also
samples as one. Old and reference log-probabilities and every inner epoch are computed on packed
forests.

`--replicated` scores every rollout in full instead. The training is the same, but slower. (The
differences by rounding grow with the updates. After some 50 iterations they change a drawn word.)

    python examples/grpo.py                              # about a minute on a CPU
    python examples/grpo.py --dr-grpo --branches 16,1,1,1,1
    python examples/grpo.py --plot docs/images/grpo.png  # both ways, in one image; needs [plot]
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from torch.nn.utils.rnn import pad_sequence

from prefixtree import MicroBatch, PrefixForest, plan_micro_batches, sequence_logprobs
from prefixtree.demo import depot
from prefixtree.sampling import Draws, TreeSampler

TURN_WORDS = 3
# the most tokens of all rollouts whose keys are held
MAX_KEYS = 50_000


@dataclass(frozen=True)
class Settings:
    """Everything that a training run depends on."""

    iterations: int = 60
    # continuations of each turn. (16, 1, 1, 1, 1) forks at the prompts alone: one prompt with N
    # responses, DualKV's case, is a forest like any other (also `PrefixForest.from_groups`)
    branches: tuple[int, ...] = (4, 2, 2, 1, 1)
    # divide neither by a group's deviation nor by a rollout's length (arXiv 2503.20783)
    dr_grpo: bool = False
    epochs: int = 2  # updates on the same rollouts
    clip: float = 0.2
    kl: float = 0.01
    learning_rate: float = 3e-3
    max_tokens: int = 4096  # distinct tokens per micro-batch
    seed: int = 0
    replicated: bool = False


# ---- rollouts ------------------------------------------------------------------------------------


@dataclass
class Rollout:
    """An episode, up to the agent's last word.

    Attributes:
        state: of the depot at the end.
        tokens: of the whole episode.
        mask: true for each token of the agent.
        logprobs: of tokens 1 to n - 1, as they were drawn; 0 for those that others said.
    """

    state: depot.Depot
    tokens: np.ndarray
    mask: np.ndarray
    logprobs: torch.Tensor


def roll_out(model: Any, branches: Sequence[int], draws: Draws) -> list[Rollout]:
    """Plays every task to its end; rollouts that fork share the keys of all that stands before."""
    states = [depot.Depot(task) for task in range(depot.TASKS)]
    prompts = PrefixForest.from_sequences([depot.encode(state.prompt) for state in states])
    rows = TreeSampler(model, max_keys=MAX_KEYS).start(prompts)
    for turn, count in enumerate(branches):
        rows.branch(count)
        rows.generate(TURN_WORDS, draws, stop=[depot.END_TOKEN])
        said = [rows.new_tokens(row) for row in range(len(rows))]
        before = [state for state in states for _ in range(count)]
        calls = [s.call(depot.decode(words)) for s, words in zip(before, said, strict=True)]
        states = [state for state, _ in calls]
        if turn + 1 < len(branches):
            for row, (words, (_, reply)) in enumerate(zip(said, calls, strict=True)):
                # an <end> that the agent left out is not its word
                missing = [depot.END_TOKEN] * (words[-1] != depot.END_TOKEN)
                rows.append({row: missing + depot.encode(reply)})
    samples = rows.samples()
    played = states, samples.sequences, samples.loss_masks, samples.logprobs
    return [Rollout(*each) for each in zip(*played, strict=True)]


# ---- the method ----------------------------------------------------------------------------------


def group_advantages(rewards: np.ndarray, groups: np.ndarray, dr_grpo: bool) -> np.ndarray:
    """The advantage of each rollout over its group, [rollouts]."""
    advantages = np.zeros(len(rewards))
    for group in np.unique(groups):
        own = groups == group
        gain = rewards[own] - rewards[own].mean()
        advantages[own] = gain if dr_grpo else gain / (rewards[own].std() + 1e-6)
        assert own.sum() > 1 or advantages[own] == 0, "a group of one teaches nothing"
    return advantages


def token_losses(
    new: torch.Tensor,
    old: torch.Tensor,
    ref: torch.Tensor,
    mask: torch.Tensor,
    advantage: torch.Tensor,
    settings: Settings,
) -> torch.Tensor:
    """GRPO's clipped surrogate and the k3 estimate of KL(policy || reference); all [tokens]."""
    ratio = torch.exp(new - old)
    clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
    surrogate = -torch.minimum(ratio * advantage, clipped * advantage)
    k3 = torch.exp(ref - new) - (ref - new) - 1
    # the mask multiplies the loss, not the ratio: a ratio of 0 or 1 would still give a loss
    losses = (surrogate + settings.kl * k3) * mask
    assert not losses[mask == 0].any(), "a token that the agent did not say has a loss"
    return losses


def score(
    model: Any, batch: MicroBatch, sequences: list[Any], masks: list[Any], replicated: bool
) -> list[torch.Tensor]:
    """log p of tokens 1 to n - 1, [n - 1] per sequence of the micro-batch; differentiable."""
    if not replicated:
        return sequence_logprobs(model, batch, loss_mask=masks).logprobs
    alone = batch.take(sequences)
    # padding comes after the scored tokens, so that the causal mask is enough
    ids = pad_sequence(alone, batch_first=True)
    logprobs = model(ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    picked = logprobs.gather(2, ids[:, 1:, None])[..., 0]
    return [row[: len(s) - 1] for row, s in zip(picked, alone, strict=True)]


def update(
    policy: Any,
    reference: Any,
    optimizer: torch.optim.Optimizer,
    rollouts: list[Rollout],
    settings: Settings,
) -> dict[str, Any]:
    """The inner epochs on one batch of rollouts."""
    sequences = [torch.from_numpy(r.tokens) for r in rollouts]
    masks = [torch.from_numpy(r.mask).float() for r in rollouts]
    groups = np.array([r.state.task for r in rollouts])
    rewards = np.array([r.state.reward for r in rollouts])
    advantages = group_advantages(rewards, groups, settings.dr_grpo)
    plan = plan_micro_batches(sequences, settings.max_tokens, groups=groups)
    if settings.dr_grpo:
        longest = TURN_WORDS * len(settings.branches)
        weights = plan.loss_weights("constant", constant=longest)
    else:
        weights = plan.loss_weights("sequence-mean", masks)

    def score_all(model: Any) -> list[torch.Tensor]:
        scores = {}
        for batch in plan[0]:
            found = score(model, batch, sequences, masks, settings.replicated)
            scores |= zip(batch.sequence_indices.tolist(), found, strict=True)
        return [scores[i] for i in range(len(sequences))]

    with torch.no_grad():
        olds, refs = score_all(policy), score_all(reference)
    for old, mask, rollout in zip(olds, masks, rollouts, strict=True):
        gap = float(((old - rollout.logprobs) * mask[1:]).abs().max())
        assert gap < 1e-4, f"the policy is not the one that played: off by {gap:.1e}"
    # the loss needs these besides the new log-probabilities: [5, n - 1] per sequence
    given = [
        torch.stack([old, ref, mask[1:], torch.full_like(old, a), torch.full_like(old, w)])
        for old, ref, mask, a, w in zip(olds, refs, masks, advantages, weights, strict=True)
    ]
    losses = []
    for epoch in range(settings.epochs):
        optimizer.zero_grad()
        total = 0.0
        for batch in plan[0]:
            new = torch.cat(score(policy, batch, sequences, masks, settings.replicated))
            old, ref, mask, advantage, weight = torch.cat(batch.take(given), 1)
            drift = float(((new.detach() - old) * mask).abs().max())
            assert epoch or drift < 1e-4, f"the first ratios are 1, not off by {drift:.1e}"
            each = token_losses(new, old, ref, mask, advantage, settings)
            # the weights are those of the whole batch, so its loss is the sum over micro-batches
            loss = (weight * each).sum()
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    return {
        "reward": float(rewards.mean()),
        "parcels": float(np.mean([r.state.taken for r in rollouts])),
        "losses": losses,
        "tokens": (plan.stats.replicated_tokens, plan.stats.packed_tokens),
    }


# ---- training ------------------------------------------------------------------------------------


def make_model(settings: Settings) -> Any:
    """A tiny Qwen3 with random weights: no dropout, old and new log-probabilities must agree."""
    return depot.player(settings.seed, "sdpa" if settings.replicated else "prefixtree")


def train(policy: Any, settings: Settings) -> Iterator[dict[str, Any]]:
    """Trains the policy, and yields the facts of each iteration after it."""
    reference = copy.deepcopy(policy)
    # a large epsilon: Adam would blow rounding noise in a gradient near zero up to a full step
    optimizer = torch.optim.Adam(policy.parameters(), settings.learning_rate, eps=1e-4)
    for iteration in range(settings.iterations):
        # rollouts grow on the forest, whichever way they are scored
        policy.set_attn_implementation("prefixtree")
        rollouts = roll_out(policy, settings.branches, Draws(seed=1000 * settings.seed + iteration))
        policy.set_attn_implementation(reference.config._attn_implementation)
        # CPU time of this process: on a shared machine the wall clock measures other processes too
        start = time.process_time()
        facts = update(policy, reference, optimizer, rollouts, settings)
        yield {**facts, "seconds": time.process_time() - start}


def draw(curves: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Rewards over the iterations, and over the CPU seconds that the updates took."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for (name, history), width in zip(curves.items(), (1.5, 5), strict=True):
        rewards = [facts["reward"] for facts in history]
        seconds = np.cumsum([facts["seconds"] for facts in history])
        # the curves coincide, so the lower one is wider
        style = {"lw": width, "alpha": 1 / width**0.6, "zorder": -width}
        left.plot(range(1, len(rewards) + 1), rewards, label=name, **style)
        right.plot(seconds, rewards, label=f"{name}, {seconds[-1]:.0f} s")
    left.set(xlabel="iteration", ylabel="mean reward")
    right.set(xlabel="CPU seconds of updates, rollouts not counted")
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.grid(alpha=0.2)
    figure.savefig(path, dpi=150)


def main(
    iterations: int = Settings.iterations,
    branches: str = ",".join(map(str, Settings.branches)),
    dr_grpo: bool = False,
    seed: int = 0,
    replicated: bool = False,
    plot: Path | None = None,
) -> None:
    """GRPO on rollouts that fork; --plot trains both ways and draws both curves to a file."""
    counts = tuple(int(count) for count in branches.split(","))
    if min(counts) < 1 or len(counts) > depot.Depot.battery:
        raise typer.BadParameter("--branches are one to five numbers, each at least 1")
    settings = Settings(iterations, counts, dr_grpo, seed=seed)
    ways = {"packed": False, "replicated": True} if plot else {"": replicated}
    runs = [replace(settings, replicated=way) for way in ways.values()]
    curves: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    # the runs take turns, so that both meet the same load of the machine
    for step in zip(*(train(make_model(run), run) for run in runs), strict=True):
        for name, facts in zip(ways, step, strict=True):
            curves[name].append(facts)
            before, after = facts["tokens"]
            print(
                f"{len(curves[name]):3d}  reward {facts['reward']:.3f}  "
                f"parcels {facts['parcels']:4.0%}  "
                f"losses {'  '.join(f'{loss:+.5f}' for loss in facts['losses'])}  "
                f"{facts['seconds']:5.2f} s  {before:,} tokens, {after:,} distinct  {name}"
            )
    if plot:
        draw(curves, plot)


if __name__ == "__main__":
    typer.run(main)
