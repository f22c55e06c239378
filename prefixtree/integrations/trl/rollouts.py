"""`tree_rollouts`: TRL's GRPO samples on a prefix forest, with the model that it trains.

Legend: V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from trl import GRPOTrainer

from prefixtree.errors import UnsupportedError, refuse
from prefixtree.forest import PrefixForest
from prefixtree.integrations.trl.refusals import ROLLOUTS, check_distribution
from prefixtree.models.changes import changing
from prefixtree.sampling import Draws
from prefixtree.sampling.kept_sampler import sampler_of
from prefixtree.sampling.rows import Rows
from prefixtree.sampling.whole_copy import whole_copy

#: (row's number, its completion so far) -> the ids that come next; None ends the rollout.
Reply = Callable[[int, list[int]], Sequence[int] | None]


def tree_rollouts(
    prompts: list[Any], trainer: GRPOTrainer, *, reply: Reply | None = None
) -> dict[str, Any]:
    """Samples completions for TRL's GRPOTrainer without vLLM: a `rollout_func`.

        PrefixTreeGRPOTrainer(..., rollout_func=tree_rollouts)

    Every distinct token of the prompts is read once: the samples of a prompt share it, and prompts
    share their common beginnings. For several turns pass the environment, by
    `functools.partial(tree_rollouts, reply=...)`.

    The trainer's `temperature`, `top_k`, `top_p`, `min_p`, `max_completion_length` and stop tokens
    apply. Seeds come from torch's generator, which the trainer seeds and keeps in checkpoints. The
    model is in evaluation mode during sampling. As in TRL's `generate`, a model with adapters
    samples without the autocast of `bf16=True`: its log-probabilities then differ from training's
    by bfloat16's rounding.

    The sampler lives as long as the trainer, with its captured steps, while its keys take less than
    a sixteenth of the free memory.

    Under FSDP2 every rank samples its own prompts from a whole copy of the model, in the dtype that
    training computes in. The copy is made and dropped in every call. All ranks must call it
    together.

    Args:
        prompts: as TRL hands them over, one per completion.
        trainer: a trainer whose model has attn_implementation="prefixtree", for example
            `PrefixTreeGRPOTrainer`.
        reply: a function that gives the token ids that follow a completion which ended with a stop
            token. It gets the row's number among `prompts` and the ids of its completion so far,
            and returns None to end the rollout. Replies count towards `max_completion_length`; one
            that leaves no room for a further token ends the rollout. Default: a rollout is one
            turn.

    Returns:
        prompt_ids, completion_ids and logprobs, a list per prompt: token ids, and log-probabilities
        over the full vocabulary at the trainer's temperature, 0 for replies. With `reply` also
        env_mask: 1 where a token was sampled.

    Raises:
        UnsupportedError: images or a processor of them, `tools`, `repetition_penalty`,
            `generation_kwargs`; a vision model or quantised weights under FSDP2; what `TreeSampler`
            refuses (ZeRO-3).
        MemoryError: no room for a whole copy on a rank.
    """
    _check(trainer)
    prompt_ids = _tokenized(prompts, trainer) if prompts else []
    with _evaluated(trainer) as model:
        if not prompt_ids:
            # a rank without prompts takes part in the copies of the others
            names = "prompt_ids", "completion_ids", "logprobs", "env_mask"
            return {name: [] for name in names[: 3 if reply is None else 4]}
        forest = PrefixForest.from_sequences(prompt_ids)
        # a row's last token is not read, but its place in the pool is
        keys = forest.num_tokens + len(prompt_ids) * trainer.max_completion_length
        # a copy is of one call
        owner = None if trainer.is_fsdp_enabled else trainer
        with sampler_of(owner, model, keys, len(prompt_ids)) as sampler:
            rows = sampler.start(forest)
            _play(rows, prompt_ids, _draws(trainer), trainer, reply)
    samples = rows.samples()
    starts = [len(ids) for ids in prompt_ids]
    parts = list(zip(starts, samples.sequences, strict=True))
    out = {
        "prompt_ids": prompt_ids,
        "completion_ids": [tokens[at:].tolist() for at, tokens in parts],
        "logprobs": [p[at - 1 :].tolist() for at, p in zip(starts, samples.logprobs, strict=True)],
    }
    if reply is not None:
        masks = zip(starts, samples.loss_masks, strict=True)
        out["env_mask"] = [mask[at:].astype(int).tolist() for at, mask in masks]
    return out


def _tokenized(prompts: list[Any], trainer: GRPOTrainer) -> list[list[int]]:
    if not trainer._is_vlm:
        # the samples of a prompt are neighbours
        runs = [(prompt, len(list(same))) for prompt, same in itertools.groupby(prompts)]
        distinct, images, _ = trainer._tokenize_prompts([prompt for prompt, _ in runs])
        if images is None:
            tokens = [[int(token) for token in ids] for ids in distinct]
            found = zip(tokens, (count for _, count in runs), strict=True)
            return [list(ids) for ids, count in found for _ in range(count)]
    # with a processor TRL keeps `generate` from sampling image tokens
    raise UnsupportedError(
        "tree_rollouts samples from text: pass the tokenizer as processing_class, or leave "
        "rollout_func out for images"
    )


@contextmanager
def _evaluated(trainer: GRPOTrainer) -> Iterator[Any]:
    """The trainer's model in evaluation mode; under FSDP2 a copy, whole on this rank."""
    model = trainer.model
    if trainer.is_fsdp_enabled:
        policy = trainer.accelerator.state.fsdp_plugin.mixed_precision_policy
        with whole_copy(model, policy and policy.param_dtype) as copied:
            yield copied
        return
    with changing(model) as changes:
        for module in model.modules():
            # parts of a model in training mode may be in evaluation mode
            changes.note(module, "training")
        model.eval()
        yield model


def _check(trainer: GRPOTrainer) -> None:
    """Refuses settings of generation that the sampler does not have."""
    if trainer.is_fsdp_enabled:
        check_distribution(trainer)
    refuse(ROLLOUTS, trainer)


def _draws(trainer: GRPOTrainer) -> Draws:
    accelerator = trainer.accelerator
    # ranks that were seeded alike must not draw alike
    seed = int(torch.randint(2**31, ())) * accelerator.num_processes + accelerator.process_index
    return Draws(
        temperature=trainer.temperature,
        seed=seed,
        # TRL's 0 and 1.0 mean none
        top_k=trainer.top_k or None,
        top_p=None if trainer.top_p == 1.0 else trainer.top_p,
        min_p=trainer.min_p or None,
    )


def _play(
    rows: Rows, prompts: list[list[int]], draws: Draws, trainer: GRPOTrainer, reply: Reply | None
) -> None:
    """Samples until every row has ended, or is as long as it may be."""
    room = dict.fromkeys(range(len(prompts)), trainer.max_completion_length)
    said: dict[int, list[int]] = {row: [] for row in room}
    going = list(room)
    while going:
        rows.generate(min(room[row] for row in going), draws, trainer.eos_token_ids, going)
        stopped = set(rows.stopped())
        following = []
        for row in going:
            new = rows.new_tokens(row)
            said[row] += new
            room[row] -= len(new)
            if row in stopped:
                answer = None if reply is None else reply(row, list(said[row]))
                if answer is None or len(answer) >= room[row]:
                    continue
                rows.append({row: answer})
                said[row] += [int(token) for token in answer]
                room[row] -= len(answer)
            if room[row]:
                following.append(row)
        going = following
