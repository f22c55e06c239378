"""For `make docs`: pages and files of other folders are part of the site.

Their links are those of the repository, so that they work on GitHub. On the site they lead to where
the page is there.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import join, normpath
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

# a file of the repository, and its place on the site
MOVED = {
    "benchmarks/results.md": "results.md",
    "benchmarks/notebook.md": "notebook.md",
    "benchmarks/README.md": "benchmarks.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "tests/README.md": "tests.md",
}
# copied as they are, for links to them
COPIED = ("examples/", "benchmarks/results/cpu/")
SOURCE = {page: file for file, page in MOVED.items()}
# a link or an image whose address is a path
LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """The site's files, with those of other folders."""
    root = config.config_file_path.rpartition("/")[0]
    for file, page in MOVED.items():
        files.append(File.generated(config, page, abs_src_path=join(root, file)))
    for name in _copied(root):
        file = File.generated(config, name, abs_src_path=join(root, name))
        # mkdocs.yml leaves out Python files
        file.inclusion = InclusionLevel.INCLUDED
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The page with links that lead to places on the site."""
    source = SOURCE.get(page.file.src_uri, join("docs", page.file.src_uri))
    depth = page.file.src_uri.count("/")

    def on_site(found: re.Match[str]) -> str:
        target = normpath(join(source, "..", found[2]))
        place = MOVED.get(target) or target.removeprefix("docs/")
        is_there = place != target or target.startswith(COPIED)
        return found[1] + ("../" * depth + place if is_there else found[2])

    return LINK.sub(on_site, markdown)


def _copied(root: str) -> list[str]:
    files = (p for folder in COPIED for p in Path(root, folder).rglob("*"))
    found = (p for p in files if p.is_file() and p.suffix != ".pyc")
    return sorted(p.relative_to(root).as_posix() for p in found)
