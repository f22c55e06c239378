"""Triton's interpreter without what it does again at every call: two thirds of its time.

For each launch and for each call of a function inside a kernel it looks through all of
triton.language for what to replace (`_patch_lang`), and it checks every sum and product of 32 bits
for overflow by computing it in 64. For each value it writes the name of its type, wraps each
number of its shape, and writes a table to look numpy's dtype up in.
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

    @cache
    def in_interpreter(member: Any) -> Any:
        """A builtin as kernels call it here, without the check that the compiler is there."""
        inner = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return inner(*args, **kwargs)

        return call

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins_of(package):
            scope.set_attr(package, name, in_interpreter(member))

    builder: Any = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang, interpreter._patch_builtin = patch_once, patch_builtin  # type: ignore[assignment]
    _remember_types(interpreter)


def _remember_types(interpreter: Any) -> None:
    """A shape, its numbers as constants, and a dtype are made once and shared: nobody changes
    them."""
    core, dtype_of = interpreter.tl.core, interpreter._get_np_dtype
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}
    dtype_of_scalar = cache(dtype_of)

    def block_init(self: Any, element_ty: Any, shape: Any) -> None:
        numbers = tuple([n.value if type(n) is core.constexpr else n for n in shape])
        key = element_ty.name, numbers
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = {name: vars(self)[name] for name in ("shape", "numel", "name")}
        vars(self).update(blocks[key], element_ty=element_ty)

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        numbers = tuple(type.shape.values) if type.is_block() else ()
        if numbers not in shapes:
            make_tensor(self, handle, type)
            shapes[numbers] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[numbers]

    def np_dtype(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, core.block_type) else dtype
        known = dtype_of if isinstance(scalar, core.pointer_type) else dtype_of_scalar
        return known(scalar)

    core.block_type.__init__, core.tensor.__init__ = block_init, tensor_init
    interpreter._get_np_dtype = np_dtype
