"""The trainer: steps, checkpoints, metrics, trackers, memory. Start with ``trainer``."""
