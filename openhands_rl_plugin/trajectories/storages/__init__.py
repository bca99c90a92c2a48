"""What every storage shares: the header of an episode, packing, redaction before anything is written."""
