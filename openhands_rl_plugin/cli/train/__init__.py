"""``openhands-rl train``. Start with ``train``."""
