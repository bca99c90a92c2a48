"""The stores against other projects' stores: start with ``compare``."""
