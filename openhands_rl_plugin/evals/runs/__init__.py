"""Evaluation runs: suites, episodes, grading, resuming, OpenHands' output files.

Start with ``evaluate``, which the command calls, then ``swe_runner`` and ``environment_runner`` (one graded episode of
either kind).
"""
