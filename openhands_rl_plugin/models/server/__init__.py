"""An OpenAI-compatible server over ``models.generator``, with hot-reloaded adapters. Start with ``app``."""
