"""The storage ``file``: one SQLite file in a folder. Start with ``storage``."""
