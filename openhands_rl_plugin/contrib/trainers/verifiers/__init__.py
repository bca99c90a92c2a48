"""OpenHands as the harness of verifiers 0.4 and prime-rl, in a Python of its own, and our suites as its taskset."""
