"""Injected bugs: the kinds of them, and how a syntax tree is changed without touching the rest of a file."""
