"""Injected bugs: the modifiers, in the ``table``, and edits of source text by position. Start with ``table``."""
