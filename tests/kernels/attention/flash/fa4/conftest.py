"""These tests run in an environment of their own (`make test-flash`), never with the others.

No GPU is needed: kernels are compiled for sm_90 and, where that is enough, run on the CPU.
"""

from __future__ import annotations

import importlib.util
import os

import pytest

# what flash-attn-4 compiles for where there is no device to ask; read when it is imported
os.environ |= {
    "CUTE_DSL_ARCH": "sm_90a",
    "FLASH_ATTENTION_ARCH": "sm_90",
    "FLASH_ATTENTION_NUM_SMS": "132",
    # ptxas says registers and spills
    "CUTE_DSL_COMPILER_OPT": "remarks{ptx}",
}


def pytest_configure(config: pytest.Config) -> None:
    if importlib.util.find_spec("flash_attn") is None:
        raise pytest.UsageError(
            "tests/kernels/attention/flash/fa4 needs flash-attn-4: run `make test-flash`"
        )
    # of each operation the line of source, for messages, which takes a third of the time
    from cutlass.base_dsl import dsl

    dsl._set_enable_frame_filtering = lambda enable: None
    # the CuTe DSL and flash-attn-4 warn about their own internals, fake tensors of their pointers
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning")
    config.addinivalue_line("filterwarnings", "ignore::UserWarning")
    config.addinivalue_line("filterwarnings", "ignore::FutureWarning")
