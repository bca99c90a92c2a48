"""Benchmarks of search: overhead, forks of a workspace, success against tokens (``curve``)."""
