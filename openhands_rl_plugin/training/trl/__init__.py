"""Training by TRL's GRPOTrainer, on rows of ours: ``trainer`` first."""
