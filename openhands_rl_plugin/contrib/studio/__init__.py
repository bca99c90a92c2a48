"""The studio: stored episodes, runs, evaluations and adapters in the browser. Start with ``server.running_studio``."""
