"""`prefixtree doctor`: what it finds here, and that nothing missing or broken stops it."""

from __future__ import annotations

import sys
import tomllib
import warnings
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import prefixtree
from prefixtree import doctor
from prefixtree.kernels.recurrence import fla
from tests.support.cli_runs import run, run_json
from tests.support.warm import run_warm

ROOT = Path(__file__).parents[2]
LOOKED_UP = {wanted.name: wanted for wanted in doctor.WANTED}


@pytest.fixture
def versions(monkeypatch):
    """Makes distributions seem to be of other versions, or (None) not installed."""
    original, others = metadata.version, {}

    def version(name):
        found = others.get(name, "") if name in others else original(name)
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    # nothing heavy is imported by surprise, and nothing that this environment lacks
    others.update(dict.fromkeys(("trl", "verl", "flash-attn", "flash-attn-4", "fla-core")))
    monkeypatch.setattr(metadata, "version", version)
    return others


def lines_of(result) -> dict[str, str]:
    return {line[:13].strip(): line[14:] for line in result.stdout.splitlines()}


def test_doctor_shows_what_is_here():
    result = run("doctor")
    assert result.exit_code == 0, result.stdout
    lines = lines_of(result)
    assert lines["prefixtree"] == f"{prefixtree.__version__} in {ROOT / 'prefixtree'}"
    # a wheel of PyPI is 2.13.0 there, and 2.13.0+cu130 in torch.__version__
    assert lines["torch"].startswith(f"{metadata.version('torch')}, built for ")
    for name in ("numpy", "numba", "transformers"):
        assert lines[name] == metadata.version(name)
    assert len(result.stdout.splitlines()) < 27
    assert "tree_attention would run '" in lines["backend"]
    facts = run_json("doctor")
    assert facts["broken"] == [] and facts["prefixtree"] == prefixtree.__version__


def test_without_a_gpu_one_line_tells_the_backend_of_every_head_shape():
    (found,) = doctor.backends("cpu")
    assert len(found.heads) == len(doctor.HEADS) and "24/4 x 256" in found.heads
    assert not found.is_problem
    assert found.says.startswith("tree_attention would run 'sdpa': q is on cpu")


def test_without_a_gpu_one_line_tells_the_backend_of_all_recurrent_layers():
    (found,) = doctor.recurrences("cpu")
    assert len(found.heads) == len(doctor.RECURRENCES) and "tree_ssd" in found.heads
    assert not found.is_problem
    assert found.says.startswith("would run 'chunked': the mask is on cpu")
    lines = lines_of(run("doctor"))
    assert lines["recurrence"] == f"{', '.join(found.heads)}: {found.says}"


def test_recurrent_layers_that_raise_are_shown_and_exit_1(versions, monkeypatch):
    def raises(*_, **__):
        raise ImportError("fla: undefined symbol\nmore")

    monkeypatch.setattr("prefixtree.kernels.recurrence.explain_recurrence", raises)
    broken = "tree_conv, tree_delta_rule, tree_delta_rule per channel, tree_ssd: it raises "
    facts = run_json("doctor", exit_code=1)
    assert facts["broken"] == [f"{broken}ImportError: fla: undefined symbol"]


def test_fla_core_of_the_wrong_version_is_named(versions):
    expected = "GPUs, recurrent layers, backend 'fla'): pip install 'prefixtree-attention[fla]'"
    assert lines_of(run("doctor"))["fla-core"] == f"not installed (for {expected}"
    versions["fla-core"] = "0.5.0"
    expected = "0.5.0, expected ==0.6.0: pip install 'fla-core==0.6.0'"
    assert lines_of(run("doctor"))["fla-core"] == expected
    # what the backend itself asks for
    assert SpecifierSet(LOOKED_UP["fla-core"].versions) == SpecifierSet(f"=={fla.VERSIONS[-1]}")


def test_what_is_missing_comes_with_the_command_that_adds_it(versions):
    versions |= dict.fromkeys(("triton", "matplotlib", "pyarrow", "pillow", "liger-kernel"))
    result = run("doctor")
    assert result.exit_code == 0
    lines = lines_of(result)
    for name, extra in {
        "flash-attn-4": "fa4",
        "flash-attn": "fa2",
        "trl": "trl",
        "verl": "verl",
        "matplotlib": "plot",
        "pyarrow": "parquet",
        "pillow": "images",
    }.items():
        assert lines[name].startswith("not installed (for ")
        options = "--no-build-isolation " if extra == "fa2" else ""
        assert lines[name].endswith(f": pip install {options}'prefixtree-attention[{extra}]'")
    assert lines["triton"].endswith(": pip install triton")
    assert lines["liger-kernel"].endswith(": pip install 'liger-kernel>=0.8'")


@pytest.mark.full
def test_optional_packages_that_raise_as_they_are_imported_are_shown(tmp_path):
    # real imports, in a process that has not got these yet
    for package, module, code in (
        ("matplotlib", "figure", "raise RuntimeError('built for another numpy\\nand more')"),
        ("pyarrow", "parquet", "print('noise'); raise SystemExit(3)"),
        ("liger_kernel", "other", ""),
    ):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
        (tmp_path / package / f"{module}.py").write_text(code)
    (tmp_path / "liger_kernel" / "__init__.py").write_text("import ctypes; ctypes.CDLL('no.so')")
    for name in ("matplotlib-3.11", "pyarrow-26.0", "liger_kernel-0.8.5"):
        folder = tmp_path / f"{name}.dist-info"
        folder.mkdir()
        project, version = name.rsplit("-", 1)
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n"
        )
    code = (
        "import runpy, sys\n"
        "sys.path[:0] = [sys.argv.pop()]\n"
        "runpy.run_module('prefixtree', run_name='__main__')\n"
    )
    result = run_warm(code, "doctor", str(tmp_path))
    assert (result.returncode, result.stderr) == (0, "")
    lines = lines_of(result)
    assert lines["matplotlib"] == (
        "3.11, cannot be imported: RuntimeError: built for another numpy"
    )
    assert lines["pyarrow"] == "26.0, cannot be imported: SystemExit: 3"
    assert lines["liger-kernel"].startswith("0.8.5, cannot be imported: OSError: no.so: cannot")
    assert "noise" not in result.stdout
    assert lines["ok"] == "nothing that is required is missing or broken"


def test_what_is_required_and_broken_exits_1(versions, monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    result = run("doctor")
    assert result.exit_code == 1
    lines = lines_of(result)
    assert "cannot be imported: ModuleNotFoundError: " in lines["numba"]
    assert lines["BROKEN"].startswith("numba: cannot be imported") and "ok" not in lines


def test_what_is_required_and_missing_or_too_old_exits_1(versions):
    versions |= {"transformers": "4.57.0", "networkx": None}
    facts = run_json("doctor", exit_code=1)
    assert facts["broken"] == [
        "networkx: not installed",
        "transformers: expected >=5.5,<6: pip install 'transformers>=5.5,<6'",
    ]
    expected = "models: all but report): pip install 'prefixtree-attention[train]'"
    assert lines_of(run("doctor"))["networkx"] == f"not installed (for {expected}"


def test_an_optional_package_of_a_version_that_was_not_checked_is_named(versions):
    versions["flash-attn-4"] = "4.0.0b99"
    result = run("doctor")
    assert result.exit_code == 0
    expected = "4.0.0b99, expected ==4.0.0b36: pip install 'flash-attn-4==4.0.0b36'"
    assert lines_of(result)["flash-attn-4"] == expected


def test_gpus_are_named(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=140 * 2**30)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(doctor, "backends", lambda device: (device,))
    found = doctor.examine()
    assert found.gpus == (doctor.Gpu("NVIDIA H200", "9.0", 140 * 2**30),)
    assert found.gpu_problem is None and found.backends == ("cuda:0",)


def test_why_a_build_for_gpus_finds_none(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def too_old():
        warnings.warn("The NVIDIA driver on your system is too old\nsee nvidia.com", stacklevel=1)
        return False

    for asked, expected in (
        (too_old, "UserWarning: The NVIDIA driver on your system is too old"),
        (lambda: False, "torch finds none"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", asked)
        found = doctor.examine()
        assert (found.gpus, found.gpu_problem) == ((), expected)
        assert lines_of(run("doctor"))["GPU"] == f"none: {expected}"


def test_a_backend_that_raises_is_shown_and_exits_1(versions, monkeypatch):
    def raises(*_, **__):
        raise ImportError("libtriton.so: undefined symbol\nmore")

    monkeypatch.setattr(prefixtree, "explain", raises)
    result = run("doctor")
    assert result.exit_code == 1
    line = lines_of(result)["backend"]
    assert line.endswith(": it raises ImportError: libtriton.so: undefined symbol")


def test_the_versions_are_pyprojects():
    file = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, groups = file["project"], file["dependency-groups"]
    lists = {**project["optional-dependencies"], "test": groups["test"]}
    required = {r.name: r.specifier for r in map(Requirement, project["dependencies"])}
    # what prints is there, or nothing would
    del required["rich"], required["typer"]
    wanted = {w.name: SpecifierSet(w.versions) for w in doctor.WANTED if not w.used_for}
    assert wanted == required
    for name, given_by in (
        ("flash-attn-4", "fa4"),
        ("flash-attn", "fa2"),
        ("fla-core", "fla"),
        ("flash-qla", "qla"),
        ("tilelang", "qla"),
        ("trl", "trl"),
        ("verl", "verl"),
        ("matplotlib", "plot"),
        ("pyarrow", "parquet"),
        ("pillow", "images"),
        ("liger-kernel", "test"),
    ):
        (given,) = [r for r in map(Requirement, lists[given_by]) if r.name == name]
        assert SpecifierSet(LOOKED_UP[name].versions) == given.specifier, name
        assert given_by == "test" or LOOKED_UP[name].install.endswith(f"-attention[{given_by}]'")
