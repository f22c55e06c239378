#!/usr/bin/env python3
"""Everything that has to be green before a change lands, side by side on all cores, with its cost.

    .ci/run                   what a change needs
    .ci/run --all             every target, also those whose files are as they were when last green,
                              and every test of the adapters
    .ci/run lint test         these targets
    .ci/run --record          when green: notes the costs (tests/costs.json, tests/README.md)

A target is a target of the Makefile. The cost of a target is its processor time, divided by that of
a fixed loop on the same machine, so that neither a slow machine nor a busy one changes it much. A
target that costs twice what tests/costs.json says, and two minutes more, fails: growth is seen when
it happens.

A target with `files` is skipped while they are as they were when it was last recorded green. The
nightly workflow runs it all the same.

The Python of the system runs this file, before there is any environment.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
COSTS = ROOT / "tests/costs.json"
README = ROOT / "tests/README.md"
LOGS = ROOT / ".ci/logs"
# the rooms that decide full products of families, modes and wrappers; of the kernels the host side,
# which compiled layers have in their graphs
_OF_MODELS = (
    *("models", "recompute", "sampling", "scoring", "parallel", "testing"),
    *("kernels", "kernels/attention", "kernels/lm_head", "kernels/recurrence"),
)
# and those of an adapter's: what its trainers hand through
_OF_TRAINERS = ("models", "scoring", "parallel", "planning", "testing")
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
        files: patterns of the files that decide its result, if it is left out while they stay.
        pins: variables of the Makefile that decide it too.
        has_more: whether it has tests that run with --full alone, which --all gives it.
    """

    name: str
    needs: tuple[str, ...] = ()
    all_cores: bool = False
    files: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()
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
    return [
        # the longest first
        Target("test-trl", (trl,)),
        Target("test-verl", (verl,)),
        *(
            Target(
                f"test-full-{name}",
                (environment,),
                files=(
                    *(f"prefixtree/{room}/*.py" for room in _OF_TRAINERS),
                    *("prefixtree/integrations/*.py", f"prefixtree/integrations/{name}/**/*.py"),
                    *(f"tests/integrations/{name}/*.py", f"examples/{name}*", *more),
                ),
                pins=(*(pin_of.upper() for pin_of in pinned), "TORCH"),
            )
            for name, environment, more, pinned in (
                (
                    "trl",
                    trl,
                    ("examples/configs/*", "benchmarks/lib/trl*.py"),
                    ("trl", "deepspeed"),
                ),
                ("verl", verl, ("benchmarks/lib/verl*.py", "benchmarks/cases/verl*.py"), ("verl",)),
            )
        ),
        Target(
            "test-flash",
            (flash,),
            files=(
                *(f"prefixtree/kernels/attention/{name}.py" for name in ("flash/*", "protocol")),
                *("prefixtree/packing/block_tables.py", "prefixtree/loops/block_tables.py"),
                *("tests/kernels/attention/flash/fa4/*.py", "tests/support/flash_*.py"),
            ),
            pins=("FLASH", "TORCH"),
        ),
        Target(
            "test-full PART=rest",
            files=(
                *(f"prefixtree/{room}/*.py" for room in _OF_MODELS),
                *("prefixtree/planning/model_cost.py", "prefixtree/sharing/estimate.py"),
                *("examples/fsdp2_grpo.py", "docs/what-fits-where.md", "pyproject.toml"),
                *("tests/support/*_configs.py", "tests/support/*_ranks.py"),
                *_tests_marked_full(kernels=False),
            ),
            pins=("TORCH",),
        ),
        Target(
            "test-full PART=kernels",
            files=(
                *("prefixtree/kernels/**/*.py", "benchmarks/cases/compiled.py"),
                *_tests_marked_full(kernels=True),
            ),
            pins=("TORCH",),
        ),
        Target(
            "test-benchmarks",
            files=(
                *("benchmarks/**/*.py", "tests/benchmarks/*.py", "tools/gpu_check.sh"),
                "prefixtree/kernels/**/*.py",
            ),
            pins=("TORCH",),
        ),
        Target(
            "test-transformers",
            files=(
                *(f"prefixtree/{room}/*.py" for room in ("models", "scoring", "integrations")),
                *("tests/models/test_families.py", "tests/support/*_configs.py"),
            ),
            pins=("TRANSFORMERS", "TORCH"),
        ),
        Target("types"),
        Target("test-trainers", (".venvs/trainers/.ready", trl, torchao, swift)),
        Target("test-verl-hybrids", (verl,), has_more=True),
        Target(f"test-megatron MEGATRON={new}", (megatron[new],)),
        Target(
            f"test-megatron MEGATRON={old}",
            (megatron[old],),
            files=(
                "prefixtree/integrations/megatron/*.py",
                *("tests/integrations/megatron/*.py", "tests/support/megatron_cpu.py"),
            ),
            pins=("MEGATRON", "TORCH"),
        ),
        Target("test-verl-megatron", (megatron[new], verl)),
        Target("test-fla", (fla,)),
        Target("docs", (".venvs/docs/.ready",)),
        Target("lint"),
        Target("test", all_cores=True),
    ]


def _tests_marked_full(kernels: bool) -> Iterable[str]:
    """The files of the main environment, outside tests/benchmarks, whose tests run in part with
    --full alone."""
    for file in sorted(ROOT.glob("tests/**/test_*.py")):
        name = str(file.relative_to(ROOT))
        of_part = name.startswith("tests/kernels/") == kernels
        of_part &= not re.search(r"benchmarks|/trl/|/verl/|/megatron/", name)
        if of_part and re.search(r"mark\.full|mostly", file.read_text()):
            yield name


def pins() -> dict[str, str]:
    """The variables of the Makefile that are set with ?=."""
    text = (ROOT / "Makefile").read_text()
    return dict(re.findall(r"^([A-Z_]+) \?= (.*)$", text, re.MULTILINE))


def fingerprint(target: Target) -> str:
    """A hash of the files and pins that decide a target's result."""
    digest = hashlib.sha256()
    for file in sorted({f for pattern in target.files for f in ROOT.glob(pattern)}):
        digest.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    pin = pins()
    digest.update("\n".join(f"{name}={pin[name]}" for name in target.pins).encode())
    for need in target.needs:
        # the recipe of its environment: up to the next blank line
        rule = re.sub(r"-[^/]*/", "-%/", need) + ":"
        digest.update(
            (ROOT / "Makefile").read_text().partition(rule)[2].partition("\n\n")[0].encode()
        )
    return digest.hexdigest()[:16]


# ---- cost ---------------------------------------------------------------------------------------

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
    arguments += " --full" * full
    command = [sys.executable, "-c", _REAPER, "make", *target.name.split()]
    if target.name.startswith("test"):
        # beside another target one process is enough, which collects once
        workers = [] if target.all_cores else ["WORKERS=0"]
        command += [f"ARGS={arguments} --durations=20 -q", *workers]
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

    def problem(self, run: Run) -> str:
        """Why a run is red, or nothing."""
        if run.status != 0:
            return f"exit status {run.status}"
        entry = self.recorded.get(run.target.label)
        if entry is None or run.target.makes_environment or run.full:
            return ""
        recorded = entry["loops"] * self.loop_seconds
        growth = run.processor / recorded
        if growth < MOST_GROWTH or run.processor - recorded < SLACK:
            return ""
        return (
            f"costs {growth:.1f} times what tests/costs.json says ({run.processor:.0f} s of "
            f"processor time): make it cheaper, or record it with .ci/run --record and say why"
        )

    def unchanged(self, target: Target) -> bool:
        """Whether a target that depends on few files was green with just these."""
        entry = self.recorded.get(target.label, {})
        return bool(target.files) and entry.get("files") == fingerprint(target)

    def record(self, runs: Sequence[Run]) -> None:
        for run in runs:
            if run.target.makes_environment or run.full:
                continue
            self.recorded[run.target.label] = {
                "loops": round(run.processor / self.loop_seconds, 1),
                "minutes": round(run.seconds / 60, 1),
                **tests_of(run),
                **({"files": fingerprint(run.target)} if run.target.files else {}),
            }
        COSTS.write_text(json.dumps(self.recorded, indent=1, sort_keys=True) + "\n")
        write_table(self.recorded)


def tests_of(run: Run) -> dict[str, object]:
    """The number of tests of a run, and the seconds of its ten most expensive files."""
    report = log_of(run.target).with_suffix(".xml")
    if not report.exists():
        return {}
    seconds: Counter[str] = Counter()
    cases = list(ET.parse(report).iter("testcase"))
    for case in cases:
        name = case.get("file") or case.get("classname", "").replace(".", "/") + ".py"
        seconds[name.removeprefix("tests/")] += float(case.get("time", 0))
    return {
        "tests": len(cases),
        "most": [[name, round(value)] for name, value in seconds.most_common(10)],
    }


_BEGIN, _END = "<!-- costs -->\n", "<!-- /costs -->\n"


def write_table(recorded: dict[str, dict[str, object]]) -> None:
    """The table of tests/README.md."""
    rows = [
        "| target | tests | minutes | loops | most expensive files (s) |",
        "|---|---|---|---|---|",
    ]
    entries = sorted(recorded.items(), key=lambda item: -float(str(item[1]["loops"])))
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
    parser.add_argument("--record", action="store_true", help="note costs when all is green")
    options = parser.parse_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    costs = Costs(calibrate())
    known = targets()
    if unknown := set(options.names) - {target.label for target in known}:
        parser.error(f"no target {sorted(unknown)}; there are {[t.label for t in known]}")
    wanted = [t for t in known if not options.names or t.label in options.names]
    skipped = [t for t in wanted if not (options.all or options.names) and costs.unchanged(t)]
    for target in skipped:
        say(f"  as it was when last green: {target.label} (.ci/run --all runs it)")
    wanted = [target for target in wanted if target not in skipped]
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
    if green and options.record:
        costs.record(schedule.runs)
    return 0 if green else 1


if __name__ == "__main__":
    sys.exit(main())
