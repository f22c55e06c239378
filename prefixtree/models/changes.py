"""Changes of a model: those of one call, which are taken back, and those of others between two
calls.

A model that an interrupt left changed fails in its next call, or scores something else. So a call
changes a model through `changing`: the way back is noted before each change, and every step of it
may run twice. The backward of steps and a sampler's keys need the model they began with. A
`ModelStamp` tells, without reading numbers of tensors, so that it never waits for a GPU.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

_ABSENT = object()


class Changes:
    """Changes of modules, and the way back; `lock` is held by the thread that makes them."""

    def __init__(self, lock: threading.RLock) -> None:
        self.lock = lock
        self.thread = threading.get_ident()
        self._way_back: list[Callable[[], None]] = []

    def note(self, module: Any, *names: str) -> None:
        """Notes attributes of an instance, present or absent, as they are now."""
        held = vars(module)
        for name in names:
            self._way_back.append(partial(_put, held, name, held.get(name, _ABSENT)))

    def set(self, module: Any, **attributes: Any) -> None:
        """Sets attributes of an instance; those of its class stay."""
        self.note(module, *attributes)
        vars(module).update(attributes)

    def hook(self, register: Callable[..., Any], hook: Callable[..., Any], **options: Any) -> None:
        """Registers a hook through a method such as `module.register_forward_hook`."""
        handles: list[Any] = []
        self._way_back.append(partial(_remove, handles))
        handles.append(register(hook, **options))

    def keep(self) -> None:
        """Makes the changes so far permanent."""
        self._way_back.clear()

    def take_back(self) -> None:
        """Takes all changes back, last to first; after an interrupt, the remaining ones."""
        while self._way_back:
            self._way_back[-1]()
            self._way_back.pop()


def _put(held: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        held.pop(name, None)
    else:
        held[name] = value


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


@contextmanager
def changing(model: Any) -> Iterator[Changes]:
    """A context in which this thread may change a model and what is inside of it.

    Everything is as before once it closes, whatever was raised and wherever. Other threads that
    want to change the model wait; the same thread may open it again.
    """
    lock = _lock_of(model)
    with lock:
        changes = Changes(lock)
        _open[changes] = None
        try:
            try:
                yield changes
            finally:
                changes.take_back()
        finally:
            # an interrupt of the line above
            changes.take_back()


# ---- threads and processes -----------------------------------------------------------------------

_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_locks_lock = threading.Lock()
# in the order in which they were opened
_open: weakref.WeakKeyDictionary[Changes, None] = weakref.WeakKeyDictionary()


def _lock_of(model: Any) -> threading.RLock:
    with _locks_lock:
        return _locks.setdefault(model, threading.RLock())


def _after_fork() -> None:
    """Takes other threads' changes back and releases their locks in the child of a fork.

    Only the thread that forked goes on there. A fork that waited for the locks instead would wait
    for whole forwards.
    """
    global _locks_lock
    _locks_lock = threading.Lock()
    open_changes, thread = list(_open), threading.get_ident()
    for changes in reversed(open_changes):
        if changes.thread != thread:
            changes.take_back()
    held = [changes.lock for changes in open_changes if changes.thread == thread]
    for model, lock in list(_locks.items()):
        if lock not in held:
            _locks[model] = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# ---- checkpointing, turned off and on by trainers ------------------------------------------------

#: Attributes of modules that change meanwhile, but no number of a forward.
OF_CHECKPOINTING = frozenset(
    {
        "gradient_checkpointing",
        "_gradient_checkpointing_func",
        "_require_grads_hook",
        "_require_grads_hooks",
    }
)
_ASKING = "make_inputs_require_grads", "make_inputs_require_grad"
_ASKING_PACKAGES = "transformers", "peft"


def asks_for_gradients(hook: Any) -> bool:
    """Whether a hook only sets requires_grad, as transformers and PEFT register it.

    Of transformers' there is one more whenever a trainer turns checkpointing on again.
    """
    package = str(getattr(hook, "__module__", "")).partition(".")[0]
    return getattr(hook, "__name__", "") in _ASKING and package in _ASKING_PACKAGES


# ---- the state of a model at one moment ----------------------------------------------------------

# wrappers whose plain attributes are their machinery
_WRAPPERS = DistributedDataParallel, FullyShardedDataParallel
# private attributes of PEFT's layers, and one that some layers have from their class
_OF_ADAPTERS = "_active_adapter", "_disable_adapters", "merged_adapters"
# they change no number that a forward gives
_HARMLESS = OF_CHECKPOINTING | {"use_cache"}
# they say how the model trains, not what it computes without noise
_OF_TRAINING = frozenset({"training"})
_CHILDREN = "_modules"


class _Tensor(NamedTuple):
    """A parameter, a buffer or another tensor, and its state when it was recorded."""

    owner: Any
    name: str
    # the module that holds it under this name
    where: Mapping[str, Any]
    tensor: torch.Tensor
    address: int
    # None for a tensor of inference mode, which has no version, or one that forwards write
    version: int | None
    is_trained: bool


class _Setting(NamedTuple):
    """A plain attribute, or the children of a module, and its value when it was recorded."""

    owner: Any
    name: str
    where: Mapping[str, Any]
    value: Any


class ModelStamp:
    """Records the state of a model, to tell later whether it changed.

    It notices another module in a place; parameters, buffers and other tensors of modules that were
    replaced, got other memory (`.data =`) or were written, also by torch's optimizers; plain
    attributes of modules and configurations (numbers, words, lists and dictionaries of them), among
    them the active adapters, their scaling and whether they are merged.

    It does not notice numbers written through `.data`, or the state of hooks.

    Args:
        others: names and tensors that must stay the same too. Default: none.
        for_backward: whether `training` and `requires_grad` must stay the same. Default: False.
    """

    def __init__(
        self,
        model: nn.Module,
        others: Mapping[str, torch.Tensor] | None = None,
        for_backward: bool = False,
    ) -> None:
        self._model = model
        self._for_backward = for_backward
        modules = list(model.modules())
        # sharding takes parameters out of their places and puts others there
        self._in_place = not any(
            isinstance(m, (FSDPModule, FullyShardedDataParallel)) for m in modules
        )
        ignored = _HARMLESS if for_backward else _HARMLESS | _OF_TRAINING
        self._tensors = [
            *_tensors_of(modules, self._in_place),
            *_tensors_in(None, others or {}),
        ]
        self._settings = list(_settings_of(modules, ignored))
        # fused optimizers change parameters and leave their versions as they are (torch 2.13)
        updated = self._updated = set[int]()
        hook = register_optimizer_step_post_hook(
            lambda optimizer, *_: updated.update(
                id(p)
                for group in optimizer.param_groups
                for p in group["params"]
                if p.grad is not None
            )
        )
        weakref.finalize(self, hook.remove)

    def settle(self) -> None:
        """Accepts what the first forwards changed themselves.

        PEFT sets the parameters that `target_parameters` names, and modules count their calls.
        """
        self._tensors = [
            held._replace(version=None) if _is_written(held) else held
            for held in self._tensors
            if not self._is_replaced(held)
        ]
        self._settings = [held for held in self._settings if not _is_other(held)]

    def change(self) -> str | None:
        """Says the first change, "NAME changed" or "A of NAME became X (it was Y)", if any."""
        # settings first: another adapter also changes which parameters are trained
        for setting in self._settings:
            if _is_other(setting):
                if setting.name == _CHILDREN:
                    return f"modules of {self._path_of(setting.owner)} were replaced"
                now = f"{setting.where[setting.name]!r} (it was {setting.value!r})"
                return f"{setting.name} of {self._path_of(setting.owner)} became {now}"
        for held in self._tensors:
            if self._is_replaced(held):
                return f"{self._name_of(held)} was replaced"
            if _is_written(held) or id(held.tensor) in self._updated:
                return f"{self._name_of(held)} changed"
            if self._for_backward and held.tensor.requires_grad != held.is_trained:
                return f"requires_grad of {self._name_of(held)} became {not held.is_trained}"
        return None

    def _is_replaced(self, held: _Tensor) -> bool:
        now = held.where.get(held.name)
        return self._in_place and (now is not held.tensor or held.tensor.data_ptr() != held.address)

    def _name_of(self, held: _Tensor) -> str:
        if held.owner is None or held.owner is self._model:
            return held.name
        return f"{self._path_of(held.owner)}.{held.name}"

    def _path_of(self, owner: Any) -> str:
        """Finds the place of a module or a configuration; slow, so only once something changed."""
        if owner is self._model:
            return "the model"
        names = (name for name, module in self._model.named_modules() if module is owner)
        return next(names, type(owner).__name__)


def _is_written(held: _Tensor) -> bool:
    return held.version is not None and held.tensor._version != held.version


# numbers and words, and what may hold them
_SCALARS = bool, int, float, str, type(None)
_PLAIN = *_SCALARS, dict, list, tuple


def _is_other(held: _Setting) -> bool:
    now = held.where.get(held.name, held.value)
    # a list or a dictionary is not the copy
    return now is not held.value and (not isinstance(now, _PLAIN) or now != held.value)


# ---- tensors and settings to compare -------------------------------------------------------------


def _tensors_of(modules: Sequence[nn.Module], with_attributes: bool) -> Iterator[_Tensor]:
    copied = [m for m in modules if isinstance(m, DistributedDataParallel)]
    # some of its forwards write what rank 0 has, and others do not
    written = {id(buffer) for module in copied for buffer in module.buffers()}
    for module in modules:
        yield from _tensors_in(module, module._parameters, written)
        yield from _tensors_in(module, module._buffers, written)
        if with_attributes:
            yield from _tensors_in(module, vars(module))


def _tensors_in(
    owner: Any, where: Mapping[str, Any], written: Collection[int] = ()
) -> Iterator[_Tensor]:
    for name, tensor in where.items():
        # offloaded ones are made anew for each forward
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
            no_version = tensor.is_inference() or id(tensor) in written
            version = None if no_version else tensor._version
            yield _Tensor(
                owner, name, where, tensor, tensor.data_ptr(), version, tensor.requires_grad
            )


def _settings_of(modules: Iterable[nn.Module], ignored: frozenset[str]) -> Iterator[_Setting]:
    configs: dict[int, Any] = {}
    for module in modules:
        attributes = vars(module)
        if module._modules:
            yield _Setting(module, _CHILDREN, attributes, dict(module._modules))
        if not isinstance(module, _WRAPPERS):
            yield from _plain_settings(module, attributes, ignored)
        config = attributes.get("config")
        if hasattr(config, "__dict__"):
            configs[id(config)] = config
    for config in configs.values():
        yield from _plain_settings(config, vars(config), ignored)


def _plain_settings(
    owner: Any, attributes: Mapping[str, Any], ignored: frozenset[str]
) -> Iterator[_Setting]:
    for name, value in attributes.items():
        if name[0] != "_" and name not in ignored:
            plain = _plain(value)
            if plain is not _OTHER:
                yield _Setting(owner, name, attributes, plain)
    kind = type(owner)
    for name in _OF_ADAPTERS:
        if hasattr(kind, name):
            yield _Setting(owner, name, attributes, _plain(getattr(owner, name)))


_OTHER = object()


def _plain(value: Any) -> Any:
    """Copies a number, a word, or a list or dictionary of these; `_OTHER` for anything else."""
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, dict):
        items = {key: _plain(one) for key, one in value.items()}
        return _OTHER if _OTHER in items.values() else items
    if isinstance(value, (list, tuple)):
        parts = [_plain(one) for one in value]
        if _OTHER not in parts:
            return parts if isinstance(value, list) else tuple(parts)
    return _OTHER
