"""fla's kernels are tuned with their configurations compiled side by side.

Triton's autotuner compiles a configuration where it first times it, one after another: 50 of them
before the gated delta rule's first gradient. Here all configurations of a kernel compile in threads
when its tuning begins. Then Triton times them as ever. If that fails, they compile one by one.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from types import ModuleType
from typing import Any

from triton.runtime import Autotuner, Heuristics

from prefixtree.kernels.recurrence.states import INTERPRETED

_log = logging.getLogger("prefixtree")


def compile_side_by_side(rules: ModuleType) -> None:
    """The kernels that a module's functions launch compile their configurations in threads."""
    for tuner in () if INTERPRETED else tuners(rules):
        tuner._bench = partial(_timed, tuner)


def tuners(rules: ModuleType) -> Iterator[Any]:
    """The autotuned kernels that the functions a module has can reach by global names."""
    rest, seen = list(vars(rules).values()), set[int]()
    while rest:
        one = rest.pop()
        while isinstance(one, Heuristics):
            one = one.fn
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Autotuner):
            yield one
        elif inspect.isfunction(one):
            function = inspect.unwrap(one)
            names = function.__code__.co_names
            rest += [function.__globals__[x] for x in names if x in function.__globals__]


def _timed(tuner: Any, *arguments: Any, config: Any, **options: Any) -> list[float]:
    """The autotuner's time of a configuration; before the first of a tuning, all are compiled."""
    try:
        configs = tuner.prune_configs(options)
        if config == configs[0]:
            # the mode is a context's, and would stay if its end failed
            copy_context().run(_compile, tuner, configs, arguments, options)
    except Exception as error:
        # the autotuner's own call says what is wrong, or does not need it
        _log.info("%s compiles one by one: %r", tuner.base_fn.__name__, error)
    return type(tuner)._bench(tuner, *arguments, config=config, **options)


def _compile(
    tuner: Any, configs: list[Any], arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Afterwards Triton has them."""
    from triton.runtime._async_compile import AsyncCompileMode

    with (
        ThreadPoolExecutor(min(len(configs), len(os.sched_getaffinity(0)))) as pool,
        # one that cannot be compiled says so where it is timed
        AsyncCompileMode(pool, ignore_errors=True),
    ):
        for config in configs:
            # a hook could change what is compiled
            if config.pre_hook is None:
                tuner.fn.run(*arguments, **{**options, **config.all_kwargs(), "warmup": True})
