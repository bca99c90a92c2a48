"""Tasks in Harbor's format (Terminal-Bench 2) in a local sandbox. Start with ``tasks``, then ``environment``."""
