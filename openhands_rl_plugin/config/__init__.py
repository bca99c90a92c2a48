"""From the ``[rl]`` section of ``config.toml`` to checked settings, and from names to classes.

Start with ``rl`` (the sections and their keys); ``toml`` reads the file, ``registry`` finds a class by its name, and
``build`` makes the objects that the settings name.
"""
