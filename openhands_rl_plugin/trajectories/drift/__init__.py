"""Where a turn's tokens are no prefix of the next turn's: ``breaks`` finds, ``causes`` explains, ``drift`` reports."""
