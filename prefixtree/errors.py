"""The errors prefixtree raises on purpose: each says what was expected, what came, and the fix."""


class ForestError(ValueError):
    """The sequences, masks or trees handed in do not describe a prefix forest."""


class UnsupportedError(NotImplementedError):
    """A request that this build, device or model cannot serve exactly; the message says why."""


class InputError(ValueError):
    """A file, a name or a setting that cannot be used; the message says which and why."""
