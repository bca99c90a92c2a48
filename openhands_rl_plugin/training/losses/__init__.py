"""Losses of the algorithms over log-probabilities. Start with ``losses``; the formulas are in ``objectives``."""
