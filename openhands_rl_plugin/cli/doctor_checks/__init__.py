"""The checks of ``openhands-rl doctor``. Start with ``checks``."""
