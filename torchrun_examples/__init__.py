"""Short programs to copy. Each runs with the one torchrun line in its docstring.

May import: everything.
"""
