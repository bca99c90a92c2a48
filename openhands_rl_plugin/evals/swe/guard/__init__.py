"""Reward-hack guard: rules for patches, a channel besides the log, rules for commands. Start with ``guard``."""
