"""GRPO of a pretrained chat model on sums, in minutes on a CPU: `prefixtree demo --real`.

A few of its chats are run packed and one by one. Then it trains on packed forests alone. Questions
that it never trains on tell before and after what it learnt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prefixtree.demo.tasks import Dialogue, Question, Sums, Task, questions
from prefixtree.demo.training import Batch, packed_update
from prefixtree.forest import PrefixForest
from prefixtree.packing.layout import PackedForest, pack
from prefixtree.progress import Status, unannounced
from prefixtree.sampling import Draws, TreeSampler
from prefixtree.sharing.measure import measure
from prefixtree.testing.compare import (
    Objective,
    Run,
    gradient_differences,
    run_packed,
    run_replicated,
    scored_tokens,
    worst_difference,
)
from prefixtree.testing.judge import FLOAT32
from prefixtree.testing.models import Setting, build

TASK: Task = Sums(shots=8)
STEPS, QUESTIONS, SAMPLES = 10, 8, 6
# questions of the first step, and chats of each, that are drawn and compared
COMPARED = 4, 2
# questions that are never trained on, and samples of each
HELD_OUT, HELD_OUT_SAMPLES = 24, 4
LEARNING_RATE = 5e-6
# those of `verify`
LIMITS = {"logprobs": FLOAT32.scores, "gradients": FLOAT32.parameter}


@dataclass(frozen=True)
class Chats:
    """Sampled answers to questions, one per chat; those to one question stand side by side.

    Attributes:
        asked: the questions.
        sequences: int64 token ids of prompt and answer.
        loss_masks: bool, one per token: whether the model chose it.
        answers: what it said.
        rewards: the task's scores.
        right: whether it said what is right.
    """

    asked: list[Question]
    sequences: list[np.ndarray]
    loss_masks: list[np.ndarray]
    answers: list[str]
    rewards: list[float]
    right: list[bool]

    def take(self, chats: Sequence[int]) -> Chats:
        """Selects chats by their numbers."""
        return Chats(*([getattr(self, f.name)[i] for i in chats] for f in fields(self)))

    def batch(self) -> Batch:
        """The training batch; advantages are normalised within the `SAMPLES` of a question."""
        groups = np.reshape(self.rewards, (-1, SAMPLES))
        gains = groups - groups.mean(1, keepdims=True)
        gains /= groups.std(1, keepdims=True) + 1e-6
        mean = float(groups.mean())
        return Batch(self.sequences, self.loss_masks, gains.flatten().tolist(), mean)

    def facts(self) -> dict[str, Any]:
        """Gathers what was asked and answered, ready for JSON."""
        by_question: dict[str, list[dict[str, Any]]] = {}
        for question, answer, right in zip(self.asked, self.answers, self.right, strict=True):
            by_question.setdefault(question.text, []).append({"says": answer, "right": right})
        return {
            "reward": float(np.mean(self.rewards)),
            "right": sum(self.right),
            "samples": len(self.right),
            "answers": by_question,
        }

    def rows(self) -> list[dict[str, Any]]:
        """The chats as lines of a rollout file."""
        return [
            {
                "id": f"chat {number}",
                "group": question.text,
                "reward": reward,
                "token_ids": tokens.tolist(),
                "loss_mask": mask.astype(int).tolist(),
            }
            for number, (question, reward, tokens, mask) in enumerate(
                zip(self.asked, self.rewards, self.sequences, self.loss_masks, strict=True)
            )
        ]


def packed(chats: Chats) -> PackedForest:
    """The packed forest of chats."""
    return pack(PrefixForest.from_sequences(chats.sequences))


def learn(
    folder: Path,
    seed: int,
    *,
    draw: Callable[[PackedForest], list[Path]] | None = None,
    status: Status = unannounced,
    tell: Callable[[str, Any], object] = lambda name, part: None,
) -> tuple[dict[str, Any], Chats]:
    """Compares chats packed and one by one, then takes `STEPS` steps of GRPO.

    Args:
        folder: of the model, with a tokenizer that has a chat template.
        seed: of the questions and the samples.
        draw: called with the packed forest of the chats; returns the files it wrote.
        status: shows progress.
        tell: gets the name and the value of what is ready: "learner" (the `Learner`), "chats" (the
            compared ones), and the facts "pictures", "compared", "before", "step" (each), "after".

    Returns:
        The facts, ready for JSON, and the compared chats.

    Raises:
        InputError: the folder holds no model, no chat template, or one that does not end turns
            with eos_token.
    """
    with status("loading the model"):
        learner = Learner(folder, seed)
    facts: dict[str, Any] = {
        "seed": seed,
        "folder": str(folder),
        "parameters": sum(p.numel() for p in learner.model.parameters()),
    }
    tell("learner", learner)
    asked = questions(TASK, HELD_OUT + STEPS * QUESTIONS, seed)
    held_out, asked = asked[:HELD_OUT], asked[HELD_OUT:]
    with status("the first chats"):
        first = learner.chat(asked[:QUESTIONS], SAMPLES, 1)
    few, each = COMPARED
    compared = first.take([q * SAMPLES + n for q in range(few) for n in range(each)])
    facts["pictures"] = [str(file) for file in draw(packed(compared))] if draw else []
    tell("chats", compared)
    tell("pictures", facts["pictures"])
    with status("these chats one by one, and packed"):
        facts["compared"] = learner.compare(compared)
    tell("compared", facts["compared"])
    facts["passed"] = facts["compared"]["passed"]
    facts["steps"] = []
    if not facts["passed"]:
        return facts, compared
    with status("the questions that it will not train on"):
        facts["before"] = learner.chat(held_out, HELD_OUT_SAMPLES, 0).facts()
    tell("before", facts["before"])
    for number in range(1, STEPS + 1):
        start = time.perf_counter()
        with status(f"step {number} of {STEPS}"):
            mine = asked[(number - 1) * QUESTIONS : number * QUESTIONS]
            chats = first if number == 1 else learner.chat(mine, SAMPLES, number)
            learner.update(chats)
        step = {**chats.facts(), "seconds": time.perf_counter() - start}
        facts["steps"].append(step)
        tell("step", step)
    with status("the questions that it did not train on"):
        facts["after"] = learner.chat(held_out, HELD_OUT_SAMPLES, 0).facts()
    tell("after", facts["after"])
    return facts, compared


class Learner:
    """A chat model in float32 on the CPU, its tokenizer and its optimizer.

    Raises:
        InputError: as `learn`.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        from transformers import AutoTokenizer

        setting = Setting(str(folder), "float32", "cpu", seed)
        self.model = build(setting, "prefixtree")
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.seed = seed
        self._dialogue = Dialogue(TASK, self.tokenizer)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), LEARNING_RATE, weight_decay=0.0
        )

    def chat(self, asked: Sequence[Question], samples: int, number: int) -> Chats:
        """Samples answers to every question; `number` tells this call's draws from others'."""
        prompts = [
            self.tokenizer.apply_chat_template(
                question.prompt, add_generation_prompt=True, return_dict=False
            )
            for question in asked
        ]
        rows = len(prompts) * samples
        sampler = TreeSampler(self.model, sum(map(len, prompts)) + rows * TASK.new_tokens, rows)
        draws = Draws(seed=1000 * self.seed + number)
        stop = [self.tokenizer.eos_token_id]
        sampled = sampler.sample(prompts, samples, TASK.new_tokens, draws, stop)
        asked = [question for question in asked for _ in range(samples)]
        masks = [np.asarray(mask, bool) for mask in sampled.loss_masks]
        words = [ids[mask].tolist() for ids, mask in zip(sampled.sequences, masks, strict=True)]
        pairs = [(question.facts, ids) for question, ids in zip(asked, words, strict=True)]
        return Chats(
            asked,
            sampled.sequences,
            masks,
            [self._dialogue.play(*pair)[0][-1].strip() for pair in pairs],
            [self._dialogue.reward(*pair) for pair in pairs],
            [self._dialogue.is_right(*pair) for pair in pairs],
        )

    def compare(self, chats: Chats) -> dict[str, Any]:
        """Runs chats one by one through torch's attention, and packed; forward and backward.

        The loss is the mean log p of what the model said.
        """
        # what is compiled or loaded once is not timed
        self._both(chats.take([0, 1]))
        alone, at_once = self._both(chats)
        differences = {
            "logprobs": worst_difference(at_once.logprobs, alone.logprobs),
            "gradients": max(gradient_differences(at_once.gradients, alone.gradients).values()),
        }
        return {
            "forest": measure(packed(chats).forest),
            "seconds": {"replicated": alone.seconds, "packed": at_once.seconds},
            "differences": differences,
            "limits": LIMITS,
            "passed": all(differences[name] <= limit for name, limit in LIMITS.items()),
        }

    def _both(self, chats: Chats) -> tuple[Run, Run]:
        """Results of the chats one by one, and of their packed forest."""
        scored = scored_tokens(chats.sequences, chats.loss_masks)
        count = sum(int(tokens.sum()) for tokens in scored)
        objective = Objective(
            scored, [tokens / count for tokens in scored], [torch.zeros(len(s)) for s in scored]
        )
        self.model.set_attn_implementation("sdpa")
        alone = run_replicated(self.model, chats.sequences, objective)
        self.model.set_attn_implementation("prefixtree")
        return alone, run_packed(self.model, packed(chats), objective, chats.loss_masks)

    def update(self, chats: Chats) -> None:
        """Takes one step of GRPO on the packed forest of chats."""
        packed_update(self.model, chats.batch(), packed(chats))
        self._optimizer.step()
