"""A file per benchmark: the question in its docstring's first line, and `main(arguments)`."""
