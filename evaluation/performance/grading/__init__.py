"""Benchmarks of grading: its cost in addition to the tests, and how long the local suite takes."""
