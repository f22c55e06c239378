"""Refuses what does not go with a way of running a forest: steps, kept trunks, values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from prefixtree.errors import Refusal
from prefixtree.models.checks import runs_deepspeed

if TYPE_CHECKING:
    from prefixtree.planning.costs import ImportCost

#: The ways of dividing a forest among ranks: each imports the keys and values that its tokens see
#: ("parts"), or ranks exchange tokens for heads ("ulysses").
GroupMode = Literal["parts", "ulysses"]


_STEPS = "score in micro-batches that fit (plan_micro_batches without reuse=True)"
_KEPT = "score each micro-batch by itself"


def divided_by_transformers(model: nn.Module) -> Any:
    """The first module that transformers made tensor or expert parallel."""
    # getattr of an attribute that most modules lack would take most of the time
    hooked = (m for m in model.modules() if vars(m).get("_is_hooked"))
    return next(({"kind": type(module).__name__} for module in hooked), None)


def _is_static(model: nn.Module) -> bool:
    return any(isinstance(m, DistributedDataParallel) and m.static_graph for m in model.modules())


#: Refusals of a model with `max_step_tokens`, however large the forest is.
STEPS = (
    Refusal(
        # its ranks cannot agree on a number of steps
        "DeepSpeed",
        runs_deepspeed,
        "DeepSpeed counts one backward per micro-batch, and steps have several: use FSDP2, or "
        f"{_STEPS}",
    ),
)
#: Refusals of a model whose forest is larger than max_step_tokens.
SEVERAL_STEPS = (
    Refusal(
        "static_graph",
        _is_static,
        "DistributedDataParallel with static_graph=True expects one backward per update, and steps "
        f"have several: leave static_graph at False, or {_STEPS}",
    ),
)
#: Refusals of keywords of a call with `max_step_tokens` and `group`.
STEPS_IN_GROUPS = (
    Refusal(
        "images",
        lambda keywords: keywords["images"] is not None,
        "images are not verified with max_step_tokens and group together; leave one of the two out",
    ),
    Refusal(
        "auto",
        lambda keywords: keywords["recompute"] == "auto",
        "recompute='auto' is not planned for steps that ranks of a group divide; give "
        "recompute='all', 'all_but_attention' or 'nothing', or leave group or max_step_tokens out",
    ),
)
#: Refusals of a model with kept trunks.
KEPT_TRUNKS = (
    Refusal(
        "DeepSpeed",
        runs_deepspeed,
        "DeepSpeed counts one backward per micro-batch, and kept trunks add their own: use FSDP2, "
        f"or {_KEPT}",
    ),
    Refusal(
        "static_graph",
        _is_static,
        "DistributedDataParallel with static_graph=True expects one backward per update, and kept "
        f"trunks have several: leave static_graph at False, or {_KEPT}",
    ),
    Refusal(
        "FSDP1",
        lambda model: any(isinstance(m, FullyShardedDataParallel) for m in model.modules()),
        f"FSDP1 is not verified with kept trunks; use FSDP2 (fully_shard), or {_KEPT}",
    ),
    Refusal(
        "tensor or expert parallel",
        divided_by_transformers,
        f"{{kind}} is tensor or expert parallel, which is not verified with kept trunks; {_KEPT}",
    ),
)
#: Refusals of a forest whose values are asked for.
VALUES = (
    Refusal(
        "routes",
        lambda forest: getattr(forest, "routes", None) is not None,
        "routes of experts are not verified for values; make the forest without routes",
    ),
)


def check_group_mode(mode: Any) -> None:
    """Raises a ValueError for anything but a GroupMode."""
    if mode not in get_args(GroupMode):
        raise ValueError(
            f"group_mode must be one of {', '.join(map(repr, get_args(GroupMode)))}, got {mode!r}"
        )


def check_steps(max_step_tokens: int | None, import_cost: ImportCost | None) -> None:
    """Raises a ValueError for an import_cost without max_step_tokens."""
    if import_cost is not None and max_step_tokens is None:
        raise ValueError("import_cost goes with max_step_tokens, and only with it")
