"""From recorded trajectories to a trained LoRA adapter."""
