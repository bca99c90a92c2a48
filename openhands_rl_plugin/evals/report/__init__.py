"""Reports of evaluation runs and comparisons of two: ``run_records`` reads runs, ``figures`` computes, ``page`` writes.

Start with ``figures``.
"""
