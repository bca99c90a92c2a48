"""Localization tasks: find the places of a fix. They need a repository with a history, no tests.

Start with ``rows`` (tasks as instances) and ``outline`` (what a place is); ``making`` is what ``tasks make
--localization`` calls. The score itself is the reward ``localization``.
"""
