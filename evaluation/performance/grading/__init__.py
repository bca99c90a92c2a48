"""Benchmarks of grading: what it costs beside the tests, and how long the local suite takes."""
