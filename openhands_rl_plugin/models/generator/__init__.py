"""Token generation on this machine: batching, prefix cache, LoRA, sampling. Start with ``generator``."""
