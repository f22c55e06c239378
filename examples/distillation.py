"""On-policy distillation on packed rollouts: KL(teacher || student) at every scored token.

The distribution at a token depends only on the tokens before it on its path. So both models run
once over the packed forest, and each distinct edge is measured once, however many sequences share
it. Of the teacher hidden states are kept (`pt.Teacher`); logits exist for a chunk of edges at a
time, of both models. docs/losses.md has other divergences.

    python examples/distillation.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

import prefixtree as pt
import prefixtree.integrations.transformers  # registers attn_implementation="prefixtree"


def token_kl(
    student: nn.Module,
    teacher: nn.Module,
    packed: pt.PackedForest,
    loss_mask: Sequence[Any] | None = None,
    temperature: float = 1.0,
) -> list[torch.Tensor]:
    """KL(teacher || student), in nats, of the distributions that the tokens were drawn from.

    Args:
        student: a causal language model with attn_implementation="prefixtree".
        teacher: another one with the same tokenizer; it gets no gradient.
        packed: the packed rollouts.
        loss_mask: [n] per sequence, 0 where a token is not scored. Default: all are scored.
        temperature: divides the logits of both models.

    Returns:
        Float32 [n - 1] per sequence, differentiable in the student; 0 where the loss mask is 0.
    """
    kl = pt.Teacher(teacher, packed, loss_mask).divergence()
    scores = pt.sequence_logprobs(student, packed, temperature, loss_mask, measure=kl)
    assert scores.measured is not None
    return [values[:, 0] for values in scores.measured]


def main() -> None:
    """Five steps of a student towards its teacher."""
    torch.manual_seed(0)
    small = Qwen3Config(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16
    )
    large = Qwen3Config(
        vocab_size=100,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        head_dim=16,
        initializer_range=0.1,  # a teacher that prefers some tokens
    )
    student, teacher = (
        AutoModelForCausalLM.from_config(config, attn_implementation="prefixtree")
        for config in (small, large)
    )
    teacher.eval()
    rollouts = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 9, 9], [1, 2, 3, 7, 8], [1, 2, 3, 4]]
    masks = [[0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 1]]
    packed = pt.pack(pt.PrefixForest.from_sequences(rollouts))
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-3)
    for step in range(5):
        kl = token_kl(student, teacher, packed, masks)
        loss = torch.cat(kl).sum() / sum(map(sum, masks))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: KL {loss.item():.4f} nats per token")


if __name__ == "__main__":
    main()
