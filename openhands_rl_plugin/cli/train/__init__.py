"""``openhands-rl train`` and ``watch``. Start with ``train``."""
