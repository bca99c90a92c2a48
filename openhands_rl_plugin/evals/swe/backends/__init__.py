"""Where instances are set up and patches are tested: in a sandbox here (``local``) or in Docker (``docker``).

Start with ``local``; ``caching`` keeps environments and installed repositories.
"""
