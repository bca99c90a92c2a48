"""From stored trajectories to token sequences: samples, masks, layout of a micro-batch. Start with ``batch``."""
