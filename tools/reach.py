"""Which files decide what a test does: all that it can reach, found without importing anything.

    python -m tools.reach tests/test_forest.py

Followed are imports, wherever they stand, and the packages above what is imported; names that a
package imports where they are first used (`pt.sequence_values`); modules, commands and paths in
strings; the code of pages; and every conftest.py above a test. Not followed are docstrings, imports
for types alone, and what `prefixtree/__init__.py` imports for those who use it, where they do not.
Where this errs, it is on the side of too much.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "prefixtree"
CODE = (PACKAGE, "tests", "benchmarks", "examples", "tools")
# the adapter for transformers is imported after it, whoever imports it: by any package of others
# that is not known to do without
_REGISTRATION = f"{PACKAGE}/registration.py"
_WITHOUT_TRANSFORMERS = re.compile(
    f"({'|'.join(sys.stdlib_module_names)}|numpy|torch|triton|numba|_?pytest|hypothesis|packaging|psutil"
    "|flash_attn|cutlass|cuda|quack|fla|tilelang|flash_qla|matplotlib|pyarrow|rich|PIL|networkx)"
)


class Sources:
    """A checkout: its files, and what each of them needs."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        found = [f for top in (*CODE, "docs") for f in (root / top).rglob("*")]
        found += [*root.glob("*.*"), *root.glob("Makefile")]
        names = (str(f.relative_to(root)) for f in found if f.is_file())
        self.files = {name for name in names if "__pycache__" not in name}
        self.modules = {
            re.sub(r"\.__init__$", "", file[:-3].replace("/", ".")): file
            for file in self.files
            if file.endswith(".py") and file.split("/")[0] in CODE
        }
        self.folders: dict[str, set[str]] = {}
        for name in self.files:
            for up in Path(name).parents:
                self.folders.setdefault(str(up), set()).add(name)
        self._needs: dict[str, set[str]] = {}

    def text(self, file: str) -> str:
        return (self.root / file).read_text(errors="replace")

    @cached_property
    def later(self) -> dict[str, set[str]]:
        """Names that packages import where they are first used, by a table {module: names} or by a
        module's own name, or for others alone; and their files."""
        found: dict[str, set[str]] = {}
        for package in (name for name, file in self.modules.items() if self.is_lazy(file)):
            pairs = []
            for node in ast.walk(ast.parse(self.text(self.modules[package]))):
                if isinstance(node, ast.Dict):
                    rows = zip(node.keys, node.values, strict=True)
                    pairs += [
                        (n, m) for key, row in rows for n in strings(row) for m in strings(key)
                    ]
                pairs += [(full.rpartition(".")[2], full) for full in imported(node, "")]
                pairs += [(name, f"{package}.{name}") for name in strings(node, deep=False)]
            for name, module in pairs:
                if module.rpartition(".")[0] in self.modules:
                    found.setdefault(name, set()).update(self.module(module))
        return found

    def is_lazy(self, file: str) -> bool:
        return file.endswith("/__init__.py") and "def __getattr__(" in self.text(file)

    @cached_property
    def by_name(self) -> dict[str, str]:
        """Files that import a module by a name they are given, and its package."""
        found = {}
        for file in self.modules.values():
            match = re.search(r'import_module\(f"([\w.]+)\.\{[^}]*\}"\)', self.text(file))
            if match and match[1] in self.modules:
                found[file] = match[1]
        return found

    def module(self, name: str) -> set[str]:
        """The files that run when a module, or something in it, is imported."""
        parts = name.split(".")
        steps = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        return {self.modules[step] for step in steps if step in self.modules}

    def reach(self, *tests: str) -> set[str]:
        """All that decides what files of tests do, these among them."""
        above = {str(up) for test in tests for up in Path(test).parents}
        beside = {f"{up}/{name}" for up in above for name in ("conftest.py", "pytest.ini")}
        todo = [*tests, *(beside & self.files), "pyproject.toml"]
        found, names = set(todo), set[str]()
        while todo:
            file = todo.pop()
            needed = set(self.needs(file))
            if file.startswith("tests/") and file.endswith(".py"):
                names |= words_of(self.text(file))
            for package in {self.by_name[f] for f in self.by_name.keys() & found}:
                known = {name for name in names if f"{package}.{name}" in self.modules}
                needed.update(*(self.module(f"{package}.{name}") for name in known))
            todo += needed - found
            found |= needed
        return found

    def near(self, test: str) -> set[str]:
        """Of what a file of tests reaches: its own room of the package, and all that is beside the
        package. Tests of a folder that has no room of its name reach all alike."""
        _, *rooms, _ = test.split("/")
        room = "/".join(rooms[: 2 if rooms[:1] == ["integrations"] else 1])
        own = (f"{PACKAGE}/{room}/",) if f"{PACKAGE}/{room}" in self.folders else ()
        if not rooms or not (own or room in self.folders):
            return self.reach(test)
        return {f for f in self.reach(test) if not f.startswith(f"{PACKAGE}/") or f.startswith(own)}

    def fingerprint(self, test: str, made_by: str, near: bool = False) -> str:
        """A hash of all that decides what a file of tests does, or of what is near it, and of how
        its target is made."""
        digest = hashlib.sha256(made_by.encode())
        for file in sorted(self.near(test) if near else self.reach(test)):
            digest.update(f"{file}\n".encode() + (self.root / file).read_bytes())
        return digest.hexdigest()[:12]

    def needs(self, file: str) -> set[str]:
        """The files that one file needs by itself."""
        if file not in self._needs:
            suffix, found = Path(file).suffix, set[str]()
            if suffix == ".py":
                found = self._of_python(file, ast.parse(self.text(file)))
            elif suffix == ".md":
                for code in re.findall(r"```py\w*\n(.*?)```", self.text(file), re.DOTALL):
                    found |= self._of_text(code, file)
            elif suffix in (".sh", ".yaml", ".ipynb", ".ini"):
                found = self._of_text(self.text(file), file)
            self._needs[file] = found - {file}
        return self._needs[file]

    def _of_python(self, file: str, tree: ast.Module) -> set[str]:
        found = self.module(file[:-3].replace("/", "."))
        inside = file.startswith(f"{PACKAGE}/")
        # the strings of a package that imports later are names that others use
        lazy = self.is_lazy(file)
        for node in running(tree):
            for name in imported(node, file):
                handed = lazy and f'"{name.rpartition(".")[2]}"' in self.text(file)
                found |= set() if handed else self.module(name)
                if lazy:
                    continue
                found |= self.later.get(name.rpartition(".")[2], set())
                top = name.partition(".")[0]
                # what a function of the package imports, whoever calls it has imported
                here = not inside or node in tree.body
                if here and top not in CODE and not _WITHOUT_TRANSFORMERS.fullmatch(top):
                    found |= self.module(f"{PACKAGE}.integrations.transformers")
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id in ("pt", PACKAGE, "loops"):
                    every = node.attr == "__all__" and not inside
                    found |= self.later.get(node.attr, set())
                    found |= set().union(*self.later.values()) if every else set()
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if not inside:
                    found |= self._of_text(node.value, file)
                elif not lazy and file != _REGISTRATION and re.fullmatch(r"\w+\..*", node.value):
                    found |= self.module(node.value)
            elif not inside:
                found |= self._of_pattern(node, file)
        return found

    def _of_pattern(self, node: ast.AST, file: str) -> set[str]:
        """Of f-strings, `folder / "a" / "b"`, `folder.glob("*.py")` and `"-m", "name"`."""
        if isinstance(node, ast.JoinedStr):
            text = joined(node)
            ours = text.partition(".")[0] in CODE and file not in self.by_name
            if ours and re.fullmatch(r"[\w*.]+", text):
                return {self.modules[name] for name in matching(text, self.modules, r"[\w.]*")}
            return self._path(text, file) if re.search(r"/.*\.\w+$", text) else set()
        if isinstance(node, ast.BinOp):
            base = re.match(r"_?[A-Z]+ /|.*__file__", ast.unparse(node))
            return self._path(joined(node), file, folders=bool(base) and file not in self.by_name)
        attribute = getattr(node.func, "attr", "") if isinstance(node, ast.Call) else ""
        if attribute in ("with_name", "with_suffix") and "__file__" in ast.unparse(node):
            beside = getattr(Path(file), attribute)(joined(*node.args))
            return {str(beside)} & self.files
        if attribute in ("glob", "rglob"):
            assert isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            deep = "**/" if node.func.attr == "rglob" else ""
            below = joined(node.func.value)
            pattern = f"{below}/{deep}{joined(*node.args)}".lstrip("/")
            if file in self.by_name:
                return set()
            found = self._path(pattern, file) if below or "(__file__)" in self.text(file) else set()
            if re.search(r"(prefixtree|pt)\.__file__", self.text(file)):
                found |= self._path(f"{PACKAGE}/{pattern}", file)
            return found
        items = node.args if isinstance(node, ast.Call) else getattr(node, "elts", [])
        pairs = pairwise(items)
        after = [joined(b) for a, b in pairs if isinstance(a, ast.Constant) and a.value == "-m"]
        return set().union(*(self.module(f"{name}.__main__") for name in after))

    def _of_text(self, text: str, file: str) -> set[str]:
        """Of a string, or of what is no Python: names of modules, files and what comes later."""
        found = set(self.later.get(text, ()))
        for name in re.findall(rf"\b(?:{'|'.join(CODE)})(?:\.\w+)+", text):
            found |= self.module(name)
        for name in re.findall(r"-m (\w+)\b", text):
            found |= self.module(f"{name}.__main__")
        for part in re.findall(r"[\w./-]*[./][\w./-]*", text):
            found |= self._path(part.strip(".-/"), file, folders="/" in part.strip("/"))
        if re.search(r"\bimport\b|\bpt\.|\bprefixtree\.", text):
            for name in re.findall(r"\w+", text):
                found |= self.later.get(name, set())
                found |= self.module(name) if name in CODE else set()
        return found

    def _path(self, path: str, file: str, folders: bool = False) -> set[str]:
        """Files by a path from the root or the file's folder; tests run only where pytest is
        given them."""
        found = set[str]()
        path = path.strip("/")
        for full in (path, f"{Path(file).parent}/{path}") if set(path) - set("*/.") else ():
            found |= {full} & self.files
            found |= set(matching(full, self.files)) if "*" in full else set()
            found |= self.folders.get(full, set()) if folders else set()
        return {name for name in found if not re.match(r"tests/.*test_\w+\.py$", name)}


def made_by(target: str, makefile: str) -> str:
    """The rules and variables of a Makefile that a target is made with, those of its environments
    among them."""
    sets = dict(re.findall(r"^([\w.]+) [:?]?= (.*)$", makefile, re.MULTILINE))
    for name in ("VENV", "READY", "DOCS"):
        makefile = makefile.replace(f"$({name})", sets.get(name, "").replace("$(VENV)", ".venv"))
    makefile = re.sub(r"\$\((\w+):%=(.*?)\)", r"\1 \2", makefile)
    rules = re.findall(r"^([^\s#:=]+):(?!=)(.*\n(?:[\t#].*\n)*)", makefile, re.MULTILINE)
    found, todo = set[str](), [target]
    while todo:
        text = todo.pop()
        if text in found:
            continue
        found.add(text)
        words = re.findall(r"\w+", text)
        # FULL_$(p) and WHEELS_$* are each of them
        starts = tuple(word for word in words if word.endswith("_"))
        words += [name for name in sets if starts and name.startswith(starts)]
        todo += [f"{name} = {sets[name]}" for name in words if name in sets]
        for word in set(re.findall(r"[\w.%/$(){}:=-]+", text)):
            plain = re.sub(r"\$\(.*?\)|\$\$\w+", "%", word)
            for head, body in rules:
                if re.fullmatch(re.escape(head).replace("%", ".+"), plain):
                    todo.append(f"{head}:{body}")
    return "\n".join(sorted(found))


def running(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run: no docstrings, no imports for types, no folders that pytest leaves out;
    of `a / b / c` the whole."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node = ast.Module(node.orelse, [])
        if isinstance(node, ast.Assign) and "'collect_ignore'" in ast.dump(node.targets[0]):
            continue
        yield node
        while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            yield from running(ast.Tuple([node.right], ast.Load()))
            node = node.left
        yield from running(node)


def imported(node: ast.AST, file: str) -> Iterator[str]:
    """The full names that an import names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = file.split("/")[: -node.level] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        yield from (f"{base}.{alias.name}" for alias in node.names)


def strings(tree: ast.AST, deep: bool = True) -> Iterator[str]:
    for node in ast.walk(tree) if deep else (tree,):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@cache
def words_of(text: str) -> frozenset[str]:
    """The strings of a file that can be names."""
    return frozenset(name for name in strings(ast.parse(text)) if name.isidentifier())


def joined(*nodes: ast.AST) -> str:
    """The text of strings, f-strings and paths; what is not known is a star."""
    if len(nodes) != 1:
        return "*"
    (node,) = nodes
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        left = joined(node.left)
        return f"{left}/{joined(node.right)}" if left not in ("", "*") else joined(node.right)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(joined, node.values))
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "*" if isinstance(node, ast.FormattedValue) else ""


def matching(pattern: str, names: Iterable[str], star: str = "[^/]*") -> list[str]:
    text = re.escape(pattern).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", star)
    return [name for name in names if re.fullmatch(text, name)]


if __name__ == "__main__":
    print("\n".join(sorted(Sources().reach(*sys.argv[1:]))))
