"""Rewards: pure functions over stored trajectories."""
