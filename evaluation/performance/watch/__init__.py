"""Benchmarks of learning in use: what its gates let through (``gates``)."""
