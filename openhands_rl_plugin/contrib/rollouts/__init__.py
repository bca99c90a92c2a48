"""Rollouts as a service: tasks come over HTTP, wait in a queue on the disk, and are played by workers."""
