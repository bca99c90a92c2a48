"""Losses of the algorithms over log-probabilities, with their formulas."""
