"""A browser agent's rollouts with screenshots: one update of a tiny Qwen3-VL, both ways.

A fake browser of ours makes the rollouts: a few tasks in a web shop, turns that branch, and after
every turn a screenshot. Two copies of the model take one GRPO update: one runs every sequence
alone, the other runs the packed forest and encodes every distinct screenshot once. First a sequence
is a rollout, then the rollout up to the end of a turn, as step-wise trainers make them.

    python examples/browser_images.py [FOLDER]

writes rollouts, screenshots and the model's folder into FOLDER (default: nowhere to keep) and
prints what both took and how far apart they are. It exits with 1 when they differ.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

import prefixtree as pt
import prefixtree.integrations.transformers  # registers attn_implementation="prefixtree"
from prefixtree.demo.browser import write_rollouts
from prefixtree.rollouts import ChatTokenizer, ImageBatch, Rollouts, expand_turns, read_rollouts
from prefixtree.testing.compare import gradient_differences

LIMIT = 1e-4

# log-probabilities [n - 1] per sequence -> loss
Loss = Callable[[list[torch.Tensor]], torch.Tensor]


def advantages(rewards: list[float], rollouts: Rollouts) -> list[float]:
    """One per sequence: the reward of its line, normalised within its group, as in GRPO."""
    assert rollouts.groups is not None
    own = [rewards[line - 1] for line in rollouts.lines]
    of_group: dict[Any, list[float]] = {}
    for reward, group in zip(own, rollouts.groups, strict=True):
        of_group.setdefault(group, []).append(reward)
    return [
        float((reward - np.mean(of_group[group])) / (np.std(of_group[group]) + 1e-6))
        for reward, group in zip(own, rollouts.groups, strict=True)
    ]


def alone(model: nn.Module, batch: ImageBatch, losses: list[Loss]) -> list[torch.Tensor]:
    """Every sequence alone, forward and backward; its log-probabilities, [n - 1] each."""
    kept = []
    for i, loss in enumerate(losses):
        inputs = batch.model_inputs(i)
        logits = model(**inputs, use_cache=False).logits[0, :-1]
        targets = inputs["input_ids"][0, 1:, None]
        logprobs = logits.float().log_softmax(-1).gather(1, targets)[:, 0]
        loss([logprobs]).backward()
        kept.append(logprobs.detach())
    return kept


def packed(
    model: nn.Module, forest: pt.PackedForest, images: pt.Images, loss: Loss
) -> list[torch.Tensor]:
    """The packed forest, forward and backward; the log-probabilities per sequence."""
    scores = pt.sequence_logprobs(model, forest, images=images)
    loss(scores.logprobs).backward()
    return [logprobs.detach() for logprobs in scores.logprobs]


def timed_update(model: nn.Module, run: Callable[[], Any]) -> tuple[Any, float]:
    """Gradients and one step of Adam; what `run` gave, and the seconds."""
    # made here, so that its first step, which sets up its state, counts on both sides
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    start = time.perf_counter()
    result = run()
    optimizer.step()
    return result, time.perf_counter() - start


def compare(rollouts: Rollouts, rewards: list[float], config: Any) -> dict[str, Any]:
    """One update both ways; counts, seconds and the largest differences.

    Args:
        rollouts: with images, loss masks and groups; a sequence per rollout or turn.
        rewards: one per line of the file.
        config: of the model, which gets random weights.
    """
    torch.manual_seed(0)
    # the vision encoder keeps an ordinary attention
    parts = {"": "sdpa", "text_config": "sdpa", "vision_config": "sdpa"}
    model = AutoModelForImageTextToText.from_config(config, attn_implementation=parts).eval()
    ours = copy.deepcopy(model)
    ours.set_attn_implementation(parts | {"": "prefixtree", "text_config": "prefixtree"})

    batch = rollouts.image_batch()
    assert batch is not None and rollouts.loss_masks is not None
    images = pt.Images.from_batch(batch.sequences, batch.pixel_values, batch.image_grid_thw, config)
    forest = pt.pack(pt.PrefixForest.from_sequences(images.sequences))

    masks = [torch.from_numpy(mask[1:]) for mask in rollouts.loss_masks]
    scored = sum(int(mask.sum()) for mask in masks)
    weights = [
        -advantage * mask / scored
        for advantage, mask in zip(advantages(rewards, rollouts), masks, strict=True)
    ]
    each: list[Loss] = [lambda logprobs, w=w: (logprobs[0] * w).sum() for w in weights]

    def together(logprobs: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(logprobs) @ torch.cat(weights)

    # what is compiled once, and the memory that is taken once, is not timed
    packed(ours, forest, images, together)
    alone(model, batch, each[:1])
    for copy_ in (model, ours):
        copy_.zero_grad()
    expected, alone_seconds = timed_update(model, lambda: alone(model, batch, each))
    found, packed_seconds = timed_update(ours, lambda: packed(ours, forest, images, together))
    gradients = ({name: p.grad for name, p in side.named_parameters()} for side in (ours, model))
    is_image = forest.input_ids.numpy() >= images.first_id
    return {
        "sequences": len(rollouts),
        "tokens": (forest.forest.num_replicated_tokens, forest.num_tokens),
        "image tokens": (
            sum(int((s >= images.first_id).sum()) for s in images.sequences),
            int(is_image.sum()),
        ),
        "images encoded": (images.num_given, len(images)),
        "seconds of an update": (alone_seconds, packed_seconds),
        "differences": {
            "log-probabilities": max(
                float(((a - b) * mask).abs().max())
                for a, b, mask in zip(found, expected, masks, strict=True)
            ),
            "gradients": max(gradient_differences(*gradients).values()),
        },
    }


def show(facts: dict[str, Any], unit: str) -> bool:
    """Prints the facts; whether the two ways agree."""
    passed = all(difference <= LIMIT for difference in facts["differences"].values())
    print(f"{facts['sequences']} sequences, one per {unit}\n{'':29}alone      packed")
    for name in ("tokens", "image tokens", "images encoded", "seconds of an update"):
        one, other = facts[name]
        form = "12,.2f" if isinstance(one, float) else "12,"
        # a speed-up of a wrong result is none
        ratio = f"{one / other:6.2f}x" if passed else ""
        print(f"{name:22}{one:{form}}{other:{form}}   {ratio}")
    for name, difference in facts["differences"].items():
        print(f"largest difference, {name}: {difference:.1e}")
    print("PASS\n" if passed else f"FAIL: the limit is {LIMIT:.0e}\n")
    return passed


def main(folder: Path) -> bool:
    """Writes rollouts into the folder, reads them, and compares an update; whether all agree."""
    file = write_rollouts(folder)
    rollouts = read_rollouts(file, strict=True, tokenizer=ChatTokenizer(folder / "model"))
    rewards = [json.loads(line)["reward"] for line in file.read_text().splitlines()]
    config = AutoConfig.from_pretrained(folder / "model")
    whole = show(compare(rollouts, rewards, config), "rollout")
    return show(compare(expand_turns(rollouts), rewards, config), "turn") and whole


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(not main(Path(sys.argv[1])))
    with tempfile.TemporaryDirectory() as nowhere:
        sys.exit(not main(Path(nowhere)))
