"""Tools as an environment: a call is a step. Start with ``base`` (write a tool), then ``environment``."""
