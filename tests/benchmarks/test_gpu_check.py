"""tools/gpu_check.sh without a GPU: steps, results, what failed."""

from __future__ import annotations

import json
import re
import tarfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

from benchmarks import write_tables
from tests.benchmarks.support import ROOT, TINY_ATTENTION
from tests.support.benchmark_runs import gpu_check


@pytest.mark.full
def test_the_script_runs_the_benchmark_and_keeps_its_results(tmp_path: Path) -> None:
    done = gpu_check(
        tmp_path, "attention", BACKEND="sdpa", ATTENTION_ARGS=TINY_ATTENTION + " --quick"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all done: attention"
    assert len(json.loads((tmp_path / "out" / "attention.json").read_text())["rows"]) == 3
    assert "3 green, 0 red" in (tmp_path / "out" / "attention.log").read_text()


def test_the_script_says_which_step_failed(tmp_path: Path) -> None:
    words = {"BACKEND": "sdpa", "MEMORY_ARGS": "--layers 1 --prompts 2048"}
    python = 'echo "python3 $*"; case "$*" in *benchmarks\\ attention*) exit 1; esac'
    done = gpu_check(tmp_path, "attention", "memory", python=python, **words)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "FAILED: attention (1)"
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("python3 -m benchmarks memory")]
    assert " --layers 1 --prompts 2048" in line
    assert gpu_check(tmp_path, "attention", "dance").returncode == 2
    usage = gpu_check(tmp_path)
    assert usage.returncode == 2 and "carry" in usage.stdout


def test_the_tests_of_the_gpu_exist(tmp_path: Path) -> None:
    done = gpu_check(
        tmp_path,
        "tests",
        "compile",
        "chosen",
        "liger",
        python='echo "python3 $*"',
        PYTEST_ARGS="-x",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("python3 -m pytest")]
    assert len(lines) == 6
    files = [word for line in lines for word in line.split() if word.endswith(".py")]
    assert len(files) >= 10 and all((ROOT / file).exists() for file in files)
    assert ["-x" in line.split() for line in lines] == [True, False, True, True, True, False]


def test_compiled_kernels_go_to_the_next_machine(tmp_path: Path) -> None:
    def machine(name: str, **words: str) -> list[str]:
        done = gpu_check(
            tmp_path,
            "head",
            python="ls $TILELANG_CACHE_DIR; mkdir -p $TILELANG_CACHE_DIR/kernel",
            UNPACKED=str(tmp_path / name),
            GPU_FILES=str(tmp_path / "files"),
            **words,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return [line for line in done.stdout.splitlines() if line == "kernel"]

    (tmp_path / "files").mkdir()
    first = machine("first", CACHES="1")
    (tmp_path / "out/caches.tar.xz").rename(tmp_path / "files/caches.tar.xz")
    assert len(machine("second")) == len(first) + 1


def test_the_steps_of_updates_fit_in_a_call(tmp_path: Path) -> None:
    """At most 600 s each, defaults beside best settings, results under names that tables read."""
    steps = ("update_best", "update_36", "update_long", "experts", "experts_peers", "experts_best")
    for step in (*steps, "settings", "settings_2gpu"):
        done = gpu_check(tmp_path, step, python='echo "python3 $*"')
        assert done.returncode == 0, done.stdout + done.stderr
        limits = re.findall(r"== \w[\w.-]* \(at most (\d+) s\)", done.stdout)
        assert limits and sum(map(int, limits)) <= 600, step
        files = re.findall(r"--out \S*/(\S+\.json)", done.stdout)
        patterns = [p for _, *some in write_tables.TABLES.values() for p in some]
        assert files and all(any(fnmatch(f"h200/{f}", p) for p in patterns) for f in files), files


def test_results_come_back_as_one_archive(tmp_path: Path) -> None:
    """Also those of a step that fails; and each run of `wide` has its kernels compiled before."""
    brought = tmp_path / "all.tgz"
    python = 'case "$*" in *wide_256_24*) exit 3; esac; echo "python3 $*"'
    done = gpu_check(tmp_path, "wide", python=python, BRING=str(brought))
    assert done.returncode == 1 and done.stdout.splitlines()[-1] == "FAILED: wide_256_24 (3)"
    with tarfile.open(brought) as archive:
        logs = {Path(name).name for name in archive.getnames()} - {""}
    assert logs == {
        f"wide_{name}.log" for name in ("192", "192_keys", "256", "256_24", "192_128")
    } | {"wide.compiled.log"}
    compiled = (tmp_path / "out" / "wide.compiled.log").read_text().splitlines()
    assert len([line for line in compiled if "--scale 0.01" in line]) == 9
    limits = re.findall(r"== \w+ \(at most (\d+) s\)", done.stdout)
    assert len(limits) == 5 and 100 + sum(map(int, limits)) <= 600


def test_the_steps_of_low_precision(tmp_path: Path) -> None:
    """Behind what the machine has; and without its archive a step fails."""
    files = tmp_path / "files"
    files.mkdir()
    with tarfile.open(files / "low.tar.xz", "w:xz"):
        pass
    steps = {"low": 4, "low_compiled": 2, "distill": 1, "distill_models": 1}
    for step, runs in steps.items():
        done = gpu_check(tmp_path, step, python='echo "python3 $* in $PYTHONPATH"')
        assert done.returncode == 0, done.stdout + done.stderr
        limits = re.findall(r"== \w+ \(at most (\d+) s\)", done.stdout)
        assert len(limits) == runs and sum(map(int, limits)) <= 600
        paths = re.findall(r"^python3 .* in (\S+)$", done.stdout, re.MULTILINE)
        assert paths[-1].split(":")[-1].endswith("prefixtree-low")
    missing = gpu_check(tmp_path, "low", UNPACKED=str(tmp_path / "new"), GPU_FILES=str(tmp_path))
    assert missing.returncode == 1 and "low.tar.xz" in missing.stdout
