"""Container images without a container engine: read from archives and registries, unpacked once, run by bubblewrap.

Start with ``store``; ``layers`` is what meets files of strangers, ``sandbox`` what runs in an image.
"""
