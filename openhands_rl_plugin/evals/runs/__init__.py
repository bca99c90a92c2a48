"""Evaluation runs: suites, episodes, grading, resuming, OpenHands' output files.

Start with ``evaluate`` (what the command calls), then ``evaluation`` (every task in every run), then ``swe_runner`` and
``environment_runner`` (one graded episode of either kind).
"""
