"""One episode for the trainer of others: against the endpoint that it gives, with what it needs to train on it."""
