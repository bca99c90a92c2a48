"""Trajectories in and out of the formats that others use; ``formats`` lists them."""
