"""Output of `prefixtree demo --real`: a part at a time, as minutes pass between them."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from prefixtree.demo.pretrained import HELD_OUT_SAMPLES, LIMITS, TASK, Chats, Learner
from prefixtree.forest import PrefixForest

# letters of a node's text at either end, and held-out questions whose answers are shown
_SHOWN, _QUESTIONS = 40, 4


class Teller:
    """Prints what `learn` tells, each part by the method of its name."""

    def __init__(self, console: Console) -> None:
        self._print = console.print
        self._steps = 0

    def __call__(self, name: str, part: Any) -> None:
        getattr(self, name)(part)

    def learner(self, learner: Learner) -> None:
        self._tokenizer = learner.tokenizer
        size = sum(p.numel() for p in learner.model.parameters())
        self._print(
            f"A pretrained {learner.model.config.model_type} of {size:,} weights, float32, this "
            f"CPU. It is asked for sums, after {TASK.shots} worked examples.\n"
        )

    def chats(self, chats: Chats) -> None:
        self._print(f"The forest of {len(chats.asked)} of its chats, tokens x chats per node:\n")
        self._print(chat_tree(chats, self._tokenizer))

    def pictures(self, files: list[str]) -> None:
        if files:
            self._print(f"\nPictures of it: {', '.join(files)}.", markup=False, soft_wrap=True)

    def compared(self, compared: dict[str, Any]) -> None:
        tokens, seconds = compared["forest"]["tokens"], compared["seconds"]
        apart = compared["differences"]
        self._print(
            f"\nOne by one these are {tokens['replicated']:,} tokens, forward and backward in "
            f"{seconds['replicated']:.1f} s; packed {tokens['distinct']:,}, in "
            f"{seconds['packed']:.1f} s. Log p differ by at most {apart['logprobs']:.1e}, the "
            f"gradient of any weight by {apart['gradients']:.1e} of its norm."
        )
        if not compared["passed"]:
            limits = " and ".join(f"{limit:g}" for limit in LIMITS.values())
            self._print(f"[bold red]The two ways differ[/] by more than {limits}.")

    def before(self, facts: dict[str, Any]) -> None:
        self._held_out = facts
        self._print(
            f"\n{len(facts['answers'])} questions that it will not train on, asked "
            f"{HELD_OUT_SAMPLES} times each: {_share(facts)} right.\n\n"
            "GRPO on packed forests; a row is a step, and one of its questions:"
        )

    def step(self, facts: dict[str, Any]) -> None:
        self._steps += 1
        # the question that was answered rightly most often, not always
        question, answers = max(facts["answers"].items(), key=lambda item: _mixed(item[1]))
        self._print(
            Text.assemble(
                f"{self._steps:>3}  {facts['seconds']:5.1f} s  reward ",
                (f"{facts['reward']:.2f}", "bold"),
                f"  {facts['right']:>2} of {facts['samples']} right  ",
                _answered(question, answers),
            ),
            soft_wrap=True,
        )

    def after(self, facts: dict[str, Any]) -> None:
        self._print(
            f"\nThe questions that it did not train on: {_share(self._held_out)} right before, "
            f"[bold]{_share(facts)}[/] after. Some of them:"
        )
        for question in [*facts["answers"]][:_QUESTIONS]:
            before, after = (f["answers"][question] for f in (self._held_out, facts))
            line = Text.assemble("  ", _answered(question, before), "   after ", _said(after))
            self._print(line, soft_wrap=True)


def _share(facts: dict[str, Any]) -> str:
    return f"{facts['right'] / facts['samples']:.0%}"


def _mixed(answers: list[dict[str, Any]]) -> int:
    """How much a group of answers teaches: its right ones, where there are wrong ones too."""
    right = sum(answer["right"] for answer in answers)
    return right if right < len(answers) else 0


def _answered(question: str, answers: list[dict[str, Any]]) -> Text:
    return Text.assemble(f"{question.removesuffix('?')}", _said(answers))


def _said(answers: list[dict[str, Any]]) -> Text:
    """Joins what comes after the last = of every answer; a right one is marked."""
    parts: list[Any] = []
    for answer in answers:
        words = " ".join(answer["says"].rpartition("=")[2].split())[:12] or "-"
        parts += [(f"{words}✓", "bold green") if answer["right"] else words, " "]
    return Text.assemble(*parts[:-1])


def chat_tree(chats: Chats, tokenizer: Any) -> Tree:
    """The forest of chats, a node's text in a line."""
    forest = PrefixForest.from_sequences(chats.sequences)
    assert forest.tokens is not None
    right = dict(zip(forest.sequence_node.tolist(), chats.right, strict=True))
    top = Tree("[dim]chats[/]", hide_root=True)
    trees: list[Tree] = []
    for node, parent in enumerate(forest.node_parent):
        start, length = forest.node_start[node], forest.node_length[node]
        text = " ".join(tokenizer.decode(forest.tokens[start : start + length]).split())
        if len(text) > 2 * _SHOWN:
            text = f"{text[:_SHOWN]} … {text[-_SHOWN:]}"
        label = Text.assemble(
            (f"{length} x {forest.node_multiplicity[node]}  ", "dim"),
            (text, "bold green" if right.get(node) else ""),
            no_wrap=True,
            overflow="ellipsis",
        )
        trees.append((top if parent < 0 else trees[parent]).add(label))
    return top
