"""No field of a configuration changes eager's log-probabilities and not ours: the recorded sweep of
`support.config_fields`, and the fields of it that are factors, again."""

from __future__ import annotations

from typing import Any

import pytest
from packaging import version

import prefixtree.models.attention as adapter
from prefixtree.kernels.lm_head.eager import LogitRule
from prefixtree.scoring import forward as scoring
from prefixtree.scoring.lm_head import Handed
from tests.support import config_fields
from tests.support.config_fields import FACTOR, RED, Field, fields, outcome_of, recorded, try_field
from tests.support.family_configs import FAMILIES
from tests.support.family_table import NEWEST
from tests.support.full import mostly
from tests.support.models import TRANSFORMERS, cases
from tests.support.variant_configs import VARIANTS

_IS_NEWEST = version.parse(NEWEST).release == TRANSFORMERS.release[:2]


def _field(name: str, key: str) -> Field:
    return next(field for field in fields(name) if field.name == key)


def test_no_field_is_red():
    found = recorded()
    assert list(found) == [*FAMILIES, *VARIANTS]
    assert not [(name, key) for name, of in found.items() for key in of if of[key] == RED]


@pytest.mark.skipif(not _IS_NEWEST, reason=f"the sweep is of transformers {NEWEST}")
def test_every_field_was_tried():
    """A field that is new in transformers needs a sweep (python -m tests.support.config_fields)."""
    for name, found in recorded().items():
        assert {field.name for field in fields(name)} == found.keys(), name


# by a multiplier, a scale of positions, of experts and of values
_QUICK = {"gemma2", "gemma3n_text"}
# of which the sweep is: elsewhere test-full would try the same fields again
_IN_NEWEST = pytest.mark.skipif(not _IS_NEWEST, reason=f"make test-transformers has {NEWEST}")


def _factors() -> list[Any]:
    """One family of each name of a factor that changes log p."""
    firsts: dict[str, tuple[str, str]] = {}
    for name, outcomes in recorded().items():
        for key, outcome in outcomes.items():
            last = key.rpartition(".")[2]
            if outcome.startswith("followed") and FACTOR.search(last):
                firsts.setdefault(last, (name, key))
    return [
        pytest.param(
            *case.values,
            key,
            marks=[*case.marks, *[_IN_NEWEST] * (name not in _QUICK)],
            id=f"{name}-{key}",
        )
        for name, key in firsts.values()
        for case in cases([name])
    ]


@pytest.mark.parametrize("name, key", mostly(_factors(), _QUICK))
def test_factors_are_followed(name, key):
    trials = try_field(name, _field(name, key))
    assert outcome_of(trials) == recorded()[name][key], trials


# ---- the sweep must turn red ---------------------------------------------------------------------


def test_a_hidden_factor_of_logits_turns_it_red(monkeypatch):
    """As falcon_h1's was: log p was off by 5.67 at 2.0. And without the check of what the model
    does to its logits."""
    field = Field(("lm_head_multiplier",), (2.0,))
    monkeypatch.setattr(scoring, "logit_rule", lambda model: LogitRule())
    assert outcome_of(try_field("falcon_h1", field)) == "refused"
    monkeypatch.setattr(Handed, "check_treatment", lambda *args: None)
    assert outcome_of(try_field("falcon_h1", field)) == RED


def test_a_hidden_factor_of_attention_turns_it_red(monkeypatch):
    field = Field(("attn_logit_softcapping",), (0.5,))
    assert outcome_of(try_field("gemma2", field)) == "followed"
    attend = adapter.tree_attention
    monkeypatch.setattr(
        adapter, "tree_attention", lambda *args, **kw: attend(*args, **{**kw, "softcap": None})
    )
    assert outcome_of(try_field("gemma2", field)) == RED


def test_a_field_that_we_alone_read_turns_it_red(monkeypatch):
    """Llama has no logit scale: reading one would be as wrong as hiding one."""
    field = Field(("logit_scale",), (0.5,))
    assert outcome_of(try_field("llama", field)) == "no effect"
    monkeypatch.setattr(
        scoring, "logit_rule", lambda model: LogitRule(getattr(model.config, "logit_scale", 1.0))
    )
    monkeypatch.setattr(Handed, "check_treatment", lambda *args: None)
    config_fields._base("llama")
    assert outcome_of(try_field("llama", field)) == RED
