"""Trained models: LoRA, quantised, whole; their layers, fused kernels, packed attention. Start with ``lora_policy``."""
