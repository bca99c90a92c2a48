"""Where tests of a patch run: on this machine in a sandbox (``local``) or in Docker (``docker``)."""
