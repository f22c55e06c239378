"""On-policy distillation on packed rollouts: KL(teacher || student) at every scored token.

The distribution at a token depends only on the tokens before it on its path. So both models run
once over the packed forest. Each distinct predictor gets one row of logits, however many sequences
share it.

    python examples/distillation.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

import prefixtree as pt
import prefixtree.integrations.transformers  # registers attn_implementation="prefixtree"
from prefixtree.models.families import check_modules


def token_kl(
    student: nn.Module,
    teacher: nn.Module,
    packed: pt.PackedForest,
    loss_mask: Sequence[Any] | None = None,
    temperature: float = 1.0,
) -> list[torch.Tensor]:
    """KL(teacher || student), in nats, of the distributions that the tokens were drawn from.

    Needs memory for the logits of all distinct predictors of both models at once.

    Args:
        student: a causal language model with attn_implementation="prefixtree".
        teacher: another one with the same vocabulary; it gets no gradient.
        packed: the packed rollouts.
        loss_mask: [n] per sequence, 0 where a token is not scored. Default: all are scored.
        temperature: divides the logits of both models.

    Returns:
        Float32 [n] per sequence, differentiable in the student. It is 0 at the first token of the
        sequence, and where the loss mask is 0.
    """
    check_modules(student)
    edges = packed.edges(loss_mask)
    predictor, row = edges.predictor.unique(return_inverse=True)
    inputs = {**packed.model_inputs(), "logits_to_keep": predictor}
    with torch.no_grad():
        target = (teacher(**inputs).logits[0].float() / temperature).log_softmax(-1)  # [P, V]
    log_q = (student(**inputs).logits[0].float() / temperature).log_softmax(-1)
    kl = F.kl_div(log_q, target, reduction="none", log_target=True).sum(-1)  # [P]
    at_token = kl.new_zeros(packed.num_tokens).index_put((edges.token,), kl[row])  # [T]
    per_sequence = packed.unpack(at_token)
    if loss_mask is None:
        return per_sequence
    # a shared token counts only in the sequences whose mask selects it
    masks = [torch.as_tensor(m, device=kl.device) != 0 for m in loss_mask]
    return [kl * mask for kl, mask in zip(per_sequence, masks, strict=True)]


def main() -> None:
    """Five steps of a student towards its teacher."""
    torch.manual_seed(0)
    small = Qwen3Config(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16
    )
    large = Qwen3Config(
        vocab_size=100, hidden_size=96, intermediate_size=192, num_hidden_layers=3, head_dim=16
    )
    student, teacher = (
        AutoModelForCausalLM.from_config(config, attn_implementation="prefixtree")
        for config in (small, large)
    )
    teacher.eval()
    rollouts = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 9, 9], [1, 2, 3, 7, 8], [1, 2, 3, 4]]
    masks = [[0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 1]]
    packed = pt.pack(pt.PrefixForest.from_sequences(rollouts))
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    for step in range(5):
        kl = token_kl(student, teacher, packed, masks)
        loss = torch.cat(kl).sum() / sum(map(sum, masks))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: KL {loss.item():.4f} nats per token")


if __name__ == "__main__":
    main()
