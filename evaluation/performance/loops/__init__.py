"""Benchmarks of whole training loops: the demo over seeds."""
