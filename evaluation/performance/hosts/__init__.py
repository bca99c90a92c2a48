"""Benchmarks of OpenHands sessions: sessions a process, evaluation overhead."""
