"""Reinforcement learning here against TRL's GRPOTrainer at equal processor time: start with ``compare``."""
