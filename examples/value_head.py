"""A critic and a reward model on packed rollouts: one value per token, one reward per sequence.

Any model works whose output has one row per token. Call it with `packed.model_inputs()`, and use
`packed.unpack` to copy the rows back to the sequences. transformers' token classifiers are such
models. `AutoModelForSequenceClassification` is not: it pools each row of a batch, and a whole
forest is one row. Load its checkpoint as a token classifier with one label instead, and read the
last token of each sequence.

    python examples/value_head.py
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForTokenClassification, Qwen3Config

import prefixtree as pt
import prefixtree.integrations.transformers  # registers attn_implementation="prefixtree"
from prefixtree.models.families import check_modules


def token_values(model: nn.Module, packed: pt.PackedForest) -> list[torch.Tensor]:
    """The value at every token, float32 [n] per sequence. The model runs once."""
    check_modules(model)  # refuses active dropout; the head's default is 0.1
    values = model(**packed.model_inputs()).logits[0, :, 0].float()  # [T]
    return packed.unpack(values)


def rewards(model: nn.Module, packed: pt.PackedForest) -> torch.Tensor:
    """The value at the last token of every sequence, [S]. Sequences may end inside the tree."""
    return torch.stack([values[-1] for values in token_values(model, packed)])


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
        values = token_values(critic, packed)
        losses = [((v - r) ** 2).mean() for v, r in zip(values, returns, strict=True)]
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")
    print("rewards:", [round(x, 3) for x in rewards(critic, packed).tolist()])


if __name__ == "__main__":
    main()
