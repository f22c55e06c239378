"""GRPO on live rollouts that branch, every update replicated and packed: `prefixtree demo`.

A tiny Qwen3 with random weights acts in `demo.depot`. Every turn is continued several times, which
makes one tree per task. A turn's reward is the mean over the rollouts that go on from it. Two
copies of the model take the same updates, one on every sequence alone, one on the packed forest.
Then the packed copy goes on without the other, to see what it learns."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prefixtree.demo import depot
from prefixtree.forest import PrefixForest
from prefixtree.packing.layout import PackedForest, pack
from prefixtree.progress import Status, Watch, unannounced, unwatched
from prefixtree.sharing.measure import measure
from prefixtree.testing.compare import Meter, gradient_differences

# continuations of each turn: 3 x 2 x 2 rollouts per task
BRANCHING = (3, 2, 2, 1, 1)
# batches that both copies train on, and further ones of the packed copy; of its last one only the
# rollouts are taken
BATCHES, ALONE, EPOCHS = 3, 3, 2
_TURN_WORDS = 6
# of the rollouts' keys and values
_MAX_KEYS = 20_000
_CLIP = 0.2
_LEARNING_RATE = 1e-2
_LIMIT = 1e-4


@dataclass
class Turn:
    """One turn of the agent, and the turns that go on from it.

    Attributes:
        tokens: the history and the turn itself.
        begin: where the turn begins in them.
        end: where the words that the agent chose end; after them an <end> it left out.
        state: the depot after the turn.
        children: the next turns.
    """

    tokens: list[int]
    begin: int
    end: int
    state: depot.Depot
    children: list[Turn] = field(default_factory=list)

    @property
    def words(self) -> str:
        """The words that the agent chose."""
        chosen = depot.decode(self.tokens[self.begin : self.end])
        return chosen.replace(depot.END, "").strip() or "(nothing)"

    @property
    def rewards(self) -> list[float]:
        """The rewards of all rollouts that go through this turn."""
        below = [reward for child in self.children for reward in child.rewards]
        return below or [self.state.reward]


@dataclass
class Batch:
    """The training sequences of one batch of trees: one per turn, which scores that turn.

    Attributes:
        sequences: int64 token ids. loss_masks: bool, one per token.
        advantages: one per sequence, normalised within its task as in GRPO.
        old_logprobs: float32 [n - 1] per sequence, from before the first update; None until then.
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


def train(
    seed: int,
    *,
    draw: Callable[[PackedForest], list[Path]] | None = None,
    watch: Watch = unwatched,
    status: Status = unannounced,
) -> tuple[dict[str, Any], list[list[Turn]]]:
    """Runs `BATCHES` x `EPOCHS` updates both ways, then `ALONE` batches packed.

    Args:
        seed: of the weights and the rollouts.
        draw: called with the first batch's packed forest; returns the files it wrote.
        watch, status: show progress.

    Returns:
        The facts, ready for JSON, and the first trees.
    """
    replicated = depot.player(seed)
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
    played: list[list[list[Turn]]] = []
    with status("compiling, once"):
        _warm_up(replicated, packed)
    for number in watch(range(BATCHES * EPOCHS), "rollouts and updates", BATCHES * EPOCHS):
        if number % EPOCHS == 0:
            trees, rollout_seconds = _timed(partial(roll_out, packed, seed + number))
            played.append(trees)
            batch = Batch.of(trees)
            forest = pack(PrefixForest.from_sequences(batch.sequences))
            if first_forest is None:
                first_trees, first_forest = trees, forest.forest
                drawn = [] if draw is None else draw(forest)
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
    difference = _worst_weight(replicated, packed)
    alone_seconds = 0.0
    if passed:
        more, alone_seconds = _timed(
            lambda: _go_on(packed, optimizers[1], seed + BATCHES * EPOCHS, watch)
        )
        played += more
    return {
        "passed": passed,
        "seed": seed,
        "parameters": sum(p.numel() for p in packed.parameters()),
        "tasks": depot.TASKS,
        "rollouts": depot.TASKS * math.prod(BRANCHING),
        "scored_tokens": batch.scored,
        "forest": measure(first_forest),
        "updates": updates,
        "weights_difference": difference,
        "limit": _LIMIT,
        "pictures": [str(file) for file in drawn],
        "seconds": seconds,
        "learnt": {**what_was_learnt(played), "seconds_alone": alone_seconds},
        # a speed-up of a wrong result is none
        "speedup": seconds["replicated"] / seconds["packed"] if passed else None,
    }, first_trees


# ---- rollouts ------------------------------------------------------------------------------------


def roll_out(model: Any, seed: int) -> list[list[Turn]]:
    """Plays every task with `BRANCHING` continuations per turn.

    Returns the first turns, one list per task.
    """
    from prefixtree.sampling import Draws, TreeSampler

    states = [depot.Depot(task) for task in range(depot.TASKS)]
    trees: list[list[Turn]] = [[] for _ in states]
    # what is to be continued: the tokens so far, the depot, and where its turns are kept
    open_: list[tuple[list[int], depot.Depot, list[Turn]]] = [
        (depot.encode(state.prompt), state, trees[state.task]) for state in states
    ]
    rows = TreeSampler(model, _MAX_KEYS).start(
        PrefixForest.from_sequences([tokens for tokens, _, _ in open_])
    )
    for continuations in BRANCHING:
        rows.branch(continuations)
        rows.generate(_TURN_WORDS, Draws(seed=seed), stop=[depot.END_TOKEN])
        following, heard = [], {}
        for row, (tokens, state, turns) in enumerate(
            o for o in open_ for _ in range(continuations)
        ):
            words = rows.new_tokens(row)
            after, reply = state.call(depot.decode(words))
            whole = tokens + words + [depot.END_TOKEN] * (words[-1] != depot.END_TOKEN)
            turn = Turn(whole, len(tokens), len(tokens) + len(words), after)
            turns.append(turn)
            following.append((whole + depot.encode(reply), after, turn.children))
            heard[row] = following[-1][0][turn.end :]
        rows.append(heard)
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


def _walk(turns: list[Turn]) -> list[Turn]:
    return [node for turn in turns for node in (turn, *_walk(turn.children))]


# ---- what was learnt -----------------------------------------------------------------------------


def _go_on(
    packed: Any, optimizer: torch.optim.Optimizer, seed: int, watch: Watch
) -> list[list[list[Turn]]]:
    """Trains the packed copy alone on `ALONE` batches, of which the last is only played."""
    played: list[list[list[Turn]]] = []
    for number in watch(range(ALONE), "the packed model alone", ALONE):
        trees = roll_out(packed, seed + number)
        played.append(trees)
        if number == ALONE - 1:
            break
        batch = Batch.of(trees)
        forest = pack(PrefixForest.from_sequences(batch.sequences))
        for _ in range(EPOCHS):
            packed_update(packed, batch, forest)
            optimizer.step()
    return played


def what_was_learnt(played: list[list[list[Turn]]]) -> dict[str, Any]:
    """Mean rewards, the share of turns that called a tool and parcels taken, one per batch; a
    rollout in words."""
    paths = [[path for turns in trees for path in _paths(turns)] for trees in played]
    rewards = [[path[-1].state.reward for path in batch] for batch in paths]
    called = [sum(path[-1].state.calls for path in batch) / sum(map(len, batch)) for batch in paths]
    taken = [sum(path[-1].state.taken for path in batch) for batch in paths]
    # the last batch with a parcel, or else the last
    batch = max((n for n, count in enumerate(taken) if count), default=len(played) - 1)
    # of equal rewards the one that takes its parcel soonest
    best = max(paths[batch], key=lambda path: (path[-1].state.reward, -len(_until_taken(path))))
    shown = _until_taken(best)
    return {
        "mean_rewards": [float(np.mean(batch)) for batch in rewards],
        "tool_calls": called,
        "parcels_taken": taken,
        "rollouts_per_batch": len(paths[0]),
        "best": {
            "batch": batch + 1,
            "task": best[-1].state.task + 1,
            "reward": best[-1].state.reward,
            "taken": best[-1].state.taken,
            "customer": depot.OPENINGS[best[-1].state.task],
            "turns": [
                {"agent": turn.words, "depot": _reply(turn, above)}
                for above, turn in zip([None, *shown], shown, strict=False)
            ],
        },
    }


def _paths(turns: list[Turn]) -> list[list[Turn]]:
    """The rollouts below some turns: the turns of each, first to last."""
    return [[turn, *rest] for turn in turns for rest in (_paths(turn.children) or [[]])]


def _until_taken(path: list[Turn]) -> list[Turn]:
    taken = next((n for n, turn in enumerate(path, 1) if turn.state.taken), len(path))
    return path[:taken]


def _reply(turn: Turn, above: Turn | None) -> str:
    """The depot's answer to a turn; `above` is the turn before, None for the first."""
    before = depot.Depot(turn.state.task) if above is None else above.state
    _, reply = before.call(depot.decode(turn.tokens[turn.begin : turn.end]))
    return reply.replace(depot.END, "").strip()


# ---- one update, both ways -----------------------------------------------------------------------


def _update(replicated: Any, packed: Any, batch: Batch, forest: PackedForest) -> dict[str, Any]:
    """Loss and gradients on both models, and how far apart they are."""
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
    old_logprobs = batch.old_logprobs
    with Meter(device) as at_once:
        at_once_loss, scored = packed_update(packed, batch, forest)
    worst = max(
        float(((a - b).abs() * torch.from_numpy(mask[1:])).max())
        for a, b, mask in zip(kept, scored, batch.loss_masks, strict=True)
    )
    of_packed, of_replicated = _gradients(packed), _gradients(replicated)
    gradients = gradient_differences(of_packed, of_replicated)
    # both copies are held to the same old policy
    batch.old_logprobs = old_logprobs or kept
    meters = {"replicated": one_by_one, "packed": at_once}
    return {
        "loss": {"replicated": total, "packed": at_once_loss},
        "gradient_norm": {"replicated": _norm(of_replicated), "packed": _norm(of_packed)},
        "differences": {
            "loss": abs(total - at_once_loss),
            "logprobs": worst,
            "gradients": max(gradients.values()),
        },
        "seconds": {name: meter.seconds for name, meter in meters.items()},
        "peak_bytes": {name: meter.peak_bytes for name, meter in meters.items()},
    }


def packed_update(
    packed: Any, batch: Batch, forest: PackedForest
) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of the packed batch; the loss and the log-probabilities, detached.

    The first call of a batch makes its log-probabilities the old policy's.
    """
    from prefixtree.scoring.logprobs import sequence_logprobs

    packed.zero_grad()
    scores = sequence_logprobs(packed, forest, loss_mask=batch.loss_masks)
    losses = [batch.loss(i, logprobs) for i, logprobs in enumerate(scores.logprobs)]
    loss = torch.stack(losses).sum()
    loss.backward()
    scored = [logprobs.detach() for logprobs in scores.logprobs]
    batch.old_logprobs = batch.old_logprobs or scored
    return float(loss.detach()), scored


def _norm(gradients: dict[str, torch.Tensor | None]) -> float:
    return math.sqrt(
        sum(float(g.double().square().sum()) for g in gradients.values() if g is not None)
    )


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


def _timed(run: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    result = run()
    return result, time.perf_counter() - start
