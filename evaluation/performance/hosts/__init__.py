"""Benchmarks of OpenHands sessions: recording overhead, sessions a process, evaluation overhead."""
