#!/usr/bin/env python3
"""Everything that has to be green before a change lands, side by side on all cores, with its cost.

    .ci/run                   what a change needs
    .ci/run --all             every target and file, also those that reach only what was there when
                              last green, and every test of the adapters
    .ci/run lint test         these targets
    .ci/run --record          notes what is green, and costs (tests/costs.json, tests/README.md)

A target is a target of the Makefile. The cost of a target is its processor time, divided by that of
a fixed loop on the same machine, so that neither a slow machine nor a busy one changes it much. A
target that costs twice what tests/costs.json says, and two minutes more, fails: growth is seen when
it happens.

A target with `tests` runs those files of tests for which something changed that they can reach
(tools/reach.py) since they were last recorded green. Tests marked full, which few changes can
break, wait for changes of their own room of the package, and of all beside the package. The nightly
workflow runs all of them.

The Python of the system runs this file, before there is any environment.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.marks import MARKS_FULL
from tools.reach import Sources, made_by, matching

ROOT = Path(__file__).parents[1]
COSTS = ROOT / "tests/costs.json"
README = ROOT / "tests/README.md"
LOGS = ROOT / ".ci/logs"
# a target fails when it takes this many times its entry in COSTS, and so many processor seconds
# more: what caches hold (mypy's, numba's) is no growth
MOST_GROWTH, SLACK = 2.0, 120.0


@dataclass(frozen=True)
class Target:
    """A target of the Makefile.

    Attributes:
        name: in the Makefile, with the variables that it is called with.
        needs: the targets that make its environment; they are run before, once.
        all_cores: whether it keeps all cores busy by itself.
        tests: patterns of its files of tests, if each is left out while what it reaches stays.
        full: whether it runs the tests marked full alone, which few files have.
        near: whether of the package its files wait for changes of their own room alone.
        whole: whether it runs all its files when one has to.
        left: the files of tests that it leaves out.
        options: more of pytest's.
        has_more: whether it has tests that run with --full alone, which --all gives it.
    """

    name: str
    needs: tuple[str, ...] = ()
    all_cores: bool = False
    tests: tuple[str, ...] = ()
    full: bool = False
    near: bool = False
    whole: bool = False
    left: tuple[str, ...] = ()
    options: str = ""
    has_more: bool = False

    @property
    def label(self) -> str:
        """The name as file names and tables have it."""
        return re.sub(" [A-Z]+=", "-", self.name)

    @property
    def makes_environment(self) -> bool:
        return self.name.startswith(".venv")


def targets() -> list[Target]:
    """The targets with their environments; the versions are those of the Makefile."""
    pin = pins()
    trl, verl, fla = (f".venvs/{n}-{pin[n.upper()]}/.ready" for n in ("trl", "verl", "fla"))
    torchao = f".venvs/torchao-{pin['TORCHAO']}/.ready"
    swift = f".venvs/ms-swift-{pin['SWIFT']}/.ready"
    flash = f".venvs/fa4-{pin['FLASH']}/.ready"
    new, old = pin["MEGATRON"].split()
    megatron = {v: f".venvs/megatron-{v}/.ready" for v in (new, old)}
    of = {name: (f"tests/integrations/{name}/test_*.py",) for name in ("trl", "verl", "megatron")}
    hybrids, replay, on_megatron = (
        f"tests/integrations/verl/test_{name}.py" for name in ("hybrids", "replay", "megatron")
    )
    families = tuple(f"tests/models/test_{name}.py" for name in ("families", "config_fields"))
    trainers = tuple(
        f"tests/integrations/{name}/test_*.py" for name in ("batch_trainers", "ms_swift")
    )
    rooms = {file.parent.name for file in ROOT.glob("tests/*/test_*.py")}
    rooms -= {"kernels", "benchmarks", "integrations", "real"}
    rest = ("tests/test_*.py", "tests/integrations/test_*.py")
    rest += tuple(f"tests/{room}/**/test_*.py" for room in sorted(rooms))
    kernels = "tests/kernels"
    updates = tuple(f"tests/integrations/{name}/test_real_update.py" for name in ("trl", "verl"))
    not_models = ("tests/models/test_torchao.py", "tests/benchmarks/test_precision.py")
    return [
        # the longest first
        Target("test-trl", (trl,), tests=of["trl"]),
        Target("test-verl", (verl,), tests=of["verl"]),
        Target("test-full-trl", (trl,), tests=of["trl"], full=True),
        Target("test-full-verl", (verl,), tests=of["verl"], full=True),
        Target(
            "test-flash", (flash,), tests=(f"{kernels}/attention/flash/fa4/test_*.py",), near=True
        ),
        Target("test-full PART=rest", tests=rest, full=True),
        Target("test-full PART=kernels", tests=(f"{kernels}/**/test_*.py",), full=True),
        # `test` runs the others every time
        Target(
            "test-benchmarks", tests=("tests/benchmarks/test_*.py",), full=True, options=" -m full"
        ),
        Target("test-transformers", tests=families, whole=True),
        Target(
            "test-real",
            (".venvs/real/.ready", trl, verl),
            tests=("tests/real/test_*.py", *updates),
            whole=True,
        ),
        Target("types"),
        Target(
            "test-trainers",
            (".venvs/trainers/.ready", trl, torchao, swift),
            tests=(*not_models, *trainers),
            whole=True,
        ),
        Target("test-verl-hybrids", (verl,), tests=(hybrids, replay), has_more=True),
        *(
            Target(f"test-megatron MEGATRON={version}", (megatron[version],), tests=of["megatron"])
            for version in (new, old)
        ),
        Target("test-verl-megatron", (megatron[new], verl), tests=(on_megatron,)),
        Target("test-fla", (fla,), tests=(f"{kernels}/recurrence/fla/test_*.py",)),
        Target("docs", (".venvs/docs/.ready",)),
        Target("dist", (".venvs/dist/.ready",)),
        Target("lint"),
        Target("test", all_cores=True),
    ]


def pins() -> dict[str, str]:
    """The variables of the Makefile that are set with ?=."""
    text = (ROOT / "Makefile").read_text()
    return dict(re.findall(r"^([A-Z_]+) \?= (.*)$", text, re.MULTILINE))


def fingerprints(target: Target, sources: Sources) -> dict[str, str]:
    """Of each of a target's files of tests: a hash of all that decides its result."""
    made = made_by(target.name, sources.text("Makefile"))
    made += f"{target.options}{target.full}{sys.version_info[:2]}"
    near = target.near or target.full
    return {name: sources.fingerprint(name, made, near) for name in files_of(target, sources)[0]}


def files_of(target: Target, sources: Sources) -> tuple[list[str], list[str]]:
    """A target's files of tests, and those in its folders of which it runs none."""
    found = sorted({name for pattern in target.tests for name in matching(pattern, sources.files)})
    full = [name for name in found if re.search(MARKS_FULL, sources.text(name))]
    return (full, sorted({*found} - {*full})) if target.full else (found, [])


# ---- cost ----------------------------------------------------------------------------------------

_LOOP = """
import hashlib, time
start = time.process_time()
data, table = b"prefixtree", {}
for i in range(600_000):
    data = hashlib.sha256(data).digest()
    table[data[:2]] = table.get(data[:2], 0) + i % 7
print(time.process_time() - start)
"""


def calibrate() -> float:
    """Processor seconds of the fixed loop while every core runs it, the median of three."""
    found = []
    for _ in range(3):
        runs = [
            subprocess.Popen([sys.executable, "-c", _LOOP], stdout=subprocess.PIPE, text=True)
            for _ in range(os.cpu_count() or 1)
        ]
        found.append(max(float(run.communicate()[0]) for run in runs))
    return sorted(found)[1]


@dataclass
class Run:
    """A target that runs or has run.

    Attributes:
        seconds: wall time; `processor` is processor time, of all its processes.
        status: the exit status of make, or None while it runs.
    """

    target: Target
    process: subprocess.Popen[bytes]
    started: float
    seconds: float = 0.0
    processor: float = 0.0
    status: int | None = None
    problem: str = ""
    full: bool = False

    @property
    def log(self) -> Path:
        return log_of(self.target)


def log_of(target: Target) -> Path:
    return LOGS / (target.label.replace("/", "_").strip("._") + ".log")


# runs a command as the parent of all orphans below it (ranks of a forkserver that ended before
# them), so that their processor time counts too; PR_SET_CHILD_SUBREAPER is 36
_REAPER = """
import ctypes, os, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
command = subprocess.Popen(sys.argv[1:])
status, until = None, float("inf")
while time.monotonic() < until:
    try:
        pid, found = os.waitpid(-1, 0 if status is None else os.WNOHANG)
    except ChildProcessError:
        break
    if pid == command.pid:
        status, until = os.waitstatus_to_exitcode(found), time.monotonic() + 10
    elif pid == 0:
        time.sleep(0.1)
os._exit(status if status >= 0 else 128 - status)
"""


def start(target: Target, full: bool = False) -> Run:
    arguments = f"--junitxml={log_of(target).with_suffix('.xml')} -o junit_family=xunit1"
    full = full and target.has_more
    arguments += target.options + " --full" * full
    command = [sys.executable, "-c", _REAPER, "make", *target.name.split()]
    if target.name.startswith("test"):
        # beside another target one process is enough, which collects once
        workers = [] if target.all_cores else ["WORKERS=0"]
        without = files_of(target, Sources(ROOT))[1] if target.full else []
        left = "".join(f" --ignore={name}" for name in (*target.left, *without))
        command += [f"ARGS={arguments} --durations=20 -q{left}", *workers]
    # that of an earlier start would stand for one that ends before it writes its own
    log_of(target).with_suffix(".xml").unlink(missing_ok=True)
    with log_of(target).open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
    return Run(target, process, time.monotonic(), full=full)


def wait(running: Iterable[Run]) -> Run:
    """The next target that ends."""
    by_pid = {run.process.pid: run for run in running}
    while True:
        pid, status, used = os.wait4(-1, 0)
        if pid in by_pid:
            run = by_pid[pid]
            run.status = run.process.returncode = os.waitstatus_to_exitcode(status)
            run.seconds = time.monotonic() - run.started
            run.processor = used.ru_utime + used.ru_stime
            return run


@dataclass
class Schedule:
    """Runs targets on `cores`: those that use all cores alone, the others one per core."""

    todo: list[Target]
    cores: int
    full: bool = False
    runs: list[Run] = field(default_factory=list)

    def next_to_start(self) -> Target | None:
        running = [run.target for run in self.runs if run.status is None]
        ready = {run.target.name for run in self.runs if run.status == 0}
        if any(target.all_cores for target in running) or len(running) >= self.cores:
            return None
        # environments first, as others wait for them
        for target in sorted(self.todo, key=lambda t: not t.makes_environment):
            if set(target.needs) <= ready and not (target.all_cores and running):
                return target
        return None

    def drop_what_cannot_run(self) -> list[Target]:
        """Those whose environment could not be made."""
        failed = {run.target.name for run in self.runs if run.status not in (None, 0)}
        lost = [target for target in self.todo if failed & set(target.needs)]
        self.todo = [target for target in self.todo if target not in lost]
        return lost

    def run(self, costs: Costs) -> list[Target]:
        """Runs all; the targets that could not run."""
        lost: list[Target] = []
        while self.todo or any(run.status is None for run in self.runs):
            while (target := self.next_to_start()) is not None:
                self.todo.remove(target)
                self.runs.append(start(target, self.full))
                say(f"  start   {target.label}")
            run = wait(run for run in self.runs if run.status is None)
            run.problem = costs.problem(run)
            say_end(run)
            lost += self.drop_what_cannot_run()
        return lost


# ---- what is recorded ----------------------------------------------------------------------------


class Costs:
    """tests/costs.json: what each target cost when it was last recorded, and of which files."""

    def __init__(self, loop_seconds: float) -> None:
        self.loop_seconds = loop_seconds
        self.recorded = json.loads(COSTS.read_text()) if COSTS.exists() else {}
        self.sources = Sources(ROOT)
        self.now: dict[str, dict[str, str]] = {}

    def problem(self, run: Run) -> str:
        """Why a run is red, or nothing."""
        if run.status != 0:
            return f"exit status {run.status}"
        # of a target that was never green as a whole, the files alone are known
        entry = self.recorded.get(run.target.label, {})
        if "loops" not in entry or run.target.makes_environment or run.full:
            return ""
        recorded = entry["loops"] * self.loop_seconds
        growth = run.processor / recorded
        if growth < MOST_GROWTH or run.processor - recorded < SLACK:
            return ""
        return (
            f"costs {growth:.1f} times what tests/costs.json says ({run.processor:.0f} s of "
            f"processor time): make it cheaper, or record it with .ci/run --record and say why"
        )

    def to_run(self, target: Target, everything: bool) -> Target | None:
        """A target without the files of tests that were green with all that decides them; None if
        none is left. What decides them is read now: it may change while they run."""
        now = self.now[target.label] = fingerprints(target, self.sources) if target.tests else {}
        before = self.recorded.get(target.label, {}).get("files", {})
        green = [name for name in now if now[name] == before.get(name)]
        if now and len(green) == len(now) and not everything:
            return None
        whole = everything or target.whole
        return target if whole else replace(target, left=tuple(green))

    def record(self, runs: Sequence[Run]) -> None:
        """Costs of targets that ran whole and green; which files of tests are green, in any."""
        for run in runs:
            if run.target.makes_environment or run.full:
                continue
            entry = self.recorded.setdefault(run.target.label, {})
            if run.status == 0 and not run.target.left:
                entry["loops"] = round(run.processor / self.loop_seconds, 1)
                entry["minutes"] = round(run.seconds / 60, 1)
                entry |= tests_of(run)
            now = self.now.get(run.target.label, {})
            if run.status != 0:
                green = green_files(run)
                now = entry.get("files", {}) | {name: now[name] for name in now if name in green}
            if now:
                entry["files"] = now
        COSTS.write_text(json.dumps(self.recorded, indent=1, sort_keys=True) + "\n")
        write_table(self.recorded)


def green_files(run: Run) -> set[str]:
    """The files of a red run whose tests all were green, if one start of pytest ran them all."""
    report = log_of(run.target).with_suffix(".xml")
    # pytest marks so that it ended before the last test
    ended = report.exists() and re.search(r"^(!{3}|INTERNALERROR)", run.log.read_text(), re.M)
    if run.target.whole or ended or not report.exists():
        return set()
    cases = [
        (name_of(case), bool(len(case.findall("failure") + case.findall("error"))))
        for case in ET.parse(report).iter("testcase")
    ]
    return {name for name, _ in cases} - {name for name, is_red in cases if is_red}


def name_of(case: ET.Element) -> str:
    """The file of a test."""
    return case.get("file") or case.get("classname", "").replace(".", "/") + ".py"


def tests_of(run: Run) -> dict[str, object]:
    """The number of tests of a run, and the seconds of its most expensive files, by which
    tests/conftest.py orders them."""
    report = log_of(run.target).with_suffix(".xml")
    if not report.exists():
        return {}
    seconds: Counter[str] = Counter()
    cases = list(ET.parse(report).iter("testcase"))
    for case in cases:
        seconds[name_of(case).removeprefix("tests/")] += float(case.get("time", 0))
    return {
        "tests": len(cases),
        "most": [[name, round(value)] for name, value in seconds.most_common(40)],
    }


_BEGIN, _END = "<!-- costs -->\n", "<!-- /costs -->\n"


def write_table(recorded: dict[str, dict[str, object]]) -> None:
    """The table of tests/README.md."""
    rows = [
        "| target | tests | minutes | loops | most expensive files (s) |",
        "|---|---|---|---|---|",
    ]
    known = [(label, entry) for label, entry in recorded.items() if "loops" in entry]
    entries = sorted(known, key=lambda item: -float(str(item[1]["loops"])))
    for label, entry in entries:
        most = entry.get("most", [])
        assert isinstance(most, list)
        files = ", ".join(
            f"`{name}` {value}" for name, value in most[: 10 if label == "test" else 3]
        )
        tests = entry.get("tests", "")
        rows.append(f"| `{label}` | {tests} | {entry['minutes']} | {entry['loops']} | {files} |")
    before, _, rest = README.read_text().partition(_BEGIN)
    README.write_text(before + _BEGIN + "\n".join(rows) + "\n" + _END + rest.partition(_END)[2])


# ---- what is shown -------------------------------------------------------------------------------


def say(text: str) -> None:
    print(text, flush=True)


def say_end(run: Run) -> None:
    word = "FAILED" if run.problem else "ok"
    last = run.log.read_text(errors="replace").splitlines()
    closing = last[-1].strip("= ") if last and run.target.name.startswith("test") else ""
    say(f"  {word:<7} {run.target.label:<28} {run.seconds / 60:5.1f} min  {closing}")
    if run.problem:
        say(f"          {run.problem}; the end of {run.log}:")
        say("\n".join(f"          | {line}" for line in telling(last)))


def telling(lines: Sequence[str], most: int = 80) -> list[str]:
    """The end of a log, without what was skipped and how long tests took: the failures are at the
    very end, as whoever shows this may cut it."""
    failures = [line for line in lines if re.match(r"(FAILED|ERROR) ", line)]
    noise = re.compile(r"(SKIPPED|FAILED|ERROR|XFAIL) |\s*[\d.]+s (call|setup|teardown) ")
    rest = [line for line in lines if not noise.match(line)]
    causes = [line for line in rest if re.match(r"E  ", line)]
    return [*rest[-most:], *causes[-most // 4 :], *failures[-most // 4 :]]


def summary(runs: Sequence[Run], lost: Sequence[Target], loop_seconds: float) -> bool:
    """Prints minutes per target; whether all are green."""
    say(f"\nminutes per target (the fixed loop takes {loop_seconds:.2f} s here)")
    for run in sorted(runs, key=lambda run: -run.processor):
        loops = run.processor / loop_seconds
        say(
            f"  {run.target.label:<40} {run.seconds / 60:5.1f}, "
            f"{run.processor / 60:5.1f} of a core, {loops:7.1f} loops"
        )
    counts: Counter[str] = Counter()
    for run in runs:
        if run.target.name.startswith("test"):
            closing = run.log.read_text(errors="replace").splitlines()[-1:]
            for number, word in re.findall(r"(\d+) (passed|failed|skipped)", " ".join(closing)):
                counts[word] += int(number)
    red = [run.target.label for run in runs if run.problem] + [target.label for target in lost]
    for run in runs:
        if run.problem:
            say(f"\n{run.target.label}: {run.problem}")
            say("\n".join(telling(run.log.read_text(errors="replace").splitlines(), 20)))
    say(f"\nred: {', '.join(red)}" if red else "\nall green")
    counts["failed"] += len(red) if not counts["failed"] else 0
    say(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return not red


def main() -> int:
    parser = argparse.ArgumentParser(description="runs the targets of CI side by side")
    parser.add_argument("names", nargs="*", help="targets (default: all that a change needs)")
    parser.add_argument("--all", action="store_true", help="also targets whose files are unchanged")
    parser.add_argument("--record", action="store_true", help="note what is green, and its costs")
    options = parser.parse_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    costs = Costs(calibrate())
    known = targets()
    if unknown := set(options.names) - {target.label for target in known}:
        parser.error(f"no target {sorted(unknown)}; there are {[t.label for t in known]}")
    everything = options.all or bool(options.names)
    wanted = []
    for target in [t for t in known if not options.names or t.label in options.names]:
        needed = costs.to_run(target, everything)
        if needed is None or needed.left:
            number = len(needed.left if needed else costs.now[target.label])
            of = len(costs.now[target.label])
            say(f"  as when last green: {number} of {of} files of {target.label} (--all runs them)")
        wanted += [needed] if needed else []
    # everything stands on .venv
    first = Schedule([Target(".venv/.ready")], 1)
    lost = first.run(costs)
    environments = dict.fromkeys(need for target in wanted for need in target.needs)
    cores = os.cpu_count() or 1
    schedule = Schedule([*map(Target, environments), *wanted], cores, options.all)
    if first.runs[0].status == 0:
        lost = schedule.run(costs)
    runs = first.runs + schedule.runs
    green = summary(runs, lost, costs.loop_seconds)
    say(f"{(time.monotonic() - begin) / 60:.1f} minutes")
    if options.record:
        costs.record(schedule.runs)
    return 0 if green else 1


if __name__ == "__main__":
    sys.exit(main())
