"""Updates with layers of low precision: checked beside the stock forward, timed, red where wrong.

`make test-trainers` runs float8, whose package changes what transformers imports.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cases import model
from benchmarks.lib import layers, precision
from benchmarks.lib.layers import prompt_batch
from benchmarks.lib.replicated import chains
from prefixtree.models import attention
from tests.benchmarks.support import TINY, causal
from tests.support.benchmark_runs import result
from tests.support.models import let_wrong_masks_run

SOME = ["--layers", "1", "--cases", "apart", "--sides", "packed", "fa2"]
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)


def run(tmp_path: Path, name: str, *more: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and what was written."""
    if gone := precision.missing(name):
        pytest.skip(f"{' and '.join(gone)} not installed")
    out = tmp_path / "model.json"
    code = model.main([*TINY, *SOME, "--precision", name, *more, "--out", str(out)])
    return code, result(out)


@pytest.mark.full
@pytest.mark.parametrize("name", ["float8", "lora", "qlora"])
def test_an_update(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, data = run(tmp_path, name)
    assert code == 0 and data["precision"] == name
    packed, fa2 = data["rows"]
    assert packed["seconds"] > 0 and fa2["drift"] < 0.1 and set(packed["speedup"]) == {"fa2"}
    for side in ("packed", "fa2"):
        plain, stock, found, between = data["checks"][side]["distances"].values()
        for key in ("logprobs", "gradient"):
            # quantised indeed, and alike
            assert name == "lora" or stock[key] > 3 * plain[key]
            assert 0 < between[key] < stock[key] and 0.5 < found[key] / stock[key] < 1.5
    assert f"{name} " in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize("name", ["float8", "qlora"])
def test_a_side_without_its_tree_is_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    let_wrong_masks_run(monkeypatch)
    monkeypatch.setattr(attention, "tree_attention", causal)
    code, data = run(tmp_path, name, "--sides", "packed")
    (row,) = data["rows"]
    assert code == 1 and "seconds" not in row
    assert any("logprobs is" in text and "the stock forward" in text for text in row["red"])


@pytest.mark.full
@pytest.mark.parametrize("name", ["float8", "lora"])
def test_a_gradient_that_is_partly_lost_is_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Float8's rounding hides its distance, not its share."""
    inner = layers._small_run

    def lost(side: str, *rest: Any) -> Any:
        found = inner(side, *rest)
        if side == "packed":
            gradients = {key: x if x is None else 0.9 * x for key, x in found.gradients.items()}
            found = replace(found, gradients=gradients)
        return found

    monkeypatch.setattr(layers, "_small_run", lost)
    code, data = run(tmp_path, name, "--sides", "packed")
    (row,) = data["rows"]
    assert code == 1 and "seconds" not in row
    assert any("shares of float32's gradient" in text for text in row["red"])


def test_what_is_too_far() -> None:
    """Of float32, and of the stock forward in the same precision; NaN is."""

    def red(precision_: str, side: float, between: float) -> int:
        each = {"float32": 0.01, "stock": 0.1, "side": side, "side to stock": between}
        far = {name: {"logprobs": value} for name, value in each.items()}
        return len(precision.too_far(far, precision_))

    assert red("float8", 0.14, 0.09) == red("qlora", 0.14, 0.029) == 0
    assert red("float8", 0.16, 0.09) == red("float8", 0.14, 0.11) == red("qlora", 0.1, 0.031) == 1
    assert red("qlora", float("nan"), float("nan")) == 2


def test_float8_has_whole_multiples_of_tokens() -> None:
    batch = prompt_batch(21, [5, 9], 100)
    for side, tokens in (("packed", 48), ("own", 64)):
        packed = batch.packed(side, "cpu", "float8")
        assert packed.num_tokens == tokens
        assert batch.packed(side, "cpu").num_tokens == (35 if side == "packed" else 56)
    q = torch.randn(64, 2, 16)
    attend = layers.attention_of("fa2", batch.forest, "cpu", "float32", "float8")
    plain = layers.attention_of("fa2", batch.forest, "cpu", "float32")
    assert attend is not None and plain is not None
    torch.testing.assert_close(attend(q, q, q)[:56], plain(*[q[:56]] * 3))
    assert precision.padding_of(chains(batch.forest), "float8") == 8


def test_settings_that_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for more in (["--recompute", "auto"], ["--layers-by", "liger"]):
        with pytest.raises(SystemExit):
            model.main([*TINY, *SOME, "--precision", "lora", *more])
        assert "--recompute auto and liger" in capsys.readouterr().err
    if precision.missing("float8"):
        with pytest.raises(SystemExit):
            model.main([*TINY, *SOME, "--precision", "float8"])
        assert "needs torchao" in capsys.readouterr().err
