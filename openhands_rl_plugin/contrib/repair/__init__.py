"""Repair tasks: one small function of a real package with a bug, examples as its tests, for models of 100M parameters.

Start with ``rows`` (tasks as instances) and ``suites``.
"""
