"""Rolling out, training and publishing by turns: runs put together from settings, for ``loop`` and ``demo``."""
