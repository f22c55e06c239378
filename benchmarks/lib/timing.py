"""Medians of times, and peaks of memory: on a GPU by events, on the host by the clock."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]

# of a step on the host
REPEATS = 9
# cycles, about 2 ms
_HEAD_START = 4_000_000


def median_ms(
    run: Callable[[], object], device: torch.device, repeats: int, warm_ups: int
) -> tuple[float, list[float]]:
    """Median and all milliseconds of `run`, by CUDA events where there is CUDA."""
    for _ in range(warm_ups):
        run()
    times = []
    for _ in range(repeats):
        if device.type != "cuda":
            start = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - start))
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # the GPU waits a moment, so that launches are queued before it begins: a host that is
        # slower than the kernels would be timed otherwise (host time is a column of the table)
        torch.cuda._sleep(_HEAD_START)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times), times


def host_ms(run: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Median milliseconds of `run` on the host, after one warm-up; garbage is collected between."""
    run()
    times = []
    for _ in range(repeats):
        gc.collect()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def host_us(run: Callable[[], object], calls: int = 10) -> float:
    """Median microseconds until a call returns while the GPU still works: what the host pays."""
    times = []
    torch.cuda.synchronize()
    for _ in range(calls):
        start = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return statistics.median(times)


def peak_bytes(run: Callable[[], object]) -> int:
    """Most memory held during `run` beyond what was held before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def size(*tensors: torch.Tensor) -> int:
    """Bytes."""
    return sum(x.numel() * x.element_size() for x in tensors)


def times_of(
    attend: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    dout: torch.Tensor,
    pairs: int,
    repeats: int,
    warm_ups: int,
) -> Row:
    """Medians of forward and backward apart, what the host pays, TF of so many visible pairs."""
    device, (_, heads, d), d_v = dout.device, inputs[0].shape, inputs[2].shape[2]

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return attend(*inputs)

    row: Row = {}
    timed = partial(median_ms, device=device, repeats=repeats, warm_ups=warm_ups)
    row["forward_ms"], row["forward_all_ms"] = timed(forward)
    backward = partial(torch.autograd.grad, attend(*inputs), inputs, dout, retain_graph=True)
    row["backward_ms"], row["backward_all_ms"] = timed(backward)
    if device.type == "cuda":
        row["forward_host_us"], row["backward_host_us"] = host_us(forward), host_us(backward)
    row["forward_tflops"] = 2.0 * (d + d_v) * heads * pairs / row["forward_ms"] / 1e9
    row["backward_tflops"] = (6.0 * d + 4.0 * d_v) * heads * pairs / row["backward_ms"] / 1e9
    return row


def profile_of(run: Callable[[], object]) -> Any:
    """torch's profile of `run`, which is warm, with the kernels of the GPU if there is one."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(ProfilerActivity.CUDA)
    with profile(activities=kinds) as seen:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return seen


def profiled(run: Callable[[], object], rows: int = 40) -> str:
    """The kernels that take the time of `run`, which is warm, as a table."""
    return _table(profile_of(run), rows)


def note_profile(run: Callable[[], object], path: Path, title: str) -> Any:
    """Appends the kernels of `run` to a text file; -> the profile."""
    seen = profile_of(run)
    with path.open("a") as file:
        file.write(f"== {title}\n{_table(seen, 40)}\n\n")
    return seen


def _table(seen: Any, rows: int) -> str:
    by = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    table = seen.key_averages().table(sort_by=by, row_limit=rows, max_name_column_width=90)
    return str(table)
