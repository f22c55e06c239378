"""Tree-structured shared-prefix attention for training LLM agents.

What a name needs is imported where the name is used first: forests, rollouts and reports need no
torch and no transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

from prefixtree.errors import (
    ForestError,
    InputError,
    UnsupportedError,
    near_name,
    with_command,
)
from prefixtree.registration import register_when_imported as _register

if TYPE_CHECKING:
    from prefixtree.forest import PrefixForest
    from prefixtree.images.images import Image, Images, image_key
    from prefixtree.integrations.transformers import prepare
    from prefixtree.kernels.attention import explain, tree_attention
    from prefixtree.kernels.lm_head.measures import MeasuredEdges
    from prefixtree.models.compiled import compile_layers
    from prefixtree.models.dropout import share_dropout
    from prefixtree.packing.block_tables import BlockTables, MaskStats, TileShape
    from prefixtree.packing.layout import Edges, PackedForest, pack
    from prefixtree.packing.mask import TreeMask
    from prefixtree.planning.costs import CostModel, ImportCost
    from prefixtree.planning.micro_batch import MicroBatch, PlanStats, ReuseStats
    from prefixtree.planning.micro_batches import MicroBatchPlan, plan_micro_batches
    from prefixtree.planning.steps import StepStats
    from prefixtree.planning.trunks import TrunkStats
    from prefixtree.recompute.choose import (
        RecomputePlan,
        max_micro_batch_tokens,
        plan_recomputation,
    )
    from prefixtree.sampling import Draws, Rows, Samples, TreeSampler
    from prefixtree.scoring.batches import BatchScores, batch_logprobs
    from prefixtree.scoring.in_steps import import_cost
    from prefixtree.scoring.kept_trunks import kept_trunks, kept_values
    from prefixtree.scoring.logprobs import SequenceScores, sequence_logprobs
    from prefixtree.scoring.teacher import Teacher
    from prefixtree.scoring.values import sequence_values
    from prefixtree.testing.live import Verdict, verify

__version__ = "0.2.0"
__all__ = [
    "BatchScores",
    "BlockTables",
    "CostModel",
    "Draws",
    "Edges",
    "ForestError",
    "Image",
    "Images",
    "ImportCost",
    "InputError",
    "MaskStats",
    "MeasuredEdges",
    "MicroBatch",
    "MicroBatchPlan",
    "PackedForest",
    "PlanStats",
    "PrefixForest",
    "RecomputePlan",
    "ReuseStats",
    "Rows",
    "Samples",
    "SequenceScores",
    "StepStats",
    "Teacher",
    "TileShape",
    "TreeMask",
    "TreeSampler",
    "TrunkStats",
    "UnsupportedError",
    "Verdict",
    "batch_logprobs",
    "compile_layers",
    "explain",
    "image_key",
    "import_cost",
    "kept_trunks",
    "kept_values",
    "max_micro_batch_tokens",
    "pack",
    "plan_micro_batches",
    "plan_recomputation",
    "prepare",
    "sequence_logprobs",
    "sequence_values",
    "share_dropout",
    "tree_attention",
    "verify",
]


# by module, imported where a name is used first
_LATER = {
    "prefixtree.forest": ("PrefixForest",),
    "prefixtree.images.images": (
        "Image",
        "Images",
        "image_key",
    ),
    "prefixtree.integrations.transformers": ("prepare",),
    "prefixtree.kernels.attention": (
        "explain",
        "tree_attention",
    ),
    "prefixtree.kernels.lm_head.measures": ("MeasuredEdges",),
    "prefixtree.models.compiled": ("compile_layers",),
    "prefixtree.models.dropout": ("share_dropout",),
    "prefixtree.packing.block_tables": (
        "BlockTables",
        "MaskStats",
        "TileShape",
    ),
    "prefixtree.packing.layout": (
        "Edges",
        "PackedForest",
        "pack",
    ),
    "prefixtree.packing.mask": ("TreeMask",),
    "prefixtree.planning.costs": (
        "ImportCost",
        "CostModel",
    ),
    "prefixtree.planning.micro_batch": (
        "MicroBatch",
        "PlanStats",
        "ReuseStats",
    ),
    "prefixtree.planning.micro_batches": (
        "MicroBatchPlan",
        "plan_micro_batches",
    ),
    "prefixtree.planning.steps": ("StepStats",),
    "prefixtree.planning.trunks": ("TrunkStats",),
    "prefixtree.recompute.choose": (
        "RecomputePlan",
        "max_micro_batch_tokens",
        "plan_recomputation",
    ),
    "prefixtree.sampling": (
        "Draws",
        "Rows",
        "Samples",
        "TreeSampler",
    ),
    "prefixtree.scoring.batches": (
        "BatchScores",
        "batch_logprobs",
    ),
    "prefixtree.scoring.in_steps": ("import_cost",),
    "prefixtree.scoring.kept_trunks": (
        "kept_trunks",
        "kept_values",
    ),
    "prefixtree.scoring.logprobs": (
        "SequenceScores",
        "sequence_logprobs",
    ),
    "prefixtree.scoring.teacher": ("Teacher",),
    "prefixtree.scoring.values": ("sequence_values",),
    "prefixtree.testing.live": (
        "Verdict",
        "verify",
    ),
}
# public names of other modules, for the message
_ELSEWHERE = {
    "prefixtree.integrations.transformers": ("allow_model_type", "supported_model_types"),
    "prefixtree.rollouts": ("Rollouts", "expand_turns", "read_rollouts"),
}


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            try:
                return getattr(importlib.import_module(module), name)
            except ModuleNotFoundError as problem:
                raise with_command(f"{__name__}.{name}", problem) from None
    if name in ("rollouts", "sampling"):
        return importlib.import_module(f"prefixtree.{name}")
    mend = near_name(name, __all__)
    if name.startswith("PrefixTree") and name.endswith("Trainer"):
        mend = f"; write from prefixtree.integrations.trl import {name}"
    for module, names in _ELSEWHERE.items():
        if name in names:
            mend = f"; write from {module} import {name}"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{mend}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_register()
