"""GRPO with TRL on prefix forests: tokens that completions share are computed once.

The prompts are problems of grade-school mathematics and begin with the same worked examples. So a
whole micro-batch shares its beginning, and completions are short compared with it. `--stock` trains
with TRL's own trainer instead: the losses are the same, and it is slower.

    pip install '.[trl]'
    accelerate launch examples/trl_grpo.py --model Qwen/Qwen3-0.6B     # --vllm generates with it
    accelerate launch --config_file examples/configs/fsdp2.yaml examples/trl_grpo.py \
        --model Qwen/Qwen3-8B     # sharded over 8 GPUs; --num_processes 2 for 2
    # DeepSpeed, or zero2.yaml
    accelerate launch --config_file examples/configs/zero3.yaml examples/trl_grpo.py
    # one GPU, everything set that makes a step fast; prints tokens per second
    python examples/trl_grpo.py --model Qwen/Qwen3-0.6B --fast
    python examples/trl_grpo.py --tiny     # a random model on a CPU, in seconds, without network
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    TrainerCallback,
    set_seed,
)
from trl import GRPOConfig, GRPOTrainer

import prefixtree
from prefixtree.integrations.trl import PrefixTreeGRPOTrainer, tree_rollouts

TASK = "Solve the problem step by step. End with '#### ' and the number."


def chat(examples: list[dict[str, str]], question: str) -> list[dict[str, str]]:
    """A prompt: the worked examples, then the question.

    Nothing that changes (a date, an id) may stand before the shared examples.
    """
    shown = [f"{example['question']}\n{example['answer']}" for example in examples]
    return [
        {"role": "system", "content": "\n\n".join([TASK, *shown])},
        {"role": "user", "content": question},
    ]


def prompts(problems: Dataset, num_examples: int) -> Dataset:
    """One row per problem: prompt and solution."""
    examples = [problems[i] for i in range(num_examples)]
    rows = problems.select(range(num_examples, len(problems)))
    return rows.map(
        lambda row: {
            "prompt": chat(examples, row["question"]),
            "solution": row["answer"].split("####")[-1].strip(),
        },
        remove_columns=rows.column_names,
    )


def correct(
    completions: list[list[dict[str, str]]], solution: list[str], **columns: Any
) -> list[float]:
    """1 for the right number after '####', 0.1 for another number there, else 0."""
    rewards = []
    for completion, wanted in zip(completions, solution, strict=True):
        found = re.findall(r"#### *(-?[\d,.]*\d)", completion[-1]["content"])
        right = bool(found) and found[-1].replace(",", "") == wanted.replace(",", "")
        rewards.append(1.0 if right else 0.1 * bool(found))
    return rewards


def digits(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The share of even bytes: a reward that the random model can learn."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


class Rate(TrainerCallback):
    """Prints a line per step: reward, seconds, and tokens (prompts and completions) per second.

    Every generation is trained on `num_iterations` times; the later times sample nothing.
    """

    def __init__(self) -> None:
        self.tokens = 0.0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if not logs or "step_time" not in logs or not state.is_world_process_zero:
            return
        seconds = logs["step_time"]
        line = f"step {state.global_step}: {seconds:.2f} s"
        if "num_tokens" in logs:
            rate = (logs["num_tokens"] - self.tokens) / seconds
            self.tokens = logs["num_tokens"]
            line += f", reward {logs['reward']:.3f}, {rate:,.0f} tokens/s"
        if "prefixtree/replication_ratio" in logs:
            line += f", {logs['prefixtree/replication_ratio']:.1f} tokens per distinct one"
        print(line, flush=True)


def save_tiny_model(folder: Path) -> str:
    """The main process saves a Qwen3 with random weights and a tokenizer of bytes; its folder."""
    process = PartialState(cpu=True)
    if not process.is_main_process:
        process.wait_for_everyone()
        return str(folder)
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}",
    ).save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    set_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    process.wait_for_everyone()
    return str(folder)


def main(arguments: list[str] | None = None) -> GRPOTrainer:
    """Trains, and returns the trainer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--output", default="trl-grpo")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--vllm", action="store_true", help="generate with vLLM in this process")
    parser.add_argument("--stock", action="store_true", help="TRL's own GRPOTrainer")
    parser.add_argument("--tiny", action="store_true", help="a random model on a CPU")
    parser.add_argument(
        "--fast",
        action="store_true",
        help="one GPU: sampling on the forest, compiled layers, as little recomputed as fits",
    )
    options = parser.parse_args(arguments)
    if options.fast and (options.stock or options.vllm):
        parser.error("--fast is a setting of prefixtree's trainer without vLLM")
    if options.tiny:
        options.model = save_tiny_model(Path(options.output) / "model")
        sums = [{"question": f"{a} + {a}?", "answer": f"#### {2 * a}"} for a in range(36)]
        data, reward = prompts(Dataset.from_list(sums), num_examples=4), digits
        sizes: dict[str, Any] = {"num_generations": 4, "max_completion_length": 16, "use_cpu": True}
        sizes |= {"bf16": False, "max_steps": min(options.steps, 4), "learning_rate": 1e-3}
    else:
        data = prompts(load_dataset("openai/gsm8k", "main", split="train"), num_examples=8)
        reward = correct
        sizes = {"num_generations": 8, "max_completion_length": 512, "max_steps": options.steps}
        # thinking would run out of tokens before its answer
        sizes |= {"chat_template_kwargs": {"enable_thinking": False}}
    config = GRPOConfig(
        output_dir=options.output,
        # whole groups in a micro-batch: a multiple of num_generations
        per_device_train_batch_size=2 * sizes["num_generations"],
        gradient_accumulation_steps=2,
        num_iterations=2,
        beta=0.01,
        use_vllm=options.vllm,
        vllm_mode="colocate",
        logging_steps=1,
        report_to="none",
        **{"learning_rate": 1e-6, **sizes},
    )
    trainer_class: Any = GRPOTrainer if options.stock else PrefixTreeGRPOTrainer
    fast = {"rollout_func": tree_rollouts, "recompute": "auto"} if options.fast else {}
    trainer = trainer_class(
        model=options.model,
        reward_funcs=reward,
        args=config,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(options.model, padding_side="left"),
        callbacks=[Rate()],
        **fast,
    )
    if options.fast and not options.tiny:
        prefixtree.compile_layers(trainer.model)
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
