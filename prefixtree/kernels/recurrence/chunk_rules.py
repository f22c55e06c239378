"""The algebra of one chunk of a recurrence: from the state before it to its outputs and the state
behind it, in torch, differentiable by autograd.

Legend: n chunks of c tokens, Hk key heads, H value heads, K and V head dims (N and P of Mamba-2).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# (state [n, H, K, V], inputs [n, c, ...]..) -> out [n, c, H, V], state behind the chunk
Rule = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def delta_rule(scale: float, qk_l2norm: bool) -> Rule:
    """The gated delta rule; inputs query, key, value, g, beta as in `DeltaCall`."""

    def rule(
        state: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = state.dtype
        query, key = query.to(wide), key.to(wide)
        if qk_l2norm:
            query, key = (
                x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key)
            )
        query, key = (_by_head(x, value.shape[2]) for x in (query * scale, key))
        value, beta = value.to(wide).transpose(1, 2), beta.to(wide).transpose(1, 2)[..., None]
        decays = _Decays(g.to(wide).transpose(1, 2))
        # every token's change of the state is what its key does not find there yet; the changes of
        # a chunk depend on one another through a unit triangular system
        system = decays.products(key * beta, key).tril(-1)
        found = (key * decays.from_start) @ state
        change = torch.linalg.solve_triangular(
            system, beta * (value - found), upper=False, unitriangular=True
        )
        return _outputs(state, query, key, change, decays)

    return rule


def ssd(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    log_decay: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mamba-2; inputs as in `SsdCall`, with log_decay [n, c, H] = dt A in place of A."""
    wide = state.dtype
    key, query = (_by_head(part.to(wide), x.shape[2]) for part in (B, C))
    change = (x.to(wide) * dt[..., None].to(wide)).transpose(1, 2)
    return _outputs(state, query, key, change, _Decays(log_decay.to(wide).transpose(1, 2)))


class _Decays:
    """The decays within chunks.

    Args:
        g: [n, H, c] log of the decay of each token, or [n, H, c, K], one per channel.

    Attributes:
        from_start: [n, H, c, 1 or K], of the state before the chunk until each token, its own
            decay included.
        to_end: [n, H, c, 1 or K], from behind each token until the chunk's end.
        whole: [n, H, 1 or K, 1], of the state before the chunk over all of it.
    """

    def __init__(self, g: torch.Tensor) -> None:
        self._per_channel = g.ndim == 4
        tokens = g.shape[2]
        # summed from j + 1 to i for every pair: a difference of running sums loses digits where a
        # decay is strong, and is not a number where one is 0
        behind = torch.ones(tokens, tokens, dtype=torch.bool, device=g.device).tril(-1)
        if self._per_channel:
            behind = behind[..., None]
        between = g.unsqueeze(3).masked_fill(~behind, 0).cumsum(2)
        later = behind.transpose(0, 1)
        self._between = between.masked_fill(later, -torch.inf).exp()
        from_start, to_end = g.cumsum(2).exp(), self._between[:, :, -1]
        if not self._per_channel:
            from_start, to_end = from_start[..., None], to_end[..., None]
        self.from_start, self.to_end = from_start, to_end
        self.whole = from_start[:, :, -1:].transpose(2, 3)

    def products(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """[n, H, c, c]: rows_i . columns_j with the decay from behind j until i; 0 for j > i."""
        if self._per_channel:
            return torch.einsum("nhik,nhjk,nhijk->nhij", rows, columns, self._between)
        return (rows @ columns.transpose(2, 3)) * self._between


def _outputs(
    state: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    change: torch.Tensor,
    decays: _Decays,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of the chunk's queries, and the state behind the chunk."""
    out = (query * decays.from_start) @ state + decays.products(query, key) @ change
    behind = decays.whole * state + (key * decays.to_end).transpose(2, 3) @ change
    return out.transpose(1, 2), behind


def _by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[n, c, Hk, K] -> [n, H, c, K], a key head for each value head."""
    return x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2)
