"""Which backend serves a call: what flash refuses, what "auto" takes, and what `explain` says."""

from __future__ import annotations

import functools
import gc
import importlib
import re
import sys
import timeit
import tomllib
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import prefixtree as pt
from prefixtree import PrefixForest, TreeMask, UnsupportedError, explain, tree_attention
from prefixtree.kernels import runtime
from prefixtree.kernels.attention import choice
from prefixtree.kernels.attention.flash import launch
from prefixtree.kernels.attention.protocol import AttentionCall
from prefixtree.kernels.chosen import words
from tests.support.attention_checks import Case
from tests.support.strategies import mask_of, random_forest

CPU = torch.device("cpu")

FOREST = PrefixForest.from_parents([-1, 0, 0], [70, 30, 40])
# (change of the case, change of the mask, reason)
REFUSED: list[tuple[dict, Callable[[TreeMask], TreeMask], str]] = [
    ({"dtype": torch.float32}, lambda m: m, "float16 and bfloat16, and q is torch.float32"),
    # its gradients were wrong on a GPU
    ({"dims": (80, 80)}, lambda m: m, "80 and 80 .*64, 96, 128, 192, 256; 192 with 128 of v"),
    ({"dims": (16, 16)}, lambda m: m, "16 and 16 are not among those checked"),
    ({"dims": (128, 64)}, lambda m: m, "128 and 64 are not among those checked"),
    ({"dims": (192, 128)}, lambda m: m, "differ .192 and 128. without grouped queries"),
    ({"scale": 0.0}, lambda m: m, "scale must be above 0"),
    ({}, lambda m: m.with_options(deterministic=True), "no deterministic backward"),
]


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that flash would serve, as far as the reasons that come first go."""
    monkeypatch.setattr(launch, "installed", lambda: launch.VERSION)
    monkeypatch.setattr(runtime, "capability", lambda device: (9, 0))
    refusal = launch.refusal
    monkeypatch.setattr(
        launch,
        "refusal",
        lambda call: launch.refused_features(call) if call.q.device == CPU else refusal(call),
    )


@pytest.mark.parametrize("changes, of_mask, reason", REFUSED)
def test_refusals_say_why(
    on_hopper: None, changes: dict, of_mask: Callable[[TreeMask], TreeMask], reason: str
) -> None:
    mask = of_mask(mask_of(FOREST))
    case = Case.random(mask, **({"dims": (64, 64), "dtype": torch.bfloat16} | changes))
    with pytest.raises(UnsupportedError, match=f"backend 'flash': .*{reason}"):
        tree_attention(case.q, case.k, case.v, mask, backend="flash", **case.options)
    said = explain(mask, case.q, case.k, case.v, backend="flash", **case.options)
    assert said.startswith("tree_attention would refuse: backend 'flash'")


def test_another_version_or_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = mask_of(FOREST)
    case = Case.random(mask, dims=(64, 64), dtype=torch.bfloat16)
    for version, said in (
        (None, "prefixtree-attention.fa4.*not installed"),
        ("4.0.0b99", "needs flash-attn-4 4.0.0b36.*4.0.0b99 is installed"),
        (launch.VERSION, "runs on NVIDIA GPUs, and q is on cpu"),
    ):
        monkeypatch.setattr(launch, "installed", lambda version=version: version)
        with pytest.raises(UnsupportedError, match=f"backend 'flash': .*{said}"):
            tree_attention(case.q, case.k, case.v, mask, backend="flash")


def test_it_is_the_version_the_extra_installs() -> None:
    project = tomllib.loads((Path(pt.__file__).parents[1] / "pyproject.toml").read_text())
    assert f"flash-attn-4=={launch.VERSION}" in project["project"]["optional-dependencies"]["fa4"]


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU: what the choice looks at."""

    is_cuda = True


def gpu_case(mask: TreeMask, **changes: object) -> list[torch.Tensor]:
    case = Case.random(mask, **({"dims": (64, 64), "dtype": torch.bfloat16} | changes))
    return [x.as_subclass(OnGpu) for x in (case.q, case.k, case.v)]


def rows_on_gpu(
    mask: TreeMask,
    heads: tuple[int, int] = (8, 2),
    dims: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
) -> list[torch.Tensor]:
    """q, k and v that take no memory, for forests that fill many tiles."""
    rows = [
        torch.zeros(1, 1, d, dtype=dtype).expand(n, h, d)
        for n, h, d in (
            (mask.num_queries, heads[0], dims[0]),
            (mask.num_tokens, heads[1], dims[0]),
            (mask.num_tokens, heads[1], dims[1]),
        )
    ]
    return [x.as_subclass(OnGpu) for x in rows]


def call_of(mask: TreeMask, inputs: list[torch.Tensor], **options: object) -> AttentionCall:
    return AttentionCall(*inputs, None, mask.host, **({"scale": 0.1} | options))


def auto(mask: TreeMask, inputs: list[torch.Tensor], **options: object) -> str:
    """The name of what "auto" takes."""
    return choice.choose("auto", call_of(mask, inputs, **options)).backend.name


def on_capability(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """A GPU of it, with flash-attn-4."""
    monkeypatch.setattr(launch, "installed", lambda: launch.VERSION)
    monkeypatch.setattr(launch, "import_problem", lambda: None)
    monkeypatch.setattr(runtime, "capability", lambda device: capability)


@pytest.fixture
def may_take_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper GPU, where "auto" chooses between triton and flash, by a limit that stays."""
    on_capability(monkeypatch, (9, 0))
    monkeypatch.setattr(choice, "MOST_WORK", {None: 1.4})


# work 1.10, and 6.13
LONG = PrefixForest.from_parents([-1], [8192])
SHORT = PrefixForest.from_parents([-1, *[0] * 60], [100] * 61)


@pytest.mark.parametrize("capability, flash", [((9, 0), True), ((10, 0), False), ((8, 0), False)])
def test_auto_takes_flash_on_hopper(
    may_take_flash: None,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    flash: bool,
) -> None:
    on_capability(monkeypatch, capability)
    mask = mask_of(LONG)
    inputs = rows_on_gpu(mask)
    backend = "flash" if flash else "triton"
    assert (launch.refusal(call_of(mask, inputs)) is None) == flash
    assert auto(mask, inputs) == backend
    said = explain(mask, *inputs)
    assert f"would run {backend!r}" in said and ("Hopper" in said) == (not flash)
    # an AMD GPU's capability may begin with 9 too
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", "7.0")
        assert "an AMD GPU" in str(launch.refusal(call_of(mask, inputs)))


def test_auto_passes_over_a_broken_flash_attn_4(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = launch.import_problem.__wrapped__
    on_capability(monkeypatch, (9, 0))
    monkeypatch.setattr(launch, "import_problem", problem)
    # None in the table of modules is one that cannot be imported
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    mask = mask_of(LONG)
    inputs = rows_on_gpu(mask)
    assert "cannot be imported" in str(launch.refusal(call_of(mask, inputs)))
    assert auto(mask, inputs) == "triton"
    assert re.search("'triton': .*cannot be imported", explain(mask, *inputs))


def test_deprecations_of_its_packages_do_not_break_flash_attn_4(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "flash_attn" / "cute"
    package.mkdir(parents=True)
    warn = "import warnings; warnings.warn('a layout', DeprecationWarning)"
    (package / "interface.py").write_text(warn)
    for name in [n for n in sys.modules if n.split(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DeprecationWarning):
        importlib.import_module("flash_attn.cute.interface")
    assert launch.import_problem.__wrapped__() is None


def test_auto_goes_by_the_work(may_take_flash: None) -> None:
    for forest, said in (
        (LONG, r"'flash': flash-attn-4 does 1\.1\d times the work .* up to 1\.40 times\."),
        (SHORT, r"'triton': .*flash-attn-4 would do 6\.\d\d times the work .* up to 1\.40"),
    ):
        mask = mask_of(forest)
        assert re.search(said, explain(mask, *rows_on_gpu(mask)))
    mask = mask_of(LONG)
    inputs = rows_on_gpu(mask)
    # where a query sees two tiles most of the work is for nothing
    assert auto(mask, inputs, window=4096) == "flash"
    assert auto(mask, inputs, window=256) == "triton"
    none = mask_of(PrefixForest.from_parents([-1], [1]))
    assert auto(none, rows_on_gpu(none)) == "triton"


@pytest.mark.parametrize("window", [0, 200])
def test_the_work_is_of_the_tiles_it_visits(window: int) -> None:
    for seed in range(4):
        mask = mask_of(random_forest(np.random.default_rng(seed), 20, 300))
        stats = mask.stats(pt.TileShape(128, 128), window or None)
        tiles = stats.tile_pairs + stats.partial_tiles / 2 + 2.7 * -(-mask.num_tokens // 128)
        want = tiles * 128 * 128 / stats.visible_pairs
        assert choice.flash_work(mask.host, window) == pytest.approx(want)
    assert choice.flash_work(TreeMask(np.empty(0, np.int32)).host, 0) == 0


def test_the_longest_key_tile_counts_where_heads_are_few(
    may_take_flash: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All read the 256 tokens of the prompt; with 9 heads of 64 flash was 1.19 times slower."""
    mask = mask_of(PrefixForest.from_parents([-1, *[0] * 64], [256, *[1024] * 64]))
    tables = mask.tables(pt.TileShape(128, 128))
    share = float(tables.k_cost.max() / tables.k_cost.sum())
    assert choice.longest_key_tile_share(mask.host, 0) == pytest.approx(share)
    work = choice.flash_work(mask.host, 0)
    for heads in (1, 9, 64):
        tail = max(1.0, share * 132 / heads)
        want = pytest.approx(work * (0.3 + 0.7 * tail))
        assert choice.with_tail(work, share, heads, 132) == want
    monkeypatch.setattr(choice, "MOST_WORK", {None: 1.8})
    monkeypatch.setattr(runtime, "processors", lambda device: 132)
    for heads, backend in (((9, 3), "triton"), ((32, 8), "flash")):
        inputs = rows_on_gpu(mask, heads)
        assert auto(mask, inputs) == backend
    assert choice.longest_key_tile_share(TreeMask(np.empty(0, np.int32)).host, 0) == 0


@pytest.mark.parametrize(
    "changes, of_mask, why_not",
    [
        ({}, lambda m: m, None),
        ({"dtype": torch.float16}, lambda m: m, None),
        ({"heads": (8, 8)}, lambda m: m, None),
        ({"heads": (6, 1), "dims": (256, 256)}, lambda m: m, None),
        ({"heads": (8, 8), "dims": (192, 128)}, lambda m: m, None),
        ({"dims": (80, 80)}, lambda m: m, "not among those checked"),
        ({"dims": (128, 64)}, lambda m: m, "not among those checked"),
        # which triton's interpreter takes
        ({"dtype": torch.float32}, lambda m: m, ""),
        ({}, lambda m: m.with_options(deterministic=True), "no deterministic backward"),
        ({}, lambda m: m.for_queries([(0, 8000)]), None),
    ],
)
def test_auto_leaves_what_flash_refuses(
    may_take_flash: None,
    changes: dict,
    of_mask: Callable[[TreeMask], TreeMask],
    why_not: str | None,
) -> None:
    mask = of_mask(mask_of(LONG))
    inputs = rows_on_gpu(mask, **changes)
    chosen = auto(mask, inputs, deterministic=mask.deterministic)
    assert (chosen == "flash") == (why_not is None)
    said = explain(mask, *inputs)
    assert f"would run {chosen!r}" in said
    assert why_not is None or why_not in said


def test_chosen_keys(may_take_flash: None) -> None:
    """Flash refuses them; asked before or not."""
    mask = mask_of(LONG)
    inputs = rows_on_gpu(mask)
    bits = torch.zeros(1, 1, dtype=torch.int32).expand(mask.num_tokens, words(mask.host.deepest))
    for chosen, backend in ((None, "flash"), (bits, "triton"), (None, "flash")):
        assert auto(mask, inputs, chosen=chosen) == backend


def test_gradients_in_float32(may_take_flash: None) -> None:
    """As those of a part, whether its forward or its backward asks, and asked before or not."""
    mask = mask_of(LONG)
    grouped, apart = rows_on_gpu(mask), rows_on_gpu(mask, heads=(8, 8))
    for _ in range(2):
        for inputs, wide in ((grouped, "flash"), (apart, "triton")):
            assert auto(mask, inputs) == "flash"
            assert auto(mask, inputs, wide=True) == wide
    with pytest.raises(UnsupportedError, match="those of a part are summed in float32"):
        choice.choose("flash", call_of(mask, apart, wide=True))


def test_the_work_of_a_part(may_take_flash: None) -> None:
    """Flash visits whole tiles of the grid: a few rows of each are the work of all."""
    mask = mask_of(LONG)
    half = mask.for_queries([(0, mask.num_tokens // 256 * 128)])
    few = mask.for_queries([(start, start + 4) for start in range(60, mask.num_tokens - 68, 128)])
    work = [choice.flash_work(m.host, 0) for m in (mask, half, few)]
    assert work[1] < 1.3 * work[0] and work[2] > 20 * work[0]
    assert auto(few, rows_on_gpu(few)) == "triton"


def test_auto_without_triton(may_take_flash: None, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = mask_of(SHORT)
    inputs = rows_on_gpu(mask)
    assert auto(mask, inputs) == "triton"
    # better than sdpa, however much work
    monkeypatch.setattr("prefixtree.kernels.runtime.installed", lambda package: False)
    # of another mask: choices are kept
    assert choice.choose("auto", call_of(mask_of(SHORT), inputs)) == choice.Choice(
        choice.FLASH, "backend 'triton': it needs the package triton"
    )


def test_a_choice_is_made_once_and_goes_with_the_plan(
    may_take_flash: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = mask_of(LONG)
    inputs = rows_on_gpu(mask)

    chosen = functools.partial(choice.choose, "auto", call_of(mask, inputs))
    first = chosen()
    with monkeypatch.context() as patch:
        patch.setattr(choice, "_automatic", lambda *arguments: pytest.fail("asked again"))
        assert chosen() is first
    microseconds = 1e6 * min(timeit.repeat(chosen, number=1000, repeat=5)) / 1000
    print(f"a choice made before: {microseconds:.2f} us (below 3 on a quiet machine)")
    assert microseconds < 50
    assert auto(mask, inputs, deterministic=True) == "triton"
    host = weakref.ref(mask.host)
    assert host() in choice._chosen
    del mask, chosen
    gc.collect()
    assert host() is None


def test_explain_says_what_runs() -> None:
    mask = mask_of(FOREST)
    case = Case.random(mask)
    inputs = (case.q, case.k, case.v)
    assert explain(mask) == explain(mask, *inputs)
    assert explain(mask) == (
        "tree_attention would run 'sdpa': q is on cpu, and the other backends need a GPU."
    )
    assert "'reference': it was asked for" in explain(mask, *inputs, backend="reference")
    assert "'reference'" in explain(mask.with_options(backend="reference"), *inputs)
    assert "'magic' does not exist" in explain(mask, backend="magic")
    with pytest.raises(ValueError, match="together"):
        explain(mask, case.q)
    with pytest.raises(ValueError, match="the mask has 140 queries"):
        explain(mask, case.q[1:], case.k, case.v)


def test_explain_says_why_triton_does_not() -> None:
    mask = mask_of(FOREST)
    wide = gpu_case(mask, dtype=torch.float32, dims=(300, 300))
    assert auto(mask, wide) == "sdpa"
    assert "'sdpa': backend 'triton': head dims must be 1 to 256" in explain(mask, *wide)
