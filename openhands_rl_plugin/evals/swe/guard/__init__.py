"""Reward-hack guard: restored files, checks of the run's own report, altered tests. Start with ``guard``."""
