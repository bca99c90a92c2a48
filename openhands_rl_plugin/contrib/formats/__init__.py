"""Formats of other programs, reached by the entry points ``openhands_rl_plugin.formats``: each is a ``Format``."""
