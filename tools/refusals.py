"""Writes docs/refusals.md: what prefixtree refuses, in the words of its errors.

    python -m tools.refusals

The texts are read from the sources: the argument of every `UnsupportedError(...)` of the package.
One that takes its words from a table in the source, in a loop or by a key, gives a text per entry.
What an error fills in as it is raised stands as "…". A test asserts that the page is what this
writes.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "refusals.md"
PACKAGE = "prefixtree"
UNKNOWN = "…"
# stands for names until they are known
_NAME = "\N{BLACK SQUARE}"

# a table with a place of its own (docs/families.md)
_ELSEWHERE = "UNSERVED"
# how many errors begin; it says nothing of what is refused
_BEGINNINGS = ('attn_implementation="prefixtree": ', "packed forests are not served with ")

# pattern of "path:function" -> section; the first that is found. A file that is moved keeps its
# section as long as its path says what it is about. None: functions that no trainer calls by name
SECTIONS: tuple[tuple[str, str | None], ...] = (
    (r"/trl/", "TRL"),
    (r"/verl/.*megatron", "veRL with Megatron"),
    (r"/verl/", "veRL"),
    (r"/megatron/", "Megatron-Core"),
    (r"/sampling/", "Sampling"),
    (r"picture|vision", "Pictures"),
    (r"steps", "Steps (max_tokens=)"),
    (r"in_groups|/parallel/|_check_divided|divided", "Groups of ranks (group=)"),
    (r"/recompute/", "Recomputation"),
    (r"adapters|low_precision", "Adapters and quantised weights"),
    (r"router_loss|replay", "Mixtures of experts"),
    (r"hybrids", "Recurrent layers"),
    (r"/kernels/|/packing/|dualkv|plotting", None),
    (r"", "Every model"),
)
ORDER = ("Every model", *(title for _, title in SECTIONS[:-1] if title))

# where the text of an error turns from what is refused to what to do
_VERBS = (
    "set use leave call pass give take load install pip drop make enable remove keep undo score "
    "sample build wrap let ask train run gather"
)
_TURN = re.compile(rf"[;:.,] (?=(?:{'|'.join(_VERBS.split())})\b)", re.IGNORECASE)

HEAD = """# Refusals

Written by `python -m tools.refusals` from the sources; do not edit.

prefixtree refuses what it would compute otherwise than the replicated batch, and what no test has
proven, with `prefixtree.UnsupportedError`. The rows are the texts of the errors, with "…" for what
an error fills in. [Families](families.md#refused) has the model types. Wrong input (a mask of
another length, ranks of a group with different arguments) raises `ValueError` instead.
[Troubleshooting](troubleshooting.md) has the errors that are met most.
"""


class Module:
    """One file of the package.

    Attributes:
        where: its path from the package's parent.
        tree: its syntax.
        constants: the expressions that its module-level names stand for.
        classes: the names of the fields of its classes, in order.
    """

    def __init__(self, path: Path) -> None:
        self.where = path.relative_to(ROOT).as_posix()
        self.tree = ast.parse(path.read_text())
        self.constants: dict[str, ast.expr] = {}
        self.classes: dict[str, list[str]] = {}
        self._imports: dict[str, tuple[str, str]] = {}
        for node in self.tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.constants[name] = value
                case ast.Assign(targets=[ast.Tuple() as names], value=ast.Tuple() as values):
                    self.constants |= _bind(names, values)
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    self.constants[name] = value
                case ast.ClassDef(name=name, body=body):
                    fields = (x.target for x in body if isinstance(x, ast.AnnAssign))
                    self.classes[name] = [x.id for x in fields if isinstance(x, ast.Name)]
                case ast.ImportFrom(module=str(module), names=names) if module.startswith(PACKAGE):
                    for alias in names:
                        self._imports[alias.asname or alias.name] = (module, alias.name)

    def constant(self, name: str) -> tuple[Module, ast.expr] | None:
        """What a name stands for, and the module that says so."""
        if name in self.constants:
            return self, self.constants[name]
        if name in self._imports:
            module, original = self._imports[name]
            path = ROOT / (module.replace(".", "/") + ".py")
            return read(path).constant(original) if path.exists() else None
        return None


@cache
def read(path: Path) -> Module:
    """The file at `path`."""
    return Module(path)


class Message:
    """Turns the argument of one error into text.

    Args:
        module: where the error stands.
        function: the function around it, or None.
        bound: what the targets of loops around it stand for.
    """

    def __init__(
        self, module: Module, function: ast.AST | None, bound: dict[str, ast.expr]
    ) -> None:
        self._module, self._function, self._bound = module, function, bound

    def text(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=value):
                return str(value)
            case ast.JoinedStr(values=values):
                return "".join(map(self.text, values))
            case ast.FormattedValue(value=value):
                return self.text(value)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self.text(left) + self.text(right)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                known = self._holds(test)
                return self._either(
                    *((body, orelse) if known is None else (body if known else orelse,))
                )
            case ast.Name(id=name):
                return self._named(name)
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int(at))):
                return self._entry(name, at)
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Name(id=key)):
                return self._value(name, key)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value))):
                return str(-value)
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name in self._bound:
                return self._field(self._bound[name], attr)
        return UNKNOWN

    def _holds(self, test: ast.expr) -> bool | None:
        """Whether a comparison with a loop's target holds; None if that is not known."""
        match test:
            case ast.Compare(
                left=ast.Name(id=name), ops=[ast.Eq()], comparators=[ast.Constant(value=value)]
            ) if name in self._bound:
                return self.text(self._bound[name]) == value
        return None

    def _either(self, *nodes: ast.expr) -> str:
        if len(nodes) == 1:
            return self.text(nodes[0])
        texts = [text for text in map(self.text, nodes) if UNKNOWN not in text and text]
        return " / ".join(texts) if texts else UNKNOWN

    def _named(self, name: str) -> str:
        if name in self._bound:
            return self.text(self._bound[name])
        if assigned := self._assigned(name):
            return self._either(*assigned)
        if (found := self._module.constant(name)) is None:
            return UNKNOWN
        module, node = found
        return Message(module, None, {}).text(node)

    def _assigned(self, name: str) -> list[ast.expr]:
        """The expressions that the function assigns to a local name."""
        nodes = ast.walk(self._function) if self._function else iter(())
        found = []
        for node in nodes:
            match node:
                case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                    found.append(value)
        # one that is made of itself, or that the function is given, is not known
        return [x for x in found if isinstance(x, (ast.Constant, ast.JoinedStr, ast.IfExp))]

    def _entry(self, name: str, at: int) -> str:
        found = self._module.constant(name)
        if found is not None and isinstance(found[1], (ast.Tuple, ast.List)):
            return Message(found[0], None, {}).text(found[1].elts[at])
        return UNKNOWN

    def _value(self, name: str, key: str) -> str:
        found = self._module.constant(name)
        if found is not None and isinstance(found[1], ast.Dict) and key in self._bound:
            wanted = self.text(self._bound[key])
            for given, value in zip(found[1].keys, found[1].values, strict=True):
                if isinstance(given, ast.Constant) and given.value == wanted:
                    return Message(found[0], None, {}).text(value)
        return UNKNOWN

    def _field(self, node: ast.expr, attr: str) -> str:
        match node:
            case ast.Call(func=ast.Name(id=kind), args=args, keywords=keywords):
                given = dict(zip(self._module.classes.get(kind, ()), args, strict=False))
                given |= {k.arg: k.value for k in keywords if k.arg}
                return self.text(given[attr]) if attr in given else UNKNOWN
        return UNKNOWN


def _rows(module: Module, node: ast.expr) -> list[ast.expr] | None:
    """The entries that a loop over `node` takes, if they stand in the source."""
    match node:
        case ast.Tuple(elts=entries) | ast.List(elts=entries):
            return entries
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return [ast.Tuple(elts=[k, v], ctx=ast.Load()) for k, v in pairs if k is not None]
        case ast.Name(id=name) if found := module.constant(name):
            return _rows(*found)
        case ast.Call(func=ast.Attribute(value=value, attr="items"), args=[]):
            return _rows(module, value)
    return None


def _bind(target: ast.expr, value: ast.expr) -> dict[str, ast.expr]:
    match target, value:
        case ast.Name(id=name), _:
            return {name: value}
        case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
            pairs = map(_bind, targets, values)
            return {name: entry for pair in pairs for name, entry in pair.items()}
    return {}


def _keys(module: Module, error: ast.Call) -> list[list[dict[str, ast.expr]]]:
    """What the keys stand for by which an error takes words from tables."""
    choices = []
    for node in ast.walk(error):
        match node:
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Name(id=key)):
                found = module.constant(name)
                if name != _ELSEWHERE and found is not None and isinstance(found[1], ast.Dict):
                    keys = [x for x in found[1].keys if isinstance(x, ast.Constant)]
                    choices.append([dict[str, ast.expr]([(key, x)]) for x in keys])
    return choices


def _errors(
    node: ast.AST, function: ast.AST | None, loops: tuple[ast.For, ...]
) -> Iterator[tuple[ast.Call, ast.AST | None, tuple[ast.For, ...]]]:
    """Every UnsupportedError made below `node`, with the function and the loops around it."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        function, loops = node, ()
    if isinstance(node, ast.For):
        loops = (*loops, node)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "UnsupportedError"
    ):
        yield node, function, loops
    for child in ast.iter_child_nodes(node):
        yield from _errors(child, function, loops)


def _texts(module: Module) -> Iterator[tuple[str, str]]:
    """(section, text) of every error of a file."""
    for error, function, loops in _errors(module.tree, None, ()):
        where = f"{module.where}:{getattr(function, 'name', '')}"
        section = next(title for pattern, title in SECTIONS if re.search(pattern, where))
        if section is None:
            continue
        choices = []
        for loop in loops:
            if rows := _rows(module, loop.iter):
                choices.append([_bind(loop.target, row) for row in rows])
        choices += _keys(module, error)
        # rows that differ in nothing but a name, the first of a loop's targets, give one text
        names: dict[str, list[str]] = {}
        for chosen in itertools.product(*choices):
            bound = {name: value for one in chosen for name, value in one.items()}
            text, target = _text(module, function, bound, error), next(iter(bound), "")
            match bound.get(target):
                case ast.Constant(value=str(name)) if name in text:
                    names.setdefault(text.replace(name, _NAME, 1), []).append(name)
                case _:
                    names[text] = []
        for text, of_text in names.items():
            yield section, text.replace(_NAME, ", ".join(of_text))


def _text(
    module: Module, function: ast.AST | None, bound: dict[str, ast.expr], error: ast.Call
) -> str:
    message = Message(module, function, bound)
    return _plain(" ".join(map(message.text, error.args)))


def _plain(text: str) -> str:
    """In one line, without what holds nothing but what an error fills in."""
    for beginning in _BEGINNINGS:
        text = text.removeprefix(beginning)
    text = re.sub(rf" \\({UNKNOWN}\\)| \\({UNKNOWN}: {UNKNOWN}\\)|\\({UNKNOWN}\\)", "", text)
    return re.sub(rf"{UNKNOWN}([., ]*{UNKNOWN})+", UNKNOWN, " ".join(text.split()))


def collect() -> dict[str, list[str]]:
    """Section -> the texts of its errors, in the order of files and lines."""
    found: dict[str, list[str]] = {title: [] for title in ORDER}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        for section, text in _texts(read(path)):
            known = re.sub(rf"{UNKNOWN}|\W", "", text)
            # of some errors nothing stands in the source but what they are made of
            if len(known) > 30 and text not in found[section]:
                found[section].append(text)
    return found


def all_texts() -> list[str]:
    """Every string of the package's sources, as far as it is known."""
    texts = []
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        module = read(path)
        for node in ast.walk(module.tree):
            match node:
                case ast.Constant(value=str()) | ast.JoinedStr():
                    texts.append(Message(module, None, {}).text(node))
    return texts


def _cell(text: str) -> str:
    escapes = {"|": "&#124;", "<": "&lt;", ">": "&gt;", "{": "&#123;", "*": "\\*", "[": "\\["}
    return "".join(escapes.get(c, c) for c in text)


def row(text: str) -> str:
    """One row: what is refused and why, and what to do."""
    turn = _TURN.search(text)
    refused, instead = (text[: turn.start()], text[turn.end() :]) if turn else (text, "")
    return f"| {_cell(refused)} | {_cell(instead)} |\n"


def page() -> str:
    """docs/refusals.md."""
    parts = [HEAD]
    for title, texts in collect().items():
        parts.append(f"\n## {title}\n\n| refused | instead |\n|---|---|\n")
        parts += map(row, texts)
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
