"""Environments behind an HTTP server with ``/reset`` and ``/step``. Start with ``client``."""
