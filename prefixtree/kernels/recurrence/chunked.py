"""The recurrent layers by torch's operations on any device: chunks of tokens, level by level.

Chunks of one length run together, so nothing is padded. One piece of a level's segments runs at a
time. Its states are gathered for it alone, and only the final states of segments with children are
kept from a level to the next. The backward computes these again, and those before every chunk of
its piece; a chunk's gradients come from autograd. If one segment alone has too many of those, the
heads are taken in parts. The convolution goes by slabs of channels.

Legend: T packed tokens, B segments with children, n segments (chunks of c tokens) of a piece, Hk
key heads, H value heads, K and V head dims (N and P of Mamba-2), D channels, W taps, M entries of
`Taps`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from prefixtree.kernels.recurrence.protocol import Call, Computed, ConvCall, DeltaCall, SsdCall
from prefixtree.packing.copies import move
from prefixtree.packing.host_mask import HostMask
from prefixtree.packing.segments import Segments, Taps, segments_of, tables_of

# (state [n, H, K, V], inputs [n, c, ...]..) -> out [n, c, H, V], state after the chunk
Rule = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def delta_rule(scale: float, qk_l2norm: bool) -> Rule:
    """Makes the gated delta rule; inputs query, key, value, g, beta as in `DeltaCall`."""

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
        # a token changes the state by what its key does not find there yet; the changes of a chunk
        # depend on one another through a unit triangular system
        system = decays.products(key * beta, key).tril(-1)
        present = (key * decays.from_start) @ state
        change = torch.linalg.solve_triangular(
            system, beta * (value - present), upper=False, unitriangular=True
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
    """Computes Mamba-2; inputs as in `SsdCall`, with log_decay [n, c, H] = dt A in place of A."""
    wide = state.dtype
    key, query = (_by_head(part.to(wide), x.shape[2]) for part in (B, C))
    change = (x.to(wide) * dt[..., None].to(wide)).transpose(1, 2)
    return _outputs(state, query, key, change, _Decays(log_decay.to(wide).transpose(1, 2)))


class _Decays:
    """The decays within chunks, given g, the log of each token's: [n, H, c] or [n, H, c, K]."""

    def __init__(self, g: torch.Tensor) -> None:
        self._per_channel = g.ndim == 4
        tokens = g.shape[2]
        # summed from j + 1 to i for every pair: a difference of running sums loses digits if a
        # decay is strong, and is not a number if one is 0
        after = torch.ones(tokens, tokens, dtype=torch.bool, device=g.device).tril(-1)
        if self._per_channel:
            after = after[..., None]
        between = g.unsqueeze(3).masked_fill(~after, 0).cumsum(2)
        later = after.transpose(0, 1)
        self._between = between.masked_fill(later, -torch.inf).exp()
        from_start, to_end = g.cumsum(2).exp(), self._between[:, :, -1]
        if not self._per_channel:
            from_start, to_end = from_start[..., None], to_end[..., None]
        # [n, H, c, 1 or K]: of the state before the chunk until each token, its own included; of
        # after each token until the chunk's end
        self.from_start, self.to_end = from_start, to_end
        # [n, H, 1 or K, 1], of all of the chunk
        self.whole = from_start[:, :, -1:].transpose(2, 3)

    def products(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Computes rows_i . columns_j with the decay after j until i, [n, H, c, c]; 0 for j > i."""
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
    """Computes the output of the chunk's queries, and the state after the chunk."""
    out = (query * decays.from_start) @ state + decays.products(query, key) @ change
    next_state = decays.whole * state + (key * decays.to_end).transpose(2, 3) @ change
    return out.transpose(1, 2), next_state


def _by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Brings [n, c, Hk, K] to [n, H, c, K], a key head for each value head."""
    return x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2)


# an intermediate of a slab of channels has at most this many numbers
_SLAB_NUMBERS = 1 << 24


def conv_forward(call: ConvCall) -> torch.Tensor:
    """Computes out [T, D] in x's dtype."""
    out = torch.empty_like(call.x, memory_format=torch.contiguous_format)
    for channels in _slabs(call):
        total = _sums(call, channels)
        out[:, channels] = (F.silu(total) if call.silu else total).to(out.dtype)
    return out


def conv_backward(call: ConvCall, dout: torch.Tensor) -> list[torch.Tensor]:
    """Computes the gradients of x, weight and, if there is one, bias."""
    taps, width = _taps(call), call.weight.shape[1]
    wide = torch.promote_types(call.x.dtype, torch.float32)
    dx = torch.empty_like(call.x, memory_format=torch.contiguous_format)
    dweight = call.weight.new_empty(call.weight.shape, dtype=wide)
    dbias = None if call.bias is None else call.bias.new_empty(call.bias.shape, dtype=wide)
    rows = taps.branch_tokens
    counts = taps.start.diff()
    for channels in _slabs(call):
        dtotal = dout[:, channels].to(wide)
        if call.silu:
            dtotal = _silu_backward(dtotal, _sums(call, channels))
        weight = call.weight[channels].to(wide)
        x = call.x[:, channels].to(wide)
        # the taps of the token itself; then those of the next tokens in packed order
        dpart = dtotal * weight[:, width - 1]
        dweight[channels, width - 1] = (dtotal * x).sum(0)
        for j in range(1, width):
            reads = (taps.ancestors[j] >= 0)[:, None]
            read = x.index_select(0, taps.ancestors[j].clamp(min=0)) * reads
            dweight[channels, width - 1 - j] = (dtotal * read).sum(0)
            if j < len(dpart):
                near = taps.ancestors[j, j:] == torch.arange(len(dpart) - j, device=dpart.device)
                dpart[:-j] += dtotal[j:] * weight[:, width - 1 - j] * near[:, None]
        if len(rows):
            # tokens over a branch: one after another, never atomics
            terms = dtotal.index_select(0, taps.token)
            terms *= weight.t().index_select(0, width - 1 - taps.tap)
            dpart[rows] += torch.segment_reduce(
                terms, "sum", lengths=counts[rows], axis=0, unsafe=True, initial=0
            )
        dx[:, channels] = dpart.to(dx.dtype)
        if dbias is not None:
            dbias[channels] = dtotal.sum(0)
    grads = [dx, dweight.to(call.weight.dtype)]
    return grads if call.bias is None or dbias is None else [*grads, dbias.to(call.bias.dtype)]


def _taps(call: ConvCall) -> Taps[torch.Tensor]:
    assert call.mask is not None
    return tables_of(call.mask, call.x.device).taps(call.weight.shape[1])


def _slabs(call: ConvCall) -> list[slice]:
    """Cuts the channels into slabs that are computed together."""
    rows, channels = max(len(call.x), len(_taps(call).token), 1), call.x.shape[1]
    step = max(1, _SLAB_NUMBERS // rows)
    return [slice(first, min(first + step, channels)) for first in range(0, channels, step)]


def _sums(call: ConvCall, channels: slice) -> torch.Tensor:
    """Computes the sums before the activation, [T, channels]."""
    taps, width = _taps(call), call.weight.shape[1]
    wide = torch.promote_types(call.x.dtype, torch.float32)
    x, weight = call.x[:, channels].to(wide), call.weight[channels].to(wide)
    total = x * weight[:, width - 1]
    if call.bias is not None:
        total += call.bias[channels].to(wide)
    for j in range(1, width):
        reads = (taps.ancestors[j] >= 0)[:, None]
        read = x.index_select(0, taps.ancestors[j].clamp(min=0))
        total += read * (weight[:, width - 1 - j] * reads)
    return total


def _silu_backward(dout: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    sigmoid = x.sigmoid()
    return dout * sigmoid * (1 + x * (1 - sigmoid))


# tokens of a chunk; gates per channel take a product per pair of tokens and channel
_CHUNK = 64
_CHUNK_PER_CHANNEL = 16
# the states before every chunk of a piece, and all products of the pairs of its chunks' tokens,
# have at most this many numbers, unless the piece is one segment and one key head
_PIECE_NUMBERS = 1 << 25


class _Scan(NamedTuple):
    """A recurrence over all tokens: the rule of a chunk over inputs, [T, ...] each."""

    rule: Rule
    inputs: tuple[torch.Tensor, ...]
    # (H, K, V)
    state_shape: tuple[int, int, int]
    mask: HostMask
    # tokens of a chunk, at most, and numbers that a head holds per pair of them
    chunk: int
    pairs: int
    # [I, H, K, V], the states that enter
    initial: torch.Tensor | None

    @property
    def chunks_of_piece(self) -> int:
        """The most chunks that the segments of a piece have, if they are more than one."""
        heads, k, v = self.state_shape
        numbers = heads * max(k * v, self.chunk**2 * self.pairs)
        return max(1, _PIECE_NUMBERS // max(1, numbers))

    def head_parts(self) -> int:
        """Counts the parts in which heads are taken, so that the longest segment is a piece."""
        segments = segments_of(self.mask)
        longest = -(-int(np.diff(segments.start).max(initial=0)) // self.chunk)
        # all inputs have heads in their second dimension, the key heads are the fewest
        key_heads = min(x.shape[1] for x in self.inputs)
        for parts in range(1, key_heads):
            if key_heads % parts == 0 and self.part(0, parts).chunks_of_piece >= longest:
                return parts
        return max(1, key_heads)

    def part(self, number: int, parts: int) -> _Scan:
        """Makes the scan of some of the heads."""
        heads, k, v = self.state_shape
        inputs = tuple(_part(x, number, parts) for x in self.inputs)
        initial = None if self.initial is None else _part(self.initial, number, parts)
        return self._replace(inputs=inputs, state_shape=(heads // parts, k, v), initial=initial)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of states and sums."""
        return torch.promote_types(self.inputs[0].dtype, torch.float32)


def refusal(call: Call) -> str | None:
    """Returns None: this backend serves every call."""
    return None


def saves(call: Call) -> list[torch.Tensor]:
    """Returns nothing: the backward computes the forward again."""
    return []


def forward(call: Call) -> Computed:
    """Computes out, contiguous, in the dtype of x or value, and the states that leave."""
    if isinstance(call, ConvCall):
        return Computed(conv_forward(call), [])
    scan = _scan(call)
    like = call.value if isinstance(call, DeltaCall) else call.x
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    final = None
    if call.num_final is not None:
        final = like.new_empty(call.num_final, *scan.state_shape, dtype=scan.dtype)
    parts = scan.head_parts()
    for number in range(parts):
        scan_part = scan.part(number, parts)
        states = _run(scan_part, _part(out, number, parts))
        if final is not None:
            _part(final, number, parts).copy_(states[_leaving(scan_part)])
    return Computed(out, [], final)


def backward(
    call: Call, dout: torch.Tensor, saved: list[torch.Tensor], dfinal: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Computes a gradient for each tensor of the call, contiguous."""
    if isinstance(call, ConvCall):
        return conv_backward(call, dout)
    scan = _scan(call)
    gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in scan.inputs]
    dinitial = None if call.initial is None else torch.zeros_like(call.initial)
    parts = scan.head_parts()
    for number in range(parts):
        of_part = [_part(x, number, parts) for x in (dout, *gradients)]
        states = [None if x is None else _part(x, number, parts) for x in (dfinal, dinitial)]
        _run_back(scan.part(number, parts), *of_part, dfinal=states[0], dinitial=states[1])
    initial = [] if dinitial is None else [dinitial]
    if isinstance(call, DeltaCall):
        return gradients + initial
    dx, ddt, dlog_decay, dB, dC = gradients
    wide = scan.dtype
    ddt = ddt.to(wide) + dlog_decay * call.A.to(wide)
    dA = (dlog_decay * call.dt.to(wide)).sum(0)
    return [dx, ddt.to(call.dt.dtype), dA.to(call.A.dtype), dB, dC, *initial]


def _scan(call: DeltaCall | SsdCall) -> _Scan:
    assert call.mask is not None
    shape, mask, initial = call.state_shape, call.mask, call.initial
    if isinstance(call, DeltaCall):
        rule = delta_rule(call.scale, call.qk_l2norm)
        if call.g.ndim == 3:
            return _Scan(rule, call[:5], shape, mask, _CHUNK_PER_CHANNEL, shape[1], initial)
        return _Scan(rule, call[:5], shape, mask, _CHUNK, 1, initial)
    wide = torch.promote_types(call.x.dtype, torch.float32)
    log_decay = call.dt.to(wide) * call.A.to(wide)
    inputs = (call.x, call.dt, log_decay, call.B, call.C)
    return _Scan(ssd, inputs, shape, mask, _CHUNK, 1, initial)


def _part(x: torch.Tensor, number: int, parts: int) -> torch.Tensor:
    """Takes one of equal parts of the heads, the second dimension."""
    heads = x.shape[1] // parts
    return x[:, number * heads : (number + 1) * heads]


class _Piece(NamedTuple):
    """Segments [n] of one level, neighbours in its order."""

    segments: np.ndarray
    # (rows [m], tokens [m, c]) of the chunks that run together, in the order of time: rows are
    # places in `segments`, none twice in a step
    steps: list[tuple[torch.Tensor, torch.Tensor]]


def _pieces(scan: _Scan, inner: bool, backwards: bool = False) -> Iterator[_Piece]:
    """Yields all segments, or the `inner` with children, parents first; reversed if `backwards`."""
    all_segments = segments_of(scan.mask)
    limit = scan.chunks_of_piece
    device = scan.inputs[0].device
    for level in range(all_segments.num_levels)[:: -1 if backwards else 1]:
        segments = all_segments.order[
            all_segments.level_start[level] : all_segments.level_start[level + 1]
        ]
        if inner:
            segments = segments[all_segments.has_children[segments]]
        lengths = all_segments.start[segments + 1] - all_segments.start[segments]
        chunks = -(-lengths // scan.chunk)
        cuts = [0]
        total = 0
        for i, count in enumerate(chunks.tolist()):
            if total + count > limit and i > cuts[-1]:
                cuts.append(i)
                total = 0
            total += count
        parts = list(zip(cuts, [*cuts[1:], len(segments)], strict=True)) if len(segments) else []
        for first, last in parts[:: -1 if backwards else 1]:
            of_piece = segments[first:last]
            yield _Piece(of_piece, _steps(all_segments, of_piece, scan.chunk, device))


def _steps(
    found: Segments, segments: np.ndarray, chunk: int, device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    starts = found.start[segments].astype(np.int64)
    lengths = found.start[segments + 1] - starts
    steps = []
    for at in range(0, int(lengths.max(initial=0)), chunk):
        here = np.minimum(lengths - at, chunk)
        for count in np.unique(here[here > 0])[::-1].tolist():
            rows = np.flatnonzero(here == count)
            tokens = (starts[rows] + at)[:, None] + np.arange(count)
            steps.append(
                (move(torch.from_numpy(rows), device), move(torch.from_numpy(tokens), device))
            )
    return steps


def _before(scan: _Scan, piece: _Piece, states: torch.Tensor) -> torch.Tensor:
    """Gives the states from which the piece's segments start, [n, H, K, V]."""
    segments = segments_of(scan.mask)
    parents = segments.parent[piece.segments]
    if len(parents) == 0 or parents[0] < 0:
        # roots are the whole first level
        before = states.new_zeros((len(parents), *scan.state_shape))
        if scan.initial is not None:
            entered, rows = _entered(scan, piece)
            before[entered] = scan.initial.index_select(0, rows)
        return before
    return states.index_select(0, _rows(segments.state_row[parents], states.device))


def _entered(scan: _Scan, piece: _Piece) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the places in a piece of roots that states enter, and the rows of these states."""
    rows = segments_of(scan.mask).entry[piece.segments]
    places = np.flatnonzero(rows >= 0)
    device = scan.inputs[0].device
    return _rows(places, device), _rows(rows[places], device)


def _leaving(scan: _Scan) -> torch.Tensor:
    """Finds the rows of the states that leave among those after segments."""
    segments = segments_of(scan.mask)
    return _rows(segments.state_row[segments.exits], scan.inputs[0].device)


def _rows(rows: np.ndarray, device: torch.device) -> torch.Tensor:
    return move(torch.from_numpy(rows.astype(np.int64)), device)


@torch.no_grad()
def _run(scan: _Scan, out: torch.Tensor | None) -> torch.Tensor:
    """Writes out [T, H, V], if given; returns states [B, H, K, V] after segments with children."""
    segments = segments_of(scan.mask)
    states = scan.inputs[0].new_empty((segments.num_states, *scan.state_shape), dtype=scan.dtype)
    for piece in _pieces(scan, inner=out is None):
        state = _before(scan, piece, states)
        for rows, tokens in piece.steps:
            part, state[rows] = scan.rule(state[rows], *(x[tokens] for x in scan.inputs))
            if out is not None:
                out[tokens] = part.to(out.dtype)
        inner = np.flatnonzero(segments.has_children[piece.segments])
        into = _rows(segments.state_row[piece.segments[inner]], states.device)
        states[into] = state[_rows(inner, states.device)]
    return states


@torch.no_grad()
def _run_back(
    scan: _Scan,
    dout: torch.Tensor,
    *grads: torch.Tensor,
    dfinal: torch.Tensor | None,
    dinitial: torch.Tensor | None,
) -> None:
    """Writes the gradients of the inputs, and adds those of the states that enter."""
    segments = segments_of(scan.mask)
    states = _run(scan, None)
    dstates = torch.zeros_like(states)
    if dfinal is not None:
        dstates[_leaving(scan)] = dfinal
    for piece in _pieces(scan, inner=False, backwards=True):
        state = _before(scan, piece, states)
        before = []
        for rows, tokens in piece.steps:
            before.append(state[rows])
            _, state[rows] = scan.rule(before[-1], *(x[tokens] for x in scan.inputs))
        dstate = torch.zeros_like(state)
        inner = np.flatnonzero(segments.has_children[piece.segments])
        state_rows = _rows(segments.state_row[piece.segments[inner]], states.device)
        dstate[_rows(inner, states.device)] = dstates[state_rows]
        for rows, tokens in reversed(piece.steps):
            leaves = [before.pop(), *(x[tokens] for x in scan.inputs)]
            with torch.enable_grad():
                leaves = [x.requires_grad_() for x in leaves]
                part, end = scan.rule(*leaves)
            output_grads = (dout[tokens].to(part.dtype), dstate[rows])
            dbefore, *of_inputs = torch.autograd.grad((part, end), leaves, output_grads)
            dstate[rows] = dbefore
            for grad, of_tokens in zip(grads, of_inputs, strict=True):
                grad[tokens] = of_tokens
        if dinitial is not None:
            _add_to_entries(scan, piece, dstate, dinitial)
        _add_to_parents(segments, piece.segments, dstate, dstates)


def _add_to_entries(
    scan: _Scan, piece: _Piece, dstate: torch.Tensor, dinitial: torch.Tensor
) -> None:
    """Adds [n, H, K, V] into [I, H, K, V]: several roots may start from one state."""
    rows = segments_of(scan.mask).entry[piece.segments]
    for place in np.flatnonzero(rows >= 0)[::-1].tolist():
        dinitial[rows[place]] += dstate[place]


def _add_to_parents(
    found: Segments, segments: np.ndarray, dstate: torch.Tensor, dstates: torch.Tensor
) -> None:
    """Adds [n, H, K, V] into [B, H, K, V], children one after another, without atomics."""
    parents = found.parent[segments]
    if len(parents) == 0 or parents[0] < 0:
        return
    firsts = np.flatnonzero(np.diff(parents, prepend=-1))
    counts = np.diff(np.append(firsts, len(parents)))
    into = _rows(found.state_row[parents[firsts]], dstates.device)
    total = torch.segment_reduce(
        dstate, "sum", lengths=_rows(counts, dstates.device), axis=0, unsafe=True, initial=0
    )
    dstates[into] = dstates[into] + total
