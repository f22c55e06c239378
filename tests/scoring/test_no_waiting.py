"""A forward and a backward of a packed forest queue work for the GPU without waiting for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

import prefixtree as pt
from prefixtree import PackedForest
from prefixtree.recompute.layers import MODES
from tests.support.models import build, enable_checkpointing, pack_sequences

# operators whose result the host reads, or whose shape depends on values
_READS = {"_local_scalar_dense", "equal", "allclose", "nonzero", "masked_select", "_unique2"}
# dynamo's own look at .grad of its inputs
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


SEQUENCES = [[5, 6, 7, 8, 9], [5, 6, 7, 10], [5, 11, 12, 13]]
MASKS = [np.arange(len(sequence)) > 1 for sequence in SEQUENCES]


class HostRead(AssertionError):
    """A value of a tensor was read."""


class NothingIsRead(TorchDispatchMode):
    """Raises where the host would wait for a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        by_mask = name.startswith("index") and any(
            isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8)
            for i in (args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ())
        )
        if (name in _READS and not _is_handle(args[0])) or by_mask:
            raise HostRead(name)
        return func(*args, **(kwargs or {}))


def _is_handle(tensor: torch.Tensor) -> bool:
    # a mask's number stands in a tensor of its own, on the CPU whatever the device
    return tensor.dtype == torch.int64 and tensor.shape == (1,) and tensor.device.type == "cpu"


@pytest.fixture
def no_look_for_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers looks for packed sequences in position_ids before its layers run, and reads the
    result: one wait per forward that is not ours. The masks it looks for are never made."""
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)


def update(model: Any, packed: PackedForest, mode: str) -> None:
    """Old log-probabilities, then forward and backward, as in a policy update."""
    with torch.no_grad():
        old = pt.sequence_logprobs(model, packed, loss_mask=MASKS).logprobs
    new = pt.sequence_logprobs(model, packed, loss_mask=MASKS, recompute=mode).logprobs
    ratio = (torch.cat(new) - torch.cat(old)).exp()
    ratio.clamp(0.8, 1.2).sum().backward()


def a_model(model_type: str, **more: Any) -> Any:
    model = build(model_type, **more).train()
    enable_checkpointing(model, use_reentrant=False)
    return model


@pytest.mark.usefixtures("no_look_for_sequences")
@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe", "gemma2"])
def test_nothing_is_read(model_type: str) -> None:
    model, packed = a_model(model_type), pack_sequences(SEQUENCES)
    for mode in MODES:
        update(model, packed, mode)
        with NothingIsRead():
            update(model, packed, mode)
    # the test sees what it is for
    with pytest.raises(HostRead, match="equal"), NothingIsRead():
        inputs = packed.model_inputs()
        model(**inputs | {"position_ids": inputs["position_ids"].clone()})


@pytest.mark.usefixtures("no_look_for_sequences")
def test_nothing_is_read_of_a_part() -> None:
    model, packed = a_model("qwen3"), pack_sequences(SEQUENCES)
    with NothingIsRead():
        pt.sequence_logprobs(model, packed, max_step_tokens=8)
    packed.position_ids[-1] += 1
    with pytest.raises(ValueError, match="position_ids are not the tokens' positions"):
        pt.sequence_logprobs(model, packed, max_step_tokens=8)


def test_positions_are_known_by_memory_that_nobody_wrote_to() -> None:
    model, packed = a_model("qwen3"), pack_sequences(SEQUENCES)
    inputs = packed.model_inputs()
    assert packed.mask.is_given(inputs["position_ids"][0])
    assert not packed.mask.is_given(inputs["position_ids"][0].clone())
    # a part of the same memory is another tensor
    assert not packed.mask.is_given(inputs["position_ids"][0, :-1])
    packed.position_ids[-1] += 1
    assert not packed.mask.is_given(inputs["position_ids"][0])
    with pytest.raises(ValueError, match="position_ids are not the tokens' positions"):
        model(**packed.model_inputs())
    # equal again, and found so by looking
    packed.position_ids[-1] -= 1
    model(**packed.model_inputs())


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.usefixtures("no_look_for_sequences")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_gpu_is_not_waited_for(compiled: bool) -> None:
    model = a_model("qwen3", head_dim=64).to("cuda", torch.bfloat16)
    if compiled:
        pt.compile_layers(model)
    packed = pack_sequences(SEQUENCES).to("cuda")
    for mode in (*MODES, "auto"):
        # kernels are compiled, and tables of the forest made
        update(model, packed, mode)
        torch.cuda.synchronize()
        with waiting_is_an_error():
            update(model, packed, mode)
