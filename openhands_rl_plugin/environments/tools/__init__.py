"""Tools as an environment: a call is a step. Start with ``environment``."""
