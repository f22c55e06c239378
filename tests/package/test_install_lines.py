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
    *(ROOT / "examples").rglob("*.*"),
    *(ROOT / "tests").rglob("test_*gpu.py"),
    *ROOT.glob("*.md"),
]
FILES = [file for file in _TEXTS if "pip install" in file.read_text()]
# quoted or not, of this project or of others; "." is a checkout
_INSTALLED = re.compile(
    r"pip install (?:--group \w+ )?(?:-e )?(?P<quote>['\"]?)(?P<what>[\w.\-]+)\[(?P<extras>[^]]+)]"
)
_BARE = re.compile(r"pip install (?:-e )?['\"]?(prefixtree[\w\-]*)")


def install_lines(text: str) -> list[tuple[str, str, list[str]]]:
    """(quote, name, extras) of each line that installs something with extras."""
    return [(m["quote"], m["what"], m["extras"].split(",")) for m in _INSTALLED.finditer(text)]


def test_the_search_finds_what_it_should() -> None:
    text = (
        "`pip install --group dev -e '.[plot,fa4]'`, pip install foo, "
        "(pip install bar[x]) pip install 'b-c[y]'"
    )
    assert install_lines(text) == [
        ("'", ".", ["plot", "fa4"]),
        ("", "bar", ["x"]),
        ("'", "b-c", ["y"]),
    ]
    found = {name for file in FILES for _, name, _ in install_lines(file.read_text())}
    assert {".", "prefixtree-attention"} <= found


def test_the_name_is_ours() -> None:
    assert PROJECT["name"] == "prefixtree-attention"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_what_is_to_be_installed_exists(file: Path) -> None:
    text = file.read_text()
    for quote, name, extras in install_lines(text):
        line = f"{name}[{','.join(extras)}]"
        assert name in (".", PROJECT["name"]), f"{file.name}: {line} is another project's"
        assert set(extras) <= set(EXTRAS), f"{file.name}: {line} has an extra that is not there"
        # zsh takes [..] for a pattern
        assert quote, f"{file.name}: {line} wants quotes"
    for name in _BARE.findall(text):
        assert name == PROJECT["name"], f"{file.name}: {name} on PyPI is another project's"


def test_packages_that_messages_name_are_in_their_extras() -> None:
    from prefixtree.kernels.flash.launch import VERSION
    from prefixtree.kernels.recurrence.fla import VERSIONS

    names = {extra: {Requirement(r).name for r in given} for extra, given in EXTRAS.items()}
    assert "matplotlib" in names["plot"] and "pyarrow" in names["parquet"]
    assert EXTRAS["fa4"] == [f"flash-attn-4=={VERSION}"]
    assert EXTRAS["fla"] == [f"fla-core=={VERSIONS[-1]}"]
