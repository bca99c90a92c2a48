"""Reward-hack guard: rules over patches, a channel beside the test log, agents' commands. Start with ``guard``."""
