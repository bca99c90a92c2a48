"""The recording gateway against other projects' gateways: start with ``compare``."""
