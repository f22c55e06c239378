"""`pip install prefixtree-attention` without an extra: what runs where there is no torch and no
transformers, and what the rest says."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from tests.support.chat_tokenizer import CHATML, save_tokenizer
from tests.support.cli_runs import write_rollouts

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# of a chat: three sequences of two turns
CHAT = [
    {"role": role, "content": f"number {i}"} for i, role in enumerate(("user", "assistant") * 2)
]


@cache
def others(*extras: str) -> list[str]:
    """The modules here that an install with these extras would not bring."""
    lines = [*PROJECT["dependencies"]]
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    brought, todo = {"pip", "setuptools"}, [Requirement(line) for line in lines]
    while todo:
        wanted = todo.pop()
        name = wanted.name.lower().replace("_", "-")
        if name not in brought and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
            brought.add(name)
            todo += [Requirement(line) for line in metadata.requires(wanted.name) or []]
    of = metadata.packages_distributions().items()
    return sorted(
        module
        for module, names in of
        if not {n.lower().replace("_", "-") for n in names} & brought
        and module not in ("prefixtree", "tests")
    )


def run(code: str, *arguments: object, extras: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    """Runs code where all other modules are missing; `program(*arguments)` is the command."""
    assert {"torch", "transformers", "networkx", "pytest"} <= set(others(*extras))
    before = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({others(*extras)!r}))\n"
        "def program(*arguments):\n"
        "    from prefixtree.cli import app\n"
        "    try: app(list(arguments), prog_name='prefixtree')\n"
        "    except SystemExit as end: return end.code\n"
    )
    return subprocess.run(
        [sys.executable, "-c", before + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )


def test_report_and_doctor_run(tmp_path: Path) -> None:
    file = write_rollouts(tmp_path / "r.jsonl")
    done = run(
        "assert program('report', sys.argv[1], '--json') == 0\n"
        "from importlib import metadata; known = metadata.version\n"
        "def version(name):\n"
        "    if name in ('numpy', 'numba'): return known(name)\n"
        "    raise metadata.PackageNotFoundError(name)\n"
        "metadata.version = version\n"
        "sys.exit(program('doctor'))",
        file,
    )
    assert (done.returncode, done.stderr) == (0, "")
    facts, *doctor = done.stdout.splitlines()
    assert json.loads(facts)["tokens"]["replicated"] == 4 * 46
    lines = {line[:13].strip(): line[14:] for line in doctor}
    needs = "not installed (for models: all but report): pip install 'prefixtree-attention[train]'"
    assert lines["torch"] == lines["transformers"] == lines["networkx"] == needs
    assert "backend" not in lines and lines["ok"]


def test_report_of_chats_runs(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer", CHATML)
    file = tmp_path / "r.jsonl"
    file.write_text("".join(json.dumps({"messages": CHAT[:n]}) + "\n" for n in (2, 4, 4)))
    code = "sys.exit(program('report', sys.argv[1], '--tokenizer', sys.argv[2], '--json'))"
    done = run(code, file, folder, extras=("chat",))
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["sequences"] == 3
    bare = run(code, file, folder)
    assert (bare.returncode, bare.stdout) == (2, "")
    assert bare.stderr == (
        "prefixtree: a tokenizer needs tokenizers, which is not installed: "
        "pip install 'prefixtree-attention[chat]'\n"
    )


NAMES = """
import prefixtree as pt
forest = pt.PrefixForest.from_sequences([[1, 2, 3], [1, 2, 4]])
assert forest.num_tokens == 4 and pt.PrefixForest is type(forest)
def said(use):
    try: use()
    except ModuleNotFoundError as problem: print(problem.name, problem)
said(lambda: pt.sequence_logprobs)
said(lambda: pt.pack(forest))
said(lambda: pt.sampling)
said(forest.to_networkx)
said(lambda: __import__("prefixtree.integrations.trl"))
said(lambda: __import__("prefixtree.testing.compare"))
"""


def test_a_name_that_needs_torch_says_what_to_install() -> None:
    done = run(NAMES)
    assert (done.returncode, done.stderr) == (0, "")
    end = "which is not installed: pip install 'prefixtree-attention[train]'"
    assert done.stdout.splitlines() == [
        f"{package} {what} needs {package}, {end}"
        for package, what in (
            ("torch", "prefixtree.sequence_logprobs"),
            ("torch", "prefixtree.pack"),
            ("torch", "prefixtree.sampling"),
            ("networkx", "to_networkx"),
            ("torch", "prefixtree.integrations"),
            ("torch", "prefixtree.testing"),
        )
    ]


NEED_TORCH = {
    "verify FILE --model x": "prefixtree verify",
    "bench": "prefixtree.testing",
    "demo": "prefixtree demo",
    "report FILE --model x": "report --model",
    "report FILE --ranks 2": "report --ranks",
    "report FILE --plot x.png": "report --plot",
}


def test_commands_that_need_torch_say_so_in_a_line(tmp_path: Path) -> None:
    file = str(write_rollouts(tmp_path / "r.jsonl"))
    lines = [[file if a == "FILE" else a for a in line.split()] for line in NEED_TORCH]
    done = run(f"for line in {lines!r}: assert program(*line) == 2")
    assert (done.returncode, done.stdout) == (0, "")
    end = "needs torch, which is not installed: pip install 'prefixtree-attention[train]'"
    assert done.stderr.splitlines() == [f"prefixtree: {what} {end}" for what in NEED_TORCH.values()]


def test_an_import_loads_nothing_but_ours() -> None:
    """Where everything is installed, too."""
    code = (
        "import sys; before = set(sys.modules); import prefixtree\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(new - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout.split(), done.stderr) == (["prefixtree"], "")


def test_a_report_loads_no_torch_where_it_is_installed(tmp_path: Path) -> None:
    file = write_rollouts(tmp_path / "r.jsonl")
    folder = save_tokenizer(tmp_path / "tokenizer", CHATML)
    code = (
        "import sys\nfrom prefixtree.cli import app\n"
        "try: app(['report', *sys.argv[1:]])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'transformers', 'networkx'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(file), "--tokenizer", str(folder)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert (done.returncode, done.stderr) == (0, "")
