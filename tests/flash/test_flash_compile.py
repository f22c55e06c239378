"""Forward and backward of every feature, compiled for sm_90 by the calls that the backend makes."""

from __future__ import annotations

import contextlib
import re
from dataclasses import fields
from typing import Any

import cutlass
import pytest
import torch
from flash_attn.cute import interface
from strategies import mask_of
from torch._subclasses.fake_tensor import FakeTensorMode

from prefixtree import PrefixForest
from prefixtree.kernels.flash import device, launch
from prefixtree.kernels.flash.lists import ForestLists, Lists, lists_of
from prefixtree.kernels.options import Options

FOREST = PrefixForest.from_parents([-1, 0, 0, 1], [700, 300, 1, 60])
PLAIN: dict[str, Any] = {"heads": (32, 8), "dims": (128, 128)}


def faked(made: Any) -> Any:
    """Lists of the same shapes and strides, on a GPU that is not there."""
    if isinstance(made, torch.Tensor):
        return torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device="cuda")
    if isinstance(made, (Lists, ForestLists)):
        return type(made)(*(faked(getattr(made, field.name)) for field in fields(made)))
    return made


def compile_both(
    patch: pytest.MonkeyPatch,
    heads: tuple[int, int],
    dims: tuple[int, int],
    forest: PrefixForest = FOREST,
    dtype: torch.dtype = torch.bfloat16,
    sinks: bool = False,
    dlse: bool = False,
    **options: Any,
) -> None:
    plan = mask_of(forest).plan
    settings = Options(**({"scale": 0.1} | options))
    tiles = launch.tiles_for(*dims)
    made = lists_of(plan, tiles, settings.window, torch.device("cpu"))
    patch.setattr(launch, "_on", lambda device: contextlib.nullcontext())
    patch.setattr(device, "address", lambda array: cutlass.Int64(0))
    with FakeTensorMode():
        lists = faked(made)
        patch.setattr(launch, "lists_of", lambda *arguments: lists)

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="cuda")

        tokens = plan.num_tokens
        q, k = empty(tokens, heads[0], dims[0]), empty(tokens, heads[1], dims[0])
        v = empty(tokens, heads[1], dims[1])
        sink = empty(heads[0]) if sinks else None
        assert launch.refused_features(q, v, settings.scale, plan, False) is None
        out, lse = launch.forward(q, k, v, sink, plan, settings)
        assert out.shape == (tokens, heads[0], dims[1]) and lse.shape == (heads[0], tokens)
        dlse_ = torch.empty_like(lse) if dlse else None
        *grads, dsinks = launch.backward(
            torch.empty_like(out), dlse_, q, k, v, sink, out, lse, plan, settings
        )
        assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
        assert dsinks is None if sink is None else dsinks.shape == sink.shape


@pytest.mark.parametrize(
    "case",
    [
        PLAIN | {"window": 200},
        PLAIN | {"softcap": 20.0},
        PLAIN | {"sinks": True, "dlse": True, "window": 200, "softcap": 20.0},
        PLAIN | {"dlse": True, "dtype": torch.float16},
        {"heads": (4, 4), "dims": (64, 64)},
        {"heads": (7, 1), "dims": (128, 128)},
        {"heads": (4, 1), "dims": (80, 80)},
        {"heads": (4, 2), "dims": (16, 16)},
        {"heads": (4, 4), "dims": (192, 128)},
        {"heads": (4, 2), "dims": (192, 192)},
        {"heads": (8, 2), "dims": (256, 256)},
        {"heads": (8, 2), "dims": (256, 256), "window": 200, "softcap": 20.0, "sinks": True},
        # a single tile
        PLAIN | {"forest": PrefixForest.from_parents([-1], [100])},
    ],
    ids=lambda case: " ".join(f"{k}={v}" for k, v in case.items() if k != "forest"),
)
def test_it_compiles(monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    compile_both(monkeypatch, **case)


def test_the_plain_kernels_do_not_spill(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """By ptxas' own words; with flash-attn-4's wrapped indices the backward does."""
    for call in (interface._flash_attn_fwd, interface._flash_attn_bwd):
        call.compile_cache.clear()
    compile_both(monkeypatch, **PLAIN)
    said = "".join(capfd.readouterr())
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", said)]
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", said)]
    print(f"registers {registers}, spilled bytes {spilled}")
    # the forward and the backward, and what prepares and converts where it was not compiled yet
    assert len(spilled) >= 2 and registers.count(168) == 2, said
    assert not any(spilled)
