"""Writes docs/refusals.md: what prefixtree refuses, and what to do instead.

    python -m tools.refusals

Prints the tables of `Refusal` rows of the package, and of its other errors those that say what to
do instead. The sources are read, not imported: not every environment has TRL, verl and Megatron.
What an error fills in stands as "…". A test asserts that the page is what this writes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "refusals.md"
UNKNOWN = "…"

# pattern of "path:function" -> section; the first that is found. None: functions that no trainer
# calls by name
SECTIONS: tuple[tuple[str, str | None], ...] = (
    (r"/trl/", "TRL"),
    (r"/verl/.*megatron|:MEGATRON|:PROVIDER", "veRL with Megatron"),
    (r"/verl/", "veRL"),
    (r"/megatron/|slime", "Megatron-Core"),
    (r"/sampling/", "Sampling"),
    (r"image|vision|/images/|:.*IMAGES", "Images"),
    (r"steps|STEPS", "Steps (max_step_tokens=)"),
    (r"scoring/mtp", "Multi-token prediction (mtp=)"),
    (r"scoring/kept|:KEPT", "Kept trunks"),
    (r"in_groups|/parallel/|group_refusals|divided", "Groups of ranks (group=)"),
    (r"/recompute/", "Recomputation"),
    (r"adapters|dropout.py|low_precision", "Adapters and quantised weights"),
    (r"/experts/", "Mixtures of experts"),
    (r"/states/", "Recurrent layers"),
    (r"/sparse/", "Sparse attention"),
    (r"/kernels/|/packing/(?!layout.py:__rtruediv__)|dualkv|plotting|/testing/", None),
    (r"", "Every model"),
)
ORDER = ("Every model", *(title for _, title in SECTIONS[:-1] if title))

# where a text turns from what is refused to what to do
_VERBS = (
    "set use leave call pass give take load install pip drop make enable remove keep undo score "
    "sample build wrap let ask train run gather compile"
)
_TURN = re.compile(rf"[;:.,] (?=(?:{'|'.join(_VERBS.split())})\b)", re.IGNORECASE)
# an error of a version says by itself what to install
_VERSIONS = re.compile(r"(pip )?install [^,]*|use transformers [^,]*")
_UNVERIFIED = re.compile(r"(.*?)(?:, which|,)? (?:is|are) not verified (.+)", re.DOTALL)
# what is met most: parts of texts, which stand first and not again (docs/troubleshooting.md)
MOST = (
    "to run exactly on packed forests; verified are",
    "that transformers loads quantised",
    "is an active dropout",
    "reentrant checkpointing loses gradients",
    "labels= (or num_items_in_batch=)",
    "the log-probabilities to",
    "recomputes layers in training mode alone",
    "averages gradients over ranks",
    "the parameters are sharded over ranks",
    "tree_rollouts samples from text",
)
# how errors of verl begin where they are no rows
_BEGINNING = 'attn_implementation="prefixtree": '
# stands for names until they are known
_NAME = "\N{BLACK SQUARE}"

HEAD = """# Refusals

<!-- written by `python -m tools.refusals` -->

What would differ from the replicated batch, or what no test has proven, raises
`prefixtree.UnsupportedError`. "…" is what an error fills in. [Families](families.md#refused) lists
model types. Errors that name one module, tensor or version, or wrong input, are not listed.
"""


def constants(tree: ast.Module) -> dict[str, ast.expr]:
    """The expressions that the names of a file stand for."""
    found = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found[name] = value
    return found


def text_of(node: ast.expr, known: dict[str, ast.expr]) -> str:
    """A string as it stands in the source."""
    match node:
        case ast.Constant(value=value):
            return str(value)
        case ast.JoinedStr(values=values):
            return "".join(text_of(value, known) for value in values)
        case ast.FormattedValue(value=value):
            return text_of(value, known)
        case ast.IfExp(body=body, orelse=orelse):
            texts = (text_of(body, known), text_of(orelse, known))
            return " / ".join(text for text in texts if UNKNOWN not in text and text) or UNKNOWN
        case ast.Name(id=name) if name in known and isinstance(known[name], _STRINGS):
            return text_of(known[name], known)
    return UNKNOWN


_STRINGS = (ast.Constant, ast.JoinedStr)


def _filled(message: str, name: str) -> str:
    """A row's message with a mark for its name, and "…" for other fields.

    A setting that the message does not name stands before it."""
    parts = Formatter().parse(message)
    words = {None: "", "name": _NAME}
    text = "".join(text + words.get(field, UNKNOWN) for text, field, *_ in parts)
    if name.isidentifier() and name not in text and _NAME not in text:
        text = f"{_NAME}: {text}"
    return text if _NAME in text else text.replace(name, _NAME, 1)


def _errors(
    node: ast.AST, owner: str, known: dict[str, ast.expr]
) -> Iterator[tuple[str, str, str]]:
    """(function or table, name, text) of every row and every error below a node."""
    match node:
        case ast.FunctionDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
            owner = name
        case ast.Call(func=ast.Name(id="Refusal"), args=[name, _, message, *_]):
            row = text_of(name, known)
            yield owner, row, _filled(text_of(message, known), row)
        case ast.Call(func=ast.Name(id="UnsupportedError" | "NotMeasuredError"), args=[message]):
            yield owner, "", text_of(message, known)
    for child in ast.iter_child_nodes(node):
        yield from _errors(child, owner, known)


def _plain(text: str) -> str:
    """In one line, without brackets around what an error fills in."""
    text = " ".join(text.removeprefix(_BEGINNING).split())
    text = re.sub(rf" ?\({UNKNOWN}\)", "", text)
    return re.sub(rf"{UNKNOWN}([., ]*{UNKNOWN})+", UNKNOWN, text)


def collect(root: Path = ROOT) -> dict[str, list[tuple[str, str]]]:
    """Section -> (what is refused, what to do), in the order of files and lines.

    Rows that differ in nothing but their names are one."""
    found: dict[str, dict[str, list[str]]] = {title: {} for title in ORDER}
    for path in sorted((root / "prefixtree").rglob("*.py")):
        tree = ast.parse(path.read_text())
        for owner, name, text in _errors(tree, "", constants(tree)):
            where = f"{path.relative_to(root).as_posix()}:{owner}"
            section = next(title for pattern, title in SECTIONS if re.search(pattern, where))
            text = _plain(text)
            # an error that begins with what it fills in names what it is about; a row stays
            is_told = name or not text.startswith(UNKNOWN) or any(part in text for part in MOST)
            if section is not None and is_told and (name or _TURN.search(text)):
                names = found[section].setdefault(text, [])
                names += [name] * (name not in names)
    return {title: [_cut(text, names) for text, names in of.items()] for title, of in found.items()}


def _cut(text: str, names: list[str]) -> tuple[str, str]:
    text = text.replace(_NAME, ", ".join(names))
    turn = _TURN.search(text)
    return (text[: turn.start()], text[turn.end() :]) if turn else (text, "")


def all_texts() -> list[str]:
    """Every string of the package's sources, as far as it is known."""
    texts = []
    for path in sorted((ROOT / "prefixtree").rglob("*.py")):
        tree = ast.parse(path.read_text())
        nodes = (node for node in ast.walk(tree) if isinstance(node, _STRINGS))
        texts += [text_of(node, constants(tree)) for node in nodes]
    return texts


def _table(*rows: tuple[str, ...]) -> str:
    escapes = {"|": "&#124;", "<": "&lt;", ">": "&gt;", "{": "&#123;", "*": "\\*", "[": "\\["}
    lines = [rows[0], ("---",) * len(rows[0]), *rows[1:]]
    cells = [["".join(escapes.get(c, c) for c in cell) for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def page(root: Path = ROOT) -> str:
    """docs/refusals.md."""
    sections: dict[str, list[tuple[str, str]]] = {"Met most": []} | collect(root)
    unverified: dict[tuple[str, str], list[str]] = {}
    for title, rows in sections.items():
        for row in list(rows):
            if title != "Met most" and any(part in " ".join(row) for part in MOST):
                sections["Met most"].append(row)
                rows.remove(row)
            elif _VERSIONS.fullmatch(row[1]):
                rows.remove(row)
            elif alone := _UNVERIFIED.fullmatch(row[0]):
                unverified.setdefault((alone[2], row[1]), []).append(alone[1])
                rows.remove(row)
    alone = [(", ".join(what), where, instead) for (where, instead), what in unverified.items()]
    parts = [
        f"\n## {title}\n\n{_table(('refused', 'instead'), *rows)}"
        for title, rows in sections.items()
        if rows
    ]
    last = f"\n## Not verified\n\n{_table(('what', 'where', 'instead'), *alone)}"
    return "".join([HEAD, *parts, last])


if __name__ == "__main__":
    PAGE.write_text(page())
