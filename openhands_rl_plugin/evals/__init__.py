"""Evaluation: suites of tasks, runs of an agent over them, and reports. Start with ``runs/evaluate``."""
