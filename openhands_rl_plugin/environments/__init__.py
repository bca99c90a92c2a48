"""Environments an episode can run in."""
