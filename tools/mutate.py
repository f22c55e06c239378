"""Do the tests notice when one sign, bound or term of the code is wrong?

    python -m tools.mutate --diff main                         # the changed lines
    python -m tools.mutate --room packing --count 20 --seed 1  # a draw from a room
    python -m tools.mutate --list tools/mutations.json --out again.json    # the same ones again

A mutation changes one place: a sign, a comparison at its bound, an index by one, a dropped term,
`and` for `or`. It runs in a copy of the tree, with those tests of its room that reach the changed
function, the fastest first, until one fails. torch and pytest are imported once; each mutation is a
fork of that process. The result names the test that failed. A survivor needs a test, or a reason
("why" in the list).

Before the first mutation each test of the room runs once, which gives its seconds and the functions
that it reaches in this process. They are kept in `--work` until a file of the package changes. At
the end the tests that killed run without a mutation, and one that fails then does not count.
Numba's loops are mutated as plain Python (NUMBA_DISABLE_JIT). A list is found again in other
commits by the text of its lines; a mutation whose lines are gone is "gone". The adapters' rooms
need the Python of their environments (`.venvs/...`).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import hashlib
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
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from tools.mutations import PACKAGE, ROOMS, ROOT, Mutation, draw, read, room_tests, write

# imported once, before the forks, where a test imports a module of them
ONCE = {"accelerate", "hypothesis", "numba", "numpy", "peft", "scipy", "sympy", "torch"}
ONCE |= {"transformers", "triton"}
MEMORY = 10 << 30  # bytes of a fork


@dataclass(eq=False)
class Watch:
    """A plugin of pytest: orders tests, notes which failed first and what each reaches."""

    copy: str
    order: dict[str, int] | None = None  # the tests to run; None: all, and see what they reach
    limit: int = 0  # seconds of CPU time; 0: to the end, whatever fails
    failed: str = ""
    ran: dict[str, dict[str, Any]] = field(default_factory=dict)
    now: set[str] = field(default_factory=set)

    def pytest_sessionstart(self, session: Any) -> None:
        # a few examples show what a test reaches
        load_profile(**({"max_examples": 5} if self.order is None else {}))

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.order is not None:
            order = self.order
            items[:] = sorted(
                (item for item in items if item.nodeid in order), key=lambda i: order[i.nodeid]
            )

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or f"import of {report.nodeid}"

    def pytest_runtest_setup(self, item: Any) -> None:
        self.now = self.ran.setdefault(item.nodeid.split("::")[0], {"reached": set()})["reached"]

    def pytest_runtest_call(self, item: Any) -> None:
        self.now = set()

    def pytest_runtest_logreport(self, report: Any) -> None:
        test = self.ran.setdefault(report.nodeid, {"seconds": 0.0, "ok": True, "reached": []})
        test["seconds"] += report.duration
        test["ok"] &= not report.failed
        if report.when == "call":
            test["reached"] = self.now
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if 0 < self.limit < time.process_time():
            raise KeyboardInterrupt

    def trace(self, frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if code.co_filename.startswith(self.copy):
            self.now.add(f"{code.co_filename[len(self.copy) + 1 :]}:{code.co_firstlineno}")


@dataclass(eq=False)
class Collected:
    """A plugin of pytest: instead of the tests it runs `act` on what has been collected."""

    act: Callable[[Any], None]

    def pytest_sessionstart(self, session: Any) -> None:
        load_profile()

    def pytest_runtestloop(self, session: Any) -> bool:
        self.act(session)
        return True


def load_profile(**some: Any) -> None:
    """Of hypothesis, after tests/conftest.py and before the tests: no search for least failures."""
    from hypothesis import Phase, settings

    settings.register_profile("mutate", phases=[Phase.explicit, Phase.generate], **some)
    settings.load_profile("mutate")


def swap_code(file: str, old: str, new: str) -> bool:
    """Puts a file's changed code into its functions; False where none of them has the change."""

    def codes(code: CodeType) -> Iterator[tuple[tuple[str, int], CodeType]]:
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                yield (inner.co_qualname, inner.co_firstlineno), inner
                yield from codes(inner)

    before, after = (dict(codes(compile(t, file, "exec", dont_inherit=True))) for t in (old, new))
    swapped = False
    # what tests/conftest.py has frozen is not seen otherwise
    gc.unfreeze()
    for function in [o for o in gc.get_objects() if type(o) is FunctionType]:
        key = (function.__code__.co_qualname, function.__code__.co_firstlineno)
        if function.__code__.co_filename == file and before.get(key) != after.get(key):
            function.__code__ = after[key]
            swapped = True
    return swapped


class Runner:
    """Runs pytest in forks of this process, in a copy of the tree."""

    def __init__(self, work: Path) -> None:
        self.work, self.copy = work, work / "tree"
        self.known: dict[str, dict[str, Any]] = {}
        self.failing: set[tuple[str, bool]] = set()
        self.refresh()
        os.environ.update(
            PYTHONPATH=str(self.copy),
            OMP_NUM_THREADS="1",
            TOKENIZERS_PARALLELISM="false",
            HF_HUB_OFFLINE="1",
            TORCHINDUCTOR_COMPILE_THREADS="1",
            PYTORCH_NVML_BASED_CUDA_CHECK="1",  # a fork may still use CUDA
        )
        os.chdir(self.copy)
        sys.path[0] = str(self.copy)
        import torch

        if not torch.cuda.is_available():
            os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
        for name in ("pytest", "hypothesis", "numba", "transformers.modeling_utils"):
            importlib.import_module(name)

    def refresh(self) -> None:
        """The copy has the files of this tree, with their times, and what numba has compiled."""
        command = ["git", "ls-files", "-co", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        files = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
        for old in self.copy.rglob("*.py"):
            if str(old.relative_to(self.copy)) not in files:
                old.unlink()
        compiled = {str(p.relative_to(ROOT)) for p in (ROOT / PACKAGE).rglob("*.nb[ci]")}
        for name in files | compiled:
            old, new = ROOT / name, self.copy / name
            if not new.exists() or new.stat().st_mtime_ns != old.stat().st_mtime_ns:
                new.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(old, new)

    def fork(self, watch: Watch, act: Callable[[], Any]) -> dict[str, Any]:
        """The answer of a run of tests in a fork; "failed" is the test, "time" or "crash"."""
        answer, log = self.work / "answer.json", self.work / "log"
        answer.unlink(missing_ok=True)
        child = os.fork()
        if not child:
            self._child(watch, act, answer, log)
        # its processor time is limited too, which a busy machine does not use up
        ends, status = time.monotonic() + (30 * watch.limit or 3600), 0
        try:
            while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < ends:
                time.sleep(0.02)
            status = ended[1]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # what its tests have started, too
        if not ended[0]:
            os.waitpid(child, 0)
        if not ended[0] or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
            return {"failed": "time"}
        if not answer.exists():
            return {"failed": "crash"}
        result: dict[str, Any] = json.loads(answer.read_text())
        if not result["failed"] and not result["ran"]:
            raise SystemExit(f"no test ran; pytest says in {log}:\n{log.read_text()}")
        return result

    def _child(self, watch: Watch, act: Callable[[], Any], answer: Path, log: Path) -> None:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        if watch.limit:
            resource.setrlimit(resource.RLIMIT_CPU, (2 * watch.limit, 2 * watch.limit + 5))
        redirect(log)
        if watch.order is None:
            sys.settrace(watch.trace)
        else:
            # a pyc file goes by size and second, which a mutation may share with another
            sys.dont_write_bytecode = True
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        try:
            act()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.settrace(None)
            modules = [name for name in sys.modules if name.split(".")[0] in ONCE]
            result = {"failed": watch.failed, "ran": watch.ran, "modules": modules}
            answer.write_text(json.dumps(result, default=sorted))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def anew(self, watch: Watch, files: Iterable[str], plain: bool = False) -> dict[str, Any]:
        """A run in a fork that imports the package and the tests."""

        def act() -> None:
            if plain:
                os.environ["NUMBA_DISABLE_JIT"] = "1"
                importlib.import_module("numba").config.DISABLE_JIT = 1
            pytest_main(["-x"] * bool(watch.limit), files, watch)

        return self.fork(watch, act)

    def tests(self, room: str) -> dict[str, Any]:
        """Of each test of a room: its seconds and what it reaches. Failing tests are left out."""
        if room in self.known:
            return self.known[room]
        kept = self.kept_answers(room)
        missing = [file for file in kept if not kept[file].exists()]
        if missing:
            print(f"{room}: {len(missing)} files of tests run once", flush=True)
            answer = self.anew(Watch(str(self.copy)), missing)
            for file in missing:
                ran = {n: t for n, t in answer["ran"].items() if n.split("::")[0] == file}
                kept[file].write_text(json.dumps({"ran": ran, "modules": answer["modules"]}))
        found = self.known[room] = {}
        for file in kept:
            answer = json.loads(kept[file].read_text())
            for name in answer["modules"]:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
            by_setup = answer["ran"].pop(file, {"reached": []})["reached"]
            for name, test in answer["ran"].items():
                if test["ok"]:
                    found[name] = {**test, "reached": {*test["reached"], *by_setup}}
                else:
                    print(f"left out, it fails without a mutation: {name}", flush=True)
        assert PACKAGE not in sys.modules, "a module that is imported once imports the package"
        return found

    def kept_answers(self, room: str) -> dict[str, Path]:
        """Where the answer of each file of tests is kept, by all texts that it depends on."""
        shared = hashlib.sha256(f"{sys.version}{sys.prefix}".encode())
        for folder in (PACKAGE, "tests/support"):
            for file in sorted((self.copy / folder).rglob("*.py")):
                shared.update(file.read_bytes())
        kept = {}
        for name in room_tests(room, self.copy):
            key = shared.copy()
            key.update(name.encode() + (self.copy / name).read_bytes())
            kept[name] = self.work / f"{key.hexdigest()[:16]}.json"
        return kept

    def order(self, mutation: Mutation) -> dict[str, int]:
        """The tests of a mutation, by rank."""
        tests = self.tests(mutation.room)
        tests = {n: t for n, t in tests.items() if (n, mutation.plain) not in self.failing}
        file = self.copy / mutation.file
        text = file.read_text() if file.exists() else ""
        return ordered(tests, mutation.file, function_at(text, mutation.line))

    def run(self, mutation: Mutation, limit: int, session: Any = None) -> None:
        """Fills in what became of a mutation: with a session of pytest only if it is killed."""
        started, target = time.monotonic(), self.copy / mutation.file
        text = target.read_text() if target.exists() else ""
        changed = mutation.mutated(text)
        if changed is None:
            mutation.result = "gone"
            return
        watch = Watch(str(self.copy), self.order(mutation), limit)
        order, times = watch.order or {}, target.stat()

        def act() -> None:
            if swap_code(str(target), text, changed):
                session.items = [item for item in session.items if item.nodeid in order]
                session.items.sort(key=lambda item: order[item.nodeid])
                session.config.option.maxfail = 1
                session.config.pluginmanager.register(watch)
                importlib.import_module("_pytest.main").pytest_runtestloop(session)
            else:
                watch.ran["::"] = {}

        try:
            target.write_text(changed)
            if session is None:
                answer = self.anew(watch, files_of(order), mutation.plain)
            else:
                answer = self.fork(watch, act)
        finally:
            target.write_text(text)
            os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))
        if answer["failed"] or session is None:
            mutation.by = answer["failed"]
            mutation.result = "killed" if mutation.by else "survived"
            mutation.tests = sum("::" in name for name in answer.get("ran", ()))
            mutation.seconds = round(time.monotonic() - started, 1)

    def run_quickly(self, todo: list[Mutation], limit: int) -> None:
        """Tries mutations of a room in forks of a process that has collected its tests.

        They change the code of functions that are there already. One that is not killed so stays
        open: some tests make at their import what others look at.
        """
        files = files_of(name for m in todo for name in self.order(m))
        answer, out = self.work / "quick.json", os.dup(1)
        answer.unlink(missing_ok=True)

        def act(session: Any) -> None:
            for m in todo:
                self.run(m, limit, session)
                write(answer, todo)
                if m.result:
                    os.write(out, f"{m.told()}\n".encode())

        child = os.fork()
        if not child:
            try:
                redirect(self.work / "log of collecting")
                pytest_main(["-s"], files, Collected(act))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        for m, tried in zip(todo, read(answer), strict=False):
            vars(m).update(vars(tried))

    def confirm(self, killed: list[Mutation], plain: bool) -> None:
        """Forgets results by tests that fail without a mutation too, run as mutations run them."""
        order = {m.by: 0 for m in killed if m.by in self.tests(m.room)}
        if order:
            ran = self.anew(Watch(str(self.copy), order), files_of(order), plain)["ran"]
            failing = {name for name in order if not ran.get(name, {"ok": False})["ok"]}
            self.failing |= {(name, plain) for name in failing}
            for m in killed:
                if m.by in failing:
                    print(f"left out, it fails without a mutation: {m.by}", flush=True)
                    m.forget()


def redirect(log: Path) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def pytest_main(options: list[str], files: Iterable[str], plugin: object) -> None:
    # hypothesis is imported already
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    # a folder with a pytest.ini of its own would name its tests, and what they import, from there
    options += ["-q", "--tb=short", "-p", "no:cacheprovider"]
    options += [f"--rootdir={Path.cwd()}", "-o", "pythonpath="]
    importlib.import_module("pytest").main([*options, *files], plugins=[plugin])


def files_of(tests: Iterable[str]) -> list[str]:
    return sorted({name.split("::")[0] for name in tests})


def function_at(text: str, line: int) -> int:
    """The first line of the innermost function that holds a line; 0 outside of functions."""
    first = 0
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0):
            first = max(first, min(n.lineno for n in (node, *node.decorator_list)))
    return first


def ordered(tests: dict[str, Any], file: str, function: int) -> dict[str, int]:
    """The tests to run, by rank: those that reach the function, the fastest first.

    Where no test is seen to reach it (at import, in numba's code, or in a process that a test
    starts), all tests of the room run.
    """
    reach = [name for name, test in tests.items() if f"{file}:{function}" in test["reached"]]
    by_time = sorted(reach or tests, key=lambda name: tests[name]["seconds"])
    return {name: rank for rank, name in enumerate(by_time)}


def run_all(runner: Runner, todo: list[Mutation], limit: int, save: Callable[[], None]) -> None:
    """Runs them; once more where the test that killed one fails without a mutation too."""
    while waiting := [m for m in todo if not m.result]:
        for room in dict.fromkeys(m.room for m in waiting if not m.plain):
            runner.run_quickly([m for m in waiting if m.room == room and not m.plain], limit)
            save()
        for m in waiting:
            if not m.result:
                runner.run(m, limit)
                save()
                print(m.told(), flush=True)
        for room, plain in sorted({(m.room, m.plain) for m in waiting}):
            runner.confirm([m for m in waiting if (m.room, m.plain) == (room, plain)], plain)
        save()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--diff", metavar="BASE", help="only lines that differ from this commit")
    parser.add_argument("--room", nargs="+", default=[], help=f"of {', '.join(ROOMS)}")
    parser.add_argument("--count", type=int, default=0, help="per room (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--list", type=Path, help="run these, which an --out has written")
    parser.add_argument("--out", type=Path, help="results; those that are there are not run again")
    parser.add_argument("--limit", type=int, default=60, help="seconds of tests per mutation")
    parser.add_argument("--work", type=Path, help="folder that keeps the copy and the first runs")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.list:
        wanted = [m for m in read(options.list) if not options.room or m.room in options.room]
        for m in wanted:
            m.forget()
    else:
        wanted = draw(options.room, options.diff, options.count, options.seed)
    rows = {m.key: m for m in read(options.out)}
    todo = [rows.setdefault(m.key, m) for m in wanted]

    def save() -> None:
        write(options.out, rows.values())

    save()
    with contextlib.ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        run_all(Runner(work.resolve()), todo, options.limit, save)
    for room in sorted({m.room for m in todo}):
        results = [m.result for m in todo if m.room == room]
        print(f"{room}: {results.count('killed')} killed of {len(results)}")
    survivors = [m for m in todo if m.result == "survived" and not m.why]
    for m in survivors:
        print(f"\n{m.file}:{m.line} {m.kind}\n- {m.before}\n+ {m.after}")
    return bool(survivors)


if __name__ == "__main__":
    raise SystemExit(main())
