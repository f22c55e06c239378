"""`Backend`: kernels by the name that calls give, imported when a call first needs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from prefixtree.kernels.packages import installed


class _Refuses(Protocol):
    def refusal(self, call: Any) -> str | None:
        """Why they cannot serve a call, in words that follow their name; None if they can."""
        ...


K = TypeVar("K", bound=_Refuses)


@dataclass(frozen=True)
class Backend(Generic[K]):
    """One implementation of a room's operators. Stateless.

    Attributes:
        name: what the keyword `backend` calls it.
        load: imports and returns the module of its kernels.
        package: a package that must be installed before `load` is called; None for none.
    """

    name: str
    load: Callable[[], K]
    package: str | None = None

    @property
    def kernels(self) -> K:
        """The functions of the module, as the room's protocol has them."""
        return self.load()

    def refuses(self, call: Any) -> str | None:
        """Says why this backend cannot serve a call; None if it can. The text follows its name."""
        if self.package is not None and not installed(self.package):
            return f"it needs the package {self.package}"
        try:
            kernels = self.kernels
        except (ImportError, AttributeError) as problem:
            return f"its kernels cannot be imported ({problem})"
        return kernels.refusal(call)
