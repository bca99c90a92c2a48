"""Learning in use: a service beside the model server that judges episodes, trains candidates and lets them in."""
