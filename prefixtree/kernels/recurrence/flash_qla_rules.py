"""The steps of the gated delta rule by FlashQLA's kernels, for all segments of a forest at once.

The functions of flash-qla used here are not its public interface; `flash_qla.VERSIONS` names the
releases that have them.

Legend: T packed tokens, N segments, H key heads, HV value heads, K and V head dims (128), C = 64
tokens of a chunk. query, key [T, H, K], value [T, HV, V], beta [T, HV]; g fp32 [T, HV], the log of
the decay; summed: g summed along each chunk, fp32 [T, HV]; solved: the triangle of each chunk, [T,
HV, C].
"""

from __future__ import annotations

import torch
from flash_qla.ops.gated_delta_rule.chunk import (
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
)
from flash_qla.ops.gated_delta_rule.chunk.hopper import (
    fused_gdr_fwd,
    fused_gdr_h,
    kkt_solve,
)
from flash_qla.ops.gated_delta_rule.chunk.hopper.cp_bwd import fused_gdr_dh_ws
from flash_qla.ops.gated_delta_rule.chunk.hopper.fused_bwd import tilelang_fused_chunk_gdr_bwd
from flash_qla.ops.gated_delta_rule.chunk.hopper.prepare_h import tilelang_prepare_h
from flash_qla.ops.utils import chunk_local_cumsum, group_reduce_vector
from flash_qla.utils.index import prepare_varlen_metadata

from prefixtree.kernels.recurrence.states import CHUNK
from prefixtree.packing.segments import SegmentTables


def sequences_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    tables: SegmentTables,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes a forest without branches: out [T, HV, V], summed, solved."""
    summed, solved, out, *_ = chunk_gated_delta_rule_fwd(
        *(x[None] for x in (query, key, value, g, beta)),
        scale=scale,
        cu_seqlens=_segments(tables),
        output_final_state=False,
    )
    return out[0].to(value.dtype), summed[0], solved[0]


def solve(
    key: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, tables: SegmentTables
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes summed and solved."""
    where = _segments(tables)
    summed = chunk_local_cumsum(g[None], cu_seqlens=where, chunk_size=CHUNK)
    solved = kkt_solve(k=key[None], b=beta[None], cu_seqlens=where, chunk_size=CHUNK)
    return summed[0], solved[0]


def ends(
    key: torch.Tensor,
    value: torch.Tensor,
    summed: torch.Tensor,
    beta: torch.Tensor,
    solved: torch.Tensor,
    tables: SegmentTables,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the end states that are read, by segments' start S: transition @ S + end.

    Returns ends fp32 [N, HV, K, V], transitions fp32 [N, HV, K, K], undefined for other segments.
    """
    where = _segments(tables)
    (_, heads, key_dim), (_, value_heads, value_dim) = key.shape, value.shape
    segments = tables.host.num_segments
    states = value.new_empty(segments, value_heads, key_dim, value_dim, dtype=torch.float32)
    transitions = value.new_empty(segments, value_heads, key_dim, key_dim, dtype=torch.float32)
    # `fused_gdr_h` rounds both to the dtype of the key; this kernel keeps them in float32
    kernel = tilelang_prepare_h(
        value_heads,
        heads,
        key_dim,
        value_dim,
        CHUNK,
        accum_dtype="float32",
        qkva_dtype=key.dtype,
        g_dtype=summed.dtype,
        b_dtype=beta.dtype,
        h0_dtype=torch.float32,
        ht_dtype=torch.float32,
        h_dtype=key.dtype,
        seqlen_dtype=where.dtype,
        use_initial_state=False,
        store_final_state=True,
        store_h=False,
        is_varlen=True,
        is_cp=True,
        state_v_first=False,
    )
    kernel(
        *(x[None] for x in (key, value, solved, summed, beta)),
        states,
        where,
        tables.chunks(CHUNK).cu_chunks,
        _chunks_where(tables, tables.has_children, value_heads),
        key.new_empty(1, 0, value_heads, key_dim, value_dim),
        states,
        transitions,
    )
    return states, transitions


def outputs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    summed: torch.Tensor,
    beta: torch.Tensor,
    solved: torch.Tensor,
    starts: torch.Tensor,
    tables: SegmentTables,
    scale: float,
) -> torch.Tensor:
    """Computes out [T, HV, V] from the segments' start states, fp32 [N, HV, K, V]."""
    out, *_ = fused_gdr_fwd(
        *(x[None] for x in (query, key, value, solved, summed, beta)),
        scale=scale,
        initial_state=starts,
        output_final_state=False,
        cu_seqlens=_segments(tables),
    )
    return out[0]


def gradients_of_starts(
    query: torch.Tensor,
    key: torch.Tensor,
    summed: torch.Tensor,
    beta: torch.Tensor,
    solved: torch.Tensor,
    dout: torch.Tensor,
    tables: SegmentTables,
    scale: float,
) -> torch.Tensor:
    """Computes each start's gradient from its segment's outputs, fp32 [N, HV, K, V]."""
    starts_from = tables.schedule(CHUNK).parent_state
    _, dstarts = fused_gdr_dh_ws(
        *(x[None] for x in (query, key, solved, summed, beta, dout)),
        output_dh0=True,
        output_dh=False,
        scale=scale,
        cu_seqlens=_segments(tables),
        # segments that start from zeros hand nothing up: their gradient is 0
        num_warmup_chunks=_chunks_where(tables, starts_from >= 0, dout.shape[1]),
    )
    return dstarts


def states(
    key: torch.Tensor,
    value: torch.Tensor,
    summed: torch.Tensor,
    beta: torch.Tensor,
    solved: torch.Tensor,
    starts: torch.Tensor,
    tables: SegmentTables,
) -> torch.Tensor:
    """Computes the state before each chunk, [1, chunks, HV, K, V], from starts [N, HV, K, V]."""
    chunk_states, _, _ = fused_gdr_h(
        *(x[None] for x in (key, value, solved, summed, beta)),
        initial_state=starts,
        output_final_state=False,
        output_h=True,
        cu_seqlens=_segments(tables),
    )
    return chunk_states


def sequences_gradients(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    summed: torch.Tensor,
    beta: torch.Tensor,
    solved: torch.Tensor,
    dout: torch.Tensor,
    tables: SegmentTables,
    scale: float,
) -> list[torch.Tensor]:
    """Computes gradients of query, key, value, g and beta in a forest without branches."""
    inputs = [x[None] for x in (query, key, value, summed, beta, solved, dout)]
    dq, dk, dv, dbeta, dg, _ = chunk_gated_delta_rule_bwd(
        *inputs, scale=scale, cu_seqlens=_segments(tables)
    )
    return [dq[0], dk[0], dv[0], dg[0], dbeta[0]]


def gradients(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    summed: torch.Tensor,
    beta: torch.Tensor,
    solved: torch.Tensor,
    dout: torch.Tensor,
    states: torch.Tensor,
    dends: torch.Tensor,
    tables: SegmentTables,
    scale: float,
) -> list[torch.Tensor]:
    """Computes the gradients of query, key, value, g and beta.

    `states` is the result of the function of this name. dends fp32 [N, HV, K, V], the gradient of
    each segment's end state, is overwritten.
    """
    where = _segments(tables)
    (_, heads, key_dim), (_, value_heads, value_dim) = key.shape, value.shape
    dq, dk, dv = (torch.empty_like(value[None]) for _ in range(3))
    dg, dbeta = torch.empty_like(summed[None]), torch.empty_like(beta[None])
    kernel = tilelang_fused_chunk_gdr_bwd(
        value_heads,
        heads,
        key_dim,
        value_dim,
        CHUNK,
        scale,
        qkva_dtype=query.dtype,
        g_dtype=summed.dtype,
        b_dtype=beta.dtype,
        h_dtype=states.dtype,
        o_dtype=dout.dtype,
        seqlen_dtype=where.dtype,
        accum_dtype="float32",
        is_varlen=True,
        use_dht=True,
        state_v_first=False,
    )
    kernel(
        dout[None],
        dends,
        *(x[None] for x in (query, key, value, solved, summed, beta)),
        states,
        where,
        tables.chunks(CHUNK).cu_chunks,
        dq,
        dk,
        dv,
        dg,
        dbeta,
        # the kernel also writes gradients of starts, which nobody needs: the program of a segment
        # and head reads its dends first and writes here last, so no more states are allocated
        dends,
    )
    if heads < value_heads:
        dq, dk = group_reduce_vector(dq, heads), group_reduce_vector(dk, heads)
    dg = chunk_local_cumsum(
        dg, chunk_size=CHUNK, reverse=True, cu_seqlens=where, zero_last_chunk=True
    )
    return [dq[0], dk[0], dv[0], dg[0], dbeta[0]]


def _segments(tables: SegmentTables) -> torch.Tensor:
    """Gives the segments' `cu_seqlens`, prepared so that flash-qla does not wait for the device."""
    start = tables.start
    if not hasattr(start, "_flash_qla_prepared_varlen"):
        prepare_varlen_metadata(start, torch.from_numpy(tables.host.start))
    return start


def _chunks_where(tables: SegmentTables, which: torch.Tensor, heads: int) -> torch.Tensor:
    """Counts the chunks of a segment where `which` [N] holds, else 0: int32 [N, HV]."""
    counts = tables.chunks(CHUNK).cu_chunks.diff() * which
    return counts[:, None].expand(-1, heads).contiguous()
