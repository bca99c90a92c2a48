"""Serving of a local model with versioned LoRA adapters. Importing this package loads no torch."""

from openhands_rl_plugin.serving.threads import prepare_threads

# Here, because it must come before torch's first import, and all modules that import torch are below this one.
prepare_threads()
