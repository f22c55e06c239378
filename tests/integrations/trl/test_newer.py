"""A TRL that is newer than those tested, stood in for by changes of the installed one: what the
adapter does not use may change, and what it uses is refused by name, with what to install."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from transformers import AttentionInterface
from trl import GRPOTrainer

from prefixtree.errors import UnsupportedError
from prefixtree.integrations.trl import (
    PrefixTreeGRPOTrainer,
    contract,
    tree_rows,
    use_tree_attention,
)
from tests.integrations.trl.runs import make, parameters

REMEDY = r"pip install 'trl==1\.16\.0', or use TRL's trainer"


def changed(monkeypatch: pytest.MonkeyPatch, method: str, **values: Any) -> None:
    """Lets GRPO's scores have another signature: `method` is a def, filled in with TRL's own."""
    scope: dict[str, Any] = {"torch": torch, "TRLS": getattr(GRPOTrainer, contract.SCORES)}
    exec(compile(method, "newer.py", "exec", dont_inherit=True), scope)
    scope["scores"].__qualname__ = f"GRPOTrainer.{contract.SCORES}"
    monkeypatch.setattr(GRPOTrainer, contract.SCORES, scope["scores"])
    # and lets TRL call it so
    ours = getattr(PrefixTreeGRPOTrainer, contract.SCORES)
    called: Callable[..., Any] = lambda self, *args, **kwargs: ours(  # noqa: E731
        self, *args, **kwargs, **values
    )
    monkeypatch.setattr(PrefixTreeGRPOTrainer, contract.SCORES, called)


ADDED = """
def scores(self, model, input_ids, attention_mask, logits_to_keep, batch_size=None,
           compute_entropy=False, compute_aux_loss=False, pixel_values=None, kept=None, share=1.0):
    return TRLS(self, model, input_ids, attention_mask, logits_to_keep)
"""
RENAMED = ADDED.replace("logits_to_keep", "num_logits")
REQUIRED = ADDED.replace("kept=None", "*, kept")
BEFORE = ADDED.replace("batch_size=None,", "kept_before=None, batch_size=None,")
RETURNS = ADDED.replace("share=1.0):", "share=1.0) -> tuple[int, int, int, int]:")


def test_an_added_parameter_that_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters after training are those of a run without it."""
    expected = make(PrefixTreeGRPOTrainer, folder, max_steps=1)
    expected.train()
    changed(monkeypatch, ADDED, kept=None, share=1.0)
    trainer = make(PrefixTreeGRPOTrainer, folder, max_steps=1)
    before = parameters(trainer.model)
    trainer.train()
    after, wanted = parameters(trainer.model), parameters(expected.model)
    assert all(torch.equal(after[name], wanted[name]) for name in wanted)
    assert any(not torch.equal(after[name], before[name]) for name in wanted)


def test_an_added_parameter_that_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = rf"{contract.SCORES} got {{}}, which is new in TRL.*{REMEDY}"
    changed(monkeypatch, ADDED, kept=torch.ones(2))
    with pytest.raises(UnsupportedError, match=refused.format("kept")):
        make(PrefixTreeGRPOTrainer, folder, max_steps=1).train()
    for name, value in {"share": 0.9, "other": 1}.items():
        with pytest.raises(UnsupportedError, match=refused.format(name)):
            contract.known_arguments(getattr(GRPOTrainer, contract.SCORES), {name: value})


@pytest.mark.parametrize(
    ("method", "what"),
    [
        (RENAMED, r"\(new num_logits; gone logits_to_keep\)"),
        (REQUIRED, r"\(new kept\)"),
        # a call that gives it by position would take it for batch_size
        (BEFORE, r"\(new kept_before\)"),
        (RETURNS, "returns 4 results"),
    ],
    ids=["renamed", "required", "before", "returns"],
)
def test_what_the_adapter_uses(method: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for when a trainer is made (test_refusals.py)."""
    changed(monkeypatch, method)
    with pytest.raises(UnsupportedError, match=rf"{contract.SCORES} {what}.*{REMEDY}"):
        contract.check_trainer(GRPOTrainer)


def test_a_name_that_is_gone() -> None:
    with pytest.raises(UnsupportedError, match=rf"cannot import name 'gone'.*{REMEDY}"):  # noqa: SIM117
        with contract.importing():
            from trl.trainer.utils import gone  # noqa: F401
    with pytest.raises(ImportError, match="no_such_package"), contract.importing():
        import no_such_package  # noqa: F401


# ---- AsyncGRPO -----------------------------------------------------------------------------------


def test_async_grpo_in_its_stable_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1.18: all of it in `trl` and one module, none of the old submodules, other arguments."""
    tests = pytest.importorskip("tests.integrations.trl.test_async")
    helper = importlib.import_module("tests.integrations.trl.async_grpo")
    found = {name: getattr(helper, name) for name in helper.__all__}
    # as in test_async.py
    monkeypatch.setattr(helper.trainer_module, "get_peak_flops_per_device", lambda *args: None)
    trainer = tests.make(folder)
    trainer.args = SimpleNamespace()
    module = type(sys)("trl.trainer.async_grpo_trainer")
    old = vars(helper.trainer_module).items()
    vars(module).update({name: value for name, value in old if not name.startswith("__")})
    vars(module)["tree_attention"] = found["tree_attention"]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in [name for name in sys.modules if name.startswith("trl.experimental.async_grpo")]:
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("AsyncGRPOTrainer", "AsyncGRPOConfig"):
        monkeypatch.setattr(trl, name, found[name], raising=False)
    for name in ("AsyncGRPOTrainer", "register_tree_attention", "tree_attention"):
        monkeypatch.setattr(found[name], "__module__", module.__name__)
    importlib.reload(helper)
    assert helper.trainer_module is helper.packing is module
    use_tree_attention(trainer)
    registered = AttentionInterface()[helper.TREE_ATTENTION]
    assert registered is tree_rows.tree_row_attention
    with pytest.raises(UnsupportedError, match=rf"TRL gives tree_depth.*{REMEDY}"):
        registered(*[None] * 5, **dict.fromkeys(contract.TREE_KEYWORDS), tree_depth=torch.ones(1))
    monkeypatch.undo()
    importlib.reload(helper)
    helper.register_tree_attention()
