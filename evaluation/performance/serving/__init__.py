"""Benchmarks of generation, adapter reloads and verifier scoring, here and on a real vLLM."""
