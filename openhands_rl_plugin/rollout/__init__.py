"""Episodes: one (``session``), many at once (``many``), stored while they run (``journal``), and their rewards."""
