"""Advantages: which token gets how much credit. Start with ``credit``; GRPO, RLOO ... are in ``estimators``."""
