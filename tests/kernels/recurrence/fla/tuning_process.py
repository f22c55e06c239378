"""fla tunes a kernel in a process that does not interpret, for a Hopper that is not there.

Kernels are compiled to machine code, and a launch does nothing. Prints what happened, in order, in
a tuning as it should be and in those in which something fails: "timed" where a configuration is,
"ahead" or "called" where one begins to compile, by thread.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from types import SimpleNamespace
from typing import Any

import torch
import triton.compiler
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import _async_compile, driver
from triton.runtime.errors import PTXASError

from prefixtree.kernels.recurrence import fla_rules

KERNEL = "chunk_local_cumsum_scalar_kernel"
(TUNER,) = (x for x in fla_rules.tuners(fla_rules) if x.base_fn.__name__ == KERNEL)
compile_really = triton.compiler.compile
# both of two configurations
together = threading.Barrier(2)
events: list[str] = []
# what compiling raises, by the number of warps
faults: dict[int, Exception] = {}


class Hopper:
    """As much of Triton's driver as it asks for."""

    utils = SimpleNamespace(
        get_device_properties=lambda _: {"max_shared_mem": 227 << 10},
        load_binary=lambda *_: ("module", "function", 0, 0, 1024),
    )
    launcher_cls = staticmethod(lambda *_: lambda *_: None)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda _: 0)
    get_active_torch_device = staticmethod(lambda: torch.device("cpu"))
    get_benchmarker = staticmethod(lambda: _time)


def _time(launch: Any, quantiles: Any) -> list[float]:
    events.append("timed")
    launch()
    return [1.0] * len(quantiles)


def _compile(*given: Any, options: dict[str, Any], **rest: Any) -> Any:
    is_main = threading.current_thread() is threading.main_thread()
    events.append("called" if is_main else "ahead")
    if not is_main:
        together.wait(5)
    if fault := faults.get(options["num_warps"]):
        raise fault
    return compile_really(*given, options=options, **rest)


def tuned(heads: int) -> dict[str, Any]:
    """A call of fla, which tunes anew for each number of heads."""
    events.clear()
    g = torch.zeros(1, 64, heads)
    starts, chunks = torch.tensor([0, 64]), torch.tensor([[0, 0]])
    try:
        fla_rules.chunk_local_cumsum(g, chunk_size=64, cu_seqlens=starts, chunk_indices=chunks)
        said = ""
    except Exception as error:
        said = repr(error)
    faults.clear()
    mode = _async_compile.active_mode.get()
    return {"events": list(events), "said": said, "mode": mode is not None}


def main() -> None:
    triton.compiler.compile = _compile
    driver.set_active(Hopper())
    os.sched_getaffinity = lambda _: set(range(2))
    # of one warp and of two
    TUNER.configs = TUNER.configs[:2]
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    found = {"as it should be": tuned(2)}
    TUNER.cache.clear()
    TUNER.fn.device_caches.clear()
    found["found on disk"] = tuned(2)

    faults[1] = PTXASError("too many registers")
    found["one does not fit"] = {**tuned(3), "warps": TUNER.best_config.num_warps}
    faults.update(dict.fromkeys((1, 2), ValueError("no such layout")))
    found["none compiles"] = tuned(4)

    def fail_once(**_: Any) -> None:
        knobs.runtime.jit_post_compile_hook = None
        raise OSError("no space left")

    knobs.runtime.jit_post_compile_hook = fail_once
    found["the end fails"] = tuned(5)
    del _async_compile.AsyncCompileMode
    found["an older Triton"] = tuned(6)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
