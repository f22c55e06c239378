"""Finds the names of other packages that prefixtree uses and that are not their public interface.

Three kinds are found in the text of the package:

    torch._C._AutoDispatchBelowAutograd   imported, or read from an imported module
    trl.trainer.utils                     a module that its package does not document as its door
    ._version                             read from an object of another package, also by a string

A name of the last kind is one that prefixtree itself nowhere defines, so one that both have is not
found. Methods that a base class of another package calls, or has, are of this kind too.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import prefixtree

ROOT = Path(prefixtree.__file__).parent
PACKAGES = frozenset(
    (
        *("torch", "transformers", "trl", "verl", "peft", "deepspeed", "megatron", "accelerate"),
        *("triton", "fla", "flash_qla", "flash_attn", "cutlass", "tilelang"),
        *("tensordict", "transfer_queue", "liger_kernel"),
    )
)
# doors: what their packages document
PUBLIC = frozenset(
    (
        *("torch", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.tensor"),
        *("torch.fx", "torch.nn", "torch.nn.attention.varlen", "torch.nn.functional"),
        *("torch.nn.parallel", "torch.optim.optimizer", "torch.overrides"),
        *("torch.utils.checkpoint", "transformers", "transformers.modeling_utils"),
        *("transformers.utils", "trl", "peft", "triton", "triton.language", "flash_attn"),
        *("tensordict", "transfer_queue"),
    )
)
# attributes that prefixtree puts on objects of others, and those of named tuples
_OURS = re.compile(r"_prefixtree_\w+|_(decode|recurrence)_library|_token_id|_replace|_asdict")
_PRIVATE = re.compile(r"_[^\W_]\w*")


@cache
def found(root: Path = ROOT) -> dict[str, set[str]]:
    """Name -> the files of the package that use it."""
    files = sorted(root.rglob("*.py"))
    nodes = {str(f.relative_to(root)): list(ast.walk(ast.parse(f.read_text()))) for f in files}
    ours = _own_names(list(chain(*nodes.values())))
    uses: dict[str, set[str]] = defaultdict(set)
    for file in nodes:
        for name in _of_file(nodes[file], ours):
            uses[name].add(file)
    return dict(uses)


def _is_private(dotted: str) -> bool:
    return any(map(_PRIVATE.fullmatch, dotted.split(".")))


def _is_foreign(dotted: str) -> bool:
    return dotted.split(".")[0] in PACKAGES


# ---- names of modules ----------------------------------------------------------------------------


def _imported(nodes: list[ast.AST]) -> tuple[dict[str, str], set[str]]:
    """Full names by the names they have in a file; and what of them is no public interface."""
    names, private = {}, set()
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in filter(lambda alias: _is_foreign(alias.name), node.names):
                first = alias.name.split(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
                private |= {alias.name} - PUBLIC
        elif isinstance(node, ast.ImportFrom) and _is_foreign(node.module or ""):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names[alias.asname or alias.name] = full
                # a module may be imported from its package
                private |= {full} if _is_private(full) else {str(node.module)} - PUBLIC
    return names, private


def _chain(node: ast.expr) -> list[str]:
    """a.b.c -> a, b, c; "" for a where it is no name."""
    if isinstance(node, ast.Attribute):
        return [*_chain(node.value), node.attr]
    return [node.id if isinstance(node, ast.Name) else ""]


# ---- names of objects ----------------------------------------------------------------------------


def _of_file(nodes: list[ast.AST], ours: set[str]) -> Iterator[str]:
    names, private = _imported(nodes)
    yield from private
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        name = ""
        if isinstance(node, ast.Attribute):
            first, *rest = _chain(node)
            if first not in names:
                name = node.attr
            elif id(node) not in inner and _is_private(".".join(rest)):
                yield ".".join([names[first], *rest])
        elif isinstance(node, ast.FunctionDef):
            name = node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value
            if re.fullmatch(r"\w+(\.\w+)+", name) and _is_foreign(name) and name not in PUBLIC:
                yield name
        if _PRIVATE.fullmatch(name) and name not in ours and not _OURS.fullmatch(name):
            yield f".{name}"


def _own_names(nodes: list[ast.AST]) -> set[str]:
    """The names that the package defines: functions, classes, variables, attributes of self."""
    own, methods, read = set(), set(), set()
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            methods.update(x.name for x in node.body if isinstance(x, ast.FunctionDef))
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute):
            is_self = isinstance(node.value, ast.Name) and node.value.id == "self"
            if is_self and isinstance(node.ctx, ast.Store):
                own.add(node.attr)
            elif not (isinstance(node.value, ast.Call) and _chain(node.value.func) == ["super"]):
                read.add(node.attr)
    # a private method that nothing here calls is called by a base class of another package
    return own - (methods - read)
