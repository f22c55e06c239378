"""Examines the installation: packages, GPUs, and the backend that would run, with the reason.

Nothing that is missing or broken stops it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import platform
import warnings
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import prefixtree
from prefixtree import PrefixForest
from prefixtree.errors import TRAIN

if TYPE_CHECKING:
    from prefixtree import TreeMask


@dataclass(frozen=True)
class Wanted:
    """A package that prefixtree works with.

    Attributes:
        name: of the distribution.
        module: what is imported to see whether it works; of the trainers our adapter.
        versions: as in pyproject.toml; tests hold them to it.
        install: the command that adds it.
        used_for: what is not there without it; "" for one that everything needs, `_MODELS` for one
            that whatever runs a model needs.
    """

    name: str
    module: str
    versions: str
    install: str
    used_for: str = ""


_ALL = "pip install prefixtree-attention"
_TRAIN = f"pip install '{TRAIN}'"
_MODELS = "models: all but report"
WANTED = (
    Wanted("numpy", "numpy", ">=2.0", _ALL),
    Wanted("numba", "numba", ">=0.61", _ALL),
    Wanted("torch", "torch", ">=2.11", _TRAIN, _MODELS),
    Wanted("networkx", "networkx", ">=3.2", _TRAIN, _MODELS),
    Wanted(
        "transformers",
        "prefixtree.integrations.transformers",
        ">=5.5,<6",
        _TRAIN,
        _MODELS,
    ),
    Wanted(
        "tokenizers",
        "tokenizers",
        ">=0.22",
        "pip install 'prefixtree-attention[chat]'",
        "chats in rollouts",
    ),
    Wanted("triton", "triton", "", "pip install triton", "GPUs, backend 'triton'"),
    Wanted(
        "flash-attn-4",
        "flash_attn.cute.interface",
        "==4.0.0b36",
        "pip install 'prefixtree-attention[fa4]'",
        "Hopper, backend 'flash'",
    ),
    Wanted(
        "fla-core",
        "fla",
        "==0.6.0",
        "pip install 'prefixtree-attention[fla]'",
        "GPUs, recurrent layers, backend 'fla'",
    ),
    Wanted(
        "flash-qla",
        "flash_qla",
        "==0.1.3",
        "pip install 'prefixtree-attention[qla]'",
        "Hopper, gated delta rule, backend 'flash_qla'",
    ),
    Wanted(
        "tilelang",
        "tilelang",
        ">=0.1.12,<0.1.16",
        "pip install 'prefixtree-attention[qla]'",
        "Hopper: flash-qla; Triton before 3.7.1 with backend 'fla'",
    ),
    Wanted(
        "flash-attn",
        "flash_attn.flash_attn_interface",
        ">=2.8",
        "pip install --no-build-isolation 'prefixtree-attention[fa2]'",
        "the other side of bench",
    ),
    Wanted(
        "liger-kernel",
        "liger_kernel",
        ">=0.8",
        "pip install 'liger-kernel>=0.8'",
        "models with Liger's kernels",
    ),
    Wanted(
        "trl",
        "prefixtree.integrations.trl",
        ">=1.15,<1.17",
        "pip install 'prefixtree-attention[trl]'",
        "the TRL adapter",
    ),
    Wanted(
        "verl",
        "prefixtree.integrations.verl",
        "==0.9.1",
        "pip install 'prefixtree-attention[verl]'",
        "the verl adapter",
    ),
    Wanted(
        "megatron-core",
        "prefixtree.integrations.megatron",
        ">=0.18",
        "pip install megatron-core==0.19.2",
        "the adapter for Megatron-Core",
    ),
    Wanted(
        "transformer-engine",
        "transformer_engine.pytorch",
        "",
        "pip install --no-build-isolation 'transformer-engine[pytorch]'",
        "Megatron's TransformerEngine layer specs; get_gpt_layer_local_spec needs none",
    ),
    Wanted(
        "matplotlib",
        "matplotlib.figure",
        ">=3.9",
        "pip install 'prefixtree-attention[plot]'",
        "images",
    ),
    Wanted(
        "pyarrow",
        "pyarrow.parquet",
        ">=15",
        "pip install 'prefixtree-attention[parquet]'",
        "parquet files",
    ),
    Wanted(
        "pillow",
        "PIL.Image",
        ">=10",
        "pip install 'prefixtree-attention[images]'",
        "images in rollouts",
    ),
)

# (query heads, kv heads, head dim): Llama 3 and Qwen3; Qwen2.5 0.5B; gpt-oss; Phi-3; Qwen3.5
HEADS = ((32, 8, 128), (14, 2, 64), (64, 8, 64), (32, 32, 96), (24, 4, 256))
# Qwen3.5 and Qwen3-Next, Kimi Linear, Nemotron-H: operator, options, and what they are called
RECURRENCES: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("tree_conv", {}, "tree_conv"),
    ("tree_delta_rule", {}, "tree_delta_rule"),
    ("tree_delta_rule", {"gate_per_channel": True}, "tree_delta_rule per channel"),
    ("tree_ssd", {}, "tree_ssd"),
)
# a prompt and its responses: parents and tokens of the nodes
_FOREST = ([-1, *[0] * 8], [2048, *[512] * 8])


@dataclass(frozen=True)
class Package:
    """A package as it was found.

    Attributes:
        version: None where it is not installed.
        problem: why it cannot be used; None where it can, or where it is not installed.
    """

    version: str | None
    problem: str | None
    wanted: Wanted

    @property
    def is_usable(self) -> bool:
        return self.version is not None and self.problem is None


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch can use: memory in bytes, capability such as "9.0"."""

    name: str
    capability: str
    memory: int


@dataclass(frozen=True)
class Backend:
    """The answer of `explain` or `explain_recurrence`, or its error, for shapes or operators."""

    heads: tuple[str, ...]
    says: str
    is_problem: bool


@dataclass(frozen=True)
class Health:
    """The result of `examine`.

    Attributes:
        folder: where prefixtree was imported from.
        cuda: what torch was built for, such as "CUDA 13.0"; None for a build for the CPU.
        gpus: those that torch can use.
        gpu_problem: why there are none, though torch was built for them.
        packages: all of `WANTED`, in its order.
        backends, recurrences: what would run in half precision on the first GPU, or in float32 on
            the CPU.
    """

    prefixtree: str
    folder: str
    python: str
    system: str
    cuda: str | None
    gpus: tuple[Gpu, ...]
    gpu_problem: str | None
    packages: tuple[Package, ...]
    backends: tuple[Backend, ...]
    recurrences: tuple[Backend, ...]

    @property
    def broken(self) -> list[str]:
        """The required packages that do not work; where torch is, those of models are required."""
        has_torch = any(p.wanted.name == "torch" and p.version for p in self.packages)
        required = ("", _MODELS) if has_torch else ("",)
        named = [
            f"{package.wanted.name}: {package.problem or 'not installed'}"
            for package in self.packages
            if package.wanted.used_for in required and not package.is_usable
        ]
        sides = (("tree_attention at ", self.backends), ("", self.recurrences))
        return named + [
            f"{what}{', '.join(backend.heads)}: {backend.says}"
            for what, backends in sides
            for backend in backends
            if backend.is_problem
        ]

    def facts(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**asdict(self), "broken": self.broken}


def examine() -> Health:
    """Looks at this machine; raises nothing, whatever is missing or broken."""
    # first, so that a package that changes what is loaded later is seen by the others
    packages = tuple(look_up(wanted) for wanted in WANTED)
    has_torch = any(p.wanted.name == "torch" and p.is_usable for p in packages)
    gpus, gpu_problem = _gpus() if has_torch else ((), None)
    device = "cuda:0" if gpus else "cpu"
    return Health(
        prefixtree=prefixtree.__version__,
        folder=str(Path(prefixtree.__file__).parent),
        python=platform.python_version(),
        system=platform.platform(),
        cuda=_built_for() if has_torch else None,
        gpus=gpus,
        gpu_problem=gpu_problem,
        packages=packages,
        backends=backends(device) if has_torch else (),
        recurrences=recurrences(device) if has_torch else (),
    )


def look_up(wanted: Wanted) -> Package:
    """Whether a package is there, of a version that fits, and can be imported."""
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return Package(None, None, wanted)
    if not _fits(version, wanted.versions):
        expected = f"{wanted.name}{wanted.versions}"
        return Package(version, f"expected {wanted.versions}: pip install '{expected}'", wanted)
    return Package(version, _import_problem(wanted.module), wanted)


def backends(device: str) -> tuple[Backend, ...]:
    """The answers of `explain` for `HEADS` on the device; equal sentences once."""
    names_of: dict[tuple[str, bool], list[str]] = {}
    for heads, kv_heads, dim in HEADS:
        try:
            says = _explain(heads, kv_heads, dim, device), False
        except Exception as problem:  # a broken driver or package raises what it likes
            says = f"it raises {_in_a_line(problem)}", True
        names_of.setdefault(says, []).append(f"{heads}/{kv_heads} x {dim}")
    return tuple(Backend(tuple(names), *says) for says, names in names_of.items())


def recurrences(device: str) -> tuple[Backend, ...]:
    """The answers of `explain_recurrence` on the device; equal sentences once."""
    from prefixtree.kernels.recurrence import explain_recurrence

    names_of: dict[tuple[str, bool], list[str]] = {}
    for operator, options, name in RECURRENCES:
        try:
            sentence = explain_recurrence(_mask(device), operator, **options)
            says = sentence.removeprefix(f"{operator} "), False
        except Exception as problem:
            says = f"it raises {_in_a_line(problem)}", True
        names_of.setdefault(says, []).append(name)
    return tuple(Backend(tuple(names), *says) for says, names in names_of.items())


def _explain(heads: int, kv_heads: int, dim: int, device: str) -> str:
    import torch

    mask = _mask(device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    # one number, seen as all of them
    row = torch.empty(1, 1, 1, dtype=dtype, device=device)
    q = row.expand(mask.num_tokens, heads, dim)
    k = row.expand(mask.num_tokens, kv_heads, dim)
    return prefixtree.explain(mask, q, k, k)


def _mask(device: str) -> TreeMask:
    from prefixtree import TreeMask

    forest = PrefixForest.from_parents(*_FOREST)
    return TreeMask(np.repeat(forest.node_subtree_end, forest.node_length)).to(device)


def _import_problem(module: str) -> str | None:
    """Why a module cannot be imported, in a line; what it prints and warns of is dropped."""
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            importlib.import_module(module)
    except (Exception, SystemExit) as problem:
        return f"cannot be imported: {_in_a_line(problem)}"
    return None


def _fits(version: str, versions: str) -> bool:
    try:
        from packaging.specifiers import SpecifierSet
        from packaging.version import InvalidVersion
    except ModuleNotFoundError:
        # it comes with what models need; without these, pip has just looked at the same versions
        return True
    try:
        return SpecifierSet(versions).contains(version, prereleases=True)
    except InvalidVersion:
        return True


def _in_a_line(problem: BaseException) -> str:
    lines = str(problem).strip().splitlines() or [""]
    return f"{type(problem).__name__}: {lines[0]}".removesuffix(": ")


def _built_for() -> str | None:
    import torch

    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return None if torch.version.cuda is None else f"CUDA {torch.version.cuda}"


def _gpus() -> tuple[tuple[Gpu, ...], str | None]:
    """The GPUs that torch can use, and why there are none, where there could be."""
    import torch

    gpus = []
    # torch warns, and does not raise, where the driver is too old
    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
                properties = torch.cuda.get_device_properties(i)
                capability = f"{properties.major}.{properties.minor}"
                gpus.append(Gpu(properties.name, capability, properties.total_memory))
        except Exception as problem:
            return (), _in_a_line(problem)
    if gpus or _built_for() is None:
        return tuple(gpus), None
    return (), _in_a_line(caught[-1].message) if caught else "torch finds none"  # type: ignore[arg-type]
