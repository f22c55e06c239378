"""Names of other packages that are not public: all are listed, and the optional gate nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import prefixtree
from prefixtree.errors import UnsupportedError
from prefixtree.kernels.runtime import Backend
from tests.package import foreign_names
from tests.support.models import build, ragged_packed

ROOT = foreign_names.ROOT
TABLE = Path(__file__).with_name("private_names.md")
KINDS = ("required", "replaced", "refused", "unseen", "apart")


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    names: list[str]
    where: list[str]
    purpose: str
    without: str

    @property
    def kind(self) -> str:
        """One of KINDS."""
        return self.without.partition(":")[0]


def rows() -> list[Row]:
    lines = [x for x in TABLE.read_text().splitlines() if x.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [
        Row(re.findall("`(.*?)`", names), re.findall("`(.*?)`", where), purpose, without)
        for names, where, purpose, without in cells
    ]


def is_in(file: str, where: str) -> bool:
    return file == where or file.startswith(f"{where}/")


def test_the_search_sees_what_it_should(tmp_path: Path) -> None:
    """The table would be right of any package if this found nothing."""
    (tmp_path / "sample.py").write_text(
        "import torch, torch._dynamo\n"
        "from torch._functorch.aot_autograd import aot_function as cut\n"
        "from torch.nn import Linear\n"
        "from trl import GRPOTrainer\n"
        "from trl.trainer.utils import pad\n"
        "class Ours(GRPOTrainer):\n"
        "    def _called_by_trl(self): return self._mine(super()._of_trl())\n"
        "    def _mine(self, x): self._kept = x._version; return torch._C._public.thing(x)\n"
        "def f(x):\n"
        "    getattr(x, '_by_name'), x._kept, x.public, torch.ops.aten.add, x.__dict__\n"
        "    return 'deepspeed.utils.nvtx', 'torch.nn', '_not a name'\n"
    )
    assert set(foreign_names.found(tmp_path)) == {
        *("torch._dynamo", "torch._functorch.aot_autograd.aot_function", "trl.trainer.utils"),
        *("._called_by_trl", "._of_trl", "._version", "torch._C._public.thing", "._by_name"),
        "deepspeed.utils.nvtx",
    }


def test_every_name_is_listed() -> None:
    found, listed = foreign_names.found(), rows()
    names = [name for row in listed for name in row.names]
    assert sorted(names) == sorted(set(names))
    new = {name: sorted(found[name]) for name in set(found) - set(names)}
    assert not new, f"not public, and not in {TABLE.name}: {new}"
    assert set(names) <= set(found), f"in {TABLE.name}, and used nowhere"
    for row in listed:
        assert row.kind in KINDS and row.purpose and row.where
        for name in row.names:
            for file in found[name]:
                assert any(is_in(file, where) for where in row.where), f"{name} is used in {file}"
        for where in row.where:
            files = {file for name in row.names for file in found[name]}
            assert any(is_in(file, where) for file in files), f"{where} uses none of {row.names}"


@pytest.mark.full
def test_what_is_optional_gates_nothing() -> None:
    """Without all optional names a forest is scored as before; without one that is required, the
    error or the warning names it."""
    found = foreign_names.found()
    kinds = {name: row.kind for row in rows() for name in row.names}
    required = [name for name in sorted(found) if kinds[name] == "required"]
    optional = {name: sorted(files) for name, files in found.items() if name not in required}
    groups = [{}, optional, *({name: sorted(found[name])} for name in required)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.package.without_names"],
        input=json.dumps(groups),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT.parent,
        # of so small a forest the loops take less time than to load what is compiled
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
    )
    assert done.returncode == 0, done.stderr
    whole, without_optional, *others = json.loads(done.stdout)
    assert whole["said"] == [] and len(whole["numbers"]) == 6
    assert without_optional["said"] == [] and without_optional["numbers"] == whole["numbers"]
    read = {str(Path(file).relative_to(ROOT)) for file in whole["files"]}
    assert len([name for name in optional if found[name] & read]) > 15
    for name, report in zip(required, others, strict=True):
        assert f"{name.rpartition('.')[2]}_gone" in " ".join(report["said"]), name


def test_kernels_that_cannot_be_imported_are_refused() -> None:
    """So that "auto" takes other kernels, and the reason has the name."""

    def load() -> Any:
        from triton import a_name_that_is_gone  # noqa: F401

    said = Backend("some", load).refuses(None)
    assert said is not None and "cannot be imported (cannot import name 'a_name_that" in said


def test_what_a_probe_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """And "auto" recomputes every layer then."""
    monkeypatch.delattr("torch.utils._python_dispatch.TorchDispatchMode")
    for name in ("probes", "counted"):
        monkeypatch.delitem(sys.modules, f"prefixtree.recompute.{name}", raising=False)
    model, packed = build("qwen3"), ragged_packed()
    with pytest.raises(UnsupportedError, match=r"cannot be probed: torch .* not public .*Dispatch"):
        prefixtree.plan_recomputation(model, packed)
    with pytest.warns(UserWarning, match="recompute='auto' recomputes every layer: nothing is"):
        prefixtree.sequence_logprobs(model, packed, recompute="auto")
