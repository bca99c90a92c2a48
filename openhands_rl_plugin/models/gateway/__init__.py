"""A recording proxy in front of any OpenAI-compatible server: agents need a change of ``base_url`` only."""
