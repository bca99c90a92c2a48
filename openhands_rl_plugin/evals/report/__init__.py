"""Reports of evaluation runs and comparisons of two: ``run_records`` reads runs, ``figures`` computes.

Start with ``figures``.
"""
