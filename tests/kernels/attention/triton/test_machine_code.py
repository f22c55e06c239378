"""The kernels compile to machine code for GPUs that are not here, within their limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cases.compiled import _loop, _overwritten, _wrong

ROOT = Path(__file__).parents[4]
pytestmark = pytest.mark.full


def compile_for(tmp_path: Path, *arguments: str) -> list[dict]:
    """Rows of benchmarks/compiled.py, in a process that does not interpret; all tests together
    compile a kernel once."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path.parent / "cache")}
    out = tmp_path / "compiled.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "compiled", *arguments, "--out", str(out)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())["rows"]


@pytest.mark.parametrize("capability", [80, 86, 90])
def test_every_configuration_fits_and_does_not_spill(capability: int, tmp_path: Path) -> None:
    rows = compile_for(tmp_path, "--capability", str(capability))
    names = {"forward", "keys", "queries", "decode"}
    assert {row["kernel"].split()[0] for row in rows} == names
    assert len({row["dims"] for row in rows}) == 4
    if capability == 90:
        # the products run on Hopper's tensor core instructions, which take 64 rows
        wide = [row for row in rows if row["kernel"] != "decode narrow"]
        assert all(loop["tensor"] > 0 for row in wide for loop in row["loops"])
    decoding = [row for row in rows if row["kernel"].startswith("decode")]
    # at most a few bytes outside the loops; so many programs that loads overlap
    assert len(decoding) == 8 and all(row["stack"] <= 16 for row in decoding)
    if capability == 90:
        at_128 = {row["kernel"]: row["programs"] for row in decoding if row["dims"] == "128x128"}
        assert at_128["decode wide"] >= 3 and at_128["decode narrow"] >= 8


@pytest.mark.parametrize("capability", [80, 86, 90])
def test_chosen_keys_fit_beside_the_tiles(capability: int, tmp_path: Path) -> None:
    """Their words go through shared memory too."""
    rows = compile_for(tmp_path, "--capability", str(capability), "--chosen")
    assert all(row["programs"] > 0 for row in rows)


def test_every_feature_compiles(tmp_path: Path) -> None:
    rows = compile_for(tmp_path, "--features", "--dims", "128x128", "--dtype", "fp16")
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
    assert _overwritten(LOST.splitlines()) == 2
    kept = (
        LOST.replace("R180, R57", "R176, R57")
        .replace("R183", "R179")
        .replace("R120, R180", "R120, R176")
    )
    assert _overwritten(kept.splitlines()) == 0


def test_products_that_wait_for_one_another_are_found() -> None:
    """As ptxas made them where registers lacked: a wait behind each of the products."""
    product, wait = LOST.splitlines()[1], "/*0150*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"
    row = {"kernel": "queries", "dims": "256x256", "overwritten": 0, "programs": 1}
    for lines, found in (([product, wait] * 12, 1), ([product] * 12 + [wait] * 4, 0)):
        loop = _loop(lines, 8)
        assert loop.products == 12
        assert len(_wrong(row | {"loops": [vars(loop)]}, False)) == found
