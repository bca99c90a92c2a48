"""OpenEnv servers over their WebSocket. Start with ``client``."""
