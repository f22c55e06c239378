"""The parts of TRL that the adapter relies on, and the refusal of a TRL where they changed.

Signatures are compared whenever a trainer is made: what the adapter uses must stand where it stood,
what is new must have a default. A call that gives what is new another value is refused. Call sites
and the entries of batches, which only the source shows, are compared by
tests/integrations/trl/test_contract.py.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import trl
from packaging.version import Version

from prefixtree.errors import UnsupportedError

#: Versions of TRL that the tests ran with, from the first to the last.
TESTED = ("1.15.0", "1.16.0")

#: Parameters for images of GRPO's scores. TRL passes them by name, so one may be gone.
IMAGE_PARAMETERS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)

#: The method of GRPO's scores, and the results that it returns.
SCORES = "_get_per_token_logps_and_entropies"
_RETURNED = 3

_COMPUTE_LOSS = {"compute_loss": "self model inputs return_outputs num_items_in_batch"}
_GENERATES = {
    "_prepare_inputs": "self generation_batch",
    "_generate_and_score_completions": "self inputs",
}
_SAMPLES = {
    SCORES: "self model input_ids attention_mask logits_to_keep batch_size compute_entropy "
    "compute_aux_loss",
    **_GENERATES,
    "training_step": "self model inputs num_items_in_batch",
    "create_accelerator_and_postprocess": "self",
}
_COMPARES = {
    "_compute_loss": "self model inputs return_outputs",
    "compute_ref_log_probs": "self model inputs",
    "_precompute_ref_logps": "self dataset name batch_size",
}
#: Parameters of the methods that the adapter overrides, by TRL's trainer.
OVERRIDDEN: dict[str, dict[str, str]] = {
    "GRPOTrainer": _SAMPLES,
    "RLOOTrainer": _SAMPLES,
    "DPOTrainer": _COMPARES,
    "KTOTrainer": _COMPARES,
    "SFTTrainer": _COMPUTE_LOSS,
    "RewardTrainer": _COMPUTE_LOSS,
    "DistillationTrainer": {
        "_compute_loss": "self unwrapped_student inputs num_items_in_batch",
        **_GENERATES,
    },
    "GKDTrainer": _COMPUTE_LOSS,
    "GOLDTrainer": _COMPUTE_LOSS,
}

#: The first version whose AsyncGRPO packs trees.
TREES_SINCE = "1.16.0"

#: The tree's keywords of AsyncGRPO's attention function, `tree_attention`.
TREE_KEYWORDS = (
    "tree_kv_index",
    "tree_cu_seqlens_q",
    "tree_cu_seqlens_k",
    "tree_max_seqlen_q",
    "tree_max_seqlen_k",
)


def check_oldest() -> None:
    """Refuses a TRL older than the first from which the adapter can import."""
    if Version(trl.__version__) < Version(TESTED[0]):
        raise UnsupportedError(
            f"prefixtree.integrations.trl needs TRL {TESTED[0]} or newer, this is TRL "
            f"{trl.__version__}: pip install 'trl=={TESTED[1]}' (it is tested with "
            f"{' to '.join(TESTED)})"
        )


@contextmanager
def importing() -> Iterator[None]:
    """Refuses a TRL without a name that the adapter imports."""
    try:
        yield
    except ImportError as problem:
        if (problem.name or "").partition(".")[0] != "trl":
            raise
        raise UnsupportedError(f"TRL {trl.__version__}: {problem}; {advice()}") from problem


def check_trainer(trainer_class: type) -> None:
    """Refuses a trainer of TRL whose overridden methods are not called as those tested."""
    _check_version()
    name = trainer_class.__name__
    for method, expected in OVERRIDDEN[name].items():
        function = getattr(trainer_class, method, None)
        check_parameters(function, f"{name}.{method}", expected.split())
    scores = getattr(trainer_class, SCORES, None)
    returned = len(get_args(inspect.signature(scores).return_annotation)) if scores else 0
    if returned not in (0, _RETURNED):
        raise UnsupportedError(
            f"{name}.{SCORES} returns {returned} results in TRL {trl.__version__}, {_RETURNED} in "
            f"those tested; {advice()}"
        )


def known_arguments(method: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Takes the images out of further arguments; refuses those at no default that are new."""
    new = given.keys() - set(IMAGE_PARAMETERS)
    # looked up for every micro-batch
    parameters = inspect.signature(method).parameters if new else {}
    for name in new:
        value = given[name]
        is_default = isinstance(value, bool | int | float | str) and (
            name in parameters and value == parameters[name].default
        )
        if value is not None and not is_default:
            raise UnsupportedError(
                f"{method.__qualname__} got {name}, which is new in TRL {trl.__version__}: what it "
                f"asks for would not be computed; leave out the setting that gives it; {advice()}"
            )
    return {name: given[name] for name in given.keys() & set(IMAGE_PARAMETERS)}


def check_tree_attention(function: Callable[..., Any] | None, name: str) -> None:
    """Refuses an attention that is not TRL's for trees, or takes other tree keywords.

    The function is judged, not its place in TRL: in 1.16 and 1.17 that is
    `trl.experimental.async_grpo.packing`, which 1.18 no longer has.
    """
    module = getattr(function, "__module__", None) or ""
    keywords = [] if function is None else _tree_keywords(function)
    if function is None or module.partition(".")[0] != "trl" or not keywords:
        raise UnsupportedError(
            f"the trainer's model runs attn_implementation={name!r}, which is not TRL's attention "
            f"for trees: pass an AsyncGRPOTrainer as TRL made it (TRL {TREES_SINCE} was the first "
            f"whose AsyncGRPO packs trees; this is {trl.__version__})"
        )
    _check_version()
    _compare(f"{module}.{function.__name__}", "keywords", keywords, TREE_KEYWORDS)


def _tree_keywords(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return [
        parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name.startswith("tree_")
    ]


def check_parameters(
    function: Callable[..., Any] | None, name: str, expected: Sequence[str]
) -> None:
    """Refuses a function of TRL that is gone, or does not begin with the parameters `expected`."""
    if function is None:
        raise UnsupportedError(f"TRL {trl.__version__} has no {name}; {advice()}")
    _compare(name, "parameters", list(inspect.signature(function).parameters.values()), expected)


def _check_version() -> None:
    first, last = map(Version, TESTED)
    if not first <= Version(trl.__version__) <= last:
        warnings.warn(
            f"TRL {trl.__version__}: {advice()}, or run the tests with yours, in a checkout of "
            f"prefixtree: make test-trl TRL={trl.__version__}",
            stacklevel=4,
        )


def _compare(
    name: str, what: str, found: Sequence[inspect.Parameter], expected: Sequence[str]
) -> None:
    # the adapter takes these in this order. What comes after them has a default or is **kwargs, so
    # TRL's calls need not give it, and those that do give it by name
    names = [p.name for p in found]
    late = found[len(expected) :]
    optional = [p for p in late if p.default is not p.empty or p.kind is p.VAR_KEYWORD]
    if names[: len(expected)] == list(expected) and len(optional) == len(late):
        return
    new = [n for n in names if n not in {*expected, *(p.name for p in optional)}]
    gone = [n for n in expected if n not in names]
    changes = [f"new {', '.join(new)}"] * bool(new) + [f"gone {', '.join(gone)}"] * bool(gone)
    raise UnsupportedError(
        f"TRL {trl.__version__} changed the {what} of {name} "
        f"({'; '.join(changes) or 'reordered'}): what is computed may no longer be what TRL means; "
        f"{advice()}"
    )


def advice() -> str:
    """Says how to mend an untested version of TRL, as the end of a sentence."""
    first, last = TESTED
    versions = first if first == last else f"{first} to {last}"
    return (
        f"the adapter is tested with TRL {versions}: pip install 'trl=={last}', or use TRL's "
        "trainer"
    )
