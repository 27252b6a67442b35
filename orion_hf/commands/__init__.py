"""One file a command; each has ``main(argv) -> int``, and the first line of its docstring is its help."""
