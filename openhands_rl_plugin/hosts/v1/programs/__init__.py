"""Programs that start conversations with ``RLAgent``: one task, an ACP server, OpenHands' CLI."""
