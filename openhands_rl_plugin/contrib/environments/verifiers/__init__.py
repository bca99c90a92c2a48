"""Tasksets of verifiers, played by verifiers itself in a Python of its own. Start with ``environment``."""
