"""Ways to run a family's own code along the tree: a module gets another class, a forward is copied
with other global names. No class or module of transformers is changed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import CellType, FunctionType
from typing import Any

from torch import nn

from prefixtree.errors import UnsupportedError

# makes the additional members of a class along the tree, above all a forward
Members = Callable[[Any], dict[str, Any]]


class AlongTree:
    """Base of the classes that prepared modules get.

    It is a class and not a forward of the instance: copies and pickles of a module keep it, and
    nothing stays bound to the module that was copied.
    """

    _original: Any
    _members: Members

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (self._original, type(self)._members), self.__dict__


def _rebuild(original: Any, members: Members) -> Any:
    kind = along_tree(original, members)
    return kind.__new__(kind)


@functools.cache
def along_tree(original: Any, members: Members) -> type[nn.Module]:
    """Makes the class of a module along the tree; one per class, so torch.compile keeps its graphs.

    Args:
        members: a function that a module holds, so that pickles find it.
    """
    about = {
        "_original": original,
        "_members": staticmethod(members),
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    return type(original.__name__, (AlongTree, original), about | members(original))


def check_own_code(name: str, module: nn.Module, kind: str) -> None:
    """Refuses a module whose forward is not transformers'.

    Args:
        kind: the module's name in messages.
    """
    class_name = type(module).__name__
    origin = str(inspect.unwrap(type(module).forward).__globals__.get("__name__", "transformers."))
    if not origin.startswith("transformers.") and not isinstance(module, AlongTree):
        raise UnsupportedError(
            f"{name}: {class_name}.forward is not the one of transformers but comes from {origin}: "
            "undo the patch, or it would not be known along the tree"
        )
    hooked = next((n for n, m in module.named_modules() if hasattr(m, "_hf_hook")), None)
    if hooked is not None:
        place = ".".join(part for part in (name, hooked) if part)
        raise UnsupportedError(
            f"{place} has a hook of accelerate (offloading, or a device_map over several devices), "
            f"which is not verified on {kind}: load the model on one device, without device_map"
        )
    if "forward" in vars(module):
        raise UnsupportedError(
            f"{name} ({class_name}) has a forward of its own ({vars(module)['forward']!r}), which "
            "knows no tree: undo the patch"
        )


# ---- copies of forwards --------------------------------------------------------------------------


def with_globals(forward: Any, meanings: Mapping[str, Callable[[Any], Any]]) -> Any:
    """Copies a function with other global names; its decorators stay.

    Args:
        meanings: per global name, makes the new object from the old one.

    Raises:
        UnsupportedError: a decorator that does not call what it decorates.
    """
    wrapped = getattr(forward, "__wrapped__", None)
    closure, scope = forward.__closure__, forward.__globals__
    if wrapped is None:
        scope = dict(scope)
        # torch.compile looks for the globals of a function that has it in that module instead
        scope.pop("__name__", None)
        for name, meaning in meanings.items():
            scope[name] = meaning(scope[name])
    else:
        inner = with_globals(wrapped, meanings)
        closure = tuple(CellType(inner) if c.cell_contents is wrapped else c for c in closure)
        if closure == forward.__closure__:
            raise UnsupportedError(
                f"{forward.__qualname__} stands in a decorator that does not call it: not verified"
            )
    copy = FunctionType(
        forward.__code__.replace(), scope, forward.__name__, forward.__defaults__, closure
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    copy.__dict__.update(forward.__dict__)
    if wrapped is not None:
        copy.__wrapped__ = inner  # type: ignore[attr-defined]
    return copy
