"""Single mutations: where the package has places for them, and which tests should see them."""

from __future__ import annotations

import ast
import json
import random
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "prefixtree"

# room: its files, its tests; a file is in the first room that has it
ROOMS = {
    "forest": (
        "forest.py _tokens.py _routes.py _invariants.py loops/trie.py",
        "tests/test_forest*.py tests/test_routes.py",
    ),
    "planning": (
        "planning/*.py loops/planning.py loops/parts.py",
        "tests/planning/test_*.py tests/parallel/test_*.py",
    ),
    "sharing": (
        "sharing/*.py loops/realign.py",
        "tests/sharing/test_*.py tests/cli/test_program_and_report.py tests/cli/test_plots.py "
        "tests/rollouts/test_picture_messages.py",
    ),
    "pictures": (
        "pictures.py _picture_inputs.py models/vision.py models/encodings.py "
        "parallel/features.py packing/placements.py",
        "tests/test_pictures.py tests/models/test_vision.py "
        "tests/scoring/test_pictures_in_groups.py",
    ),
    "recurrence": (
        "kernels/recurrence/*.py packing/segments.py loops/segments.py",
        "tests/kernels/recurrence/test_*.py tests/packing/test_segments.py",
    ),
    "flash": (
        "kernels/attention/flash/*.py",
        "tests/kernels/attention/flash/test_*.py",
    ),
    "packing": ("packing/*.py loops/*.py", "tests/packing/test_*.py"),
    "parallel": (
        "parallel/*.py scoring/in_groups.py scoring/parallel_lm_head.py",
        "tests/parallel/test_*.py tests/scoring/test_in_groups.py "
        "tests/scoring/test_states_in_groups.py tests/scoring/test_tensor_parallel.py "
        "tests/scoring/test_states_in_steps.py",
    ),
    "triton": (
        "kernels/attention/triton/*.py kernels/triton_primitives.py",
        "tests/kernels/attention/triton/test_*.py tests/kernels/attention/test_*.py",
    ),
    "attention": (
        "kernels/attention/*.py kernels/*.py",
        "tests/kernels/attention/test_*.py tests/kernels/test_*.py",
    ),
    "lm_head": ("kernels/lm_head/*.py", "tests/kernels/lm_head/test_*.py"),
    "decoding": ("kernels/decoding/*.py", "tests/kernels/decoding/test_*.py"),
    "recompute": ("recompute/*.py", "tests/recompute/test_*.py"),
    "sampling": ("sampling/*.py", "tests/sampling/test_*.py"),
    "dualkv": ("integrations/dualkv.py", "tests/integrations/test_dualkv.py"),
    "peft": ("models/adapters.py", "tests/models/test_peft.py"),
    "scoring": (
        "scoring/*.py",
        "tests/scoring/test_logprobs.py tests/scoring/test_in_steps.py "
        "tests/scoring/test_backward_of_steps.py tests/scoring/test_training.py "
        "tests/scoring/test_states_in_steps.py tests/scoring/test_kept_trunks.py",
    ),
    "models": ("models/*.py", "tests/models/test_*.py"),
    "integrations": (
        "integrations/*.py",
        "tests/package/test_imports.py tests/integrations/test_requirements.py",
    ),
    "trl": ("integrations/trl/*.py", "tests/integrations/trl/test_*.py"),
    "verl": ("integrations/verl/*.py", "tests/integrations/verl/test_*.py"),
    "megatron": ("integrations/megatron/*.py", "tests/integrations/megatron/test_*.py"),
}

COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
SIGNS = {ast.Add: ("+", "-"), ast.Sub: ("-", "+")}
TERMS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Mod, ast.BitAnd, ast.BitOr)
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


def room_of(file: str) -> str:
    """The room of a file of the package; its folder's name where no room has it."""
    inner = file.removeprefix(f"{PACKAGE}/")
    for room, (files, _) in ROOMS.items():
        if any(
            fnmatch(inner, glob) and glob.count("/") == inner.count("/") for glob in files.split()
        ):
            return room
    return inner.split("/")[0].removesuffix(".py")


def room_tests(room: str, root: Path) -> list[str]:
    globs = ROOMS[room][1] if room in ROOMS else f"tests/{room}/test_*.py tests/test_{room}.py"
    return sorted({str(p.relative_to(root)) for glob in globs.split() for p in root.glob(glob)})


class Places(ast.NodeVisitor):
    """The places of a file that a mutation can change: (kind, start, end, new text) in bytes.

    Messages, annotations, decorators and assertions are left alone.
    """

    def __init__(self, text: str) -> None:
        self.bytes = text.encode()
        self.starts = [0]
        for line in self.bytes.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[tuple[str, int, int, str]] = []
        self.visit(ast.parse(text))

    def span(self, node: Any) -> tuple[int, int]:
        ends = self.starts[node.end_lineno - 1] + node.end_col_offset
        return self.starts[node.lineno - 1] + node.col_offset, ends

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.bytes[start:end].decode()

    def add(self, kind: str, node: ast.AST, new: str) -> None:
        start, end = self.span(node)
        # lines stay where they are: what a dropped term leaves is padded inside its parentheses
        lost = self.bytes[start:end].count(b"\n") - new.count("\n")
        self.found.append((kind, start, end, new[:-1] + "\n" * lost + new[-1]))

    def between(self, kind: str, left: ast.AST, right: ast.AST, old: str, new: str) -> None:
        """An operator, which stands between its operands beside parentheses and spaces."""
        start, end = self.span(left)[1], self.span(right)[0]
        match = re.search(re.escape(old).replace(r"\ ", r"\s+"), self.bytes[start:end].decode())
        if match:
            first = start + match.start()
            self.found.append((kind, first, first + len(match.group()), new))

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
            self.between("comparison", left, right, *COMPARISONS[type(operator)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        # texts are for people, and `int | None` for type checkers
        aside = any(
            isinstance(side, ast.JoinedStr)
            or (isinstance(side, ast.Constant) and isinstance(side.value, str | None))
            for side in (node.left, node.right)
        )
        if not aside:
            if type(node.op) in SIGNS:
                self.between("sign", node.left, node.right, *SIGNS[type(node.op)])
            if isinstance(node.op, TERMS):
                self.add("dropped term", node, f"({self.text(node.left)})")
            if isinstance(node.op, ast.FloorDiv):
                up = f"(-(-({self.text(node.left)}) // ({self.text(node.right)})))"
                self.add("rounded up", node, up)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if type(node.op) in SIGNS:
            old, new = SIGNS[type(node.op)]
            self.between("sign", node.target, node.value, f"{old}=", f"{new}=")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.USub | ast.Not):
            kind = "sign" if isinstance(node.op, ast.USub) else "negation"
            self.add(kind, node, f"({self.text(node.operand)})")
        if not isinstance(node.operand, ast.Constant):
            self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            if len(node.values) == 2:  # in a longer chain the swap binds otherwise
                self.between("and/or", left, right, old, new)
        start, end = self.span(node.values[0])[0], self.span(node.values[-2])[1]
        kept = self.bytes[start:end].decode()
        if kept.count("(") == kept.count(")"):
            self.add("dropped term", node, f"({kept})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        # a larger one is a size of something, which may be another
        if type(node.value) is int and node.value <= 8:
            self.add("off by one", node, f"{node.value + 1}")

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound in (node.lower, node.upper):
            if bound is not None and not isinstance(bound, ast.Constant):
                self.add("off by one", bound, f"({self.text(bound)} + 1)")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in CALLS:
            self.add("min/max" if name in ("min", "max") else "any/all", node.func, CALLS[name])
        if name == "range" and not isinstance(node.args[-1], ast.Constant | ast.Starred):
            self.add("off by one", node.args[-1], f"({self.text(node.args[-1])} - 1)")
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for child in [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]:
            self.visit(child)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in ("stacklevel", "indent", "width"):
            self.visit(node.value)

    def leave(self, node: ast.AST) -> None:
        """Its text is for people, or it is an assertion."""

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]
    visit_JoinedStr = visit_Raise = visit_Assert = leave


@dataclass
class Mutation:
    """One change, by the whole lines before and after it; and what became of it."""

    file: str
    line: int
    kind: str
    before: str
    after: str
    room: str = ""
    result: str = ""  # killed, survived, gone
    by: str = ""  # the test that failed, or "time", "import", "crash"
    tests: int = 0  # how many ran
    seconds: float = 0.0
    why: str = ""  # a survivor's reason

    @property
    def key(self) -> tuple[str, str, str]:
        return self.file, self.before, self.after

    @property
    def plain(self) -> bool:
        """Whether its tests run without numba's compiler, which would take longer."""
        return self.file.startswith(f"{PACKAGE}/loops/")

    def forget(self) -> None:
        self.result, self.by, self.tests, self.seconds = "", "", 0, 0.0

    def told(self) -> str:
        place = f"{self.file}:{self.line} {self.kind}"
        return f"{self.result:8} {self.seconds:5} s  {place}: {self.by}"

    def mutated(self, text: str) -> str | None:
        """The file with the change; None where its lines are gone."""
        lines, old = text.split("\n"), self.before.split("\n")
        places = [i for i in range(len(lines)) if lines[i : i + len(old)] == old]
        if not places:
            return None
        self.line = 1 + min(places, key=lambda i: abs(i + 1 - self.line))
        lines[self.line - 1 : self.line - 1 + len(old)] = self.after.split("\n")
        return "\n".join(lines)


def mutations(file: str, text: str) -> list[Mutation]:
    """All single mutations of a file."""
    places, lines, room, found = Places(text), text.split("\n"), room_of(file), []
    data = places.bytes
    for kind, start, end, new in places.found:
        first, last = data[:start].count(b"\n"), data[:end].count(b"\n") + 1
        begins, ends = places.starts[first], places.starts[last]
        after = (data[begins:start] + new.encode() + data[end:ends]).decode().removesuffix("\n")
        found.append(Mutation(file, first + 1, kind, "\n".join(lines[first:last]), after, room))
    return found


def changed_lines(base: str) -> dict[str, set[int]]:
    """The lines of the package that differ from a commit."""
    command = ["git", "diff", "-U0", "--no-color", base, "--", PACKAGE]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines: dict[str, set[int]] = defaultdict(set)
    file = ""
    for line in text.splitlines():
        if line.startswith("+++ "):
            file = line[6:]
        elif match := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first = int(match[1])
            lines[file] |= set(range(first, first + int(match[2] or 1)))
    return lines


def draw(rooms: list[str], base: str | None, count: int, seed: int) -> list[Mutation]:
    """`count` mutations per room (0: all), spread over its files and then over their kinds."""
    changed = changed_lines(base) if base else None
    per_file: dict[str, dict[str, list[Mutation]]] = defaultdict(dict)
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        file = str(path.relative_to(ROOT))
        if not rooms or room_of(file) in rooms:
            found = mutations(file, path.read_text())
            if found := [m for m in found if changed is None or m.line in changed[file]]:
                per_file[room_of(file)][file] = found
    chance, drawn = random.Random(seed), []
    for files in per_file.values():
        ends = len(drawn) + (count or sum(map(len, files.values())))
        while files and len(drawn) < ends:
            for file in chance.sample(sorted(files), len(files))[: ends - len(drawn)]:
                kind = chance.choice(sorted({m.kind for m in files[file]}))
                drawn.append(chance.choice([m for m in files[file] if m.kind == kind]))
                files[file].remove(drawn[-1])
                if not files[file]:
                    del files[file]
    return drawn


def read(path: Path | None) -> list[Mutation]:
    rows = json.loads(path.read_text()) if path and path.exists() else []
    return [Mutation(**row) for row in rows]


def write(path: Path | None, mutations: Iterable[Mutation]) -> None:
    if path:
        rows = (json.dumps({k: v for k, v in vars(m).items() if v}) for m in mutations)
        path.write_text("[\n" + ",\n".join(rows) + "\n]\n")
