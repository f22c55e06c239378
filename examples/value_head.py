"""A critic and a reward model on packed rollouts: one value per token, one reward per sequence.

`sequence_values` takes token and sequence classifiers of transformers, and gives the values at
every token; the reward of a sequence is that at its last token.

    python examples/value_head.py
"""

from __future__ import annotations

import torch
from transformers import AutoModelForTokenClassification, Qwen3Config

import prefixtree as pt
import prefixtree.integrations.transformers  # registers attn_implementation="prefixtree"


def main() -> None:
    """One regression step of a critic on the returns of four rollouts."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        head_dim=16,
        num_labels=1,
        classifier_dropout=0.0,
    )
    critic = AutoModelForTokenClassification.from_config(config, attn_implementation="prefixtree")
    rollouts = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 9, 9], [1, 2, 3, 7, 8], [1, 2, 3, 4]]
    returns = [1.0, 0.0, 0.5, 0.0]  # sequences that share tokens may have different returns
    packed = pt.pack(pt.PrefixForest.from_sequences(rollouts))
    optimizer = torch.optim.AdamW(critic.parameters(), lr=2e-4)
    for step in range(5):
        values = pt.sequence_values(critic, packed)  # [n, 1] per sequence
        losses = [((v - r) ** 2).mean() for v, r in zip(values, returns, strict=True)]
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")
    rewards = [v[-1].item() for v in pt.sequence_values(critic, packed)]
    print("rewards:", [round(x, 3) for x in rewards])


if __name__ == "__main__":
    main()
