"""Classes with ``reset`` and ``step``, played in this process. Start with ``episode``; a file for each library."""
