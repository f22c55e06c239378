"""Checkpoints with a vision encoder: the updates of verl's own engine, or of each sequence alone
where verl's fails; text alone and images, one rank and two; and red where an image, its place
or its gradient is another's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from verl.utils import tensordict_utils as tu

from prefixtree import compile_layers
from prefixtree.images import vision
from prefixtree.images.placements import Placements
from prefixtree.integrations.verl import engine as engine_module
from prefixtree.integrations.verl import images as room
from tests.integrations.verl.compare import check_same, difference
from tests.integrations.verl.image_runs import shown
from tests.integrations.verl.runs import (
    actor_loss,
    batch_of,
    jagged,
    make_worker,
    parameters,
    rollouts,
    run,
    run_ranks,
)
from tests.integrations.verl.vision_cases import VISION_CASES
from tests.support.full import asked_for, mostly
from tests.support.hooks import lose_keys, wrap
from tests.support.spawn import ROOT

ONE = (
    "qwen2_5_vl, text",
    "qwen3_vl, text, decay",
    "qwen2_5_vl, images",
    "qwen3_vl_moe, images",
)
TOGETHER = ("qwen3_vl, text, two ranks a forest", "qwen3_vl, images, two ranks a forest")
# every time; the others with --full: each family, with images or without. One rank has both
TWO = ("qwen3_vl, one rank sees", "qwen3_vl, lora")
TWO_WITH_FULL = ("qwen2_5_vl, images", "qwen3_vl_moe, text, decay", "qwen3_vl, fixed size")
RED = "qwen3_vl, images"


@pytest.fixture(scope="module")
def two_ranks(sees: Path) -> list[dict[Any, Any]]:
    return run_ranks(sees, asked_for((*TWO, *TOGETHER, *TWO_WITH_FULL), (*TWO, *TOGETHER)))


@pytest.mark.parametrize("name", ONE)
def test_one_rank(name: str, sees: Path, record_property: Callable[..., None]) -> None:
    settings = VISION_CASES[name]
    packed = run("prefixtree", sees, settings)
    differences = check_same(run(settings.beside, sees, settings), packed, settings)
    print("DIFF", name, {k: f"{v:.1e}" for k, v in differences.items()})
    record_property("differences", differences)


@pytest.mark.full
def test_the_script_for_gpus(tmp_path: Path) -> None:
    out, case = tmp_path / "out.json", "qwen3_vl, images"
    command = [sys.executable, "-m", "tests.integrations.verl.on_gpu", str(out), case]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert row["case"] == case and row["red"] == [] and row["differences"]["actor: loss"] < 1e-5


@pytest.mark.parametrize("name", mostly((*TWO, *TWO_WITH_FULL), TWO))
def test_two_ranks(
    name: str, two_ranks: list[dict[Any, Any]], record_property: Callable[..., None]
) -> None:
    settings = VISION_CASES[name]
    for rank, results in enumerate(two_ranks):
        differences = check_same(
            results[name, settings.beside], results[name, "prefixtree"], settings
        )
        # old log-probabilities and reference; two updates too where cut trees would compute more
        count = 2 if name == "qwen2_5_vl, images" else 4
        trunks = {} if settings.tokens is None else {"trunks": count}
        assert results[name, "prefixtree"]["exchanges"] == trunks
        record_property(f"differences of rank {rank}", differences)
        print("DIFF", name, rank, {k: f"{v:.1e}" for k, v in differences.items()})


@pytest.mark.parametrize("name", TOGETHER)
def test_a_forest_on_two_ranks(name: str, two_ranks: list[dict[Any, Any]], sees: Path) -> None:
    """Which have the same data, so that one rank gives their updates."""
    settings = VISION_CASES[name]
    assert settings.tokens
    one = run("stock", sees, replace(settings, engine={}, tokens=2 * settings.tokens, epochs=1))
    for results in two_ranks:
        packed = results[name, "prefixtree"]
        assert packed["exchanges"].keys() == {"keys"}
        print("DIFF", name, check_same(one, packed, settings))


@pytest.mark.parametrize(
    ("engine", "override", "with_images"),
    [
        ({"strategy": "fsdp", "use_orig_params": True}, {}, False),
        ({}, {"prefixtree_recompute": "auto"}, True),
        pytest.param({}, {"prefixtree_recompute": "auto"}, False, marks=pytest.mark.full),
        pytest.param({}, {"prefixtree_compile": True}, True, marks=pytest.mark.full),
    ],
    ids=["fsdp1", "auto", "auto on text", "compiled"],
)
def test_other_settings(
    engine: dict[str, Any],
    override: dict[str, Any],
    with_images: bool,
    sees: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One update with weight decay, which moves the vision encoder on text alone too. FSDP1 is
    refused with images."""
    # inductor would take its time on a CPU
    backend = CompileCounterWithBackend("eager")
    monkeypatch.setattr(engine_module, "compile_layers", partial(compile_layers, backend=backend))
    plain = VISION_CASES["qwen3_vl, text, decay"]
    options = {"override_config": {"attn_implementation": "prefixtree", **override}}
    ends = []
    for settings in (plain, replace(plain, engine=engine, model_options=options)):
        worker = make_worker("prefixtree", sees / "qwen3_vl", settings)
        worker.set_loss_fn(actor_loss(replace(plain, algorithm="ppo")))
        rows = shown(rollouts(10, groups=4, size=4), sees / "qwen3_vl", with_images)
        flat = [torch.zeros(len(row)) for row in rows["responses"]]
        score = {"old_log_probs": jagged([row - 4 for row in flat])}
        score["advantages"] = jagged([row + i % 3 - 1 for i, row in enumerate(flat)])
        data = batch_of(rows, temperature=0.7, global_token_num=None, **score)
        tu.assign_non_tensor(
            data,
            calculate_entropy=True,
            global_batch_size=16,
            mini_batch_size=16,
            epochs=1,
            seed=3,
            dataloader_kwargs={"shuffle": False},
        )
        start = parameters(worker)
        worker.train_mini_batch(data)
        ends.append(parameters(worker))
    assert (backend.frame_count > 0) == ("prefixtree_compile" in override)
    encoder = [name for name in start if "visual." in name and "bias" not in name]
    assert encoder and all(difference([ends[1][n]], [start[n]]) > 1e-3 for n in encoder)
    # FSDP1 writes its wrappers into the names
    names = {name.replace("_fsdp_wrapped_module.", ""): name for name in ends[1]}
    assert difference([*ends[0].values()], [ends[1][names[name]] for name in ends[0]]) < 1e-6


# ---- red -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stock(sees: Path) -> Any:
    return run("stock", sees, VISION_CASES[RED])


def gaps(stock: Any, packed: Any) -> tuple[float, float, float]:
    """Of the first log-probabilities, and of the text's and the vision encoder's parameters at the
    end."""
    ends = stock["parameters"]["actor"], packed["parameters"]["actor"]
    found = {name: difference([p], [ends[1][name]]) for name, p in ends[0].items()}
    return (
        difference(stock["infer"]["old_log_probs"], packed["infer"]["old_log_probs"]),
        max(gap for name, gap in found.items() if "visual." not in name),
        max(gap for name, gap in found.items() if "visual." in name),
    )


def test_a_gradient_left_out_is_seen(
    stock: Any, sees: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first image of each forward, 8 features; or of keys that trunks export."""

    def without(repeated: Any, encoding: Any, features: torch.Tensor) -> torch.Tensor:
        return repeated(encoding, torch.cat([features[:8].detach(), features[8:]]))

    with patch.object(engine_module, "kept_trunks", wraps=engine_module.kept_trunks) as kept:
        right = gaps(stock, run("prefixtree", sees, VISION_CASES[RED]))
    assert max(right) < 1e-5, right
    # old log-probabilities, reference and two updates
    assert [len(call.kwargs["images"]) > 0 for call in kept.call_args_list] == [True] * 4
    for lose, least in (
        (lambda patched: wrap(patched, "features of placements", without), 1e-3),
        (lose_keys, 2e-4),
    ):
        with monkeypatch.context() as patched:
            lose(patched)
            scores, _, encoder = gaps(stock, run("prefixtree", sees, VISION_CASES[RED]))
        assert scores == right[0]
        assert encoder > least


def test_placements_in_another_order_are_seen(
    stock: Any, sees: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = vision.place

    def turned(*args: Any) -> Any:
        placements, paths = place(*args)
        return Placements(placements.start, placements.number[::-1], placements.frame), paths

    monkeypatch.setattr(vision, "place", turned)
    # without trunks, whose images would be of other sizes than their tokens
    whole = replace(VISION_CASES[RED], tokens=10_000)
    scores, text, encoder = gaps(stock, run("prefixtree", sees, whole))
    assert min(scores, text, encoder) > 1e-3


def test_an_image_of_another_sequence_is_seen(
    stock: Any, sees: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the third group, alike but for pixels, get their neighbours'."""
    shown_of = room.shown_of

    def turned(data: Any) -> Any:
        rows = shown_of(data)
        one_image = [i for i, row in enumerate(rows) if len(row.get("image_grid_thw", [])) == 1]
        turned = {i: rows[j] for i, j in zip(one_image, one_image[::-1], strict=True)}
        return [turned.get(i, row) for i, row in enumerate(rows)]

    monkeypatch.setattr(room, "shown_of", turned)
    scores, text, encoder = gaps(stock, run("prefixtree", sees, VISION_CASES[RED]))
    assert min(scores, text, encoder) > 1e-3
