"""Greedy tokens of real weights, beside transformers' `generate`."""

from __future__ import annotations

import torch

from prefixtree.sampling import Draws, TreeSampler
from tests.real.runs import load
from tests.support.real import chats

NEW = 24


def test_greedy_tokens_are_those_of_generate() -> None:
    """In float32: in bfloat16 the two best logits often tie. Every prompt ends where the assistant is to
    speak."""
    found = chats()
    assert found.turn_ends is not None
    masks = found.loss_masks
    assert masks is not None
    prompts = []
    for tokens, mask in zip(found.sequences, masks, strict=True):
        begins = (mask[1:] & ~mask[:-1]).nonzero()[0] + 1
        prompts += [tokens[:begin].tolist() for begin in begins[-2:]]
    # the model's own, in the order that they are given
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
    # words, and not one token again and again
    assert len({tuple(said) for said in new}) > 2 and sum(map(len, new)) > 3 * NEW
