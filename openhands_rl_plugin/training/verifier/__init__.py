"""Training a verifier: labels and splits (``data``), the question (``prompt``), its report. Start with ``train``."""
