"""Makes tasks of packages: bugs that their tests detect, past fixes, the quality gate. Start with ``suite``."""
