"""The host side of the Triton backend: layouts, buffers, launches. No synchronisation.

Legend: T packed tokens, Tq query rows, H query heads, Hk kv heads, D and Dv head dims.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from prefixtree.kernels import runtime
from prefixtree.kernels.attention.protocol import AttentionCall, gradient_dtype
from prefixtree.kernels.attention.triton import configs
from prefixtree.kernels.attention.triton.backward import (
    dkdv_kernel,
    dq_kernel,
    prepare_kernel,
    reduce_kernel,
)
from prefixtree.kernels.attention.triton.chosen import lay_out
from prefixtree.kernels.attention.triton.configs import Config, KernelConfigs, padded
from prefixtree.kernels.attention.triton.forward import forward_kernel
from prefixtree.packing.block_tables import BlockTables, TileShape

LOG2E = 1.4426950408889634
INTERPRETED = not isinstance(forward_kernel, triton.JITFunction)
# offsets inside a tile are computed in int32
_MOST_OFFSET = 2**31 - 1
# rows of out and dout that one program of the preparation takes
_PREPARED = 32


def refusal(call: AttentionCall) -> str | None:
    """Says why this backend cannot serve a call; None if it can."""
    q, v = call.q, call.v
    if not (q.is_cuda or INTERPRETED):
        return f"it runs on GPUs, and q is on {q.device}"
    dtypes = (torch.float16, torch.bfloat16)
    if q.dtype not in dtypes and not (INTERPRETED and q.dtype == torch.float32):
        return f"it computes in float16 and bfloat16, and q is {q.dtype}"
    if q.is_cuda and torch.version.hip is None and runtime.capability(q.device) < (8, 0):
        return "it needs compute capability 8.0 (Ampere) or later"
    if max(q.shape[2], v.shape[2]) > 256 or min(q.shape[2], v.shape[2]) < 1:
        return f"head dims must be 1 to 256, and are {q.shape[2]} and {v.shape[2]}"
    if not call.scale >= 0:
        return f"scale must not be negative, and is {call.scale}"
    # it multiplies a masked score, which must stay finite and far below the others
    outer = (call.softcap or call.scale) * LOG2E
    if call.chosen is not None and outer and not 2.0**-46 <= outer <= 2.0**46:
        return f"with chosen keys, scale (or softcap) must be about 1, and is {outer / LOG2E}"
    if 3 * (q.shape[0] + 1024) * q.shape[1] > _MOST_OFFSET:
        return f"{q.shape[0]} query tokens x {q.shape[1]} heads do not fit 32-bit row numbers"
    return None


@dataclass(frozen=True)
class Problem:
    """One call in layouts that the kernels read, and the facts on which they are specialised."""

    call: AttentionCall
    # those of the call, copied if no kernel can read them in place
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    choice: KernelConfigs
    # int32 [T], each token's on its path, on the device
    position: torch.Tensor
    # of the forward, the keys' and the queries' kernel
    configs: tuple[Config, Config, Config]

    @classmethod
    def of(cls, call: AttentionCall) -> Problem:
        q, k, v = _readable(call.q), _readable(call.k), _readable(call.v)
        tma = _describable(q) and all(_describable(x) and _side_by_side(x) for x in (k, v))
        choice = configs.choose(
            runtime.capability(q.device),
            padded(q.shape[2]),
            padded(v.shape[2]),
            q.shape[1] // k.shape[1],
            tma,
            torch.version.hip is None,
        )
        position = call.mask.on(q.device)["position_ids"]
        return cls(call, q, k, v, choice, position, choice.of(call.mask, call.window))

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    @property
    def blocks(self) -> int:
        return self.group // self.choice.heads

    def tokens(self, config: Config) -> int:
        """Counts the query tokens of a tile."""
        return config.rows // self.choice.heads

    def tables(self, config: Config) -> BlockTables:
        """Gives the block tables of a kernel; kernels of the same tiles read the same tables."""
        _, keys, _ = self.configs
        longest = 0
        if (config.rows, config.keys, config.cut) == (keys.rows, keys.keys, keys.cut):
            longest = configs.piece_tiles(
                self.call.mask.visible_pairs(self.call.window),
                self.tokens(config) * config.keys,
                self.k.shape[1],
                runtime.processors(self.q.device),
            )
        masked = self.call.chosen is not None
        shape = TileShape(self.tokens(config), config.keys, config.cut, longest, masked)
        return self.call.mask.tables(shape, self.call.window, self.q.device)

    def chosen(self, config: Config, tables: BlockTables, by_key: bool) -> tuple[Any, Any]:
        """Calls `chosen.lay_out`; gives unused tensors if all keys are chosen."""
        if self.call.chosen is None:
            return self.position, self.position
        size = _padded_tokens(config, self.choice), config.keys
        return lay_out(self.call, self.position, tables, size, by_key)

    def statics(self, config: Config) -> dict[str, Any]:
        """Names the compile-time arguments common to the kernels, and the launch options."""
        return _statics(
            config,
            self.choice,
            self.q.shape[1],
            self.k.shape[1],
            self.q.shape[2],
            self.v.shape[2],
            self.call.window > 0,
            self.call.softcap > 0,
            self.call.chosen is not None,
        )

    @property
    def factors(self) -> tuple[float, float]:
        """`inner` and `outer` of `triton_primitives.squash`."""
        scale, softcap = self.call.scale, self.call.softcap
        if softcap:
            return scale / softcap, softcap * LOG2E
        # with chosen keys `outer` multiplies a masked score, which must stay far below the others
        return 0.0, max(scale * LOG2E, 2.0**-46 if self.call.chosen is not None else 0.0)

    # ---- what a kernel receives for an array: a pointer, or a descriptor -------------------------

    def rows(self, x: torch.Tensor, config: Config, columns: int, shared: bool = False) -> Any:
        """Gives q or dout, in tiles of (tokens x heads of a block) and of so many columns."""
        if shared or not self.choice.tma:
            return x
        box = [self.tokens(config), self.choice.heads, columns]
        return TensorDescriptor(x, list(x.shape), [x.stride(0), x.stride(1), 1], box)

    def queries(self, config: Config) -> Any:
        return self.rows(self.q, config, self.choice.width(self.q.shape[2]), config.shared > 0)

    def keys(self, x: torch.Tensor, config: Config, piece: int) -> Any:
        """Gives k or v as a matrix, heads side by side, in pieces of so many columns."""
        if not self.choice.tma:
            return x
        columns = (x.shape[1] - 1) * x.stride(1) + x.shape[2]
        box = [config.keys, piece]
        return TensorDescriptor(x, [x.shape[0], columns], [x.stride(0), 1], box)

    def vector(self, x: torch.Tensor, size: int, tma: bool) -> Any:
        return TensorDescriptor(x, [x.numel()], [1], [size]) if tma else x

    def spans(self, tables: BlockTables) -> Any:
        return self.vector(tables.k_spans, tables.k_spans.shape[1], self.choice.tma)

    @property
    def rows_tma(self) -> bool:
        """Whether every query tile's row values start at a multiple of 16 bytes."""
        return self.choice.tma and (not self.call.mask.is_subset or self.choice.heads % 4 == 0)

    def row_values(self, rows: torch.Tensor, config: Config) -> Any:
        """Gives the output of `prepare_kernel`, [2 or 3, rows], as a vector for one descriptor."""
        return self.vector(rows, config.rows, self.rows_tma)

    def gradient_operands(
        self, config: Config, dout: torch.Tensor, rows: torch.Tensor
    ) -> tuple[Any, ...]:
        """Lists the first arguments of the kernels of dK and dV and of dQ."""
        return (
            self.queries(config),
            self.keys(self.k, config, self.choice.width(self.k.shape[2])),
            self.keys(self.v, config, padded(self.v.shape[2])),
            self.rows(dout, config, padded(dout.shape[2]), config.shared > 1),
            self.row_values(rows, config),
        )

    def gradient_numbers(self, dout: torch.Tensor, rows_a_block: int) -> tuple[Any, ...]:
        """Lists the last arguments of these kernels before the compile-time ones."""
        return (
            *self.q.stride()[:2],
            *self.key_strides(),
            *dout.stride()[:2],
            self.q.shape[0],
            rows_a_block,
            *self.factors,
            self.call.scale,
            self.call.window,
        )

    def key_strides(self) -> tuple[int, ...]:
        return (self.k.stride(0), self.k.stride(1), self.v.stride(0), self.v.stride(1))


def _padded_tokens(config: Config, choice: KernelConfigs) -> int:
    """A power of two above the greatest token of a tile's rows."""
    return triton.next_power_of_2(-(-config.rows // choice.heads))


@cache
def _statics(
    config: Config,
    choice: KernelConfigs,
    heads: int,
    kv_heads: int,
    d: int,
    dv: int,
    has_window: bool,
    has_softcap: bool,
    has_chosen: bool,
) -> dict[str, Any]:
    fixed: dict[str, Any] = {
        "GROUP": heads // kv_heads,
        "HEADS": choice.heads,
        "KV_HEADS": kv_heads,
        "D": d,
        "DV": dv,
        "D_WIDTH": choice.width(d),
        "DV_PADDED": padded(dv),
        "TOKENS_PADDED": _padded_tokens(config, choice),
        "ROWS": config.rows,
        "KEYS": config.keys,
        "HAS_WINDOW": has_window,
        "HAS_SOFTCAP": has_softcap,
        "HAS_CHOSEN": has_chosen,
        "TMA": choice.tma,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }
    if config.registers and torch.version.hip is None:
        fixed["maxnreg"] = config.registers
    return fixed


def forward(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes out [Tq, H, Dv] in q's dtype, and lse [H, Tq] float32 over the keys."""
    q, k, v, sinks = call.q, call.k, call.v, call.sinks
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    if q.shape[0] == 0:
        return out, lse
    problem = Problem.of(call)
    config, _, _ = problem.configs
    tables = problem.tables(config)
    with runtime.current(q.device):
        forward_kernel[(len(tables.q_tiles) * k.shape[1] * problem.blocks,)](
            problem.queries(config),
            problem.keys(problem.k, config, problem.choice.width(k.shape[2])),
            problem.keys(problem.v, config, padded(v.shape[2])),
            lse if sinks is None else sinks.contiguous(),
            out,
            lse,
            problem.spans(tables),
            problem.position,
            *problem.chosen(config, tables, False),
            *_forward_tables(tables),
            *problem.q.stride()[:2],
            *problem.key_strides(),
            q.shape[0],
            *problem.factors,
            call.window,
            HAS_SINKS=sinks is not None,
            Q_TMA=problem.choice.tma and config.shared < 1,
            **problem.statics(config),
        )
    return out, lse


def backward(
    call: AttentionCall,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Computes dq, dk, dv as `Kernels` says, contiguous, and dsinks."""
    q, k, v, sinks = call.q, call.k, call.v, call.sinks
    dq = q.new_empty(q.shape)
    # the kernels cast their float32 sums to the dtype of these
    dk, dv = (x.new_empty(x.shape, dtype=gradient_dtype(call)) for x in (k, v))
    if q.shape[0] == 0:
        return dq, dk.zero_(), dv.zero_(), None if sinks is None else torch.zeros_like(sinks)
    problem = Problem.of(call)
    if not (_describable(dout) or not problem.choice.tma):
        dout = dout.contiguous()
    dout = _readable(dout)
    _, keys, queries = problem.configs
    with runtime.current(q.device):
        rows, rows_a_block, dsinks = _prepare(problem, dout, dlse, sinks, out, lse, keys, queries)
        _keys_gradient(problem, keys, dout, rows, rows_a_block, dk, dv)
        _queries_gradient(problem, queries, dout, rows, rows_a_block, dq)
    return dq, dk, dv, dsinks


def _prepare(
    problem: Problem,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    keys: Config,
    queries: Config,
) -> tuple[torch.Tensor, int, torch.Tensor | None]:
    """Runs `prepare_kernel`: its ROW_VALUES, the number of rows per block of heads, and dsinks."""
    num_queries, num_heads = lse.shape[1], lse.shape[0]
    # a tile that starts at the last row must find dead rows after it, not another head's
    tokens = num_queries + max(keys.rows, queries.rows)
    tokens = triton.cdiv(tokens, _PREPARED) * _PREPARED
    shared = sinks is not None and dlse is not None
    rows = lse.new_empty(3 if shared else 2, num_heads * tokens)
    programs = tokens // _PREPARED
    partial = lse.new_empty(programs, num_heads) if sinks is not None else lse
    prepare_kernel[(programs, num_heads)](
        out,
        dout,
        lse,
        lse if dlse is None else dlse.contiguous(),
        lse if sinks is None else sinks.contiguous(),
        rows,
        partial,
        *dout.stride()[:2],
        num_queries,
        tokens,
        GROUP=problem.group,
        HEADS=problem.choice.heads,
        KV_HEADS=problem.k.shape[1],
        DV=out.shape[2],
        DV_PADDED=padded(out.shape[2]),
        ROWS=_PREPARED,
        HAS_DLSE=dlse is not None,
        HAS_SINKS=sinks is not None,
    )
    dsinks = partial.sum(0).to(sinks.dtype) if sinks is not None else None
    return rows, tokens * problem.choice.heads, dsinks


def _keys_gradient(
    problem: Problem,
    config: Config,
    dout: torch.Tensor,
    rows: torch.Tensor,
    rows_a_block: int,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    tables = problem.tables(config)
    kv_heads, d, d_v = dk.shape[1], dk.shape[2], dv.shape[2]
    deterministic = problem.call.deterministic
    slots = len(tables.slots)
    sums = rows
    if slots:
        # sums into which cut tiles add or, to be deterministic, one partial sum per piece
        count = tables.num_partials if deterministic else slots
        shape = (count, kv_heads, config.keys, d + d_v)
        sums = rows.new_empty(shape) if deterministic else rows.new_zeros(shape)
    operands = problem.gradient_operands(config, dout, rows)
    numbers = problem.gradient_numbers(dout, rows_a_block)
    chosen = problem.chosen(config, tables, True)
    for with_dk, with_dv in ((True, False), (False, True)) if config.apart else ((True, True),):
        dkdv_kernel[(len(tables.pieces) * kv_heads,)](
            *operands,
            dk,
            dv,
            sums,
            problem.spans(tables),
            problem.position,
            *chosen,
            tables.q_tiles,
            tables.k_tiles,
            tables.pieces,
            tables.k_runs,
            *numbers,
            TOKENS=problem.tokens(config),
            HAS_SHARE=len(rows) == 3,
            ROWS_TMA=problem.rows_tma,
            SUBSET=problem.call.mask.is_subset,
            DETERMINISTIC=deterministic,
            WITH_DK=with_dk,
            WITH_DV=with_dv,
            **problem.statics(config),
        )
    if slots:
        reduce_kernel[(slots, kv_heads)](
            sums,
            dk,
            dv,
            tables.k_tiles,
            tables.slots,
            KV_HEADS=kv_heads,
            D=d,
            DV=d_v,
            D_PADDED=padded(d),
            DV_PADDED=padded(d_v),
            KEYS=config.keys,
            DETERMINISTIC=deterministic,
        )


def _queries_gradient(
    problem: Problem,
    config: Config,
    dout: torch.Tensor,
    rows: torch.Tensor,
    rows_a_block: int,
    dq: torch.Tensor,
) -> None:
    tables = problem.tables(config)
    dq_kernel[(len(tables.q_tiles) * problem.k.shape[1] * problem.blocks,)](
        *problem.gradient_operands(config, dout, rows),
        dq,
        problem.spans(tables),
        problem.position,
        *problem.chosen(config, tables, False),
        *_forward_tables(tables),
        *problem.gradient_numbers(dout, rows_a_block),
        HAS_SHARE=len(rows) == 3,
        Q_TMA=problem.choice.tma and config.shared < 1,
        DOUT_TMA=problem.choice.tma and config.shared < 2,
        ROWS_TMA=problem.rows_tma,
        **problem.statics(config),
    )


def _forward_tables(tables: BlockTables) -> tuple[torch.Tensor, ...]:
    """Lists the tables of the two kernels over query tiles, in the order of their parameters."""
    return (
        tables.q_tiles,
        tables.q_order,
        tables.k_tiles,
        tables.q_ptr,
        tables.q_split,
        tables.q_runs,
        tables.partial_ptr,
        tables.partial_tiles,
    )


# ---- layouts -------------------------------------------------------------------------------------


def _readable(x: torch.Tensor) -> torch.Tensor:
    """Copies x if its last stride is not 1, or if a tile spans more than int32 offsets."""
    # 256 rows are the most a tile has; heads of one kv head can lie a whole sequence apart
    reach = 256 * x.stride(0) + x.shape[1] * x.stride(1)
    return x if x.stride(-1) == 1 and reach <= _MOST_OFFSET else x.contiguous()


def _describable(x: torch.Tensor) -> bool:
    """Whether a tensor descriptor can describe x: 16-byte strides and base."""
    step = 16 // x.element_size()
    aligned = all(s > 0 and s % step == 0 for s in x.stride()[:2])
    return aligned and x.data_ptr() % 16 == 0


def _side_by_side(x: torch.Tensor) -> bool:
    return (x.shape[1] - 1) * x.stride(1) + x.shape[2] <= x.stride(0)
