"""Advantages: which token gets how much credit. GRPO, RLOO ... are in ``algorithms``."""
