"""A directory in which commands run: sandbox, shell, copies for search, and the patch of the changes.

Start with ``shell`` (a session's commands) and ``sandbox`` (what those commands can see).
"""
