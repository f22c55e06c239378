"""Triton's interpreter without what it does again at every call: half of its time.

For each launch and for each call of a function inside a kernel it looks through all of
triton.language for what to replace (`_patch_lang`), and it checks every sum and product of 32 bits
for overflow by computing it in 64.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any


def without_repetition() -> None:
    """Once per process; nothing where this Triton's interpreter is made otherwise."""
    from triton.runtime import interpreter

    patch: Any = getattr(interpreter, "_patch_lang", None)
    scope_of: Any = getattr(interpreter, "_LangPatchScope", None)
    if patch is None or not hasattr(scope_of, "restore"):
        return
    patched: set[Any] = set()

    @cache
    def modules(fn: Any) -> frozenset[Any]:
        """The modules that `_patch_lang` changes for a function."""
        known = (interpreter.tl, interpreter.tl.core)
        return frozenset(v for v in fn.__globals__.values() if any(v is m for m in known))

    class OfLaunch(scope_of):  # type: ignore[misc]
        """Restores what a launch changed first, and lets the next launch change it again."""

        def restore(self) -> None:
            super().restore()
            patched.clear()

    def patch_once(fn: Any) -> Any:
        scope = OfLaunch()
        if not modules(fn) <= patched:
            scope._changes = patch(fn)._changes
            patched.update(modules(fn))
        return scope

    find: Any = interpreter.inspect.getmembers

    @cache
    def builtins_of(package: Any) -> list[tuple[str, Any]]:
        return [item for item in find(package) if interpreter.tl.core.is_builtin(item[1])]

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins_of(package):
            interpreter._patch_attr(package, name, member, builder, scope)

    builder: Any = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang, interpreter._patch_builtin = patch_once, patch_builtin  # type: ignore[assignment]
