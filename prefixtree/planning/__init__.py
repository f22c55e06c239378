"""Which sequences run together, in what parts, and at what cost."""
