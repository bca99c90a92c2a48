"""Learning in use: a service next to the model server that judges episodes, trains candidates and deploys them."""
