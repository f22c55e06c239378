"""DDP and FSDP2 on two ranks: gradients, clipping and updates are those of the replicated batches.

Both ranks run each case of tests/support/distributed_ranks.py once (`spawn.run_ranks`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support import image_ranks
from tests.support.distributed_ranks import CASES, QUICK, RUNS, STEPS, Case, balanced
from tests.support.full import mostly
from tests.support.image_cases import Run as ImageRun
from tests.support.image_cases import errors as image_errors
from tests.support.image_cases import reference
from tests.support.models import Run, run_replicated, tolerance
from tests.support.replay import drawn_routes, run_replayed
from tests.support.spawn import WORLD_SIZE, run_ranks

pytestmark = [
    # PEFT asks transformers under the old name of the property
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], Any]]:
    """The results of each rank, per run."""
    return run_ranks("tests.support.distributed_ranks", tmp_path_factory.mktemp("ranks"))


@cache
def _replicated(
    model_type: str, lora: bool, step: str, balance: float = 0.0, replays: bool = False
) -> tuple[list[Run], dict[str, Any]]:
    """A run a micro-batch, and the gradients: summed over a rank's, averaged over ranks."""
    case = Case("", model_type, lora=lora, balance=balance)
    model = case.model("eager")
    objectives = [balanced(o, case) for micro in STEPS[step] for o in micro if o is not None]
    runs = [
        run_replayed(model, o, drawn_routes(o.sequences)) if replays else run_replicated(model, o)
        for o in objectives
    ]
    return runs, {
        name: sum(run.gradients[name] for run in runs) / WORLD_SIZE for name in runs[0].gradients
    }


def _of(results: list[dict[tuple[str, str], Any]], case: str, step: str) -> list[dict[str, Any]]:
    found = [result[case, step] for result in results]
    for rank, each in enumerate(found):
        assert not isinstance(each, str), f"rank {rank}:\n{each}"
    return found


def _distance(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm of all."""
    names = sorted(expected)
    a, b = (torch.cat([side[name].flatten() for name in names]) for side in (got, expected))
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(("case", "step"), mostly((r for r in RUNS if not CASES[r[0]].half), QUICK))
def test_two_ranks(results, case, step):
    if CASES[case].lora:
        pytest.importorskip("peft")
    found = _of(results, case, step)
    options = CASES[case].balance, CASES[case].replays
    runs, expected = _replicated(CASES[case].model_type, CASES[case].lora, step, *options)
    if any(options):
        _, plain = _replicated(CASES[case].model_type, CASES[case].lora, step)
        assert _distance(plain, expected) > 0.05
    logprobs = [p for each in found for p in each["logprobs"]]
    reference = torch.cat([p for run in runs for p in run.logprobs])
    torch.testing.assert_close(torch.cat(logprobs), reference, atol=2e-5, rtol=1e-5)

    floor = 1e-3 * sum(float(g.norm()) ** 2 for g in expected.values()) ** 0.5
    worst = 0.0
    for each in found:
        got = {name.removeprefix("module."): g for name, g in each["gradients"].items()}
        assert got.keys() == expected.keys()
        for name, gradient in expected.items():
            error = float((got[name] - gradient).norm()) / max(float(gradient.norm()), floor)
            worst = max(worst, error)
            assert error <= tolerance(CASES[case].model_type), (name, error)
    print(f"{case}, {step}: gradients {worst:.1e}")

    model = CASES[case].model("eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for name, parameter in model.named_parameters():
        parameter.grad = expected[name].clone() if name in expected else None
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    assert norm > 0.5
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer.step()
    moved = {n: p.detach() - before[n] for n, p in model.named_parameters()}
    for each in found:
        assert each["norm"] == pytest.approx(norm, rel=1e-5)
        got = {n.removeprefix("module."): p for n, p in each["parameters"].items()}
        assert _distance({n: got[n] - before[n] for n in moved}, moved) <= 1e-4


@pytest.mark.parametrize(
    ("wrapper", "model_type", "kind"), mostly(image_ranks.RUNS, image_ranks.QUICK)
)
def test_images(results, wrapper, model_type, kind):
    """Rank 1 has no image: its vision encoder runs all the same, with gradients of zero. DDP waits
    for it without find_unused_parameters, and FSDP2 in every block."""
    expected = reference(model_type, "videos" if kind == "videos" else "images")
    found = _of(results, "images", f"{wrapper}, {model_type}, {kind}")
    gradients = {name: g / WORLD_SIZE for name, g in expected.gradients.items()}
    logprobs = [p for each in found for p in each["logprobs"]]
    if kind in image_ranks.KEPT:
        order = np.concatenate(image_ranks.OF_RANKS[kind])
        logprobs = [logprobs[i] for i in np.argsort(order)]
    for rank, each in enumerate(found):
        run = ImageRun(logprobs, each["gradients"])
        differences = image_errors(run, ImageRun(expected.logprobs, gradients))
        print(f"{wrapper}, {model_type}, {kind}: {differences}")
        assert differences.largest < 5e-5
        if kind == "steps":
            # as many on both ranks, in both passes
            assert each["calls"] == found[0]["calls"] > 8
            assert wrapper == "ddp" or each["blocks"] == found[0]["blocks"] > each["calls"]
        elif kind in image_ranks.KEPT:
            # FSDP2's other rank follows, in runs where images are recomputed or have no graph yet
            same = each["calls"], each["blocks"]
            assert wrapper == "ddp" or same == (found[0]["calls"], found[0]["blocks"])
            assert each["blocks"] > each["calls"] or kind == "kept"
            refusal = "UnsupportedError: ranks of FSDP2 gather the vision encoder together"
            assert (refusal in each["two modes"]) == (wrapper == "fsdp2")
        else:
            # once per micro-batch, without images too; the first rank's have images and videos
            assert each["calls"] == (4 if (kind, rank) == ("videos", 0) else 2)
            # rank 0 has two images and then three; blank ones stand beside them on rank 1
            # what the first rank keeps runs once, beside at least one that the other computes again
            runs = {"runs": 2 * (2 + 3), "plans": 2 * (1 + 2) + 1 + 1}
            assert each["blocks"] == runs.get(kind, each["calls"])
        assert (each["sharded"] == 0) == (wrapper == "ddp")
        assert each["wrapper"].startswith("Distributed" if wrapper == "ddp" else "FSDP")
        if wrapper == "fsdp2" and model_type == "qwen3_vl":
            assert "UnsupportedError: videos are not verified under FSDP2" in each["refused"]


@pytest.mark.parametrize(("case", "step"), mostly((r for r in RUNS if CASES[r[0]].half), QUICK))
def test_bfloat16_parameters(results, case, step):
    """FSDP2's mixed precision: no further from float32 than twice the replicated run that has its
    weights in bfloat16, and a little for the sum over ranks."""
    found = _of(results, case, step)
    model_type = CASES[case].model_type
    _, expected = _replicated(model_type, False, step)
    model = Case("", model_type).model("eager").bfloat16()
    runs = [run_replicated(model, o) for micro in STEPS[step] for o in micro if o is not None]
    half = {
        name: sum(run.gradients[name].float() for run in runs) / WORLD_SIZE for name in expected
    }
    allowed = 2 * _distance(half, expected) + 1e-3
    for each in found:
        distance = _distance(each["gradients"], expected)
        print(f"{case}, {step}: {distance:.1e}, at most {allowed:.1e}")
        assert 0 < distance <= allowed


@pytest.mark.parametrize(("case", "step"), mostly(RUNS, QUICK))
def test_the_ranks_agree(results, case, step):
    """To the bit: what was reduced is one tensor."""
    first, second = _of(results, case, step)
    for name, gradient in first["gradients"].items():
        assert torch.equal(gradient, second["gradients"][name]), name
