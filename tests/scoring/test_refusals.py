"""Every row of what does not go with a way of running a forest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForTokenClassification

from prefixtree.errors import UnsupportedError, refuse
from prefixtree.recompute import trunk_modes
from prefixtree.recompute.trunk_modes import check_modes
from prefixtree.scoring import group_refusals, refusals
from prefixtree.scoring.logprobs import sequence_logprobs
from prefixtree.scoring.values import sequence_values
from tests.support.models import build, ragged_packed
from tests.support.refusals import check_cases, pattern, rows_of


class Engine(nn.Sequential):
    """As if DeepSpeed had made it."""

    __module__ = "deepspeed.runtime.engine"


def static() -> nn.Module:
    return nn.parallel.DistributedDataParallel(nn.Linear(2, 2), static_graph=True)


def divided() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer._is_hooked = True
    return nn.Sequential(layer)


def placed() -> nn.Module:
    layer = nn.Linear(2, 2)
    mesh = init_device_mesh("cpu", (1,))
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    return layer


def of_model(table: Any, make: Callable[[], Any]) -> Callable[[], None]:
    return lambda: refuse(table, make())


CASES: dict[str, Callable[[], None]] = {
    "GROUPS: DeepSpeed": of_model(group_refusals.GROUPS, Engine),
    "GROUPS: tensor or expert parallel": of_model(group_refusals.GROUPS, divided),
    "GROUPS: parallelize_module": of_model(group_refusals.GROUPS, placed),
    "STEPS: DeepSpeed": of_model(refusals.STEPS, Engine),
    "SEVERAL_STEPS: static_graph": of_model(refusals.SEVERAL_STEPS, static),
    "STEPS_IN_GROUPS: auto": of_model(
        refusals.STEPS_IN_GROUPS, lambda: {"recompute": "auto", "images": None}
    ),
    "STEPS_IN_GROUPS: images": of_model(
        refusals.STEPS_IN_GROUPS, lambda: {"recompute": None, "images": object()}
    ),
    "KEPT_TRUNKS: DeepSpeed": of_model(refusals.KEPT_TRUNKS, Engine),
    "KEPT_TRUNKS: static_graph": of_model(refusals.KEPT_TRUNKS, static),
    "KEPT_TRUNKS: FSDP1": of_model(
        refusals.KEPT_TRUNKS,
        lambda: FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")),
    ),
    "KEPT_TRUNKS: tensor or expert parallel": of_model(refusals.KEPT_TRUNKS, divided),
    "KEPT_IMAGES: recompute_trunks": lambda: check_modes(
        fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,))), "all", "nothing", True
    ),
    "VALUES: routes": of_model(refusals.VALUES, lambda: SimpleNamespace(routes=[])),
}
ROWS = rows_of(group_refusals, refusals, trunk_modes)


def test_every_row_has_a_case() -> None:
    check_cases(ROWS, CASES)


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A group of one rank."""
    store: Path = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rows(name: str) -> None:
    with pytest.raises(UnsupportedError, match=pattern(ROWS[name])):
        CASES[name]()


@pytest.mark.parametrize(
    "table", [group_refusals.GROUPS, refusals.STEPS, refusals.SEVERAL_STEPS, refusals.KEPT_TRUNKS]
)
def test_what_is_served(table: Any) -> None:
    refuse(table, nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))


@pytest.mark.parametrize("score", [sequence_logprobs, sequence_values])
def test_a_group_of_one_rank_is_none(score: Callable[..., Any]) -> None:
    """What goes with no group goes with it: here layers that another way divides."""
    model: Any = build("qwen3")
    if score is sequence_values:
        model = AutoModelForTokenClassification.from_config(model.config)
    model.model.layers[0].mlp._is_hooked = True
    with pytest.raises(UnsupportedError, match="not verified with group"):
        refuse(group_refusals.GROUPS, model)
    score(model.eval(), ragged_packed(), group=dist.group.WORLD)


def test_kept_trunks_under_fsdp2_with_one_mode() -> None:
    model = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    check_modes(model, "all", "again", True)
    check_modes(model, "all", "nothing", False)
