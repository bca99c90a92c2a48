"""Training in processes that the trainer starts itself, for a loop, which is one process."""
