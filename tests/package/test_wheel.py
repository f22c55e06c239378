"""The wheel: what is in it, its version, and the types that a user's file sees."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
import yaml
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.version import Version

import prefixtree

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return Path(built)


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin/python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    (line,) = subprocess.check_output([python, "-c", where], text=True).splitlines()
    with zipfile.ZipFile(wheel) as file:
        file.extractall(line)
    return python


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as file:
        (name,) = (n for n in file.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(file.read(name).decode())


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        held = {n for n in file.namelist() if ".dist-info/" not in n}
    ours = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "prefixtree").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == {name for name in ours if not name.endswith((".nbi", ".nbc"))}
    assert "prefixtree/py.typed" in held


def test_one_version(wheel: Path) -> None:
    version = prefixtree.__version__
    described = metadata(wheel)
    assert (described["Name"], described["Version"]) == ("prefixtree-attention", version)
    assert wheel.name == f"prefixtree_attention-{version}-py3-none-any.whl"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == version
    heading = re.search(r"^## (\S+) - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading is not None
    if heading[2] == "unreleased":
        assert Version(version) < Version(heading[1])
    else:
        assert heading.groups() == (version, str(citation["date-released"]))


def test_a_requirement_is_listed_once() -> None:
    """No group repeats what an extra or the project itself asks for. What two extras need, they ask
    for in the same words; extras may ask for one another."""
    project, groups = PYPROJECT["project"], PYPROJECT["dependency-groups"]
    extras = {line for part in project["optional-dependencies"].values() for line in part}
    others = [line for part in (project["dependencies"], *groups.values()) for line in part]
    names = [Requirement(line).name for line in (*extras, *others) if isinstance(line, str)]
    names = [name for name in names if name != project["name"]]
    assert sorted(names) == sorted(set(names))
    assert "numba" in {Requirement(line).name for line in project["dependencies"]}
    included = {line["include-group"] for line in groups["dev"]}
    assert included == set(groups) - {"dev", "real"}


# what a user writes, and the types that mypy should tell of it
_SEEN = {
    "pt.sequence_logprobs": r"def \(model: Any, packed: prefixtree\.packing\.\S*PackedForest.*\)"
    r" -> prefixtree\.scoring\.\S*SequenceScores",
    "scores.logprobs": r"list\[.*\]",
    "pt.plan_micro_batches": r"def \(.*\) -> prefixtree\.planning\.\S*MicroBatchPlan",
    "forest.num_tokens": r"int",
    "pt.explain": r"def \(.*\) -> str",
}


def test_the_types_of_a_users_file(site: Path, tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    lines = [f"reveal_type({text})" for text in _SEEN]
    first = ["import prefixtree as pt", "forest = pt.PrefixForest.from_sequences([[1, 2], [1, 3]])"]
    wrong = "pt.plan_micro_batches(forest, 'many')"
    file.write_text("\n".join([*first, "scores: pt.SequenceScores", *lines, wrong, ""]))
    # torch is not in this environment, which saves half a minute: its types show as Any
    command = [sys.executable, "-m", "mypy", "--python-executable", str(site), str(file)]
    options = ["--config-file", "", "--no-color-output", "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("user.py:")]
    notes = [m[1] for line in said if (m := re.search(r'Revealed type is "(.*)"$', line))]
    assert len(notes) == len(_SEEN), done.stdout + done.stderr
    for found, wanted in zip(notes, _SEEN.values(), strict=True):
        assert re.fullmatch(wanted, found), f"{found} is not {wanted}"
    (error,) = (line for line in said if ": error:" in line)
    assert '"plan_micro_batches" has incompatible type "str"' in error
