"""Rollouts over HTTP for trainers that submit tasks: Polar's routes in front of Ray actors that roll out episodes."""
