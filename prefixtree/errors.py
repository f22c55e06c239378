"""The errors prefixtree raises: each says what was expected, what came and how to mend it."""


class ForestError(ValueError):
    """The sequences, masks or trees do not describe a prefix forest, or do not belong to it."""


class UnsupportedError(NotImplementedError):
    """This build, device or model cannot serve a request exactly; the message says why."""


class InputError(ValueError):
    """A file, a name or a setting cannot be used; the message says which one and why."""
