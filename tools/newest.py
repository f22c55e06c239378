#!/usr/bin/env python3
"""Tests of the adapters in environments of the newest trainers: their versions, and what failed.

    make test-newest                what a user who installs today meets
    make test-newest NEWEST=trl     of one trainer

A failure names what a release changed, before users meet it. What is red here and green with the
pins is work, not a broken change, so the nightly workflow alone runs it.
"""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("trl", "verl", "transformers", "peft", "torch", "accelerate")
#: Tests by trainer: what the adapter relies on, then runs beside the trainer's own.
TESTS = {
    "trl": ("contract", "training", "sft", "dpo", "distillation", "async"),
    "verl": ("contract", "engine", "batches", "updates"),
}
VERSIONS = """
from importlib.metadata import version, PackageNotFoundError
for name in {names!r}:
    try: print(name, version(name))
    except PackageNotFoundError: pass
"""


def failures(report: Path) -> list[str]:
    """Names the tests of a JUnit report that failed, each with the last line of its message."""
    found = []
    for case in ET.parse(report).getroot().iter("testcase"):
        for problem in (*case.findall("failure"), *case.findall("error")):
            lines = (problem.get("message") or problem.text or "").strip().splitlines()
            where = f"{case.get('classname', '')}.{case.get('name', '')}".strip(".")
            where = where.removeprefix("tests.")
            found.append(f"{where}: {lines[0] if lines else problem.tag}")
    return found


def check(trainer: str) -> int:
    """Prints a trainer's versions and failures; gives the exit status of its tests."""
    environment = ROOT / f".venvs/newest-{trainer}"
    python, report = environment / "bin/python", environment / "report.xml"
    names = subprocess.check_output([python, "-c", VERSIONS.format(names=PACKAGES)], text=True)
    print(f"{trainer}: {', '.join(names.splitlines())}", flush=True)
    files = [f"tests/integrations/{trainer}/test_{name}.py" for name in TESTS[trainer]]
    report.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-q", "-n", "auto", "--dist", "loadfile", "--tb", "short"]
    status = subprocess.run([*command, f"--junitxml={report}", *files], cwd=ROOT).returncode
    found = failures(report) if report.exists() else ["pytest did not end"] * bool(status)
    print(f"{trainer}: {len(found)} failed" + "".join(f"\n  {line}" for line in found), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(max([check(trainer) for trainer in sys.argv[1:] or TESTS]))
