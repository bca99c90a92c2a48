"""The training loop (roll out, train, publish, repeat) built from settings, for ``openhands-rl loop`` and ``demo``.

Start with ``run``.
"""
