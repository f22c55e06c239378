"""Machine code of compiled Triton kernels: what a program uses, and what a step of a loop issues.

It is read by triton's bundled cuobjdump and nvdisasm; no GPU.
"""

from __future__ import annotations

import collections
import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
# shared memory a multiprocessor has for programs, KiB
SHARED = {80: 163, 86: 99, 89: 99, 90: 227}


@dataclass
class Loop:
    """One step of an innermost loop, of one program: issue slots and tensor core cycles; Hopper's
    product instructions of a warp, and the waits for them."""

    issued: int
    tensor: int
    spills: int
    products: int
    waits: int


@dataclass
class Code:
    registers: int
    stack: int
    shared: int
    programs: int
    loops: list[Loop]
    overwritten: int = 0


def read(kernel: Any, warps: int, capability: int, with_loops: bool | None = True) -> Code:
    """Reads the machine code of a compiled kernel; without its loops, which takes as long as to
    compile it, what it uses alone. None: with loops where they have spills or Hopper's products."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
        if with_loops is None:
            with_loops = stack > 0 or "wgmma" in kernel.asm["ptx"]
        lines = _tool("nvdisasm", "-c", file.name).split("\n") if with_loops else []
    shared = kernel.metadata.shared
    by_registers = 65536 // (-(-registers // 8) * 8 * warps * 32)
    by_memory = SHARED[capability] * 1024 // (shared + 1024)
    bodies = _innermost(lines)
    loops = sorted((loop_of(body, warps) for body in bodies), key=lambda loop: loop.issued)
    # a branch back from behind the end, as waits have them, spans more than its loop
    overwritten = sum(overwritten_in(x) for x in bodies if not any(" EXIT" in y for y in x))
    return Code(registers, stack, shared, min(by_registers, by_memory), loops[:2], overwritten)


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True).stdout


def _innermost(lines: list[str]) -> list[list[str]]:
    """Bodies of the loops with matrix products that hold no other such loop."""
    label = {m[1]: i for i, x in enumerate(lines) if (m := re.match(r"\s*\.(L_x_\d+):", x))}
    spans = []
    for i, line in enumerate(lines):
        target = re.search(r"BRA.*`\(\.(L_x_\d+)\)", line)
        if target and label.get(target[1], i) < i:
            spans.append((label[target[1]], i))
    spans = [s for s in spans if any("MMA" in x for x in lines[s[0] : s[1]])]
    inner = [s for s in spans if not any(s != t and s[0] <= t[0] and t[1] <= s[1] for t in spans)]
    return [lines[a:b] for a, b in inner]


def loop_of(body: list[str], warps: int) -> Loop:
    counts: collections.Counter[str] = collections.Counter()
    tensor = 0
    for line in body:
        if m := re.search(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)", line):
            counts[m[1]] += 1
        # 64 x N x 16 at 8192 FLOP a cycle and multiprocessor, four schedulers side by side
        if m := re.search(r"HGMMA\.64x(\d+)x16", line):
            tensor += int(m[1]) // 2
    scale = warps // 4
    waits = sum("WARPGROUP.DEPBAR" in line for line in body)
    issued = sum(counts.values()) * scale
    return Loop(issued, tensor * scale, counts["LDL"], counts["HGMMA"], waits)


_PRODUCT = re.compile(r"HGMMA\.64x(\d+)x16\S* R(\d+), (R(\d+))?")
_RESULT = re.compile(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)(\S*)\s+(?:U?P\w+, )?R(\d+)\b")


def overwritten_in(body: list[str]) -> int:
    """Registers of a first operand that outlives a step, and are written in the step.

    ptxas of CUDA 12.8 gave registers of the forward's queries to probabilities where both products
    had one shape and a branch lay between: later steps read these.
    """
    written, outlives, lost = set[int](), set[int](), set[int]()
    for line in body:
        results: Iterable[int] = ()
        if m := _PRODUCT.search(line):
            first = range(int(m[4]), int(m[4]) + 4) if m[3] else ()
            outlives |= set(first) - written
            results = range(int(m[2]), int(m[2]) + int(m[1]) // 2)
        elif (m := _RESULT.search(line)) and not re.match(r"ST|RED|ATOM|LDGSTS", m[1]):
            wide = re.search(r"\.(64|128|WIDE|M88\.4|M88\.2)\b", m[2])
            count = {"128": 4, "M88.4": 4}.get(wide[1], 2) if wide else 1
            results = range(int(m[3]), int(m[3]) + count)
        lost |= outlives & set(results)
        written |= set(results)
    return len(lost)
