"""tools/reach.py: what a file of tests reaches, on a small checkout and on this one."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.support.warm import run_warm
from tools.reach import ROOT, Sources, made_by


@cache
def this_checkout() -> Sources:
    """Read once."""
    return Sources()


LAZY = """
from prefixtree.eager import Eager
from prefixtree.registration import run as _run
__all__ = ["Eager", "later"]
_LATER = {"prefixtree.later": ("later",)}
def __getattr__(name): ...
"""
FILES = {
    "prefixtree/__init__.py": LAZY,
    "prefixtree/eager.py": "",
    "prefixtree/later.py": "def later():\n    from prefixtree import deep",
    "prefixtree/deep.py": "import peft\nif TYPE_CHECKING:\n    import prefixtree.types",
    "prefixtree/types.py": "",
    "prefixtree/used.py": "import_module('prefixtree.named')",
    "prefixtree/named.py": "from prefixtree import deep",
    "prefixtree/integrations/__init__.py": "",
    "prefixtree/registration.py": "run = 'prefixtree.integrations.transformers'",
    "prefixtree/integrations/transformers.py": "def f():\n    import prefixtree.used",
    "benchmarks/__main__.py": "import_module(f'benchmarks.cases.{name}')".replace("'", '"'),
    "benchmarks/cases/__init__.py": "",
    "benchmarks/cases/one.py": "",
    "benchmarks/cases/two.py": "",
    "examples/run.py": "import prefixtree.types",
    "examples/run.sh": "python -m tests.rank --model examples/config.yaml",
    "examples/config.yaml": "",
    "docs/page.md": "see `prefixtree.deep`\n```py\nimport prefixtree as pt\npt.later()\n```\n",
    "tests/rank.py": "",
    "tests/conftest.py": "from tests import shared\ncollect_ignore = ['tests/folder/data.json']",
    "tests/shared.py": "",
    "tests/folder/data.json": "",
    "pyproject.toml": "",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "reached"),
    [
        ('"""prefixtree.deep"""\nfrom prefixtree import Eager', "eager"),
        ("import prefixtree as pt\npt.later", "later deep transformers used named"),
        ("getattr(x, 'later')", "later deep transformers used named"),
        ("patch('prefixtree.used.f')", "used named deep transformers"),
        ("run([python, '-m', 'benchmarks', 'one'])", "benchmarks/__main__ one"),
        ("start(ROOT / 'examples' / 'run.sh')", "examples/run.sh rank config.yaml"),
        ("start(ROOT / 'examples' / f'{name}.py')", "examples/run.py types"),
        ("(ROOT / 'docs/page.md').read()", "page.md later deep transformers used named"),
        ("from .. import shared\n(HERE / 'data.json').read()", "folder/data.json"),
        ("Path(__file__).with_name('data.json').read()", "folder/data.json"),
        ("import peft, prefixtree", "transformers used named deep"),
        ("import torch, prefixtree", ""),
    ],
)
def test_what_is_followed(checkout: Path, text: str, reached: str) -> None:
    (checkout / "tests/folder/test_it.py").write_text(text)
    found = Sources(checkout).reach("tests/folder/test_it.py")
    always = {"prefixtree/__init__.py", "tests/shared.py", "tests/conftest.py", "pyproject.toml"}
    always |= {f for f in FILES if f.endswith(("__init__.py", "registration.py"))}
    for name in sorted(FILES.keys() - always):
        wanted = any(
            name.rpartition(".")[0].endswith(x) or name.endswith(x) for x in reached.split()
        )
        assert (name in found) == wanted, name
    assert {"tests/shared.py", "tests/conftest.py", "pyproject.toml"} <= found


def test_a_fingerprint_is_of_all_that_is_reached(checkout: Path) -> None:
    test = checkout / "tests/folder/test_it.py"
    test.write_text("from prefixtree.used import x")
    seen = {Sources(checkout).fingerprint("tests/folder/test_it.py", "make")}
    for file, changes in (("deep", True), ("types", False), ("__init__", True)):
        changed = checkout / f"prefixtree/{file}.py"
        changed.write_text(changed.read_text() + "\n")
        found = Sources(checkout).fingerprint("tests/folder/test_it.py", "make")
        assert (found not in seen) == changes
        seen.add(found)
    assert Sources(checkout).fingerprint("tests/folder/test_it.py", "other") not in seen


@pytest.mark.parametrize(
    "test, own",
    [
        ("tests/scoring/test_teacher.py", "prefixtree/scoring/"),
        ("tests/kernels/attention/flash/test_chains.py", "prefixtree/kernels/"),
        ("tests/integrations/trl/test_training.py", "prefixtree/integrations/trl/"),
        ("tests/examples/test_fsdp2_grpo.py", "nothing"),
        # of no room
        ("tests/package/test_readme.py", "prefixtree/"),
        ("tests/test_forest.py", "prefixtree/"),
    ],
)
def test_what_is_near(test: str, own: str) -> None:
    sources = this_checkout()
    near, reach = sources.near(test), sources.reach(test)
    assert {test, "pyproject.toml"} <= near <= reach
    inside = {file for file in reach if file.startswith("prefixtree/")}
    assert near & inside == {file for file in inside if file.startswith(own)}
    assert reach - near <= inside and (own == "nothing" or near & inside)
    if reach > near:
        made = {sources.fingerprint(test, "make", near) for near in (False, True)}
        assert len(made) == 2


def test_what_makes_a_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    verl = made_by("test-full-verl", makefile)
    for part in ("VERL = ", "TORCH = ", "PINS = ", '"verl==$*"', "--group dev", "--full -m full"):
        assert part in verl
    assert "trl" not in verl and "DEEPSPEED" not in verl
    assert '"transformers==$*"' in made_by("test-transformers", makefile)
    assert "FULL_kernels = tests/kernels" in made_by("test-full PART=kernels", makefile)
    megatron = made_by("test-megatron MEGATRON=0.19.2", makefile)
    assert "BRIDGE = " in megatron and "PACKAGES_0.19.2 = omegaconf" in megatron


RUN = """
import prefixtree, pytest, sys
known = set(sys.modules)
assert not pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]])
new = [vars(module).get("__file__") for name, module in sys.modules.items() if name not in known]
print("RAN", *filter(None, new))
"""


@pytest.mark.full
def test_what_runs_is_reached() -> None:
    """Of this checkout, beside what the package imports for whoever uses it."""
    test = "tests/scoring/test_teacher.py"
    # a recurrent model through all that a teacher needs
    done = run_warm(RUN, test, "-k", "qwen3_5")
    assert done.returncode == 0, done.stdout
    ran = {Path(file) for file in done.stdout.partition("RAN")[2].split()}
    ran = {str(file.relative_to(ROOT)) for file in ran if file.is_relative_to(ROOT)}
    ran = {file for file in ran if not file.startswith(".venv")}
    assert len(ran) > 60 and test in ran and ran <= this_checkout().reach(test)
