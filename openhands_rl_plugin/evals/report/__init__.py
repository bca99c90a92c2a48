"""Figures of evaluation runs and comparisons of two, from what ``evals.runs.run_files`` reads.

Start with ``figures``.
"""
