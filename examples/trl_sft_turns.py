"""SFT with TRL on agents' conversations, one sample per turn: the history is computed once.

A sample is everything before an answer (the prompt) and the answer (the completion). It holds what
the policy saw, also where the chat template drops the reasoning of earlier turns, so that no single
sequence holds all answers. The samples of a conversation repeat its history. `PrefixTreeSFTTrainer`
packs what they share; `--stock` trains with TRL's own trainer: the losses are the same, and it is
slower.

    pip install '.[trl]'
    accelerate launch examples/trl_sft_turns.py --model Qwen/Qwen3-0.6B --data conversations.jsonl
    python examples/trl_sft_turns.py --tiny     # a random model on a CPU, in seconds

Every line of the data is an object with a list `messages` and, perhaps, a list `tools`.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

# of the same folder
from trl_grpo import save_tiny_model

from prefixtree.integrations.trl import PrefixTreeSFTTrainer


def turns(conversations: Dataset, seed: int = 0) -> Dataset:
    """One row per answer of an assistant; the rows of a conversation are neighbours.

    Conversations are shuffled here, whole, because batches are then taken in this order.
    """

    def split(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        rows: dict[str, list[Any]] = {"prompt": [], "completion": []}
        tools = columns.get("tools") or [None] * len(columns["messages"])
        for messages, offered in zip(columns["messages"], tools, strict=True):
            for at, message in enumerate(messages):
                if message["role"] == "assistant":
                    rows["prompt"].append(messages[:at])
                    rows["completion"].append([message])
                    if "tools" in columns:
                        rows.setdefault("tools", []).append(offered)
        return rows

    shuffled = conversations.shuffle(seed)
    return shuffled.map(split, batched=True, remove_columns=shuffled.column_names)


def sums(count: int, answers: int, seed: int = 0) -> Dataset:
    """Conversations that add numbers, one after another."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        total, messages = 0, [{"role": "system", "content": "Keep the sum of what you are told."}]
        for _ in range(answers):
            total += (number := draw.randint(1, 9))
            messages.append({"role": "user", "content": f"add {number}"})
            messages.append({"role": "assistant", "content": str(total)})
        rows.append({"messages": messages})
    return Dataset.from_list(rows)


def main(arguments: list[str] | None = None) -> SFTTrainer:
    """Trains, and returns the trainer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--data", help="a JSONL file of conversations")
    parser.add_argument("--output", default="trl-sft-turns")
    parser.add_argument("--batch", type=int, default=8, help="turns per batch and process")
    parser.add_argument("--stock", action="store_true", help="TRL's own SFTTrainer")
    parser.add_argument("--tiny", action="store_true", help="a random model on a CPU")
    options = parser.parse_args(arguments)
    sizes: dict[str, Any] = {"learning_rate": 1e-5, "max_length": None}
    if options.tiny:
        options.model = save_tiny_model(Path(options.output) / "model")
        data = turns(sums(count=12, answers=8))
        sizes |= {"use_cpu": True, "bf16": False, "learning_rate": 3e-3}
    elif options.data is None:
        parser.error("name a file of conversations with --data, or try --tiny")
    else:
        data = turns(load_dataset("json", data_files=options.data, split="train"))
    config = SFTConfig(
        output_dir=options.output,
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=2,
        # the order of `turns`: the turns of a conversation stay together
        train_sampling_strategy="sequential",
        num_train_epochs=1,
        logging_steps=1,
        report_to="none",
        **sizes,
    )
    trainer_class = SFTTrainer if options.stock else PrefixTreeSFTTrainer
    trainer = trainer_class(
        model=options.model,
        args=config,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(options.model),
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
