"""What the official scripts find instead of conda: programs for the sandbox, run there by the host's Python.

They import the standard library only, because nothing else is visible to them.
"""
