"""Problem statements: a bug report made from the tests that fail. Start with ``bug_report``."""
