"""`prefixtree demo`: GRPO on live rollouts that branch, every update replicated and packed.

A tiny Qwen3 with random weights acts in `cli.depot`. Every turn is continued several times, which
makes a tree a task; a turn's reward is the mean over the rollouts that go on from it. Two copies of
the model take the same updates, one on every sequence alone, one on the packed forest.
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from prefixtree import PackedForest, PrefixForest, pack
from prefixtree.cli import depot
from prefixtree.cli.compare import Meter, gradient_differences
from prefixtree.cli.console import status, steps
from prefixtree.cli.report import measure
from prefixtree.cli.rollouts import InputError

# continuations of each turn: 3 x 2 x 2 rollouts a task
BRANCHING = (3, 2, 2, 1, 1)
BATCHES, EPOCHS = 4, 2
_TURN_WORDS = 6
_CLIP = 0.2
_LEARNING_RATE = 1e-2
_LIMIT = 1e-4


@dataclass
class Turn:
    """One turn of the agent, and the turns that go on from it.

    Attributes:
        tokens: the history and the turn itself.
        begin: where the turn begins in them.
        end: where the words that the agent chose end; behind them an <end> it left out.
        state: the depot after the turn.
        children: the next turns.
    """

    tokens: list[int]
    begin: int
    end: int
    state: depot.Depot
    children: list[Turn] = field(default_factory=list)

    @property
    def rewards(self) -> list[float]:
        """Of all rollouts that go through this turn."""
        below = [reward for child in self.children for reward in child.rewards]
        return below or [self.state.reward]


@dataclass
class Batch:
    """The training sequences of one batch of trees: one per turn, scored on the turn's own words.

    Attributes:
        sequences: int64 token ids. loss_masks: bool, one per token.
        advantages: one a sequence, normalised within its task, GRPO's way.
        old_logprobs: float32 [n - 1] a sequence, from the update before the first; None until then.
    """

    sequences: list[np.ndarray]
    loss_masks: list[np.ndarray]
    advantages: list[float]
    mean_reward: float
    old_logprobs: list[torch.Tensor] | None = None

    @classmethod
    def of(cls, roots: list[list[Turn]]) -> Batch:
        sequences, masks, advantages, rewards = [], [], [], []
        for task in roots:
            leaves = [reward for turn in task for reward in turn.rewards]
            rewards += leaves
            for turn in _walk(task):
                place = np.arange(len(turn.tokens))
                sequences.append(np.array(turn.tokens))
                masks.append((place >= turn.begin) & (place < turn.end))
                gain = float(np.mean(turn.rewards) - np.mean(leaves))
                advantages.append(gain / (float(np.std(leaves)) + 1e-6))
        return cls(sequences, masks, advantages, float(np.mean(rewards)))

    def loss(self, index: int, logprobs: torch.Tensor) -> torch.Tensor:
        """GRPO's clipped loss of one sequence (arXiv 2402.03300), its share of the token mean."""
        mask = torch.from_numpy(self.loss_masks[index][1:])
        old = logprobs.detach() if self.old_logprobs is None else self.old_logprobs[index]
        ratio = torch.exp(logprobs - old)
        clipped = ratio.clamp(1 - _CLIP, 1 + _CLIP)
        gain = torch.minimum(ratio * self.advantages[index], clipped * self.advantages[index])
        return -(gain * mask).sum() / self.scored

    @cached_property
    def scored(self) -> int:
        """Scored tokens of all sequences."""
        return sum(int(mask[1:].sum()) for mask in self.loss_masks)


def train(seed: int, pictures: Path | None = None) -> tuple[dict[str, Any], list[list[Turn]]]:
    """Runs `BATCHES` x `EPOCHS` updates; the facts, ready for JSON, and the first trees."""
    replicated = _model(seed)
    packed = copy.deepcopy(replicated)
    packed.set_attn_implementation("prefixtree")
    optimizers = [
        # a large epsilon: Adam would blow rounding noise in a gradient near zero up to a full step
        torch.optim.Adam(model.parameters(), _LEARNING_RATE, eps=1e-3)
        for model in (replicated, packed)
    ]
    updates: list[dict[str, Any]] = []
    drawn: list[Path] = []
    first_forest: PrefixForest | None = None
    first_trees: list[list[Turn]] = []
    with status("compiling, once"):
        _warm_up(replicated, packed)
    for number in steps(range(BATCHES * EPOCHS), "rollouts and updates", BATCHES * EPOCHS):
        if number % EPOCHS == 0:
            torch.manual_seed(seed + number)
            trees, rollout_seconds = _timed(lambda: roll_out(replicated))
            batch = Batch.of(trees)
            forest = pack(PrefixForest.from_sequences(batch.sequences))
            if first_forest is None:
                first_trees, first_forest = trees, forest.forest
                drawn = [] if pictures is None else _draw(pictures, forest)
        else:
            rollout_seconds = 0.0
        facts = _update(replicated, packed, batch, forest)
        for optimizer in optimizers:
            optimizer.step()
        updates.append(
            {**facts, "mean_reward": batch.mean_reward, "rollout_seconds": rollout_seconds}
        )
    assert first_forest is not None
    passed = all(
        math.isfinite(d) and d <= _LIMIT for u in updates for d in u["differences"].values()
    )
    seconds = {s: sum(u["seconds"][s] for u in updates) for s in ("replicated", "packed")}
    return {
        "passed": passed,
        "seed": seed,
        "parameters": sum(p.numel() for p in packed.parameters()),
        "tasks": depot.TASKS,
        "rollouts": depot.TASKS * math.prod(BRANCHING),
        "scored_tokens": batch.scored,
        "forest": measure(first_forest),
        "updates": updates,
        "weights_difference": _worst_weight(replicated, packed),
        "limit": _LIMIT,
        "pictures": [str(file) for file in drawn],
        "seconds": seconds,
        # a speed-up of a wrong result is none
        "speedup": seconds["replicated"] / seconds["packed"] if passed else None,
    }, first_trees


# ---- rollouts ------------------------------------------------------------------------------------


def roll_out(model: Any) -> list[list[Turn]]:
    """Plays every task with `BRANCHING` continuations a turn; the first turns, a list a task."""
    states = [depot.Depot(task) for task in range(depot.TASKS)]
    trees: list[list[Turn]] = [[] for _ in states]
    # what is to be continued: the tokens so far, the depot, and where its turns are kept
    open_: list[tuple[list[int], depot.Depot, list[Turn]]] = [
        (depot.encode(state.prompt), state, trees[state.task]) for state in states
    ]
    for continuations in BRANCHING:
        following = []
        answers = _generate(model, [tokens for tokens, _, _ in open_], continuations)
        for (tokens, state, turns), spoken in zip(open_, answers, strict=True):
            for words in spoken:
                ended = words[-1] == depot.END_TOKEN
                after, reply = state.call(depot.decode(words))
                whole = tokens + words + [depot.END_TOKEN] * (not ended)
                turn = Turn(whole, len(tokens), len(tokens) + len(words), after)
                turns.append(turn)
                following.append((whole + depot.encode(reply), after, turn.children))
        open_ = following
    return trees


def rollout_rows(trees: list[list[Turn]]) -> list[dict[str, Any]]:
    """The rollouts as lines of a rollout file: every path from a task to a last turn."""
    rows: list[dict[str, Any]] = []

    def follow(task: int, turns: list[Turn], above: list[Turn]) -> None:
        for turn in turns:
            path = [*above, turn]
            if turn.children:
                follow(task, turn.children, path)
                continue
            mask = np.zeros(len(turn.tokens), int)
            for part in path:
                mask[part.begin : part.end] = 1
            rows.append(
                {
                    "id": f"rollout {len(rows)}",
                    "group": f"task {task + 1}",
                    "reward": turn.state.reward,
                    "token_ids": turn.tokens,
                    "loss_mask": mask.tolist(),
                    "turn_ends": [len(part.tokens) for part in path],
                }
            )

    for task, turns in enumerate(trees):
        follow(task, turns, [])
    return rows


def _generate(model: Any, prompts: list[list[int]], continuations: int) -> list[list[list[int]]]:
    """Sampled words after each prompt, up to its <end>."""
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), depot.PAD_TOKEN)
    for row, prompt in zip(ids, prompts, strict=True):
        row[longest - len(prompt) :] = torch.tensor(prompt)
    with torch.no_grad():
        out = model.generate(
            input_ids=ids,
            attention_mask=(ids != depot.PAD_TOKEN).long(),
            num_return_sequences=continuations,
            max_new_tokens=_TURN_WORDS,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=depot.END_TOKEN,
            pad_token_id=depot.PAD_TOKEN,
        )
    turns = [_until_end(row) for row in out[:, longest:].tolist()]
    return [turns[i : i + continuations] for i in range(0, len(turns), continuations)]


def _until_end(words: list[int]) -> list[int]:
    if depot.END_TOKEN in words:
        return words[: words.index(depot.END_TOKEN) + 1]
    return words


def _walk(turns: list[Turn]) -> list[Turn]:
    return [node for turn in turns for node in (turn, *_walk(turn.children))]


# ---- one update, both ways -----------------------------------------------------------------------


def _update(replicated: Any, packed: Any, batch: Batch, forest: PackedForest) -> dict[str, Any]:
    """Loss and gradients on both models, and how far apart they are."""
    from prefixtree.integrations.transformers import sequence_logprobs

    device = torch.device("cpu")
    replicated.zero_grad()
    total, kept = 0.0, []
    with Meter(device) as one_by_one:
        for i, tokens in enumerate(batch.sequences):
            ids = torch.from_numpy(tokens)
            logits = replicated(input_ids=ids[None], use_cache=False).logits[0, :-1]
            logprobs = logits.float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            loss = batch.loss(i, logprobs)
            loss.backward()
            total += float(loss.detach())
            kept.append(logprobs.detach())
    packed.zero_grad()
    with Meter(device) as at_once:
        scores = sequence_logprobs(packed, forest, loss_mask=batch.loss_masks)
        losses = [batch.loss(i, logprobs) for i, logprobs in enumerate(scores.logprobs)]
        loss = torch.stack(losses).sum()
        loss.backward()
    worst = max(
        float(((a - b.detach()).abs() * torch.from_numpy(mask[1:])).max())
        for a, b, mask in zip(kept, scores.logprobs, batch.loss_masks, strict=True)
    )
    gradients = gradient_differences(_gradients(packed), _gradients(replicated))
    batch.old_logprobs = batch.old_logprobs or kept
    meters = {"replicated": one_by_one, "packed": at_once}
    return {
        "loss": {"replicated": total, "packed": float(loss.detach())},
        "differences": {
            "loss": abs(total - float(loss.detach())),
            "logprobs": worst,
            "gradients": max(gradients.values()),
        },
        "seconds": {name: meter.seconds for name, meter in meters.items()},
        "peak_bytes": {name: meter.peak_bytes for name, meter in meters.items()},
    }


def _gradients(model: Any) -> dict[str, torch.Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


def _worst_weight(replicated: Any, packed: Any) -> float:
    pairs = zip(replicated.parameters(), packed.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def _warm_up(replicated: Any, packed: Any) -> None:
    """A tiny update that changes nothing: what is compiled or loaded once is not timed."""
    tokens = np.array(depot.encode(depot.Depot(0).prompt)[:16])
    pair = [tokens, np.append(tokens[:8], tokens[:3])]
    batch = Batch(pair, [np.ones(len(s), bool) for s in pair], [1.0, -1.0], 0.0)
    _update(replicated, packed, batch, pack(PrefixForest.from_sequences(pair)))


def _model(seed: int) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3Config

    import prefixtree.integrations.transformers  # noqa: F401  registers "prefixtree"

    config = Qwen3Config(
        vocab_size=len(depot.WORDS),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        # lively enough that a wrong mask would show in every figure
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=depot.END_TOKEN,
        pad_token_id=depot.PAD_TOKEN,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def _timed(run: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    result = run()
    return result, time.perf_counter() - start


# ---- what is shown -------------------------------------------------------------------------------


def _draw(folder: Path, packed: PackedForest) -> list[Path]:
    """Draws the forest and its block mask; the files."""
    from prefixtree import TileShape
    from prefixtree.cli.pictures import save
    from prefixtree.view import plot_forest, plot_mask

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise InputError(f"{folder}: cannot be written: {problem.strerror}") from None
    return save(
        {
            folder / "forest.png": plot_forest(packed.forest),
            folder / "mask.png": plot_mask(packed.mask, TileShape(64, 64)),
        }
    )


def picture(turns: list[Turn]) -> Tree:
    """One task's turns as a tree: what was said, and the mean reward of what came of it."""
    prompt = turns[0].tokens[: turns[0].begin]
    top = Tree(f"[bold]task 1[/] [dim]{len(prompt)} words: … {depot.decode(prompt[-12:])}[/]")
    _grow(top, turns)
    return top


def _grow(above: Tree, turns: list[Turn]) -> None:
    for turn in turns:
        reward = float(np.mean(turn.rewards))
        colour = "bold green" if reward > 0.5 else "yellow" if reward > 0.25 else "red"
        words = depot.decode(turn.tokens[turn.begin : turn.end]).replace(depot.END, "").strip()
        label = Text.assemble(
            (f"{reward:.2f}  ", colour), words or "(nothing)", no_wrap=True, overflow="ellipsis"
        )
        _grow(above.add(label), turn.children)


def show(facts: dict[str, Any], tree: list[Turn], console: Console) -> None:
    """Prints the first task's tree and every update, both ways."""
    forest = facts["forest"]
    tokens = forest["tokens"]
    console.print(
        f"A parcel depot with tools: {facts['tasks']} tasks, a turn continued "
        f"{' x '.join(str(b) for b in BRANCHING)} times, {facts['rollouts']} rollouts. One "
        f"training sequence per turn makes {forest['sequences']} sequences of "
        f"{tokens['replicated']:,} tokens; only {tokens['distinct']:,} of them are distinct "
        f"([bold]{tokens['ratio']:.1f}x[/]).\n"
    )
    console.print(picture(tree))
    table = Table(
        "update",
        "reward",
        "loss, replicated",
        "loss, packed",
        "gradients differ",
        "seconds",
        "packed",
        title=f"\nGRPO on a Qwen3 of {facts['parameters']:,} random weights, float32, this CPU",
        title_justify="left",
    )
    for column in table.columns:
        column.justify = "right"
    for number, update in enumerate(facts["updates"], 1):
        gap = update["differences"]["gradients"]
        table.add_row(
            str(number),
            f"{update['mean_reward']:.3f}",
            *(f"{update['loss'][side]:+.7f}" for side in ("replicated", "packed")),
            f"{gap:.1e}" if math.isfinite(gap) else "not finite",
            *(f"{update['seconds'][side]:.2f}" for side in ("replicated", "packed")),
            end_section=number % EPOCHS == 0,
        )
    console.print(table)
    peaks = [
        max(update["peak_bytes"][side] or 0 for update in facts["updates"]) / 2**20
        for side in ("replicated", "packed")
    ]
    console.print(
        f"Tokens an update: {tokens['replicated']:,} → {tokens['distinct']:,}. Peak memory: "
        f"{peaks[0]:,.0f} MiB one sequence at a time, {peaks[1]:,.0f} MiB all at once. After "
        f"{len(facts['updates'])} updates the two models' weights differ by "
        f"{facts['weights_difference']:.1e}."
    )
    if facts["pictures"]:
        console.print(f"Pictures of the first forest: {', '.join(facts['pictures'])}.")
    console.print(
        f"[bold green]The same training, {facts['speedup']:.1f}x faster[/] "
        f"({facts['seconds']['replicated']:.1f} s → {facts['seconds']['packed']:.1f} s)."
        if facts["passed"]
        else f"[bold red]The updates differ[/] by more than {facts['limit']:g}."
    )
