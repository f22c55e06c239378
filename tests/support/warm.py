"""Runs code as `python -c` does, in a fork of a process that has imported torch and nothing else:
what is imported behind torch is seen, and torch's second and a half are spent once."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]


def run_warm(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What the code wrote, and its exit code; `sys.argv` is that of `python -c CODE ARGUMENTS`."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        asked = {"code": code, "arguments": arguments, "folder": folder}
        server.stdin.write(json.dumps(asked | {"environment": dict(os.environ)}) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        said = [(Path(folder) / name).read_text() for name in ("stdout", "stderr")]
    return subprocess.CompletedProcess(code, status, *said)


@cache
def _server() -> Any:
    """It ends with its standard input: with the tests."""
    # a file: of `tests` nothing is imported either
    command = [sys.executable, __file__]
    pipe = subprocess.PIPE
    server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
    atexit.register(_end, server, os.getpid())
    return server


def _end(server: Any, started_by: int) -> None:
    # not in a fork of the tests
    if os.getpid() == started_by:
        server.communicate()


def serve() -> None:
    import torch  # noqa: F401

    # as `python -c` has it
    sys.path[0] = ""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(asked: dict[str, Any]) -> None:
    """The fork: it never returns."""
    status = 1
    try:
        for number, name in ((1, "stdout"), (2, "stderr")):
            file = os.open(Path(asked["folder"]) / name, os.O_WRONLY | os.O_CREAT)
            os.dup2(file, number)
        os.environ.clear()
        os.environ.update(asked["environment"])
        sys.argv = ["-c", *asked["arguments"]]
        sys.modules["__main__"] = ModuleType("__main__")
        exec(asked["code"], vars(sys.modules["__main__"]))
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()
