"""The parts of TRL that the adapter relies on, and the refusal of a TRL where they changed.

Signatures are compared whenever a trainer is made. Call sites and the entries of batches, which
only the source shows, are compared by tests/integrations/trl/test_contract.py.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import trl
from packaging.version import Version

from prefixtree.errors import UnsupportedError

#: Versions of TRL that the tests ran with, from the first to the last.
TESTED = ("1.15.0", "1.16.0")

#: Parameters for images of GRPO's scores: anything but None in them is refused.
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

_COMPUTE_LOSS = {"compute_loss": "self model inputs return_outputs num_items_in_batch"}
_GENERATES = {
    "_prepare_inputs": "self generation_batch",
    "_generate_and_score_completions": "self inputs",
}
_SAMPLES = {
    "_get_per_token_logps_and_entropies": "self model input_ids attention_mask logits_to_keep "
    f"batch_size compute_entropy compute_aux_loss {' '.join(IMAGE_PARAMETERS)}",
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


def check_installed() -> None:
    """Refuses a TRL older than the first from which the adapter can import."""
    if Version(trl.__version__) < Version(TESTED[0]):
        raise UnsupportedError(
            f"prefixtree.integrations.trl needs TRL {TESTED[0]} or newer, this is TRL "
            f"{trl.__version__}: pip install 'trl=={TESTED[1]}' (it is tested with "
            f"{' to '.join(TESTED)})"
        )


def check_trainer(trainer_class: type) -> None:
    """Refuses a trainer of TRL whose overridden methods take other arguments than those tested."""
    _check_version()
    name = trainer_class.__name__
    for method, expected in OVERRIDDEN[name].items():
        function = getattr(trainer_class, method, None)
        check_parameters(function, f"{name}.{method}", expected.split())


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


def _tree_keywords(function: Callable[..., Any]) -> list[str]:
    return [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name.startswith("tree_")
    ]


def check_parameters(
    function: Callable[..., Any] | None, name: str, expected: Sequence[str]
) -> None:
    """Refuses a function of TRL that is gone or takes other parameters than `expected`."""
    if function is None:
        raise UnsupportedError(f"TRL {trl.__version__} has no {name}; {advice()}")
    _compare(name, "parameters", list(inspect.signature(function).parameters), expected)


def _check_version() -> None:
    first, last = map(Version, TESTED)
    if not first <= Version(trl.__version__) <= last:
        warnings.warn(
            f"TRL {trl.__version__}: {advice()}, or run the tests with yours, in a checkout of "
            f"prefixtree: make test-trl TRL={trl.__version__}",
            stacklevel=4,
        )


def _compare(name: str, what: str, found: Sequence[str], expected: Sequence[str]) -> None:
    # by name: the adapter passes everything on by name or in the order checked here
    if list(found) == list(expected):
        return
    new = [n for n in found if n not in expected]
    gone = [n for n in expected if n not in found]
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
    return f"the adapter is tested with TRL {versions}: install {last}, or use TRL's trainer"
