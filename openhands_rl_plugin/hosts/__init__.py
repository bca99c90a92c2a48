"""Hosts: the places in which somebody else's controller plays the episode. Importing this package loads no host."""
