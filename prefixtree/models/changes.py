"""Changes that one call makes to a model, and their way back.

A model that an interrupt left changed dies in its next call, or scores something else. So what is
changed for one call is changed through `changing`: the way back is noted before each change, and
every step of it may run twice.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

_ABSENT = object()


class Changes:
    """Changes of modules, and the way back.

    Args:
        lock: held by the thread that makes them.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self.lock = lock
        self.thread = threading.get_ident()
        self._way_back: list[Callable[[], None]] = []

    def note(self, module: Any, *names: str) -> None:
        """Notes attributes of an instance, to be as they are now or absent as they are now."""
        held = vars(module)
        for name in names:
            self._way_back.append(partial(_put, held, name, held.get(name, _ABSENT)))

    def set(self, module: Any, **attributes: Any) -> None:
        """Sets attributes of an instance; those of its class stay."""
        self.note(module, *attributes)
        vars(module).update(attributes)

    def hook(self, register: Callable[..., Any], hook: Callable[..., Any], **options: Any) -> None:
        """Registers a hook.

        Args:
            register: a method such as `module.register_forward_hook`.
            hook: what it takes. options: its other arguments.
        """
        handles: list[Any] = []
        self._way_back.append(partial(_remove, handles))
        handles.append(register(hook, **options))

    def keep(self) -> None:
        """Makes the changes so far permanent."""
        self._way_back.clear()

    def take_back(self) -> None:
        """Takes all changes back, last to first; after an interrupt, those that are left."""
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
    """While open, this thread may change a model and what is inside of it.

    Behind it everything is as before, whatever was raised and wherever. Other threads that want to
    change the model wait; the same thread may open it again.

    Args:
        model: a module, or another object with attributes.
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
    """In the child of a fork only the thread that forked goes on.

    Nobody else would take back there what other threads had changed, or release their locks. A fork
    that waited for the locks instead would wait for whole forwards.
    """
    global _locks_lock
    _locks_lock = threading.Lock()
    found, thread = list(_open), threading.get_ident()
    for changes in reversed(found):
        if changes.thread != thread:
            changes.take_back()
    held = [changes.lock for changes in found if changes.thread == thread]
    for model, lock in list(_locks.items()):
        if lock not in held:
            _locks[model] = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
