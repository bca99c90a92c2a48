"""Evaluation runs: suites, instances, resuming, outcomes. Start with ``evaluation``."""
