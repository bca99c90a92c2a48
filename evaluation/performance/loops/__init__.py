"""Benchmarks of whole training loops: the demo over seeds, the asynchronous loop against the synchronous one."""
