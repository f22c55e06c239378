"""Which fields of the families' configurations change log-probabilities, and what becomes of them.

    python -m tests.support.config_fields               # all families, some 20 minutes
    python -m tests.support.config_fields falcon_h1     # some, whose entries are written anew

One field of the tiny configuration at a time gets other values (`config_values`): every number,
boolean, name, list and RoPE parameter of the text's configuration, those of the model around it,
and attributes that its code looks for though the configuration does not declare them. The packed
run must equal eager, sequence by sequence, or be refused. A configuration that is proven at its
neutral value proves nothing of a factor. The outcome of every field is in config_fields.json.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import time
import traceback
import typing
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig

import prefixtree as pt
from tests.support.config_values import other_ropes, other_values
from tests.support.family_configs import FAMILIES
from tests.support.models import (
    TRANSFORMERS,
    Objective,
    errors,
    made_of,
    make_objective,
    pack_sequences,
    ragged_sequences,
    run_packed,
    run_replicated,
    tiny_config,
)
from tests.support.variant_configs import VARIANTS

TABLE = Path(__file__).with_suffix(".json")
FOLLOWED, REFUSED, NO_EFFECT, CANNOT, RED = (
    "followed",
    "refused",
    "no effect",
    "cannot be built",
    "red",
)
OUTCOMES = (FOLLOWED, f"{FOLLOWED} and {REFUSED}", REFUSED, NO_EFFECT, CANNOT, RED)
# of values that blow rounding up (heads of two dimensions, norms without an eps)
_TOLERANCE = 5e-4
# a difference of log p that is no rounding; and how much of it a packed run may miss
_EFFECT, _MISSED = 2e-5, 0.1
# what a configuration holds beside what its model computes
_NOT_TRIED = {
    "model_type",
    "transformers_version",
    "architectures",
    "dtype",  # of parameters: tests of autocast and of precision
    "id2label",
    "label2id",
    "problem_type",
    "vision_config",  # images have tests of their vision encoders
    "audio_config",
    "sub_configs",
}


FACTOR = re.compile(
    r"multiplier|scal(e|ing)|softcap|factor|pre_attn_scalar|clip|limit|alpha|beta|window"
)
# attributes that transformers asks every configuration for, which are no part of the model
_ASKED_OF_ALL = {
    "vision_aspect_ratio",
    "vision_feature_layer",
    "vision_feature_select_strategy",
    "auto_map",
    "decoder",
    "encoder",
    "generator",
    "gradient_checkpointing",
    "mtp_layer_types",
    "name_or_path",
    "quantization_config",
    "text_config",
    "text_encoder",
}


@dataclass(frozen=True)
class Field:
    """A field of a configuration.

    Attributes:
        path: of keys from the outermost configuration.
        values: what is tried in its place: the configuration's entry `path`, or for a RoPE the
            whole of its parameters.
    """

    path: tuple[str, ...]
    values: tuple[Any, ...]

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def is_factor(self) -> bool:
        """Whether its name is one of a factor: gradients are compared at each of its values."""
        return FACTOR.search(self.path[-1]) is not None


@dataclass(frozen=True)
class Trial:
    """The outcome of one value; `said` is the error, or the differences."""

    outcome: str
    said: str = ""


# ---- fields --------------------------------------------------------------------------------------


def fields(name: str) -> list[Field]:
    """The fields of the configuration of a family or a variant."""
    arguments = tiny_config(name)
    config = AutoConfig.for_model(name.partition("/")[0], **copy.deepcopy(arguments))
    return [*_fields_of(config, (), arguments), *_undeclared(name)]


def _fields_of(config: Any, above: tuple[str, ...], arguments: Any) -> Iterator[Field]:
    hints = typing.get_type_hints(type(config), localns={"torch": torch})
    count = config.get_text_config().num_hidden_layers
    for key, value in config.to_dict().items():
        if key in _NOT_TRIED or key.startswith("_"):
            continue
        path = (*above, key)
        if key == "text_config":
            yield from _fields_of(config.text_config, path, arguments[key])
        elif isinstance(value, dict):
            yield from _nested(config, path, value)
        else:
            yield Field(path, tuple(other_values(key, value, hints.get(key), count)))


def _nested(config: Any, path: tuple[str, ...], value: dict[str, Any]) -> Iterator[Field]:
    """The entries of a dict: a RoPE's are also those that it may have."""
    for key, entry in value.items():
        if isinstance(entry, dict):
            yield from _nested(config, (*path, key), entry)
        elif key == "rope_type":
            yield Field((*path, key), tuple(other_ropes(value, _half(config, value))))
        else:
            yield Field((*path, key), tuple(other_values(key, entry, type(entry), 1)))


def _half(config: Any, rope: dict[str, Any]) -> int:
    """Of the dimensions of a head that turn."""
    # as attributes, those that differ between layers cannot be read
    of = config.to_dict()
    head = of.get("qk_rope_head_dim") or of.get("head_dim")
    head = head or of["hidden_size"] // of["num_attention_heads"]
    return int(head * rope.get("partial_rotary_factor", 1.0)) // 2


@cache
def _undeclared(name: str) -> tuple[Field, ...]:
    """Attributes that a model looks for while it is made and runs, which nothing declares."""
    with _asked_in_vain() as asked:
        _eager_logprobs(made_of(name, tiny_config(name), "eager"), objective())
    above = ("text_config",) if "text_config" in tiny_config(name) else ()
    return tuple(
        Field((*above, key), (True, False, 0.5, 2))
        for key in sorted(asked - _NOT_TRIED - _ASKED_OF_ALL)
        if not key.startswith("_")
    )


@contextmanager
def _asked_in_vain() -> Iterator[set[str]]:
    """The names of attributes that configurations were asked for and did not have."""
    asked: set[str] = set()

    def missing(self: Any, name: str) -> Any:
        asked.add(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    PreTrainedConfig.__getattr__ = missing
    try:
        yield asked
    finally:
        del PreTrainedConfig.__getattr__


def changed(name: str, field: Field, value: Any) -> dict[str, Any]:
    """The keywords of the tiny configuration with another value of a field."""
    arguments = tiny_config(name)
    path = field.path[:-1] if field.path[-1] == "rope_type" else field.path
    node, whole = arguments, AutoConfig.for_model(name.partition("/")[0], **tiny_config(name))
    made = whole.to_dict()
    for key in path[:-1]:
        made = made[key]
        if key != "text_config":
            node[key] = copy.deepcopy(made)
        node = node[key]
    # what the tiny configuration gives under another name would win
    names = (whole.get_text_config() if "text_config" in path else whole).attribute_map
    for other in [n for n in node if names.get(n, n) == names.get(path[-1], path[-1])]:
        del node[other]
    node[path[-1]] = copy.deepcopy(value)
    return arguments


# ---- trials --------------------------------------------------------------------------------------


@cache
def objective() -> Objective:
    """A tree with two branches, one of 36 tokens."""
    sequences = ragged_sequences()
    return make_objective([sequences[i] for i in (8, 3)])


@cache
def _packed() -> pt.PackedForest:
    return pack_sequences(objective().sequences)


@cache
def _base(name: str) -> torch.Tensor:
    return _eager_logprobs(made_of(name, tiny_config(name), "eager"), objective())


@cache
def _rounding(name: str) -> float:
    """Of log p, in a packed run of the tiny configuration as it is."""
    model = made_of(name, tiny_config(name))
    with torch.no_grad():
        return max(_effect(_flat(_scores(model).logprobs), _base(name)), 1e-6)


def try_field(name: str, field: Field) -> list[Trial]:
    """The values of a field in a family or a variant; no further ones where three did nothing."""
    trials: list[Trial] = []
    for value in field.values:
        if [trial.outcome for trial in trials] == [NO_EFFECT] * 3:
            break
        known = any(trial.outcome == FOLLOWED for trial in trials)
        trials.append(try_value(name, field, value, gradients=field.is_factor or not known))
    return trials


def outcome_of(trials: Sequence[Trial]) -> str:
    """Of a field, from those of its values."""
    found = {trial.outcome for trial in trials}
    if RED in found:
        return RED
    if both := [o for o in (FOLLOWED, REFUSED) if o in found]:
        return " and ".join(both)
    return NO_EFFECT if NO_EFFECT in found else CANNOT


def try_value(name: str, field: Field, value: Any, gradients: bool = True) -> Trial:
    """One value: in float32, and where that differs in float64, as rounding may grow.

    Args:
        gradients: whether to compare them too, where log p changes.
    """
    trial = _try(name, field, value, gradients, torch.float32)
    if trial.outcome != RED:
        return trial
    exact = _try(name, field, value, gradients, torch.float64)
    return trial if exact.outcome in (RED, CANNOT) else exact


def _try(name: str, field: Field, value: Any, gradients: bool, dtype: torch.dtype) -> Trial:
    wanted = objective()
    try:
        model = made_of(name, changed(name, field, value), "eager").to(dtype)
        eager = _eager_logprobs(model, wanted)
        if not eager.isfinite().all():
            return Trial(CANNOT, "log p is not finite")
        effect = _effect(eager, _base(name))
        # those of an embedding leave out the padding's
        gradients = gradients and (effect > _EFFECT or field.name.endswith("token_id"))
        reference = run_replicated(model, wanted) if gradients else None
        if reference and not all(g.isfinite().all() for g in reference.gradients.values()):
            return Trial(CANNOT, "a gradient is not finite")
    except Exception as error:
        return Trial(CANNOT, _said(error))
    try:
        model.set_attn_implementation("prefixtree")
        if reference is None:
            with torch.no_grad():
                got, off = _flat(_scores(model).logprobs), 0.0
        else:
            run = run_packed(model, _packed(), wanted)
            got, off = _flat(run.logprobs), errors(run, reference).largest
    except Exception as error:
        return Trial(REFUSED if _is_refusal(error) else RED, _said(error))
    missed = _effect(got, eager)
    said = f"changes log p by {effect:.1e}, packed {missed:.1e} from eager, all {off:.1e}"
    most = min(_MISSED * effect, _TOLERANCE * float(eager.abs().max()))
    if not (missed <= max(most, 5 * _rounding(name)) and off <= _TOLERANCE):
        return Trial(RED, said)
    return Trial(FOLLOWED if effect > _EFFECT else NO_EFFECT, said)


def _effect(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def _scores(model: Any) -> pt.SequenceScores:
    wanted = objective()
    return pt.sequence_logprobs(
        model, _packed(), temperature=wanted.temperatures, loss_mask=wanted.loss_masks
    )


@torch.no_grad()
def _eager_logprobs(model: Any, wanted: Objective) -> torch.Tensor:
    """Of every sequence alone, masked ones 0."""
    found = []
    assert wanted.loss_masks is not None
    for tokens, t, mask in zip(
        wanted.sequences, wanted.temperatures, wanted.loss_masks, strict=True
    ):
        ids = torch.from_numpy(tokens)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        log_p = (logits.float() / t).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        found.append(log_p * torch.from_numpy(mask[1:]))
    return _flat(found)


def _flat(logprobs: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(logprobs).float()


def _is_refusal(error: Exception) -> bool:
    """Ours: transformers and torch raise ValueErrors too."""
    if isinstance(error, pt.UnsupportedError):
        return True
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return isinstance(error, ValueError) and Path(pt.__file__).parent in Path(last).parents


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]


# ---- the file ------------------------------------------------------------------------------------


def recorded() -> dict[str, dict[str, str]]:
    """The outcome of every field of every family and variant, as the file has it."""
    groups = json.loads(TABLE.read_text())["families"]
    return {
        name: {field: outcome for outcome, of in outcomes.items() for field in of.split()}
        for name, outcomes in groups.items()
    }


def _grouped(outcomes: dict[str, str]) -> dict[str, str]:
    groups: dict[str, list[str]] = defaultdict(list)
    for field, outcome in sorted(outcomes.items()):
        groups[outcome].append(field)
    return {outcome: " ".join(groups[outcome]) for outcome in sorted(groups)}


def sweep(names: Sequence[str]) -> bool:
    """Tries all fields of some families and writes what became of each; whether none is red."""
    contents = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    found = contents.get("families", {})
    tried = contents.get("values", {})
    green = True
    for name in names:
        start, outcomes, tried[name] = time.monotonic(), {}, 0
        for field in fields(name):
            trials = try_field(name, field)
            tried[name] += len(trials)
            outcomes[field.name] = outcome_of(trials)
            for value, trial in zip(field.values, trials, strict=False):
                if trial.outcome == RED:
                    green = False
                    print(f"RED {name} {field.name} = {value!r}: {trial.said}", flush=True)
        found[name] = _grouped(outcomes)
        _write(found, tried)
        print(f"{name}: {len(outcomes)} fields, {tried[name]} values", end=", ")
        print(f"{time.monotonic() - start:.0f} s", flush=True)
    return green


def _write(found: dict[str, dict[str, str]], tried: dict[str, int]) -> None:
    names = [name for name in (*FAMILIES, *VARIANTS) if name in found]
    fields_of = dict.fromkeys(OUTCOMES, 0)
    for name in names:
        for outcome, of in found[name].items():
            fields_of[outcome] += len(of.split())
    contents = {
        "transformers": str(TRANSFORMERS),
        "fields": {outcome: count for outcome, count in fields_of.items() if count},
        "values": {name: tried[name] for name in names},
        "families": {name: found[name] for name in names},
    }
    TABLE.write_text(json.dumps(contents, indent=1) + "\n")


def main(names: list[str]) -> int:
    """1 where a field is red."""
    transformers.logging.set_verbosity_error()
    return int(not sweep(names or [*FAMILIES, *VARIANTS]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
