"""A container that another program has made and owns: commands and files by nothing but its ``exec``.

Start with ``place`` (where it is, how it is reached), then ``shell`` and ``files``. ``programs`` is what runs inside.
"""
