"""Benchmarks of the trainer: packing, and SFT against TRL's SFTTrainer."""
