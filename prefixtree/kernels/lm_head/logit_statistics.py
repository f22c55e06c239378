"""Statistics of the distributions behind log-probabilities, for logs and weights: no gradients.

They are computed by torch's operations on every device, from a chunk's logits before these are
scored. A call that asks for none pays nothing.

Legend: R rows, V vocabulary, K statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from prefixtree.kernels.lm_head.eager import LogitRule

# float32 logits held at once beside the chunk's
_BLOCK = 1 << 25

#: Name -> the statistic [R] of logits / temperature, float32 [R, V], and targets, int64 [R, 1].
_STATISTICS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean_logits": lambda z, target: z.mean(-1),
    # argmax takes the first of equal logits
    "is_top1": lambda z, target: z.argmax(-1, keepdim=True).eq(target)[:, 0],
    # sum p^2 = sum e^(2 log p)
    "log_sum_sq_probs": lambda z, target: torch.logsumexp(2 * torch.log_softmax(z, -1), -1),
}


def check_statistics(names: Sequence[str]) -> tuple[str, ...]:
    """The names as a tuple.

    Raises:
        ValueError: a name that is not a statistic, or one string in place of several.
    """
    if isinstance(names, str) or (unknown := [n for n in names if n not in _STATISTICS]):
        given = repr(names) if isinstance(names, str) else ", ".join(map(repr, unknown))
        raise ValueError(
            f"return_statistics takes a sequence of names among {', '.join(_STATISTICS)}; "
            f"got {given}"
        )
    return tuple(names)


@torch.no_grad()
def write_statistics(
    x: torch.Tensor,
    target: torch.Tensor,
    temperature: torch.Tensor,
    rule: LogitRule,
    names: Sequence[str],
    out: torch.Tensor,
) -> None:
    """Writes out, float32 [R, K], of rule(x) / temperature.

    Args:
        x: [R, V], not changed.
        target: int64 [R], the tokens that are scored.
        temperature: float32 [R].
        rule: the family's change to the logits.
        names: K names of statistics.
        out: float32 [R, K].
    """
    if not names:
        return
    rows = max(1, _BLOCK // x.shape[1])
    for at in range(0, x.shape[0], rows):
        part = slice(at, at + rows)
        z = rule.apply(x[part].float()) / temperature[part, None]
        for column, name in enumerate(names):
            out[part, column] = _STATISTICS[name](z, target[part, None])
