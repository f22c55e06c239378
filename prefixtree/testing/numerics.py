"""The three-way bound of docs/design.md: our error beside eager's in the same dtype.

Both errors are against float64. Per (node x head) the worst error may be twice eager's, per head
the mean error 1.2 times eager's, each with some slack for what eager gets exactly.

Legend: R rows (query or key tokens), G groups of rows (nodes), H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from prefixtree.forest import PrefixForest

# nodes with fewer tokens are judged together: the worst of three numbers says little
POOLED = 16


@dataclass(frozen=True)
class Errors:
    """The errors of one tensor beside what they may be.

    Attributes:
        worst, worst_limit: float64 [G, H], the greatest error of each group and head.
        mean, mean_limit: float64 [H], the mean error of each head.
    """

    worst: torch.Tensor
    worst_limit: torch.Tensor
    mean: torch.Tensor
    mean_limit: torch.Tensor


def pooled_nodes(forest: PrefixForest) -> np.ndarray:
    """A group number for every packed token, int64 [T]: its node's; short nodes share number 0."""
    number = np.where(forest.node_length < POOLED, 0, 1 + np.arange(forest.num_nodes))
    return np.repeat(number, forest.node_length)


def errors(
    found: torch.Tensor,
    eager: torch.Tensor,
    exact: torch.Tensor,
    group: torch.Tensor,
    slack: torch.Tensor | float,
) -> Errors:
    """The errors of `found`, and the limits that eager's errors set.

    The worst may be 2 x eager's worst + 2 x slack, the mean 1.2 x eager's mean + slack / 10.

    Args:
        found, eager: [R, H] or [R, H, D], ours and eager's in the same dtype.
        exact: the same in float64.
        group: int64 [R], the group of each row; see `pooled_nodes`.
        slack: such as the dtype's epsilon x the greatest number of `exact`.
    """
    ours, base = ((x.double() - exact).abs().reshape(*exact.shape[:2], -1) for x in (found, eager))
    worst, allowed = (_max_by(x.amax(2), group) for x in (ours, base))
    return Errors(
        worst,
        2 * allowed + 2 * slack,
        ours.mean((0, 2)),
        1.2 * base.mean((0, 2)) + 0.1 * slack,
    )


def _max_by(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Greatest of values [R, H] per group -> [G, H]; 0 for a group without rows."""
    out = values.new_zeros(int(group.max()) + 1, values.shape[1])
    return out.scatter_reduce_(0, group[:, None].expand_as(values), values, "amax")
