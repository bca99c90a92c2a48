"""Guards against patches that fake a verdict. Start with ``guard``."""
