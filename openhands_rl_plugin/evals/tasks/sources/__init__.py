"""Packages for tasks: named (``packages``), fetched, installed, tested. Start with ``prepared_package``."""
