"""Three rules of recurrence: fla-core's kernels inside chunks, ours between them.

Segments of a forest are contiguous in packed order. So fla's kernels inside chunks run once for all
segments, as for a batch of independent sequences. Two of fla's steps walk from chunk to chunk. In
their place `states.carry_states` and `states.carry_gradients` follow the tree. The functions of fla
used here are not its public interface; `fla.VERSIONS` names the releases that have them.

Triton's autotuner compiles a configuration when it first times it, one after another: 50 of them
before the gated delta rule's first gradient. Here all configurations of a kernel compile in threads
when its tuning begins. Then Triton times them as ever. If that fails, they compile one by one.

Legend: T packed tokens, H key heads, HV value heads, K and V head dims.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from types import ModuleType
from typing import Any

import torch
from fla.ops.common.chunk_o import chunk_bwd_dqkwg, chunk_bwd_dv, chunk_bwd_dv_local, chunk_fwd_o
from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd, recompute_w_u_fwd
from fla.ops.gla.chunk import chunk_gla_fwd_o_gk
from fla.ops.kda.chunk_bwd import chunk_kda_bwd_dAv, chunk_kda_bwd_wy_dqkg_fused
from fla.ops.kda.chunk_intra import chunk_kda_bwd_intra, chunk_kda_fwd_intra
from fla.ops.kda.wy_fast import recompute_w_u_fwd as recompute_kda
from fla.ops.utils import chunk_local_cumsum
from fla.ops.utils.constant import RCP_LN2
from triton.runtime import Autotuner, Heuristics

from prefixtree.kernels.recurrence.states import CHUNK, INTERPRETED, carry_gradients, carry_states
from prefixtree.packing.segments import StateSchedule

_log = logging.getLogger("prefixtree")


def compile_side_by_side(rules: ModuleType) -> None:
    """Lets the kernels of a module's functions compile their configurations in threads."""
    for tuner in () if INTERPRETED else tuners(rules):
        tuner._bench = partial(_timed, tuner)


def tuners(rules: ModuleType) -> Iterator[Any]:
    """Yields the autotuned kernels that a module's functions can reach by global names."""
    pending, seen = list(vars(rules).values()), set[int]()
    while pending:
        candidate = pending.pop()
        while isinstance(candidate, Heuristics):
            candidate = candidate.fn
        if id(candidate) in seen:
            continue
        seen.add(id(candidate))
        if isinstance(candidate, Autotuner):
            yield candidate
        elif inspect.isfunction(candidate):
            function = inspect.unwrap(candidate)
            names = function.__code__.co_names
            pending += [function.__globals__[x] for x in names if x in function.__globals__]


def _timed(tuner: Any, *arguments: Any, config: Any, **options: Any) -> list[float]:
    """Times a configuration for the autotuner; before the first of a tuning, all compile."""
    try:
        configs = tuner.prune_configs(options)
        if config == configs[0]:
            # the mode belongs to a context, and would stay if its end failed
            copy_context().run(_compile, tuner, configs, arguments, options)
    except Exception as error:
        # the autotuner's own call says what is wrong, or does not need it
        _log.info("%s compiles one by one: %r", tuner.base_fn.__name__, error)
    return type(tuner)._bench(tuner, *arguments, config=config, **options)


def _compile(
    tuner: Any, configs: list[Any], arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Compiles configurations in threads; afterwards Triton has them."""
    from triton.runtime._async_compile import AsyncCompileMode

    with (
        ThreadPoolExecutor(min(len(configs), len(os.sched_getaffinity(0)))) as pool,
        # a configuration that cannot be compiled says so when it is timed
        AsyncCompileMode(pool, ignore_errors=True),
    ):
        for config in configs:
            # a hook could change the compiled kernel
            if config.pre_hook is None:
                tuner.fn.run(*arguments, **{**options, **config.all_kwargs(), "warmup": True})


def delta_rule_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    schedule: StateSchedule,
    scale: float,
    initial: torch.Tensor | None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]:
    """Computes the gated delta rule: out [T, HV, V], what the backward needs, and the final states.

    q, k [T, H, K], v [T, HV, V], g and beta [T, HV]. The backward needs the gates summed along
    chunks, and the solved triangles.
    """
    where = _segments(schedule)
    q, k, v, beta = q[None], k[None], v[None], beta[None]
    g = chunk_local_cumsum(g[None].float(), chunk_size=CHUNK, scale=RCP_LN2, **where)
    w, u, solved = chunk_gated_delta_rule_fwd_intra(k=k, v=v, g=g, beta=beta, **where)
    h, v_new, final = carry_states(schedule, k[0], u[0], w[0], g=g[0], initial=initial)
    out = chunk_fwd_o(q=q, k=k, v=v_new[None], h=h[None], g=g, scale=scale, **where)
    return out[0], (g[0], solved[0]), final


def delta_rule_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    kept: tuple[torch.Tensor, ...],
    dout: torch.Tensor,
    schedule: StateSchedule,
    scale: float,
    initial: torch.Tensor | None,
    dfinal: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Computes gradients of q, k, v, g, beta and initial; dfinal as in `carry_gradients`."""
    where = _segments(schedule)
    g, solved = kept
    q, k, v, beta, g, solved, dout = (x[None] for x in (q, k, v, beta, g, solved, dout))
    w, u = recompute_w_u_fwd(k=k, v=v, beta=beta, A=solved, g=g, **where)
    h, v_new, _ = carry_states(schedule, k[0], u[0], w[0], g=g[0], initial=initial)
    dv = chunk_bwd_dv_local(q=q, k=k, g=g, do=dout, scale=scale, **where)
    dh, dinitial = carry_gradients(
        schedule, q[0], k[0], dout[0], w=w[0], dv=dv[0], g=g[0], scale=scale, dfinal=dfinal
    )
    inside = {"h": h[None], "dh": dh[None], "dv": dv, "scale": scale, **where}
    dq, dk, dw, dg = chunk_bwd_dqkwg(q=q, k=k, v=v_new[None], w=w, g=g, do=dout, **inside)
    dk_solved, dv, dbeta, dg_solved = prepare_wy_repr_bwd(
        k=k, v=v, beta=beta, g=g, A=solved, dw=dw, du=dv, **where
    )
    dg = chunk_local_cumsum(dg.add_(dg_solved), chunk_size=CHUNK, reverse=True, **where)
    return dq[0], dk.add_(dk_solved)[0], dv[0], dg[0], dbeta[0], dinitial


def channel_delta_rule_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    schedule: StateSchedule,
    scale: float,
    initial: torch.Tensor | None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]:
    """Computes `delta_rule_forward` with a gate per channel of the key (Kimi): g [T, HV, K]."""
    where = _segments(schedule)
    q, k, v, beta = q[None], k[None], v[None], beta[None]
    g = chunk_local_cumsum(g[None].float(), chunk_size=CHUNK, scale=RCP_LN2, **where)
    w, u, _, kg, scores, solved = chunk_kda_fwd_intra(
        q=q, k=k, v=v, gk=g, beta=beta, scale=scale, chunk_size=CHUNK, **where
    )
    h, v_new, final = carry_states(schedule, kg[0], u[0], w[0], gk=g[0], initial=initial)
    out = chunk_gla_fwd_o_gk(
        q=q, v=v_new[None], g=g, A=scores, h=h[None], scale=scale, chunk_size=CHUNK, **where
    )
    return out[0], (g[0], solved[0], scores[0]), final


def channel_delta_rule_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    kept: tuple[torch.Tensor, ...],
    dout: torch.Tensor,
    schedule: StateSchedule,
    scale: float,
    initial: torch.Tensor | None,
    dfinal: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Computes the gradients of q, k, v, g, beta and initial, with gates per channel."""
    where = {**_segments(schedule), "chunk_size": CHUNK}
    g, solved, scores = kept
    q, k, v, beta, g, solved, scores, dout = (
        x[None] for x in (q, k, v, beta, g, solved, scores, dout)
    )
    w, u, qg, kg = recompute_kda(q=q, k=k, v=v, beta=beta, A=solved, gk=g, **_segments(schedule))
    h, v_new, _ = carry_states(schedule, kg[0], u[0], w[0], gk=g[0], initial=initial)
    dscores, dv = chunk_kda_bwd_dAv(
        q=q, k=k, v=v_new[None], do=dout, A=scores, scale=scale, **where
    )
    dh, dinitial = carry_gradients(
        schedule, qg[0], kg[0], dout[0], w=w[0], dv=dv[0], gk=g[0], scale=scale, dfinal=dfinal
    )
    dq, dk, dv, dbeta, dg, dsolved = chunk_kda_bwd_wy_dqkg_fused(
        q=q,
        k=k,
        v=v,
        v_new=v_new[None],
        g=g,
        beta=beta,
        A=solved,
        h=h[None],
        do=dout,
        dh=dh[None],
        dv=dv,
        scale=scale,
        **where,
    )
    dq, dk, dbeta, dg = chunk_kda_bwd_intra(
        q=q,
        k=k,
        g=g,
        beta=beta,
        dAqk=dscores,
        dAkk=dsolved,
        dq=dq,
        dk=dk,
        db=dbeta,
        dg=dg,
        **where,
    )
    groups = v.shape[2] // q.shape[2]
    if groups > 1:
        dq, dk = (x.unflatten(2, (-1, groups)).sum(3) for x in (dq, dk))
    dg = chunk_local_cumsum(dg, reverse=True, **where)
    return dq[0], dk[0], dv[0], dg[0], dbeta[0], dinitial


def linear_attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    schedule: StateSchedule,
    scale: float,
    initial: torch.Tensor | None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]:
    """Computes linear attention with a gate per head: out [T, HV, V], what is kept, final states.

    q, k [T, H, K], v [T, HV, V], g [T, HV]. Mamba-2 is one: q = C, k = B, v = x dt, g = A dt.
    """
    where = _segments(schedule)
    g = chunk_local_cumsum(g[None].float(), chunk_size=CHUNK, scale=RCP_LN2, **where)
    h, _, final = carry_states(schedule, k, v, g=g[0], initial=initial)
    out = chunk_fwd_o(q=q[None], k=k[None], v=v[None], h=h[None], g=g, scale=scale, **where)
    return out[0], (g[0],), final


def linear_attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kept: tuple[torch.Tensor, ...],
    dout: torch.Tensor,
    schedule: StateSchedule,
    scale: float,
    initial: torch.Tensor | None,
    dfinal: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Computes the gradients of q, k, v, g and initial of gated linear attention."""
    where = _segments(schedule)
    (g,) = kept
    h, _, _ = carry_states(schedule, k, v, g=g, initial=initial)
    dh, dinitial = carry_gradients(schedule, q, k, dout, g=g, scale=scale, dfinal=dfinal)
    q, k, v, g, dout = (x[None] for x in (q, k, v, g, dout))
    inside = {"g": g, "do": dout, "dh": dh[None], "scale": scale, **where}
    dq, dk, _, dg = chunk_bwd_dqkwg(q=q, k=k, v=v, h=h[None], **inside)
    dv = chunk_bwd_dv(q=q, k=k, **inside)
    dg = chunk_local_cumsum(dg, chunk_size=CHUNK, reverse=True, **where)
    return dq[0], dk[0], dv[0], dg[0], dinitial


def _segments(schedule: StateSchedule) -> dict[str, Any]:
    """Names arguments of fla's kernels: int32 [N + 1], and int32 [NC, 2] (segment, chunk in it)."""
    return {"cu_seqlens": schedule.start, "chunk_indices": schedule.chunk_indices}


compile_side_by_side(sys.modules[__name__])
