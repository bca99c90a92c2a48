"""Benchmarks of formats: trajectories to sequences, answers to calls; ``*_peer`` is another project's code."""
