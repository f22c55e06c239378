"""GRPO in plain torch and transformers on multi-turn rollouts that fork, each distinct token once.

A tiny Qwen3 with random weights learns to fetch parcels (`prefixtree.demo.depot`, the game of
`prefixtree demo`). Rollouts fork at their turns, so the rollouts of a task form a tree. Old and
reference log-probabilities and every inner epoch are computed on packed forests.

`--replicated` scores every rollout in full instead. The training is the same, but slower. (The
differences by rounding grow with the updates. After some 60 iterations they change a drawn word.)

    python examples/grpo.py                              # about a minute on a CPU
    python examples/grpo.py --dr-grpo --branches 16,1,1,1,1
    python examples/grpo.py --plot docs/images/grpo.png  # both ways, in one picture; needs [plot]
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
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3Config

from prefixtree import MicroBatch, plan_micro_batches
from prefixtree.demo import depot
from prefixtree.integrations.transformers import sequence_logprobs

TURN_WORDS = 3


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
    """An episode so far.

    Attributes:
        state: of the depot.
        tokens: of the whole episode.
        mask: 1 for each token of the agent, 0 for all others.
        unread: the number of last tokens, a prompt or a reply, that the model has not read yet.
    """

    state: depot.Depot
    tokens: list[int]
    mask: list[int]
    unread: int

    def play(self, words: list[int]) -> Rollout:
        """The episode after one more turn and the reply to it."""
        state, reply = self.state.call(depot.decode(words))
        # an <end> that the agent left out is not its word
        heard = [depot.END_TOKEN] * (words[-1] != depot.END_TOKEN) + depot.encode(reply)
        mask = self.mask + [1] * len(words) + [0] * len(heard)
        return Rollout(state, self.tokens + words + heard, mask, len(heard))


@torch.no_grad()
def roll_out(model: Any, branches: Sequence[int]) -> list[Rollout]:
    """Plays every task to its end, on one growing key-value cache whose rows fork too."""
    rollouts = []
    for task in range(depot.TASKS):
        prompt = depot.encode(depot.Depot(task).prompt)
        rollouts.append(Rollout(depot.Depot(task), prompt, [0] * len(prompt), len(prompt)))
    cache = DynamicCache(config=model.config)
    real = torch.empty(len(rollouts), 0, dtype=torch.long)  # 0 where the cache holds padding

    def feed(new: list[list[int]]) -> torch.Tensor:
        """Feeds each row its new tokens, perhaps none; the distributions of the next tokens."""
        nonlocal real
        longest = max(map(len, new))
        ids = torch.tensor([[depot.PAD_TOKEN] * (longest - len(row)) + row for row in new])
        real = torch.cat(
            [real, torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in new])], 1
        )
        positions = (real.cumsum(1) - 1).clamp(min=0)[:, -longest:]
        out = model(ids, attention_mask=real, position_ids=positions, past_key_values=cache)
        return out.logits[:, -1].float().softmax(-1)

    for count in branches:
        probs = feed([r.tokens[-r.unread :] for r in rollouts]).repeat_interleave(count, 0)
        cache.batch_repeat_interleave(count)
        real = real.repeat_interleave(count, 0)
        turns: list[list[int]] = [[] for _ in probs]
        for _ in range(TURN_WORDS):
            speaks = [not turn or turn[-1] != depot.END_TOKEN for turn in turns]
            if not any(speaks):
                break
            drawn = probs.multinomial(1).tolist()
            new = [word if go else [] for word, go in zip(drawn, speaks, strict=True)]
            turns = [turn + word for turn, word in zip(turns, new, strict=True)]
            probs = feed(new)
        before = [r for r in rollouts for _ in range(count)]
        rollouts = [r.play(turn) for r, turn in zip(before, turns, strict=True)]
    return rollouts


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
        return sequence_logprobs(model, batch.packed, loss_mask=batch.take(masks)).logprobs
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
    # nothing is scored after the last turn
    sequences = [torch.tensor(r.tokens[: -r.unread]) for r in rollouts]
    masks = [torch.tensor(r.mask[: -r.unread]) for r in rollouts]
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
    """A Qwen3 with random weights, without dropout: old and new log-probabilities must agree."""
    config = Qwen3Config(
        vocab_size=len(depot.WORDS),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.1,
        pad_token_id=depot.PAD_TOKEN,
    )
    torch.manual_seed(settings.seed)
    attention = "sdpa" if settings.replicated else "prefixtree"
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def train(policy: Any, settings: Settings) -> Iterator[dict[str, Any]]:
    """Trains the policy, and yields the facts of each iteration after it."""
    reference = copy.deepcopy(policy)
    # a large epsilon: Adam would blow rounding noise in a gradient near zero up to a full step
    optimizer = torch.optim.Adam(policy.parameters(), settings.learning_rate, eps=1e-4)
    for iteration in range(settings.iterations):
        torch.manual_seed(1000 * settings.seed + iteration)
        rollouts = roll_out(policy, settings.branches)
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
