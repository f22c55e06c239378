"""`python -m prefixtree` is the `prefixtree` command."""

from prefixtree.cli import main

if __name__ == "__main__":
    main()
