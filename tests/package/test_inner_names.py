"""Private names of the package in its tests: one file knows them, and those that are listed."""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import prefixtree
from tests.support import hooks

PACKAGE = Path(prefixtree.__file__).parent
TESTS = Path(__file__).parents[1]
MOST = 40
_OWN = "white-box tests of the file of the same name"
#: Files that know private names, and why hooks.py or a public name does not do.
KNOWS = {
    "integrations/batch_trainers/test_forwards.py": "which forwards are ours is said nowhere else",
    "integrations/trl/test_benchmark.py": "a method of TRL's, which the adapter overrides",
    "integrations/trl/test_logprobs.py": "a method of TRL's, which the adapter overrides",
    "integrations/trl/test_tree_rows.py": "masks of a batch that is gone are freed",
    "integrations/verl/test_balance.py": "verl's ids of rollouts, one by one",
    "integrations/verl/test_distillation.py": "the rows of a small table, by hand",
    "kernels/attention/flash/fa4/test_contract.py": "what copies of flash-attn-4's code rest on",
    "kernels/attention/flash/test_*.py": "lists and what is kept of them, which no result shows",
    "kernels/attention/test_attention.py": "one backend's paths, and what the operator is given",
    "kernels/attention/test_backend_choice.py": "a choice is made once, and freed with its mask",
    "kernels/attention/test_operator.py": "masks are freed",
    "kernels/attention/triton/test_small_tiles.py": "offsets that need more memory than there is",
    "kernels/lm_head/test_logprobs.py": _OWN,
    "kernels/recurrence/fla/test_f*.py": "what is found out once in a process is forgotten",
    "kernels/recurrence/test_explain_recurrence.py": "a warning that is given once is forgotten",
    "kernels/recurrence/test_flash_qla*.py": _OWN,
    "kernels/recurrence/test_recurrence.py": "the chunked backend's steps, one by one",
    "kernels/recurrence/test_recurrence_operator.py": "a backend of the test's own",
    "kernels/test_first_calls.py": "what is said once in a process is forgotten",
    "experts/test_experts.py": _OWN,
    "sparse/test_latents.py": _OWN,
    "models/test_rows_alone.py": _OWN,
    "planning/test_planning.py": "a compiled loop beside its definition",
    "recompute/test_of_config.py": "the memory of GPUs on a page",
    "sampling/test_growing_forest.py": _OWN,
    "scoring/test_interrupts.py": "functions that are interrupted at each of their lines",
    "support/hooks.py": "the file that knows them",
    "test_plotting.py": _OWN,
}
_PATCHES = ("setattr", "delattr", "object", "setitem", "patch")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(text: str) -> set[str]:
    """Private names of the package that a file imports, reaches through what it imports, or
    patches."""
    nodes, found, ours = list(ast.walk(ast.parse(text))), set(), {prefixtree.__name__}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = node.module.split(".")
            for alias in node.names if modules[0] == prefixtree.__name__ else ():
                ours.add(alias.asname or alias.name)
                if any(map(is_private, (*modules, alias.name))):
                    found.add(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == prefixtree.__name__:
                    ours.add(alias.asname or prefixtree.__name__)
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr) and _root(node) in ours:
            found.add(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in _PATCHES:
            said = [a.value for a in node.args[:2] if isinstance(a, ast.Constant)]
            names = [name for name in said if isinstance(name, str)]
            if re.fullmatch(
                rf"{prefixtree.__name__}\.(.*\.)?_[a-zA-Z]\w*(\..*)?", "".join(names[:1])
            ):
                found.add(names[0])
            elif names and is_private(names[0]) and _root(node.args[0]) in ours:
                found.add(f"{ast.unparse(node.args[0])}.{names[0]}")
    return found


def _root(node: ast.AST) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


@cache
def texts() -> dict[str, str]:
    return {f.relative_to(TESTS).as_posix(): f.read_text() for f in sorted(TESTS.rglob("*.py"))}


def test_the_search_sees_what_it_should() -> None:
    text = (
        "import numpy as np, prefixtree as pt\n"
        "from prefixtree.packing import copies\n"
        "from prefixtree.packing.copies import _gather, gather\n"
        "from prefixtree._numbers import whole\n"
        "from tests.packing.cases import _case\n"
        "def f(monkeypatch, x):\n"
        "    copies._CHUNK, copies.Runs._rows, pt._later, np._core, x._own, copies.__name__\n"
        "    monkeypatch.setattr(copies, '_by_name', 1), monkeypatch.setattr(np, '_NoValue', 1)\n"
        "    patch('prefixtree.recompute.plan._LOGITS', 1), patch('prefixtree.forest.pack')\n"
        "    patch.object(copies.Runs, '_method'), f('prefixtree.recompute._said')\n"
    )
    assert private_names(text) == {
        *("prefixtree.packing.copies._gather", "prefixtree._numbers.whole", "copies._CHUNK"),
        *("copies.Runs._rows", "pt._later", "copies._by_name", "copies.Runs._method"),
        "prefixtree.recompute.plan._LOGITS",
    }


def test_who_knows_private_names() -> None:
    """So that the inside of a room can change, and few tests with it."""
    # of hooks.py no search sees them: they are in tables
    found = {file: names for file, text in texts().items() if (names := private_names(text))}
    new = {
        file: sorted(names)
        for file, names in found.items()
        if not any(fnmatchcase(file, pattern) for pattern in KNOWS)
    }
    assert not new, (
        f"private names of the package in {new}: use a public name, or tests/support/hooks.py, "
        "where a row gives it a plain name; if it is a test of that one file's inside, add a row "
        f"with the reason to KNOWS in tests/package/{Path(__file__).name}"
    )
    known = {*found, "support/hooks.py"}
    unused = [p for p in KNOWS if not any(fnmatchcase(file, p) for file in known)]
    assert not unused, f"they know no private name: take {unused} out of KNOWS"
    assert len(known) <= MOST


def test_hooks_are_there_and_used() -> None:
    """Also those of adapters, whose packages are not installed here."""
    used = "\n".join(text for file, text in texts().items() if file != "support/hooks.py")
    inside = texts()["support/hooks.py"]
    for what, where in (hooks.LIMITS | hooks.CALLS).items():
        assert f'"{what}"' in used or inside.count(f'"{what}"') > 1, f"nobody uses {what!r}"
        module, _, path = where.partition(":")
        tree: ast.AST = ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text())
        for name in path.split("."):
            named = [node for node in getattr(tree, "body", ()) if name in _defined(node)]
            assert named, f"{what!r} in tests/support/hooks.py: there is no {name} in {module}"
            tree = named[-1]


def _defined(node: ast.AST) -> set[str]:
    """Names that a statement of a module or class gives."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name for alias in node.names}
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    return {n.id for t in targets if t for n in ast.walk(t) if isinstance(n, ast.Name)}
