"""docs/refusals.md: the texts of the errors that refuse, read from the sources."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from prefixtree.errors import UnsupportedError
from prefixtree.models.families import check_config, check_modules
from tools import refusals

# one error whose words come from a loop over rows, by a key, from a named tuple and from constants
SOURCE = """
from typing import NamedTuple

OLDEST, NEWEST = "1.2", "3.4"
WHY = {"low": "it is too low", "high": "it is too high"}

class Row(NamedTuple):
    name: str
    message: str

ROWS = (Row("one", "set it to 1"), Row("two", f"needs version {OLDEST}"))

def check(kind, args):
    for name, why in (("left", "no left turns at all"), ("right", "no left turns at all")):
        raise UnsupportedError(f"{name}={getattr(args, name)!r}: {why}; leave it None")
    for row in ROWS:
        raise UnsupportedError(f"the setting {row.name} is refused here: {row.message}")
    instead = "set it to 5" if kind == "low" else "set it to 1"
    raise UnsupportedError(f"the kind {kind} of {args} is refused: {WHY[kind]}; {instead}")
"""


def test_the_page_is_what_the_script_writes() -> None:
    assert refusals.PAGE.read_text() == refusals.page(), "run python -m tools.refusals"


def test_every_kind_of_text_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that is refused from a table is on the page by its name."""
    (tmp_path / "prefixtree").mkdir()
    (tmp_path / "prefixtree/checks.py").write_text(SOURCE)
    monkeypatch.setattr(refusals, "ROOT", tmp_path)
    assert refusals.collect()["Every model"] == [
        "left, right=…: no left turns at all; leave it None",
        "the setting one is refused here: set it to 1",
        "the setting two is refused here: needs version 1.2",
        "the kind low of … is refused: it is too low; set it to 5",
        "the kind high of … is refused: it is too high; set it to 1",
    ]
    assert refusals.page() != refusals.PAGE.read_text()


class _Config:
    model_type = "qwen2"
    rope_parameters = {"rope_type": "spiral"}  # noqa: RUF012

    def get_text_config(self) -> _Config:
        return self


def _neftune() -> None:
    import torch

    layer = torch.nn.Linear(2, 2)
    layer.neftune_noise_alpha = 5.0  # type: ignore[assignment]
    check_modules(torch.nn.Sequential(layer))


@pytest.mark.parametrize(
    "refuse", [lambda: check_config(_Config(), training=True), _neftune], ids=["rope", "neftune"]
)
def test_an_error_that_is_raised_is_on_the_page(refuse) -> None:
    with pytest.raises(UnsupportedError) as caught:
        refuse()
    texts = [text for texts in refusals.collect().values() for text in texts]
    patterns = [re.escape(text).replace(refusals.UNKNOWN, ".*") for text in texts]
    assert sum(bool(re.fullmatch(pattern, str(caught.value))) for pattern in patterns) == 1


def test_settings_of_every_trainer_are_on_the_page() -> None:
    """Those that stood on the trainers' pages."""
    page = refusals.PAGE.read_text()
    for name in (
        *("neftune_noise_alpha", "cast_lm_head_to_fp32", "zenflow", "padding_free"),
        *("use_fused_kernels", "clip_cov", "geo_mean", "prefixtree_compile", "vanilla_mbridge"),
        *("context_parallel_size", "moe_z_loss_coeff", "mtp_num_layers", "tp_comm_overlap"),
        *("static_graph", "recompute='auto'", "quantization_config", "num_kv_shared_layers"),
    ):
        assert name in page, name


def test_the_errors_of_troubleshooting_are_errors() -> None:
    """What the page quotes in code, but for settings, is a part of a text in the sources."""
    texts = refusals.all_texts()
    page = (refusals.ROOT / "docs/troubleshooting.md").read_text()
    quoted = [
        quote
        for line in page.splitlines()
        if line.startswith("| ") and not line.startswith("| transformers: ")
        for quote in re.findall(r"`([^`]+)`", line.split(" | ")[0])
        if quote != "compile_layers"
    ]
    assert len(quoted) > 25
    for quote in quoted:
        parts = [part.strip() for part in quote.split(refusals.UNKNOWN)]
        assert any(all(part in text for part in parts) for text in texts), quote
    # and a text that no error has is found
    assert not any("is an active drop-out" in text for text in texts)
