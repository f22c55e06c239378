"""Adapters: import the one for your stack; that of transformers registers itself."""

from importlib.util import find_spec

from prefixtree.errors import need_training

need_training(__name__)


def __getattr__(name: str) -> object:
    mend = ""
    if name[0] != "_" and find_spec(f"{__name__}.{name}") is not None:
        mend = f"; write import {__name__}.{name} first"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{mend}")
