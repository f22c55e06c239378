"""docs/refusals.md: the rows of refusals, and the errors that say what to do instead."""

from __future__ import annotations

import re
from pathlib import Path

from tools import refusals

# a table, errors with words of constants and of what is given, and two that are not listed
SOURCE = """
WHY = "it is too low"

ROWS = (
    Refusal("left", turns, f"{{name}}={{value!r}}: {WHY}; leave it None"),
    Refusal("right", turns, "{name}={value!r}: it is too low; leave it None"),
    Refusal("speed", runs, "nobody runs; set it to 1"),
    Refusal("wind", blows, "the wind is not verified on water; take the train"),
    Refusal("sail", blows, "a sail under {country} is not verified on water; take the train"),
    Refusal("mast", lambda given: {"a": 1}, "a mast has no {a}"),
)

def check(kind, args):
    raise UnsupportedError(f"the kind {kind} ({args}) is refused: {WHY}; set it to 5")
    raise UnsupportedError(f"{kind} is wrong; set it to 5")
    raise UnsupportedError("all is wrong")
"""


def test_the_page_is_what_the_script_writes() -> None:
    assert refusals.PAGE.read_text() == refusals.page(), "run python -m tools.refusals"
    words, rows = len(refusals.page().split()), refusals.page().count("\n| ")
    assert words < 21 * rows, "say what is refused, why and what to do in fewer words"


def test_every_kind_of_text_is_read(tmp_path: Path) -> None:
    (tmp_path / "prefixtree").mkdir()
    (tmp_path / "prefixtree/checks.py").write_text(SOURCE)
    assert refusals.collect(tmp_path)["Every model"] == [
        ("left, right=…: it is too low", "leave it None"),
        ("speed: nobody runs", "set it to 1"),
        ("the wind is not verified on water", "take the train"),
        ("a sail under … is not verified on water", "take the train"),
        ("a mast has no …", ""),
        ("the kind … is refused: it is too low", "set it to 5"),
    ]
    page = refusals.page(tmp_path)
    assert "| the wind, a sail under … | on water | take the train |" in page


def test_the_page_opens_with_what_is_met_most() -> None:
    rows = refusals.PAGE.read_text().split("\n## ")[1].splitlines()
    assert rows[0] == "Met most" and len(rows) == 4 + len(refusals.MOST)


#: Files with rows of refusals -> the test that makes each of them.
TESTED = {
    "integrations/megatron/refusals.py": "integrations/megatron/test_refusals.py",
    "integrations/slime.py": "integrations/megatron/test_slime.py",
    "integrations/trl/distribution_refusals.py": "integrations/trl/test_refusals.py",
    "integrations/trl/refusals.py": "integrations/trl/test_refusals.py",
    "integrations/verl/refusals.py": "integrations/verl/test_refusals.py",
    "models/dropout.py": "models/test_refused_models.py",
    "models/families.py": "models/test_refused_models.py",
    "models/prepared.py": "models/test_refused_models.py",
    "images/refusals.py": "models/test_refused_models.py",
    "recompute/trunk_modes.py": "scoring/test_refusals.py",
    "scoring/group_refusals.py": "scoring/test_refusals.py",
    "scoring/mtp_refusals.py": "scoring/test_mtp.py",
    "scoring/refusals.py": "scoring/test_refusals.py",
}


def test_every_table_has_a_test_of_its_rows() -> None:
    root = refusals.ROOT / "prefixtree"
    found = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if re.search(r"^ +Refusal\(|= Refusal\(", path.read_text(), re.MULTILINE)
    }
    assert found == TESTED.keys()
    for test in TESTED.values():
        text = (refusals.ROOT / "tests" / test).read_text()
        assert "check_cases(" in text or "for refusal in REFUSALS" in text, test


def test_settings_of_every_trainer_are_on_the_page() -> None:
    """Those that stood on the trainers' pages."""
    page = refusals.PAGE.read_text()
    for name in (
        *("neftune_noise_alpha", "cast_lm_head_to_fp32", "zenflow", "padding_free"),
        *("geo_mean", "prefixtree_compile", "vanilla_mbridge"),
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
