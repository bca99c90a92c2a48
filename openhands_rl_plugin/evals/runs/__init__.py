"""Evaluation runs: suites, episodes, grading, resuming, OpenHands' output files.

Start with ``evaluate``, which the command calls, then ``runner`` (one graded episode).
"""
