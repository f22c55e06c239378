"""Forward hooks on the language model and its output embedding, whose output are scores."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn

import prefixtree as pt
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.support.models import assert_same, build, ragged_objective, ragged_packed, run_packed


def _edit(module: nn.Module, args: Any, output: Any) -> Any:
    output.logits = output.logits * 0.5
    return output


def _look(module: nn.Module, args: Any, output: Any) -> None:
    output.logits.argmax()


@pytest.mark.parametrize("hook", [_edit, _look])
def test_a_hook_on_the_language_model(hook):
    model = build("llama")
    model.register_forward_hook(hook)
    with pytest.raises(pt.UnsupportedError, match=r"language model, has a forward hook.*remove it"):
        sequence_logprobs(model, ragged_packed())


def _of(module: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as if `module` had it."""
    names = {**vars(sys.modules[__name__]), "__name__": module}
    return FunctionType(function.__code__, names, closure=function.__closure__)


# around every module, ZeRO-3 gathers parameters and releases them; the engine counts
_GATHERING = "deepspeed.runtime.zero.parameter_offload"


@pytest.mark.parametrize("module", [_GATHERING, "deepspeed.runtime.engine", "torch.distributed"])
def test_hooks_that_gather(module):
    model = build("llama")
    want = run_packed(model, ragged_packed(), ragged_objective())

    def alias(owner: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    model.register_forward_hook(_of(module, lambda *args: None))
    model.lm_head.register_forward_hook(_of(module, alias))
    assert_same(run_packed(model, ragged_packed(), ragged_objective()), want)


@pytest.mark.parametrize("module", ["deepspeed.profiling", "deepspeed_but_not_it", "elsewhere"])
def test_another_hook_on_the_output_embedding(module):
    model = build("llama")
    model.lm_head.register_forward_hook(_of(module, lambda *args: None))
    with pytest.raises(pt.UnsupportedError, match=r"the output embedding has a forward hook"):
        sequence_logprobs(model, ragged_packed())


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "hook",
    [
        lambda owner, args, output: output * 0.5,
        lambda owner, args, output: output.mul_(0.5),
        lambda owner, args, output: output.flip(1),
        lambda owner, args, output: output[:, 1:],
    ],
)
def test_a_known_hook_that_changes_its_output(hook, mode):
    """Whose package it is does not matter then."""
    model = build("llama")
    model.lm_head.register_forward_hook(_of(_GATHERING, hook))
    with mode(), pytest.raises(pt.UnsupportedError, match="a hook changed the output embedding's"):
        sequence_logprobs(model, ragged_packed())
