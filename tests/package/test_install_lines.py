"""Every `pip install` that a message or a page of the docs gives installs this project.

`prefixtree` on PyPI is somebody else's package: what users install is `prefixtree-attention`.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
_TEXTS = [
    *(ROOT / "prefixtree").rglob("*.py"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "benchmarks").glob("*.md"),
    # not what Python compiled there
    *(f for f in (ROOT / "examples").rglob("*.*") if f.suffix != ".pyc"),
    *(ROOT / "tests").rglob("test_*gpu.py"),
    *ROOT.glob("*.md"),
]
FILES = [file for file in _TEXTS if "pip install" in file.read_text()]
#: Of others, which bring nothing for torch without it.
OF_OTHERS = {"transformer-engine[pytorch]"}
# quoted or not, of this project or of others; "." is a checkout
_INSTALLED = re.compile(
    r"pip install (?P<options>(?:--group \w+ |-e |--[\w-]+ )*)"
    r"(?P<quote>['\"]?)(?P<what>[\w.\-]+)\[(?P<extras>[^]]+)]"
)
_BARE = re.compile(r"pip install (?:-e )?['\"]?(prefixtree[\w\-]*)")


def install_lines(text: str) -> list[tuple[str, str, str, list[str]]]:
    """(options, quote, name, extras) of each line that installs something with extras."""
    return [
        (m["options"].strip(), m["quote"], m["what"], m["extras"].split(","))
        for m in _INSTALLED.finditer(text)
    ]


def test_the_search_finds_what_it_should() -> None:
    text = (
        "`pip install --group dev -e '.[plot,fa4]'`, pip install foo, "
        "(pip install bar[x]) pip install --no-build-isolation 'b-c[y]'"
    )
    assert install_lines(text) == [
        ("--group dev -e", "'", ".", ["plot", "fa4"]),
        ("", "", "bar", ["x"]),
        ("--no-build-isolation", "'", "b-c", ["y"]),
    ]
    found = {name for file in FILES for _, _, name, _ in install_lines(file.read_text())}
    assert {".", "prefixtree-attention"} <= found


def test_the_name_is_ours() -> None:
    assert PROJECT["name"] == "prefixtree-attention"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_what_is_to_be_installed_exists(file: Path) -> None:
    text = file.read_text()
    for options, quote, name, extras in install_lines(text):
        line = f"{name}[{','.join(extras)}]"
        # zsh takes [..] for a pattern
        assert quote, f"{file.name}: {line} wants quotes"
        if line in OF_OTHERS:
            continue
        assert name in (".", PROJECT["name"]), f"{file.name}: {line} is another project's"
        assert set(extras) <= set(EXTRAS), f"{file.name}: {line} has an extra that is not there"
        isolated = "--no-build-isolation" not in options
        assert "fa2" not in extras or not isolated, f"{file.name}: {line} builds without torch"
    for name in _BARE.findall(text):
        assert name == PROJECT["name"], f"{file.name}: {name} on PyPI is another project's"


def test_the_table_of_readme_has_every_extra() -> None:
    """Its cells are without `pip install`, so that they fit on a phone."""
    named = re.findall(r"^\| `.*'\.\[.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    extras = [
        extra
        for line in named
        for some in re.findall(r"\[([\w,]+)]", line)
        for extra in some.split(",")
    ]
    assert sorted(extras) == sorted(EXTRAS)
    assert [line for line in named if "fa2" in line and "--no-build-isolation" in line]


def test_packages_that_messages_name_are_in_their_extras() -> None:
    from prefixtree.kernels.attention.flash.launch import VERSION
    from prefixtree.kernels.recurrence import flash_qla
    from prefixtree.kernels.recurrence.fla import VERSIONS

    names = {extra: {Requirement(r).name for r in given} for extra, given in EXTRAS.items()}
    assert "matplotlib" in names["plot"] and "pyarrow" in names["parquet"]
    assert f"flash-attn-4=={VERSION}" in EXTRAS["fa4"]
    assert EXTRAS["fla"][1:] == [f"fla-core=={VERSIONS[-1]}"] == EXTRAS["qla"][1:2]
    assert f"flash-qla=={flash_qla.VERSIONS[-1]}" in EXTRAS["qla"]


# what releases on PyPI ask for of one another (their metadata, read on 2026-11-23)
ASKED_BY = {
    "flash-attn-4==4.0.0b36": ["apache-tvm-ffi>=0.1.11,<0.2"],
    "flash-qla==0.1.3": ["tilelang>=0.1.12"],
    "tilelang==0.1.15": ["apache-tvm-ffi>=0.1.11,<0.1.13"],
}
RELEASES = {
    "apache-tvm-ffi": ["0.1.9", "0.1.10", "0.1.11", "0.1.12", "0.1.13", "0.1.14", "0.1.15.post2"],
    "tilelang": ["0.1.9", "0.1.12", "0.1.13", "0.1.14", "0.1.15"],
}


def newest(package: str, requirements: list[str]) -> str | None:
    """The newest release that all `requirements` admit, as pip takes it."""
    asked = [r.specifier for r in map(Requirement, requirements) if r.name == package]
    fit = [v for v in RELEASES[package] if all(specifier.contains(v) for specifier in asked)]
    return fit[-1] if fit else None


def test_the_kernels_on_hopper_go_together() -> None:
    """In one install, or one after the other: flash-qla dies with apache-tvm-ffi 0.1.15, which
    flash-attn-4 admits and tilelang does not."""
    assert newest("apache-tvm-ffi", ASKED_BY["flash-attn-4==4.0.0b36"]) == "0.1.15.post2"
    pinned = [*EXTRAS["fa4"], *EXTRAS["qla"]]
    asked = [r for release in ASKED_BY if release in pinned for r in ASKED_BY[release]]
    assert len(asked) == 2, "a pin of pyproject.toml has changed: write down what it asks for"
    tilelang = newest("tilelang", [*pinned, *asked])
    asked += ASKED_BY[f"tilelang=={tilelang}"]
    assert newest("apache-tvm-ffi", [*pinned, *asked]) == "0.1.12"
    # alone too, so that nothing has to be exchanged when the other comes
    for extras in (EXTRAS["fa4"], EXTRAS["qla"]):
        assert newest("apache-tvm-ffi", extras) == "0.1.12"
