"""Looking through many episodes: conditions on what is listed (``terms``), counts and changes (``listing``)."""
