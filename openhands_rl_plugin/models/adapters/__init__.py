"""Versioned LoRA adapters on the disk (``store``) and in model servers (``publisher``)."""
