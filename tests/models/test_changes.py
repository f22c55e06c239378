"""`changing`: what is changed for one call is taken back, in one place."""

from __future__ import annotations

import ast
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import prefixtree
from prefixtree.models.changes import changing

ROOT = Path(prefixtree.__file__).parent

# ---- what is taken back --------------------------------------------------------------------------


def test_attributes_and_hooks_are_as_before() -> None:
    module = nn.Linear(1, 1, bias=False)
    module.kept, module.first = 1, 2
    before = list(vars(module).items())
    seen: list[Any] = []
    with pytest.raises(ValueError, match="inside"), changing(module) as outer:
        outer.set(module, kept=2, forward=seen.append)
        outer.note(module, "training", "later")
        module.eval()
        module.later = 3
        # the same thread again, and last comes first
        with changing(module) as inner:
            inner.set(module, kept=3, forward=lambda x: x)
            inner.hook(module.register_forward_pre_hook, lambda *given: seen.append(1))
            inner.hook(module.register_forward_hook, lambda *given: seen.append(2))
            module(torch.ones(1))
        assert (module.kept, seen, len(module._forward_hooks)) == (2, [1, 2], 0)
        raise ValueError("inside")
    assert list(vars(module).items()) == before


def test_what_is_kept_stays() -> None:
    module = nn.Linear(1, 1)
    with changing(module) as changes:
        changes.set(module, one=1)
        changes.keep()
        changes.set(module, two=2)
    assert module.one == 1 and not hasattr(module, "two")


def test_an_interrupt_of_the_way_back() -> None:
    """The second call takes back what is left."""
    module = nn.Linear(1, 1)

    def interrupt() -> None:
        changes._way_back.pop()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), changing(module) as changes:
        changes.set(module, one=1)
        changes._way_back.append(interrupt)
    assert not hasattr(module, "one")


# ---- threads and processes -----------------------------------------------------------------------


def test_other_threads_wait() -> None:
    module, order = nn.Linear(1, 1), []

    def change() -> None:
        with changing(module):
            order.append("thread")

    with changing(module):
        thread = threading.Thread(target=change)
        thread.start()
        time.sleep(0.05)
        order.append("first")
    thread.join()
    assert order == ["first", "thread"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_while_another_thread_changes_a_model() -> None:
    """The child hung: nobody released there what the other thread held, or took back its change."""
    theirs, ours = nn.Linear(1, 1), nn.Linear(1, 1)
    is_open, end = threading.Event(), threading.Event()

    def hold() -> None:
        with changing(theirs) as changes:
            changes.set(theirs, one=1)
            is_open.set()
            end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_open.wait()
    with changing(ours) as changes:
        changes.set(ours, one=1)
        child = os.fork()
        if child == 0:
            # what this thread changed goes on
            as_ours = ours.one == 1 and not hasattr(theirs, "one")
            with changing(theirs) as found, changing(ours):
                found.set(theirs, one=2)
            os._exit(0 if as_ours and not hasattr(theirs, "one") else 1)
    for _ in range(1000):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        status = -1
    assert theirs.one == 1
    end.set()
    thread.join()
    assert status == 0
    assert not hasattr(theirs, "one")


# ---- nobody changes a model elsewhere ------------------------------------------------------------

# where else a module or torch's state changes, and why that is not for one call
ELSEWHERE = {
    "models/changes.py": "the one place",
    "models/checks.py": "a refusal of classifiers that are called by themselves: stays",
    "models/prepared.py": "prepare: marks that stay",
    "models/compiled.py": "compile_layers: stays",
    "models/dropout.py": "share_dropout: stays",
    "states/layers.py": "prepare: stays, and a second call completes what is missing",
    "experts/routers.py": "hooks of a replay: they stay, and the next call completes them",
    "recompute/probes.py": "on a copy of the model",
    "recompute/encoder_memory.py": "on a copy of the vision encoder",
    "integrations/trl/distillation.py": "eval() of the teacher, as TRL does",
    "integrations/trl/grpo.py": "the lm_head's forward, which TRL set: stays, as TRL's does",
    "integrations/trl/rollouts.py": "eval(), noted before",
    "integrations/verl/engine.py": "of a configuration, and of a critic that is being made",
    "integrations/verl/megatron.py": "of a configuration",
    "integrations/verl/metrics.py": "of a configuration",
    "images/encodings.py": "the output of a vision encoder, which is no module",
    "sparse/indexers.py": "prepare: stays",
    "experts/products.py": "prepare: stays",
    "sampling/whole_copy.py": "a copy of its own, which is thrown away",
    "sampling/forward.py": "torch's synchronisation warnings, within try",
    "demo/depot.py": "models of its own",
    "testing/models.py": "models of its own",
    "testing/reference.py": "models of verify's own, thrown away; torch's precision, within try",
    "kernels/operators.py": "torch's namespace of operators: stays",
}
_METHODS = {
    *("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"),
    *("register_full_backward_pre_hook", "register_module_forward_hook"),
    *("train", "eval", "gradient_checkpointing_enable", "gradient_checkpointing_disable"),
    *("set_sync_debug_mode", "set_default_dtype", "set_default_device", "set_grad_enabled"),
}
_ATTRIBUTES = {
    *("forward", "training", "use_cache", "gradient_checkpointing", "__class__"),
    *("require_backward_grad_sync", "recompile_limit", "_gradient_checkpointing_func"),
    "allow_tf32",
}


def changes_in(text: str) -> set[str]:
    """The changes that a file makes to modules and to torch otherwise than through `Changes`."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found |= {node.func.attr} & _METHODS
            called = ast.unparse(node.func)
            found |= (
                {called} if called.startswith("vars(") and node.func.attr in _OF_VARS else set()
            )
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found |= {node.func.id} & {"setattr", "delattr"}
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        for target in targets if isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)) else []:
            if isinstance(target, ast.Attribute):
                found |= {target.attr} & _ATTRIBUTES
            elif isinstance(target, ast.Subscript) and "vars(" in ast.unparse(target.value):
                found.add("vars()[..]")
    return found


_OF_VARS = {"update", "setdefault", "pop", "clear"}


def test_the_reader_sees_changes() -> None:
    for line in (
        "model.forward = f",
        "vars(layer)['forward'] = f",
        "del vars(layer)['forward']",
        "vars(layer).update(forward=f)",
        "layer.training = False",
        "setattr(layer, name, f)",
        "handle = layer.register_forward_hook(f)",
        "model.eval()",
    ):
        assert changes_in(line), line
    assert changes_in("x = model.forward(y)\nx.values = 1\nvars(x).get('forward')") == set()


def test_nobody_changes_a_model_otherwise() -> None:
    """A hook, a forward or a switch that is set for one call goes through `changing`, whose way
    back is tested at each line (transformers/test_interrupts.py)."""
    files = {str(f.relative_to(ROOT)): f.read_text() for f in sorted(ROOT.rglob("*.py"))}
    found = {name: seen for name, text in files.items() if (seen := changes_in(text))}
    assert {n: s for n, s in found.items() if n not in ELSEWHERE} == {}
    assert ELSEWHERE.keys() - found.keys() == set(), "no longer there"
