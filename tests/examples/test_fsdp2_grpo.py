"""`examples/fsdp2_grpo.py` on two gloo processes: killed and resumed, against one process and
against every rollout in full."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from prefixtree.rollouts import read_rollouts
from tests.support.cli_runs import one_thread
from tests.support.spawn import ROOT

PATH = ROOT / "examples" / "fsdp2_grpo.py"
LAUNCHER = [
    *(sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"),
    # the default is one port for all runs of a machine
    *("--main_process_port", "0"),
    *("--config_file", str(ROOT / "examples" / "configs" / "fsdp2_loop.yaml")),
]


def _load(*mutations: tuple[str, str]) -> ModuleType:
    """The example, with pieces of its text replaced by others."""
    source = PATH.read_text()
    for before, after in mutations:
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    module = ModuleType("fsdp2_grpo_example")
    module.__file__ = str(PATH)
    # typing.NamedTuple looks its module up
    sys.modules[module.__name__] = module
    exec(compile(source, PATH, "exec"), vars(module))
    return module


example = _load()


def _launch(output: Path, kill_after: str | None = None) -> list[str]:
    """The lines of `accelerate launch`, to the end or until all its processes are killed."""
    log = output.with_suffix(".err")
    with (
        log.open("a") as errors,
        subprocess.Popen(
            [*LAUNCHER, str(PATH), "--tiny", "--output", str(output)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        ) as process,
    ):
        lines = []
        try:
            for line in process.stdout or ():
                lines.append(line.rstrip())
                if kill_after is not None and line.startswith(kill_after):
                    return lines
            if process.wait(timeout=60) != 0:
                # FSDP2 holds the group beyond destroy_process_group, so gloo's threads see Python
                # end. Rarely a process then aborts, after all that is saved
                done = [line for line in lines if line.startswith(f"step {example.TINY['steps']} ")]
                ended = "terminate called without an active exception" in log.read_text()
                saved = (output / "model" / "config.json").exists()
                assert ended and done and saved, log.read_text()
            return lines
        finally:
            if process.poll() is None:
                # SIGKILL: no process can tidy up
                for each in (*psutil.Process(process.pid).children(recursive=True), process):
                    each.kill()


def _facts(lines: list[str]) -> dict[int, dict[str, float]]:
    """Per step, the printed names and values."""
    found = {}
    for line in lines:
        if line.startswith("step "):
            step, *facts = line.removeprefix("step ").split("  ")
            found[int(step)] = {k: float(v) for k, v in (f.rsplit(" ", 1) for f in facts)}
    return found


def _weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model" / "model.safetensors")


def _worst(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).abs().max()) for name in one)


def _same_facts(lines: list[str], expected: list[str], but: tuple[str, ...] = ()) -> None:
    mine, other = _facts(lines), _facts(expected)
    assert mine and mine.keys() <= other.keys()
    for step, facts in mine.items():
        for name in facts.keys() - set(but):
            assert facts[name] == pytest.approx(other[step][name], rel=1e-4, abs=1e-5), (step, name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """One process with the whole batch, in one process group of its own; its lines."""
    output = tmp_path_factory.mktemp("alone") / "run"
    return output, _run(example, output)


def _run(module: ModuleType, output: Path, *options: str) -> list[str]:
    """The lines of a run in this process."""
    text = io.StringIO()
    with redirect_stdout(text), one_thread():
        module.main(["--tiny", "--output", str(output), *options])
    return text.getvalue().splitlines()


@pytest.mark.full
def test_kill_and_resume(alone, tmp_path):
    """Two ranks, all killed after the third step: bit by bit the parameters of the run that was
    not, and those of one process to 1e-5."""
    whole = _launch(tmp_path / "whole")
    assert whole[0].startswith("FSDPQwen3ForCausalLM on 2 ranks, cpu; ")
    own, parameters = (
        int(count.replace(",", "")) for count in re.findall(r"[\d,]*\d\d\d", whole[0])
    )
    assert parameters / 2 <= own < 0.52 * parameters
    assert whole[0].endswith("; 0 steps are done") and list(_facts(whole)) == [1, 2, 3, 4, 5, 6]
    # one rank has fewer micro-batches than the other
    assert any(facts["empty steps"] > 0 for facts in _facts(whole).values())
    assert all(facts["sharing"] > 2 for facts in _facts(whole).values())

    killed = tmp_path / "killed"
    first = _launch(killed, kill_after="step 3")
    assert list(_facts(first)) == [1, 2, 3] and not (killed / "model").exists()
    # of the checkpoint that the kill cut off, nothing is read
    (killed / "checkpoint.part").mkdir(exist_ok=True)
    (killed / "checkpoint.part" / "__0_0.distcp").write_bytes(b"cut off")
    left = tmp_path / "left"
    shutil.copytree(killed, left)
    second = _launch(killed)
    done = int(re.search(r"(\d) steps are done", second[0])[1])
    assert 2 <= done <= 4 and list(_facts(second)) == list(range(done + 1, 7))
    assert _worst(_weights(killed), _weights(tmp_path / "whole")) == 0
    assert _facts(second)[6] == _facts(whole)[6]

    output, lines = alone
    _same_facts(whole, lines, but=("empty steps", "sharing"))
    worst = _worst(_weights(output), _weights(killed))
    assert worst < 1e-5
    # the checkpoint of two ranks, on one
    assert f"{done} steps are done" in _run(example, left)[0]
    resharded = _worst(_weights(left), _weights(killed))
    assert resharded < 1e-6
    moved = max(float((p - q).abs().max()) for p, q in _first_and_last(output))
    print(f"one process {worst:.1e}, resumed on one {resharded:.1e}, moved by {moved:.1e}")
    assert moved > 1e-3


def _first_and_last(output: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    config = example.AutoConfig.from_pretrained(example.TINY_MODEL, vocab_size=128)
    start = dict(example.AutoModelForCausalLM.from_config(config).named_parameters())
    return [(weight, start[name].detach()) for name, weight in _weights(output).items()]


@pytest.mark.full
def test_replicated(alone, tmp_path):
    lines = _run(example, tmp_path / "run", "--replicated")
    _same_facts(lines, alone[1])
    assert _worst(_weights(tmp_path / "run"), _weights(alone[0])) < 1e-5


@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(
            ('    schedule.load_state_dict(state["schedule"])\n', ""), marks=pytest.mark.full
        ),
        (
            'optim_state_dict=state["optimizer"]',
            'optim_state_dict=state_of(policy, optimizer, schedule)["optimizer"]',
        ),
        pytest.param(
            (
                '    return int(found[-1].name.removeprefix("checkpoint-"))',
                '    return 1 + int(found[-1].name.removeprefix("checkpoint-"))',
            ),
            marks=pytest.mark.full,
        ),
    ],
    ids=["schedule", "optimizer", "step"],
)
def test_what_a_resume_leaves_out_is_seen(mutation, alone, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(alone[0], output)
    shutil.rmtree(output / "checkpoint-000006")
    shutil.rmtree(output / "model")
    other = tmp_path / "other"
    shutil.copytree(output, other)
    _run(example, output)
    assert _worst(_weights(output), _weights(alone[0])) == 0
    _run(_load(mutation), other)
    assert _worst(_weights(other), _weights(alone[0])) > 1e-5


def test_rollouts_from_a_file(alone, tmp_path):
    """Steps take the groups in turn; `prefixtree report` reads the same file."""
    rows = example.make_rollouts(np.random.default_rng(0), tasks=3)
    file = tmp_path / "rollouts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = read_rollouts(file)
    assert [s.tolist() for s in read.sequences] == [row["token_ids"] for row in rows]
    assert read.loss_masks is not None and read.groups == [row["group"] for row in rows]
    options = argparse.Namespace(rollouts=file, tasks=2)
    taken = [{row["group"] for row in example.next_rollouts(s, options)} for s in range(4)]
    assert taken == [{0, 1}, {2, 0}, {1, 2}, {0, 1}]
    options.tasks = 5
    assert example.next_rollouts(0, options) == rows
    # a saved model, by its path
    output, saved = tmp_path / "run", str(alone[0] / "model")
    lines = _run(example, output, "--rollouts", str(file), "--steps", "1", "--model", saved)
    assert list(_facts(lines)) == [1] and (output / "checkpoint-000001").exists()
    assert 0 < _worst(_weights(output), _weights(alone[0])) < 2e-3


def test_a_file_without_groups_is_refused_by_line(tmp_path: Path) -> None:
    """Before a model is loaded; it was a bare KeyError."""
    rows = example.make_rollouts(np.random.default_rng(0), tasks=1)
    del rows[1]["group"]
    file = tmp_path / "rollouts.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=r"rollouts\.jsonl, line 2, has no group: .* one prompt"):
        example.main(["--tiny", "--rollouts", str(file), "--output", str(tmp_path)])
