"""Evaluation runs: suites, episodes, grading, resuming, OpenHands' output files, metrics.

Start with ``evaluate``, which the command calls.
"""
