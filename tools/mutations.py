"""Are the recorded mutations still killed?

    python -m tools.mutations                    # all of tools/mutations.json
    python -m tools.mutations packing trunks.py  # those whose file has one of these in its path

A mutation is a file, its lines before and after, and a test that fails with it. Each is put into a
copy of the tree, where its test runs in a fork of this process, which has torch imported. Lines
that have moved to another file are found there. New mutations come from mutmut (tests/README.md).
Adapters' mutations need the Python of their environments: elsewhere no test runs.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "prefixtree"
SECONDS = 120  # of a core, for a test
# what pytest's status without a mutation says of one that changed it: a test fails, an import (that
# of a conftest has the status of no test), the process, or it has no end
WITHOUT = {0: "killed", 4: "no test ran", 5: "no test ran"}


def recorded() -> list[tuple[str, str, str, str]]:
    """File, before, after and test of each."""
    rows = json.loads((ROOT / "tools/mutations.json").read_text())
    return [(file, *row) for file, of_file in rows.items() for row in of_file]


def place(file: str, before: str, root: Path = ROOT) -> str | None:
    """The file that has the lines, once; None where none has, or several have."""
    others = sorted(str(p.relative_to(root)) for p in (root / PACKAGE).rglob("*.py"))
    inside = [f for f in others if f"\n{before}\n" in f"\n{(root / f).read_text()}"]
    if file in inside:
        return file
    return inside[0] if len(inside) == 1 else None


def mutated(text: str, before: str, after: str) -> str:
    return f"\n{text}".replace(f"\n{before}\n", f"\n{after}\n", 1)[1:]


def answer(tests: Sequence[str], log: Path, plain: bool = False) -> int:
    """What pytest says of tests in a fork; plain: numba's loops run as Python."""
    child = os.fork()
    if not child:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        signal.alarm(10 * SECONDS)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        if plain:
            os.environ["NUMBA_DISABLE_JIT"] = "1"
            importlib.import_module("numba").config.DISABLE_JIT = 1
        options = ["-x", "-q", "-p", "no:cacheprovider"]
        # Megatron's suite has nothing but what runs every time
        options += [] if "/megatron/" in tests[0] else ["--full"]
        # hypothesis is imported already
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning", f"--rootdir={Path.cwd()}"]
        os._exit(importlib.import_module("pytest").main([*options, *tests]))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(parts: list[str]) -> int:
    rows = [row for row in recorded() if not parts or any(part in row[0] for part in parts)]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "tree")
        listed = ["git", "ls-files", "-co", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        # what Python and numba have compiled is valid by the times of the files
        compiled = [str(p.relative_to(ROOT)) for p in ROOT.glob(f"{PACKAGE}/**/__pycache__/*")]
        for name in filter(lambda name: (ROOT / name).is_file(), [*names.split("\n"), *compiled]):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
        os.chdir(copy)
        sys.path[:] = [str(copy), *(p for p in sys.path if p and Path(p).resolve() != ROOT)]
        sys.dont_write_bytecode = True
        os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "1"}
        for module in ("pytest", "hypothesis", "numba", "transformers.modeling_utils"):
            importlib.import_module(module)
        found: Counter[str] = Counter()
        log = Path(folder, "log")
        for file, before, after, test in rows:
            start, at = time.monotonic(), place(file, before)
            result = "no test" if not test else "lines gone" if at is None else ""
            if at is not None and not result:
                plain, target = at.startswith(f"{PACKAGE}/loops/"), copy / at
                text, times = target.read_text(), target.stat()
                target.write_text(mutated(text, before, after))
                status = answer([test], log, plain)
                if status == 4 and "[" in test:
                    # its parameters have other names now
                    test = test.partition("[")[0]
                    status = answer([test], log, plain)
                target.write_text(text)
                os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))
                result = "survived"
                if status:
                    result = WITHOUT.get(answer([test], log, plain), "red without it")
            found[result] += 1
            seconds = time.monotonic() - start
            print(f"{result:10} {seconds:5.1f} s  {at or file}: {test}", flush=True)
            if result != "killed":
                print(f"-{before}\n+{after}", flush=True)
    print(", ".join(f"{count} {result}" for result, count in found.items()))
    return found.total() - found["killed"] > 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
