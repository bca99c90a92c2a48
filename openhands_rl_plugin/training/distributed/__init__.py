"""Training in several processes: collectives (``ranks``) and split weights (``sharding``)."""
