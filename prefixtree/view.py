"""The old name of `prefixtree.plotting`."""

from prefixtree._renamed import renamed_names

_NAMES = ("plot_forest", "plot_mask")
__getattr__ = renamed_names(__name__, {name: f"prefixtree.plotting.{name}" for name in _NAMES})
