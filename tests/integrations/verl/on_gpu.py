"""verl's updates of checkpoints with a vision encoder on a GPU, in float32: packed ones beside
verl's engine over each sequence alone.

    python -m tests.integrations.verl.on_gpu OUT.json [CASE ...]

Log-probabilities, entropies, metrics and parameters are compared as in test_images.py, which has
more cases, on a CPU; there this runs too. On GPUs `tools/gpu_check.sh verl_images` brings verl.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.lib.environment import environment
from benchmarks.lib.verl_worker import join

CASES = ("qwen2_5_vl, images", "qwen3_vl, images", "qwen3_vl_moe, images", "qwen3_vl, lora")


def main(out: Path, cases: tuple[str, ...] = CASES) -> int:
    """Writes a row per case: the greatest differences, or what is red; 0 if nothing is."""
    options = argparse.Namespace(device="cuda" if torch.cuda.is_available() else "cpu")
    device = options.device
    if device == "cpu":
        os.environ["VERL_PLATFORM"] = "cpu"
    join(options)
    # import verl, which looks for what is missing as it is imported
    from tests.integrations.verl.compare import check_same
    from tests.integrations.verl.cpu_platform import register_engines
    from tests.integrations.verl.runs import run, save_model
    from tests.integrations.verl.vision_cases import VISION_CASES

    register_engines(device)
    torch.backends.cudnn.allow_tf32 = False
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in cases:
            settings = replace(VISION_CASES[name], beside="alone")
            path = Path(folder)
            if not (path / settings.model).exists():
                save_model(settings.model, path)
            stock, packed = (run(vendor, path, settings) for vendor in ("alone", "prefixtree"))
            row: dict[str, object] = {"case": name, "red": []}
            try:
                row["differences"] = check_same(stock, packed, settings)
            except AssertionError as problem:
                row["red"] = [str(problem)]
            rows.append(row)
            print(row, flush=True)
    here = environment() | {name: version(name) for name in ("transformers", "verl")}
    out.write_text(json.dumps({"environment": here, "rows": rows}, indent=1))
    return int(any(row["red"] for row in rows))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), tuple(sys.argv[2:]) or CASES))
