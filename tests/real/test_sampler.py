"""Greedy tokens of real weights, beside transformers' `generate`."""

from __future__ import annotations

import torch

from prefixtree.sampling import Draws, TreeSampler
from tests.real.runs import load
from tests.support.real import chats

NEW = 16


def test_greedy_tokens_are_those_of_generate() -> None:
    """In float32: in bfloat16 the two best logits often tie."""
    tokens, masks = chats().sequences, chats().loss_masks
    assert masks is not None
    # up to the assistant's last turn
    begins = [int((mask[1:] & ~mask[:-1]).nonzero()[0][-1]) + 1 for mask in masks]
    prompts = [t[:begin].tolist() for t, begin in zip(tokens, begins, strict=True)]
    ours = load("all weights", torch.float32, "prefixtree").eval()
    stop = [ours.generation_config.eos_token_id]
    samples = TreeSampler(ours, 4000).sample(
        prompts, n=1, max_new_tokens=NEW, draws=Draws(temperature=0), stop=stop
    )
    ours.set_attn_implementation("eager")
    new = [s[len(p) :].tolist() for s, p in zip(samples.sequences, prompts, strict=True)]
    for prompt, said in zip(prompts, new, strict=True):
        wanted = ours.generate(
            torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, pad_token_id=stop[0]
        )
        assert wanted[0, len(prompt) :].tolist() == said
    # they say something, and not the same
    assert len({tuple(said) for said in new}) == 3 and min(map(len, new)) > 5
