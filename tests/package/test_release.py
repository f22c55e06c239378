"""A release: its interpreters, its image, and what an issue asks for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from typer.core import TyperGroup

from prefixtree.cli import app
from tools.ci import pins

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def pythons() -> list[str]:
    """The interpreters that the workflow of a change runs."""
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    found = []
    for job in jobs.values():
        (asked,) = (step["with"] for step in job["steps"] if "setup-python" in step.get("uses", ""))
        matrix = job.get("strategy", {}).get("matrix", {}).get("python")
        assert (matrix is None) != ("matrix.python" in asked["python-version"])
        found += matrix or [asked["python-version"]]
    return found


def test_a_python_is_named_where_ci_runs_it() -> None:
    named = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert named == pythons()
    lowest, *_ = (s.version for s in SpecifierSet(PROJECT["requires-python"]))
    assert named[0] == lowest


def test_the_image_has_the_torch_of_ci_and_extras_that_exist() -> None:
    text = (ROOT / "Dockerfile").read_text()
    (torch,) = re.findall(r"^FROM pytorch/pytorch:([\d.]+)-cuda", text, re.MULTILINE)
    assert f"torch=={torch}" == pins()["TORCH"]
    extras = PROJECT["optional-dependencies"]
    (asked,) = (Requirement(r) for r in extras["train"] if Requirement(r).name == "torch")
    assert torch in asked.specifier
    (line,) = re.findall(r"^RUN pip install .*'\.\[(.*)]'$", text, re.MULTILINE)
    assert set(line.split(",")) <= extras.keys()


def test_the_image_copies_what_the_wheel_is_built_from() -> None:
    """What .dockerignore lets through is what COPY names."""
    text = (ROOT / "Dockerfile").read_text()
    copied = {
        w for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for w in line.split()
    }
    let_through = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert copied == set(let_through)
    wanted = {PROJECT["readme"], *PROJECT["license-files"], "pyproject.toml", "prefixtree"}
    assert copied == wanted


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_an_issue_asks_for_the_doctor(form: Path) -> None:
    """In a field that must be filled in."""
    fields: list[dict[str, Any]] = yaml.safe_load(form.read_text())["body"]
    (doctor,) = (f for f in fields if "prefixtree doctor" in f["attributes"]["label"])
    assert doctor["type"] == "textarea" and doctor["validations"] == {"required": True}


def test_commands_that_are_asked_for_exist() -> None:
    texts = [file.read_text() for file in (*FORMS, ROOT / "SECURITY.md")]
    named = {name for text in texts for name in re.findall(r"`prefixtree (\w+)", text)}
    named |= set(re.findall(r'^CMD \["(\w+)"]$', (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    program = typer.main.get_command(app)
    assert isinstance(program, TyperGroup)
    assert {"doctor", "report", "verify"} <= named <= program.commands.keys()


def test_the_changelog_is_one_entry_of_few_words() -> None:
    """For who meets the library first: what was in no release has no line of its own."""
    text = (ROOT / "CHANGELOG.md").read_text()
    assert len(re.findall(r"^## ", text, re.MULTILINE)) == 1 and len(text.split()) <= 1200
    parts = ["What it does", "Breaking names", "Numerics", "Performance", "What was not run"]
    assert re.findall(r"^### (.*)$", text, re.MULTILINE) == parts
