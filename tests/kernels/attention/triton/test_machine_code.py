"""The kernels compile to machine code for GPUs that are not here, within their limits."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from benchmarks.cases.compiled import _wrong, main
from benchmarks.lib.machine_code import loop_of, overwritten_in

pytestmark = pytest.mark.full
Compile = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def compile_for(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compile]:
    """Rows of benchmarks/compiled.py, in a process that does not interpret: one, which imports once
    and compiles a kernel once."""
    folder = tmp_path_factory.mktemp("compiled")
    started = multiprocessing.get_context("spawn")
    with pytest.MonkeyPatch.context() as patch, ProcessPoolExecutor(1, started) as process:
        patch.delenv("TRITON_INTERPRET", raising=False)
        patch.setenv("TRITON_CACHE_DIR", str(folder / "cache"))

        def rows(*arguments: str) -> list[dict[str, Any]]:
            out = folder / "compiled.json"
            asked = [*arguments, "--quick", "--out", str(out)]
            assert process.submit(main, asked).result() == 0
            return json.loads(out.read_text())["rows"]

        yield rows


@pytest.mark.parametrize("capability", [80, 86, 90])
def test_every_configuration_fits_and_does_not_spill(capability: int, compile_for: Compile) -> None:
    """Tiles of 192 / 128 are apart on Hopper alone; elsewhere they are those of 256 / 256, whose
    products are larger. Each row of configs.py is compiled for the GPUs that take it. Small kernels
    are shared out between 8.0 and 9.0 (`_helpers`); decoding on 8.x leaves out head dims whose
    configuration a larger one has."""
    dims = ["64x64", "128x128", "256x256"] + ["192x128"] * (capability == 90)
    rows = compile_for("--capability", str(capability), "--dims", *dims)
    names = {"forward", "keys", "queries", "decode"}
    assert {row["kernel"].split()[0] for row in rows} == names
    assert {row["dims"] for row in rows} == {*dims}
    if capability == 90:
        # the products run on Hopper's tensor core instructions, which take 64 rows
        wide = [row for row in rows if row["kernel"] != "decode narrow"]
        assert all(row["loops"] for row in wide)
        assert all(loop["tensor"] > 0 for row in wide for loop in row["loops"])
    decoding = [row for row in rows if row["kernel"].startswith("decode")]
    # at most a few bytes outside the loops; so many programs that loads overlap
    counts = {80: 4, 86: 2, 90: 8}
    assert len(decoding) == counts[capability] and all(row["stack"] <= 16 for row in decoding)
    if capability == 90:
        at_128 = {row["kernel"]: row["programs"] for row in decoding if row["dims"] == "128x128"}
        assert at_128["decode wide"] >= 3 and at_128["decode narrow"] >= 8


@pytest.mark.parametrize(
    ("capability", "dims"), [(80, ["256x256"]), (86, ["256x256"]), (90, ["256x256", "192x128"])]
)
def test_chosen_keys_fit_beside_the_tiles(
    capability: int, dims: list[str], compile_for: Compile
) -> None:
    """Their words go through shared memory too, of which these tiles take most; beside Hopper's of
    128 / 128 they are among the features below."""
    rows = compile_for("--capability", str(capability), "--chosen", "--dims", *dims)
    assert {row["dims"] for row in rows} == {*dims}
    assert all(row["programs"] > 0 for row in rows)


def test_every_feature_compiles(compile_for: Compile) -> None:
    rows = compile_for("--features", "--dims", "128x128", "--dtype", "fp16")
    assert all(row["programs"] > 0 for row in rows)


# a step of head dim 64's forward as ptxas of CUDA 12.8 made it: R180 holds queries in the first
# product and probabilities in the second
LOST = """
/*0100*/ HGMMA.64x64x16.F32.BF16 R56, R180, gdesc[UR16], RZ, !UPT ;
/*0110*/ FSEL R56, R56, -1.20892581961462917471e+24, P2 ;
/*0120*/ F2FP.BF16.F32.PACK_AB R180, R57, R56 ;
/*0130*/ F2FP.BF16.F32.PACK_AB R183, R59, R58 ;
/*0140*/ HGMMA.64x64x16.F32.BF16 R120, R180, gdesc[UR16].tnspB, R120, gsb0 ;
"""


def test_an_operand_that_a_step_gives_away_is_found() -> None:
    assert overwritten_in(LOST.splitlines()) == 2
    kept = (
        LOST.replace("R180, R57", "R176, R57")
        .replace("R183", "R179")
        .replace("R120, R180", "R120, R176")
    )
    assert overwritten_in(kept.splitlines()) == 0


def test_products_that_wait_for_one_another_are_found() -> None:
    """As ptxas made them where registers lacked: a wait behind each of the products."""
    product, wait = LOST.splitlines()[1], "/*0150*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"
    row = {"kernel": "queries", "dims": "256x256", "overwritten": 0, "programs": 1}
    for lines, found in (([product, wait] * 12, 1), ([product] * 12 + [wait] * 4, 0)):
        loop = loop_of(lines, 8)
        assert loop.products == 12
        assert len(_wrong(row | {"loops": [vars(loop)]}, False)) == found
