"""Hosts: agent frameworks whose own controller runs the episode. Importing this package imports no host."""
