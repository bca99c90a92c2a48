"""Evaluation: suites of tasks, runs of an agent over them, and reports that can be trusted."""
