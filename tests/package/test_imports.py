"""The cost of `import prefixtree`, and the direction of imports inside the package."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

import networkx
import pytest
import torch

import prefixtree
from prefixtree import loops, wings
from tests.support.warm import run_warm
from tools.rooms import ROOMS, found
from tools.rooms import room_of as room_of_image

ROOT = Path(prefixtree.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
LATER = ("transformers", "matplotlib", "numba", "networkx", "rich", "typer", "triton", "flash_attn")


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in FILES}


def run_python(code: str) -> dict[str, object]:
    done = run_warm(code)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def imports(file: Path, types: bool = False) -> Iterator[tuple[str, bool]]:
    """(module, at import time) for every import of a file.

    Imports in TYPE_CHECKING blocks are left out, or yielded too with `types`.
    """

    def is_type_checking(node: ast.AST) -> bool:
        return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)

    def visit(node: ast.AST, at_import: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, at_import
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} uses a relative import"
            assert node.module is not None
            for alias in node.names:
                # `from package import module` imports the module
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module, at_import
        elif types or not is_type_checking(node):
            inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for child in ast.iter_child_nodes(node):
                yield from visit(child, at_import and not inside)

    yield from visit(ast.parse(file.read_text()), True)


@cache
def _imports(module: str, types: bool) -> tuple[tuple[str, bool], ...]:
    return tuple(imports(MODULES[module], types))


def every_import(below: str = "prefixtree", types: bool = False) -> Iterator[tuple[str, str, bool]]:
    """(module, target, at import time) for every import of the modules below a package."""
    for module in MODULES:
        if module == below or module.startswith(f"{below}."):
            for target, at_import in _imports(module, types):
                yield module, target, at_import


# what `packing` knows of a mask, each of them built on those before it alone; nothing of it knows
# sequences, so this is all that kernels may know of `packing`
MASK_ROOMS = (
    "visible",
    "copies",
    "block_tables",
    "host_mask",
    "mask",
    "segments",
    "state_borders",
)
# the work list of decoding: what its kernels know in the place of a mask
WORK = "prefixtree.kernels.decoding.work"
LOOPS = "prefixtree.loops"
# what raises and what reads numbers that callers give: every room may know them
OF_ALL = ("prefixtree.errors", "prefixtree._numbers")


@cache
def compiled() -> set[str]:
    """numba loads and compiles as these are imported, so only functions may import them."""
    return {m for m in MODULES if ("numba", True) in _imports(m, False)}


# each room may import those before it, and modules of its own; what is not named is at 0
LAYERS = (
    ("loops", "forest", "errors", "hub", "progress"),
    ("packing",),
    ("kernels",),
    ("models",),
    ("planning",),
    ("parallel",),
    ("experts", "images", "recompute", "sparse", "states"),
    ("scoring",),
    ("sampling",),
    ("rollouts", "plotting"),
    ("sharing",),
    ("integrations",),
    ("testing",),
    ("demo",),
    ("doctor", "cli", "__main__"),
)


def layer_of(module: str) -> int:
    """A module's place in LAYERS; the package's own __init__ stands on top of all."""
    parts = module.split(".")[1:]
    if not parts:
        return len(LAYERS) - 1
    return next((n for n, rooms in enumerate(LAYERS) if parts[0] in rooms), 0)


def backend_of(module: str) -> str | None:
    """The backend of attention a module belongs to: a file or folder named so."""
    parts = module.split(".")
    if module.startswith(f"{ATTENTION}.") and parts[3] in ("reference", "sdpa", "triton", "flash"):
        return parts[3]
    return None


# The rooms that q passes, in order. Those behind import none of those before; beside them stand
# what every room may know.
ATTENTION = "prefixtree.kernels.attention"
WAY = ("", "api", "operator", "choice", "a backend", "protocol")


def room_of(module: str) -> str | None:
    """Where on the way to a kernel a module stands."""
    if backend_of(module) is not None:
        return "a backend"
    if module == ATTENTION:
        return ""
    return module.split(".")[3] if module.startswith(f"{ATTENTION}.") else None


# The same for recurrent layers, in a room of their own. "a backend" is what is named nowhere here.
RECURRENCE = "prefixtree.kernels.recurrence"
RECURRENCE_PARTS = {
    "triton": ("conv_triton", "conv_kernels"),
    # flash_qla serves a part of what fla serves, with its norms and its refusals
    "fla": ("fla_rules", "states", "state_kernels", "flash_qla", "flash_qla_rules"),
}
RECURRENCE_WAY = ("", "decode", "api", "operator", "backends", "a backend", "protocol")


def recurrence_room_of(module: str) -> str | None:
    """Where on the way to a recurrent layer's kernel a module stands."""
    if module == RECURRENCE:
        return ""
    if not module.startswith(f"{RECURRENCE}."):
        return None
    room = module.split(".")[3]
    return room if room in RECURRENCE_WAY else "a backend"


def recurrence_backend_of(module: str) -> str | None:
    """The backend a module belongs to."""
    if recurrence_room_of(module) != "a backend":
        return None
    room = module.split(".")[3]
    return next((name for name, parts in RECURRENCE_PARTS.items() if room in parts), room)


# ---- cost of an import ---------------------------------------------------------------------------


@cache
def _import_after_torch(attempt: int = 0) -> dict[str, object]:
    """The modules that `import prefixtree` adds to torch's, and its processor seconds."""
    return run_python(
        "import json, sys, time, torch; before = set(sys.modules); start = time.process_time();"
        "import prefixtree; seconds = time.process_time() - start;"
        "print(json.dumps({'new': sorted(set(sys.modules) - before), 'seconds': seconds}))"
    )


def test_nothing_heavy_is_imported_until_it_is_needed() -> None:
    new = _import_after_torch()["new"]
    assert isinstance(new, list)
    assert "prefixtree.errors" in new and "prefixtree.packing.layout" not in new
    heavy = sorted({name for name in new if name.split(".")[0] in LATER})
    assert heavy == []
    assert not compiled() & set(new)


def test_import_takes_little_longer_than_torch() -> None:
    # more than once where something else took the processor's cache
    for attempt in range(3):
        seconds = float(str(_import_after_torch(attempt)["seconds"]))
        print(f"import prefixtree after torch: {seconds:.3f} s (0.3 s on a quiet machine)")
        if seconds < 0.6:
            return
    raise AssertionError("three imports in a row took 0.6 s and more")


# ---- registration --------------------------------------------------------------------------------

_CONFIG = """
import json, sys
config = transformers.Qwen3Config(
    vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
    num_key_value_heads=1, head_dim=8
)
"""
_BUILD = """
model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="prefixtree")
packed = prefixtree.pack(prefixtree.PrefixForest.from_sequences([[1, 2, 3], [1, 2, 4, 5]]))
scores = prefixtree.sequence_logprobs(model, packed)
assert isinstance(scores, prefixtree.SequenceScores)
from prefixtree.scoring.logprobs import sequence_logprobs
assert sequence_logprobs is prefixtree.sequence_logprobs
sum(x.sum() for x in scores.logprobs).backward()
found = {
    "lengths": [len(x) for x in scores.logprobs],
    "hooks": sum(type(f).__module__.startswith("prefixtree") for f in sys.meta_path),
    "loaded": [name for name in sys.modules if name.startswith("prefixtree.")],
}
print(json.dumps(found))
"""
_ORDER = "import prefixtree, transformers"


@cache
def _plain_call(order: str) -> dict[str, object]:
    """What a forward and a backward of a plain model leave behind."""
    return run_python(order + _CONFIG + _BUILD)


@pytest.mark.parametrize(
    "order",
    [
        _ORDER,
        pytest.param(
            "import transformers; transformers.AutoModelForCausalLM; import prefixtree",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "import prefixtree.integrations.transformers, transformers", marks=pytest.mark.full
        ),
    ],
)
def test_import_prefixtree_registers_the_attention(order: str) -> None:
    """Whichever of the two comes first, and with nothing left behind on the import path."""
    found = _plain_call(order)
    assert (found["lengths"], found["hooks"]) == ([2, 3], 0)


def test_what_cannot_be_registered_warns_and_leaves_transformers_alone() -> None:
    code = (
        "import json, sys, warnings, prefixtree\n"
        "sys.modules['prefixtree.models.families'] = None  # as if it could not be imported\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    from transformers import PreTrainedModel\n"
        "said = [str(w.message) for w in caught if 'prefixtree' in str(w.message)]\n"
        "print(json.dumps({'said': said, 'name': PreTrainedModel.__name__}))"
    )
    found = run_python(code)
    assert found["name"] == "PreTrainedModel"
    (said,) = found["said"]
    assert "could not be registered, because of ModuleNotFoundError" in said and "families" in said
    # the cause is none of the versions, which are told
    assert f"found are torch {torch.__version__}, transformers {version('transformers')}" in said


def test_unknown_names_of_the_package() -> None:
    with pytest.raises(AttributeError, match="module 'prefixtree' has no attribute 'nothing'"):
        prefixtree.nothing  # noqa: B018


# ---- direction -----------------------------------------------------------------------------------


def test_the_parser_sees_what_it_should(tmp_path: Path) -> None:
    # the rules below would hold of any file if this one found nothing
    file = tmp_path / "sample.py"
    file.write_text(
        "import numpy as np\n"
        "from typing import TYPE_CHECKING\n"
        "from prefixtree.loops import trie\n"
        "if TYPE_CHECKING:\n    import networkx\n"
        "class A:\n    import json\n"
        "def f():\n    from prefixtree import loops\n    import torch\n"
    )
    assert list(imports(file)) == [
        ("numpy", True),
        ("typing", True),
        ("prefixtree.loops.trie", True),
        ("json", True),
        ("prefixtree.loops", False),
        ("torch", False),
    ]
    assert layer_of("prefixtree.loops.planning") == layer_of("prefixtree.forest") == 0
    assert ("networkx", True) in imports(file, types=True)
    assert layer_of("prefixtree.forest") < layer_of("prefixtree.packing.mask")
    assert layer_of("prefixtree.kernels.attention.sdpa") < layer_of(
        "prefixtree.integrations.transformers"
    )
    assert layer_of("prefixtree.rollouts") < layer_of("prefixtree.testing.verify")
    assert layer_of("prefixtree.demo.depot") < layer_of("prefixtree.cli.console")
    assert backend_of("prefixtree.kernels.attention.triton.forward") == "triton"
    assert room_of("prefixtree.kernels.attention.triton.forward") == "a backend"
    assert recurrence_room_of("prefixtree.kernels.recurrence.chunked") == "a backend"
    assert {recurrence_room_of(m) for m in MODULES} == {*RECURRENCE_WAY, None}
    assert {room_of(m) for m in MODULES} == {*WAY, None}
    assert {"prefixtree", "prefixtree.forest", "prefixtree.packing.mask"} <= set(MODULES)


def test_imports_point_one_way() -> None:
    for module, target, _ in every_import():
        if module != "prefixtree" and target.split(".")[0] == "prefixtree":
            # from `prefixtree` itself only what stands above all may import
            assert layer_of(target) <= layer_of(module), f"{module} imports {target}"


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Not inside functions and not for types either."""
    graph: networkx.DiGraph = networkx.DiGraph()
    for module, file in MODULES.items():
        # `from prefixtree.room import name` may name a module or what the room's __init__ exports
        graph.add_edges_from((module, m) for m, _ in imports(file, types=True) if m in MODULES)
    assert graph.has_edge("prefixtree.cli.console", "prefixtree.rollouts")
    circles = [sorted(c) for c in networkx.strongly_connected_components(graph) if len(c) > 1]
    assert circles == []


def test_the_rooms_are_known() -> None:
    """A new room has to say where it stands."""
    folders = {m.split(".")[1] for m in MODULES if m.count(".") > 1}
    assert folders <= {room for rooms in LAYERS for room in rooms}


def test_libraries_import_no_command_line() -> None:
    for module, target, _ in every_import(types=True):
        if "cli" not in module.split(".") and module != "prefixtree.__main__":
            assert target.split(".")[0] not in ("rich", "typer"), f"{module} prints"
            assert not target.startswith("prefixtree.cli"), f"{module} imports {target}"


WAYS = "ways of running"
ENTRIES = ("prefixtree.scoring.logprobs", "prefixtree.models.attention")


def wing_of(module: str) -> str | None:
    """The room of a module that the core may not import."""
    layer, room = room_of_image(module)
    return room if layer in ("wings", WAYS) else None


def test_the_core_imports_no_wing() -> None:
    """Not inside functions either: `prefixtree.wings` loads them by name."""
    core, left = set[str](), [*ENTRIES]
    while left:
        module = left.pop()
        if module in core:
            continue
        core.add(module)
        for target, _ in _imports(module, types=False):
            if target in MODULES:
                assert wing_of(target) is None, f"{module} imports {target}"
                left.append(target)
    lines = sum(len(MODULES[module].read_text().splitlines()) for module in core)
    print(f"the core: {len(core)} files, {lines:,} lines")
    assert {"prefixtree.kernels.attention.sdpa", "prefixtree.wings"} < core
    assert len(core) <= 67 and lines <= 17_500
    assert {wing_of(module) for module in MODULES} == {None, *ROOMS["wings"], *ROOMS[WAYS]}
    # nor do the rooms of the core, whoever begins there
    arrows = found()["arrows"]
    assert [(a, b) for a, b in arrows if a in ROOMS["core"] and b not in ROOMS["core"]] == []


def test_the_core_names_wings_where_their_docstring_says() -> None:
    rooms = [name for name in wings.MODULES if name in ROOMS["wings"] and name != "recompute"]
    loads = ["= load(name)", *(f'load("{room}")' for room in rooms)]
    core = [module for module in MODULES if room_of_image(module)[0] == "core"]
    sources = {module: MODULES[module].read_text() for module in core}
    naming = {m.removeprefix("prefixtree.") for m in core if any(x in sources[m] for x in loads)}
    (told,) = (part for part in str(wings.__doc__).split("\n\n") if "names a wing" in part)
    assert naming == set(re.findall(r"`([\w.]+)`", told))
    assert len(rooms) == 4


def test_a_plain_model_loads_no_wing() -> None:
    found = _plain_call(_ORDER)["loaded"]
    assert isinstance(found, list)
    wings = sorted(name for name in found if wing_of(name) is not None)
    lines = sum(len(MODULES[name].read_text().splitlines()) for name in found)
    print(f"a plain call loads {len(found)} files, {lines:,} lines")
    assert wings == [] and len(found) <= 85 and lines <= 16_000


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "docs"])
def test_benchmarks_and_examples_import_no_command_line(folder: str) -> None:
    files = sorted((ROOT.parent / folder).rglob("*.py"))
    assert files
    for file in files:
        for target, _ in imports(file, types=True):
            assert not target.startswith("prefixtree.cli"), f"{file} imports {target}"


def test_benchmarks_share_by_their_library() -> None:
    """A case imports no other case, and what they share imports no case."""
    files = sorted((ROOT.parent / "benchmarks").glob("*/*.py"))
    assert {"cases", "lib"} <= {file.parent.name for file in files}
    for file in files:
        for target, _ in imports(file, types=True):
            assert not target.startswith("benchmarks.cases"), f"{file} imports {target}"


def test_kernels_know_the_mask_alone_and_backends_not_each_other() -> None:
    for module, target, _ in every_import("prefixtree.kernels"):
        parts = target.split(".")
        if parts[0] != "prefixtree":
            continue
        if parts[1:2] == ["packing"]:
            allowed = {f"prefixtree.packing.{room}" for room in MASK_ROOMS}
            assert target in allowed, f"{module} imports {target}"
        elif parts[1:2] != ["kernels"]:
            assert target in (*OF_ALL, *([LOOPS] if module == WORK else [])), (
                f"{module} imports {target}"
            )
        ours, theirs = backend_of(module), backend_of(target)
        if ours is not None and theirs is not None:
            assert ours == theirs, f"backend {module} imports backend {target}"


def test_the_mask_is_built_of_rooms_one_on_another() -> None:
    others = {LOOPS, *OF_ALL}
    for place, room in enumerate(MASK_ROOMS):
        below = {f"prefixtree.packing.{other}" for other in MASK_ROOMS[:place]}
        for target, _ in imports(MODULES[f"prefixtree.packing.{room}"]):
            if target.startswith("prefixtree"):
                assert target in below | others, f"{room} imports {target}"


def test_a_work_list_knows_no_mask() -> None:
    found = {target for target, _ in imports(MODULES[WORK])}
    assert {name for name in found if name.startswith("prefixtree")} == {
        "prefixtree.loops",
        "prefixtree.packing.copies",
    }


def test_the_way_to_a_kernel_points_one_way() -> None:
    for module, target, at_import in every_import("prefixtree.kernels"):
        ours, theirs = room_of(module), room_of(target)
        if ours is not None and theirs is not None:
            room = WAY.index(ours)
            assert WAY.index(theirs) >= room, f"{module} imports {target}"
            # so that `import prefixtree` loads the code of no backend
            late = theirs == "a backend" and room < WAY.index(theirs)
            assert not (late and at_import), f"{module} imports {target} as it is imported"


def test_the_way_to_a_recurrent_layer_points_one_way() -> None:
    for module, target, at_import in every_import(RECURRENCE):
        room = RECURRENCE_WAY.index(str(recurrence_room_of(module)))
        assert room_of(target) is None, f"{module} imports {target}, which is attention's"
        if (theirs := recurrence_room_of(target)) is not None:
            assert RECURRENCE_WAY.index(theirs) >= room, f"{module} imports {target}"
            late = theirs == "a backend" and room < RECURRENCE_WAY.index(theirs)
            assert not (late and at_import), f"{module} imports {target} as it is imported"
        ours, others = recurrence_backend_of(module), recurrence_backend_of(target)
        if ours is not None and others is not None:
            assert ours == others, f"backend {module} imports backend {target}"


def test_attention_knows_no_recurrent_layer() -> None:
    for module, target, _ in every_import("prefixtree.kernels", types=True):
        if recurrence_room_of(module) is None:
            assert recurrence_room_of(target) is None, f"{module} imports {target}"


def test_compiled_loops_are_imported_inside_functions() -> None:
    for module, target, at_import in every_import():
        late = target in compiled() or target.split(".")[0] == "numba"
        if module not in compiled():
            assert not (late and at_import), f"{module} imports {target} as it is imported"


def test_the_loops_stand_alone_behind_their_door() -> None:
    for module, target, _ in every_import():
        if module.startswith(LOOPS):
            assert not target.startswith("prefixtree") or target.startswith(f"{LOOPS}."), (
                f"{module} imports {target}"
            )
        elif target in compiled():
            assert not target.startswith(f"{LOOPS}."), f"{module} imports {target}, not {LOOPS}"


def test_the_door_knows_every_compiled_module() -> None:
    wing = {f"{LOOPS}.{name}" for name in loops.__all__}
    assert wing == {
        module for module in compiled() if layer_of(module) < layer_of("prefixtree.cli")
    }
    assert {f"{LOOPS}.trie", f"{LOOPS}.block_tables", f"{LOOPS}.tile_costs"} <= wing
    for name in loops.__all__:
        assert getattr(loops, name).__name__ == f"{LOOPS}.{name}"
    with pytest.raises(AttributeError, match=r"'prefixtree\.loops' has no attribute 'nothing'"):
        loops.nothing  # noqa: B018


def test_a_module_of_loops_is_imported_when_it_is_first_used() -> None:
    found = run_python(
        "import json, sys; from prefixtree import PrefixForest\n"
        "loaded = lambda: sorted(m for m in sys.modules if m.startswith('prefixtree.loops.'))\n"
        "before = loaded(); PrefixForest.from_sequences([[1, 2], [1, 3]])\n"
        "print(json.dumps({'before': before, 'after': loaded()}))"
    )
    assert found == {"before": [], "after": ["prefixtree.loops.trie"]}
